"""Equal bits have equal checksums, and a change of any element changes the checksum."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from verl_server.weight_sync import checksum
from verl_server.weight_sync.checksum import tensor_checksum


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Shrink blocks to 16 words, so that small tensors span several blocks."""
    checksum._powers.cache_clear()
    monkeypatch.setattr(checksum, "_BLOCK", 16)
    yield
    checksum._powers.cache_clear()


def by_definition(tensor: torch.Tensor) -> str:
    """Compute the checksum as the module's docstring defines it, in Python integers."""
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    data += bytes(-len(data) % 4)
    words = [int.from_bytes(data[i : i + 4], "little", signed=True) for i in range(0, len(data), 4)]
    total = tensor.numel() * 8 + tensor.element_size()
    total += sum(word * pow(checksum._G, i + 1, 2**64) for i, word in enumerate(words))
    return f"{total % 2**64:016x}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
def test_equal_bits_have_equal_checksums(dtype: torch.dtype) -> None:
    tensor = torch.arange(-30, 30).to(dtype).reshape(6, 10)
    assert tensor_checksum(tensor) == tensor_checksum(tensor.clone())
    assert tensor_checksum(tensor) == tensor_checksum(tensor.t().contiguous().t()), "strides do not matter"
    assert tensor_checksum(tensor) != tensor_checksum(tensor.t())
    assert len(tensor_checksum(tensor)) == 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 17, 64, 65, 1000])
def test_it_is_what_its_definition_says(small_blocks: None, dtype: torch.dtype, count: int) -> None:
    values = (torch.randn(count + 1, generator=torch.Generator().manual_seed(count)) * 50).to(dtype)
    assert tensor_checksum(values[1:]) == by_definition(values[1:]), "at any start address"
    columns = values[:count].repeat(3).reshape(3, count).t()
    assert tensor_checksum(columns) == by_definition(columns), "with any strides"
    assert tensor_checksum(columns[:, 1:]) == by_definition(columns[:, 1:])


def test_blocks_are_put_together() -> None:
    tensor = torch.randn(3 * checksum._BLOCK + 7, generator=torch.Generator().manual_seed(0))
    assert tensor_checksum(tensor) == by_definition(tensor)


def test_the_rows_of_a_strided_tensor_are_put_together(small_blocks: None) -> None:
    wide = torch.randn(40, 30, generator=torch.Generator().manual_seed(0)).bfloat16()
    for view in (wide[:, 3:20], wide[:, 3:4], wide.t()[5:], wide[None, :, ::2]):
        assert tensor_checksum(view) == tensor_checksum(view.contiguous())


def test_every_single_change_is_seen() -> None:
    tensor = torch.zeros(257)
    seen = {tensor_checksum(tensor)}
    for i in range(257):
        changed = tensor.clone()
        changed[i] = -0.0  # differs in one bit
        seen.add(tensor_checksum(changed))
    assert len(seen) == 258


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_any_two_flipped_signs_are_seen(dtype: torch.dtype) -> None:
    tensor = torch.ones(24, dtype=dtype)
    seen = {tensor_checksum(tensor)}
    for pair in itertools.combinations(range(24), 2):
        changed = tensor.clone()
        changed[list(pair)] = -1.0
        seen.add(tensor_checksum(changed))
    assert len(seen) == 1 + 24 * 23 // 2


def test_swaps_and_lengths_are_seen() -> None:
    assert tensor_checksum(torch.tensor([1.0, 2.0])) != tensor_checksum(torch.tensor([2.0, 1.0]))
    assert tensor_checksum(torch.zeros(2)) != tensor_checksum(torch.zeros(3))
    assert tensor_checksum(torch.zeros(0)) == tensor_checksum(torch.zeros(0, 4))
    assert tensor_checksum(torch.zeros(4, dtype=torch.bfloat16)) != tensor_checksum(torch.zeros(2))


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("count", [1, 3, checksum._BLOCK * checksum._CUDA_BLOCKS + 5])
def test_a_gpu_says_the_same(dtype: torch.dtype, count: int) -> None:
    tensor = torch.randn(count, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert tensor_checksum(tensor.cuda()) == tensor_checksum(tensor)
    columns = tensor[: count // 3 * 3].view(-1, 3)
    assert tensor_checksum(columns.cuda()[:, 1:]) == tensor_checksum(columns[:, 1:])


def test_many_at_once_are_each_what_they_are_alone() -> None:
    tensors = [torch.full((n,), float(n)) for n in (0, 3, 70_000, 1)]
    tensors.append(tensors[2].view(100, 700).t())
    assert checksum.tensor_checksums(iter(tensors)) == [tensor_checksum(tensor) for tensor in tensors]
    assert checksum.tensor_checksums([]) == []

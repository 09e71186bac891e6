"""Equal bits, equal checksums; any changed element, another one."""

from __future__ import annotations

import pytest
import torch

from verl_server.weight_sync import checksum
from verl_server.weight_sync.checksum import tensor_checksum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
def test_equal_bits_have_equal_checksums(dtype: torch.dtype) -> None:
    tensor = torch.arange(-30, 30).to(dtype).reshape(6, 10)
    assert tensor_checksum(tensor) == tensor_checksum(tensor.clone())
    assert tensor_checksum(tensor) == tensor_checksum(tensor.t().contiguous().t()), "strides do not matter"
    assert tensor_checksum(tensor) != tensor_checksum(tensor.t())
    assert len(tensor_checksum(tensor)) == 16


def test_every_single_change_is_seen() -> None:
    tensor = torch.zeros(257)
    seen = {tensor_checksum(tensor)}
    for i in range(257):
        changed = tensor.clone()
        changed[i] = -0.0  # one bit
        seen.add(tensor_checksum(changed))
    assert len(seen) == 258


def test_swaps_and_lengths_are_seen() -> None:
    assert tensor_checksum(torch.tensor([1.0, 2.0])) != tensor_checksum(torch.tensor([2.0, 1.0]))
    assert tensor_checksum(torch.zeros(2)) != tensor_checksum(torch.zeros(3))
    assert tensor_checksum(torch.zeros(0)) == tensor_checksum(torch.zeros(0, 4))


def test_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    whole = tensor_checksum(tensor)
    monkeypatch.setattr(checksum, "_CHUNK", 64)
    assert tensor_checksum(tensor) == whole

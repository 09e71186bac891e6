"""Copy plans report the pairs that received NaN or infinity: all ways of copying, all dtypes, all positions."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.weight_sync.copying.test_fused_copy import FLOATS, VIEWS, same
from verl_server.weight_sync.copying import fused_copy, host_copy
from verl_server.weight_sync.copying.copy_table import build_tables
from verl_server.weight_sync.copying.finite import exponent_bits, holds_nonfinite
from verl_server.weight_sync.copying.fused_copy import CopyPlan
from verl_server.weight_sync.copying.host_copy import HostCopies

BAD = [float("nan"), float("inf"), -float("inf")]
EDGES = [0.0, -0.0, 1e-45, 6e-8, 65504.0, -3e38, 3.38e38]
"""Values that are finite in float32 and bfloat16. The last two exceed the range of float16."""
WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def all_numbers(dtype: torch.dtype) -> Tensor:
    """Return all numbers of 16 bits, or many wider numbers and all neighbours of the largest finite ones."""
    if dtype.itemsize == 2:
        return torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    integer = WORDS[dtype.itemsize]
    drawn = torch.randint(-(2**31), 2**31, (20_000,), generator=torch.Generator().manual_seed(0)).to(integer)
    drawn = drawn << (8 * dtype.itemsize - 32)
    largest = torch.tensor([torch.finfo(dtype).max, -torch.finfo(dtype).max], dtype=dtype).view(integer)
    return torch.cat([drawn, *(largest + i for i in range(-3, 9))]).view(dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_bits_of_a_word_say_which_numbers_are_not_finite(dtype: torch.dtype) -> None:
    numbers = all_numbers(dtype)
    for word_bytes, integer in WORDS.items():
        if word_bytes < dtype.itemsize:
            continue
        count = word_bytes // dtype.itemsize
        bits = exponent_bits(dtype, word_bytes)
        for place in range(count):
            others = torch.tensor([-torch.finfo(dtype).max, torch.finfo(dtype).max] * count, dtype=dtype)[:count]
            words = others.repeat(len(numbers), 1)
            words[:, place] = numbers
            seen = ((words.view(integer).flatten() & bits.exponents) + bits.lowest) & bits.signs
            assert seen.ne(0).equal(numbers.isfinite().logical_not())


def test_other_types_have_nothing_to_see() -> None:
    for dtype in (torch.int8, torch.int16, torch.int64, torch.bool, torch.complex64):
        assert exponent_bits(dtype, 8) == (0, 0, 0)
        assert not holds_nonfinite(torch.ones(3).to(dtype))


def test_a_sum_that_overflows_is_no_infinity() -> None:
    assert not holds_nonfinite(torch.full((9,), 3e38))
    assert holds_nonfinite(torch.tensor([float("inf"), -float("inf"), 3e38]))


# -- every way of copying ------------------------------------------------------------------------------------------


@pytest.fixture(
    params=[
        "compiled",
        "torch pieces",
        "torch",
        pytest.param("cuda", marks=pytest.mark.cuda),
        pytest.param("cuda, torch", marks=pytest.mark.cuda),
    ]
)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "compiled" and host_copy._compiled_copy() is None:
        pytest.skip("there is no C++ compiler")
    if request.param == "torch pieces":
        monkeypatch.setattr(host_copy, "_compiled_copy", lambda: None)
    yield request.param


def plan_of(pairs: list[tuple[Tensor, Tensor]], way: str) -> CopyPlan:
    fused = way not in ("torch", "cuda, torch")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a fallback to another way of copying warns
        return CopyPlan([d for d, _ in pairs], [s for _, s in pairs], fused=fused)


def seen(plan: CopyPlan) -> list[int]:
    plan.run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return plan.nonfinite()


def finite_pairs(to: torch.dtype, start: torch.dtype, device: str) -> list[tuple[Tensor, Tensor]]:
    """Return (destination, source) pairs with finite values inside each view and NaN or infinity around it.

    Every view is copied into a contiguous destination and into a destination with the same strides.
    """
    pairs = []
    for view in VIEWS.values():
        for like in (False, True):
            memory = torch.full((48, 160), float("nan"), dtype=start, device=device)
            source = view(memory).normal_()
            source.flatten()[: len(EDGES) - 2].copy_(torch.tensor(EDGES[:-2], device=device)[: source.numel()])
            destination = torch.full((48, 160), float("inf"), dtype=to, device=device)
            pairs.append((view(destination) if like else torch.empty(source.shape, dtype=to, device=device), source))
    return pairs


@pytest.mark.parametrize(
    ("to", "start"),
    [(d, d) for d in FLOATS]
    + [(torch.bfloat16, torch.float32), (torch.float16, torch.float64), (torch.float32, torch.bfloat16)],
)
def test_exactly_the_bad_pairs_are_named(to: torch.dtype, start: torch.dtype, way: str) -> None:
    device = way.partition(",")[0] if way.startswith("cuda") else "cpu"
    pairs = finite_pairs(to, start, device)
    plan = plan_of(pairs, way)
    assert seen(plan) == []
    dice = torch.Generator().manual_seed(1)
    for bad in BAD:
        chosen = [i for i, (_, source) in enumerate(pairs) if source.numel() and (i % 3 or bad != bad)]
        kept = [source.clone() for _, source in pairs]
        for i in chosen:
            source = pairs[i][1]
            place = int(torch.randint(source.numel(), (), generator=dice))
            source[tuple(int(k) for k in torch.unravel_index(torch.tensor(place), source.shape))] = bad
        assert seen(plan) == chosen
        assert all(same(destination, source.to(to)) for destination, source in pairs)
        for (_, source), finite in zip(pairs, kept, strict=True):
            source.copy_(finite)
        assert seen(plan) == [], "a run reports its own pairs only"


def test_each_place_of_a_block_is_seen(way: str) -> None:
    """A bad number is reported from the unaligned head, the whole words and the tail of a block, at any alignment."""
    device = way.partition(",")[0] if way.startswith("cuda") else "cpu"
    for dtype in (torch.float32, torch.bfloat16):
        memory = torch.zeros(300, dtype=dtype, device=device)
        sources = [torch.zeros(150, dtype=dtype, device=device) for _ in range(150)]
        for i, source in enumerate(sources):
            source[i] = BAD[i % 3]
        for start in (0, 1, 7):
            destinations = [memory[start : start + 150]] * len(sources)
            assert seen(plan_of(list(zip(destinations, sources, strict=True)), way)) == list(range(150))


def test_what_a_dtype_cannot_hold_is_seen(way: str) -> None:
    device = way.partition(",")[0] if way.startswith("cuda") else "cpu"
    numbers = [65504.0, 65519.9, 65520.0, -1e30, 3.39e38, 3.4e38]
    sources = [torch.full((5, 70), number, device=device) for number in numbers]
    for dtype, first in ((torch.float16, 2), (torch.bfloat16, 5), (torch.float32, 6)):
        pairs = [(torch.zeros(5, 70, dtype=dtype, device=device), source) for source in sources]
        assert seen(plan_of(pairs, way)) == list(range(first, 6))


def test_integers_are_copied_as_they_are(way: str) -> None:
    device = way.partition(",")[0] if way.startswith("cuda") else "cpu"
    source = torch.tensor([0x7F80, 0x7FFF, -1] * 50, dtype=torch.int16, device=device)
    destination = torch.zeros_like(source)
    assert seen(plan_of([(destination, source)], way)) == []
    assert destination.equal(source)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("is_compiled", [True, False])
def test_every_thread_tells(threads: int, is_compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_compiled:
        monkeypatch.setattr(host_copy, "_compiled_copy", lambda: None)
    monkeypatch.setattr(host_copy, "_BYTES_A_THREAD", 2**10)
    monkeypatch.setattr(host_copy, "_last_cache_bytes", lambda: 0)  # also test the stores that bypass the caches
    sources = [torch.zeros(40_001), torch.zeros(3, 9_000)[:, 1:8_001], torch.zeros(17), torch.zeros(30, 40, 50)]
    pairs = [(torch.empty_like(source), source) for source in sources]
    copies = HostCopies(pairs, threads)
    copies.run()
    assert copies.nonfinite() == []
    sources[0][-1], sources[1][2, -1] = BAD[0], BAD[1]
    copies.run()
    assert copies.nonfinite() == [0, 1]
    assert all(same(destination, source) for destination, source in pairs)


# -- the kernel itself ---------------------------------------------------------------------------------------------


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize(
    ("to", "start"),
    [(d, d) for d in FLOATS]
    + [(torch.bfloat16, torch.float32), (torch.float16, torch.float64), (torch.float32, torch.float16)],
)
def test_the_kernel_sees_what_it_writes(to: torch.dtype, start: torch.dtype) -> None:
    """Run the kernel in Triton's interpreter: every second source ends in a bad number.

    The interpreter is slow, so the tensors are small.
    """
    from verl_server.weight_sync.copying.copy_kernel import copy_tiles, kernel_constants

    memory = torch.zeros(6, 40, dtype=start)
    views = [memory, memory[:, 8:24], memory[:, 3:14], memory[:, ::8], memory.view(-1)[3:90], memory[1, 1]]
    places = [(view.shape, view.stride(), view.storage_offset()) for view in views for _ in range(2)]
    sources = [torch.zeros(240, dtype=start).as_strided(*place) for place in places]
    for i, source in enumerate(sources):
        source.view(-1)[-1:].fill_(BAD[i % 3]) if source.is_contiguous() else source[-1, -1:].fill_(BAD[i % 3])
        if i % 2:
            source.fill_(-1.5)
    pairs = [(torch.full(source.shape, -7, dtype=to), source) for source in sources]
    tables, left = build_tables(pairs, tile_bytes=256)
    assert not left
    found = set()
    for table in tables:
        marks = torch.zeros(len(table.pairs), dtype=torch.int32)
        copy_tiles[(len(table.tiles),)](table.records, table.tiles, marks, *kernel_constants(table))
        found |= {table.pairs[i] for i in marks.nonzero().flatten().tolist()}
    assert sorted(found) == list(range(0, len(sources), 2))
    assert all(same(destination, source.to(to)) for destination, source in pairs)


def test_torch_looks_where_the_kernel_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verl_server.weight_sync.copying.copy_kernel", None)
    pairs = [(torch.zeros(9), torch.ones(9)), (torch.zeros(9), torch.full((9,), float("nan")))]
    with pytest.warns(UserWarning, match="fused weight copy is off"):
        ((copies, numbers),) = fused_copy._device_steps(pairs, torch.device("cpu"), [0, 0])
    copies.run()
    assert (copies.nonfinite(), numbers) == ([1], [0, 1])

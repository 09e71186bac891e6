"""`CopyPlan` gives what `copy_` gives, and writes nothing else. The kernel's tables are also executed in Python."""

from __future__ import annotations

import ctypes
import sys
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from verl_server.weight_sync.copying import fused_copy
from verl_server.weight_sync.copying.copy_table import Kind, Rows, Table, as_rows, build_tables
from verl_server.weight_sync.copying.fused_copy import CopyPlan, compile_kernels
from verl_server.weight_sync.copying.host_copy import HostCopies

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
SPECIAL = [float("nan"), float("inf"), -float("inf"), -0.0, 1e-40, 65519.9, 65520.0, 1 + 2**-9, 1 + 3 * 2**-9, 3e38]
View = Callable[[Tensor], Tensor]
VIEWS: dict[str, View] = {  # views of a matrix of 48 x 160
    "whole": lambda t: t,
    "rows": lambda t: t[5:30],
    "columns": lambda t: t[:, 32:96],
    "odd columns": lambda t: t[:, 3:90],
    "one column": lambda t: t[:, 7:8],
    "every second row": lambda t: t[::2],
    "every second column": lambda t: t[:, ::2],
    "transposed": lambda t: t.t(),
    "odd length": lambda t: t.view(-1)[:6999],
    "odd start": lambda t: t.view(-1)[3:7001],
    "one element": lambda t: t[1, 1],
    "three dimensions": lambda t: t.view(6, 8, 160)[:, 2:5],
    "not two-dimensional": lambda t: t.view(6, 8, 160)[:, 2:5, 16:32],
    "permuted": lambda t: t.view(6, 8, 160).permute(2, 0, 1),
    "empty": lambda t: t[:0],
}
NO_ROWS = {"transposed", "not two-dimensional", "permuted"}
"""Views that cannot be copied as rows to a contiguous destination: more than two dimensions remain."""


def matrix(dtype: torch.dtype, device: str = "cpu") -> Tensor:
    values = torch.randn(48, 160, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) * 100
    values.view(-1)[: 20 * len(SPECIAL)] = torch.tensor(SPECIAL, dtype=torch.float64).repeat(20)
    return values.to(dtype).to(device)


def make_pairs(to: torch.dtype, start: torch.dtype, device: str = "cpu") -> list[tuple[Tensor, Tensor]]:
    """Return (destination, source) pairs for each view: to contiguous memory, from contiguous memory, view to view."""
    pairs = []
    for view in VIEWS.values():
        source = view(matrix(start, device))
        pairs.append((torch.full_like(source, -7, dtype=to, memory_format=torch.contiguous_format), source))
        destination = view(torch.full((48, 160), -7, dtype=to, device=device))
        pairs.append((destination, source.clone(memory_format=torch.contiguous_format)))
        pairs.append((view(torch.full((48, 160), -7, dtype=to, device=device)), source))
    return pairs


def same(a: Tensor, b: Tensor) -> bool:
    return bool(a.isnan().equal(b.isnan()) and a.nan_to_num(nan=1.5).equal(b.nan_to_num(nan=1.5)))


def check_copied(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Assert that each destination equals its source, and that the memory around the view is unchanged."""
    for destination, source in pairs:
        around = destination.new_full((destination.untyped_storage().nbytes() // destination.itemsize,), -7)
        around.as_strided(destination.shape, destination.stride(), destination.storage_offset()).copy_(source)
        assert same(destination.new_empty(0).set_(destination.untyped_storage()), around)


@pytest.mark.parametrize("start", FLOATS)
@pytest.mark.parametrize("to", FLOATS)
@pytest.mark.parametrize("fused", [True, False])
def test_equals_copy(to: torch.dtype, start: torch.dtype, fused: bool) -> None:
    pairs = make_pairs(to, start)
    plan = CopyPlan([d for d, _ in pairs], [s for _, s in pairs], fused=fused)
    plan.run()
    check_copied(pairs)
    assert plan.nbytes == sum(d.nbytes for d, _ in pairs)


def test_run_again_reads_what_the_sources_hold_then() -> None:
    source, destination = torch.zeros(300), torch.full((300,), -7.0)
    plan = CopyPlan([destination], [source])
    for value in (1.0, 2.0):
        source.fill_(value)
        plan.run()
        assert destination.eq(value).all()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_share_blocks_rows_and_small_tensors(threads: int) -> None:
    def pair(shape: tuple[int, ...], to: torch.dtype = torch.float32, columns: slice = slice(None)) -> None:
        source = torch.randn(shape)[..., columns]
        pairs.append((torch.full(source.shape, -7.0, dtype=to), source))

    pairs: list[tuple[Tensor, Tensor]] = []
    pair((1_500_001,))
    pair((700, 500))
    pair((700, 500), torch.bfloat16)
    pair((3, 200_000), columns=slice(1, 150_001))
    pair((2000, 300), torch.bfloat16, slice(100, 250))
    for _ in range(50):
        pair((17,))
    copies = HostCopies(pairs, threads)
    copies.run()
    copies.run()
    check_copied(pairs)


def test_an_error_in_a_thread_is_raised() -> None:
    sources = [torch.zeros(2, 200_000), torch.zeros(2_000_000)]
    copies = HostCopies([(torch.zeros(2, 200_000), sources[0]), (torch.zeros(2_000_000), sources[1])], threads=2)

    def fail() -> None:
        raise MemoryError("no")

    copies._jobs = [fail] * 2  # type: ignore[list-item]
    with pytest.raises(MemoryError):
        copies.run()


def test_parameters_and_inference_tensors_are_destinations() -> None:
    parameter = torch.nn.Parameter(torch.zeros(40))
    with torch.inference_mode():
        inference = torch.zeros(1000, 1300)
    sources = [torch.ones(40, requires_grad=True), torch.ones(1000, 1300)]
    CopyPlan([parameter, inference], sources).run()
    assert parameter.eq(1).all()
    assert inference.eq(1).all()
    assert parameter.grad_fn is None


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"2 destinations for 1 sources"):
        CopyPlan([torch.zeros(2), torch.zeros(2)], [torch.zeros(2)])
    with pytest.raises(ValueError, match=r"Copy 0: shape \[3\] does not fit into \[2\]"):
        CopyPlan([torch.zeros(2)], [torch.zeros(3)])
    CopyPlan([], []).run()


@pytest.mark.parametrize(
    ("view", "rows"),
    [
        ("whole", Rows(1, 48 * 160, 0, 0)),
        ("rows", Rows(1, 25 * 160, 0, 0)),
        ("columns", Rows(48, 64, 64, 160)),
        ("one column", Rows(48, 1, 1, 160)),
        ("every second column", Rows(48 * 80, 1, 1, 2)),
        ("every second row", Rows(24, 160, 160, 320)),
        ("three dimensions", Rows(6, 480, 480, 1280)),
        ("one element", Rows(1, 1, 0, 0)),
        *((view, None) for view in sorted(NO_ROWS)),
    ],
)
def test_as_rows(view: str, rows: Rows | None) -> None:
    source = VIEWS[view](matrix(torch.float32))
    assert as_rows(source.clone(memory_format=torch.contiguous_format), source) == rows


def test_like_permutations_are_one_row() -> None:
    source = matrix(torch.float32).view(6, 8, 160).permute(2, 0, 1)
    assert as_rows(torch.empty_like(source), source) == Rows(1, 48 * 160, 0, 0)


def run_table(table: Table) -> None:
    """Copy as the kernel does, word by word."""
    kind = table.kind
    assert table.records[:, 2].sum() > 0
    for record, number in table.tiles.tolist():
        source, destination, words, row_words, source_row, destination_row = table.records[record].tolist()
        start = number * table.tile_words
        assert 0 <= start < words, "a tile without work"
        for word in range(start, min(start + table.tile_words, words)):
            row, column = divmod(word, row_words)
            move_word(
                kind,
                source + (row * source_row + column) * kind.vector * kind.source.itemsize,
                destination + (row * destination_row + column) * kind.vector * kind.destination.itemsize,
            )


def move_word(kind: Kind, source: int, destination: int) -> None:
    for address, dtype in ((source, kind.source), (destination, kind.destination)):
        assert address % min(16, kind.vector * dtype.itemsize) == 0, "words must be aligned"
    values = torch.empty(kind.vector, dtype=kind.source)
    ctypes.memmove(values.data_ptr(), source, values.nbytes)
    if kind.source != kind.destination:
        values = values.float().to(kind.destination)
    ctypes.memmove(destination, values.data_ptr(), values.nbytes)


@pytest.mark.parametrize(
    ("to", "start"),
    [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float16, torch.float64)],
)
def test_tables_cover_the_pairs_exactly(to: torch.dtype, start: torch.dtype) -> None:
    pairs = [pair for pair in make_pairs(to, start) if pair[0].numel()]
    tables, left = build_tables(pairs, tile_bytes=512, links=[i % 3 for i in range(len(pairs))])
    for table in tables:
        run_table(table)
    check_copied([pair for i, pair in enumerate(pairs) if i not in left])
    assert all(as_rows(*pairs[i]) is None for i in left)
    assert len(left) == 2 * len(NO_ROWS) + 1  # from view to view, only one of them keeps more than two dimensions


def test_aligned_memory_travels_in_the_widest_words() -> None:
    def kinds(destination: Tensor, source: Tensor) -> list[Kind]:
        return [table.kind for table in build_tables([(destination, source)], 2**15)[0]]

    full, rounded = torch.empty(64, 64), torch.empty(64, 64, dtype=torch.bfloat16)
    assert kinds(torch.empty(64, 64), full) == [Kind(torch.int64, torch.int64, 2, torch.float32)]
    assert kinds(torch.empty(64, 32), full[:, 32:]) == [Kind(torch.int64, torch.int64, 2, torch.float32)]
    assert kinds(rounded, full) == [Kind(torch.float32, torch.bfloat16, 8, torch.bfloat16)]
    assert kinds(torch.empty(64, 60), full[:, 4:]) == [Kind(torch.int64, torch.int64, 2, torch.float32)]
    assert kinds(torch.empty(64, 61), full[:, 3:]) == [Kind(torch.int32, torch.int32, 1, torch.float32)]
    assert kinds(torch.empty(33), full.view(-1)[:33]) == [
        Kind(torch.int64, torch.int64, 2, torch.float32),
        Kind(torch.int32, torch.int32, 1, torch.float32),
    ]
    assert kinds(torch.empty(64, 64, dtype=torch.int32), full) == []


def test_more_than_2_to_the_32_elements() -> None:
    with torch.device("meta"):
        source = torch.empty(2**20, 2**14, dtype=torch.bfloat16)
        pairs = [
            (torch.empty_like(source), source),
            (torch.empty(2**20, 2**13, dtype=torch.bfloat16), source[:, 2**13 :]),
        ]
    tables, left = build_tables(pairs, 2**15)
    assert not left
    (table,) = tables
    assert table.records[:, 2].tolist() == [2**31, 2**30]
    assert len(table.tiles) * table.tile_words == 2**31 + 2**30
    first, second = (table.tiles[table.tiles[:, 0] == record, 1] for record in (0, 1))
    assert first.equal(torch.arange(2**31 // table.tile_words, dtype=torch.int32))
    assert second.equal(torch.arange(2**30 // table.tile_words, dtype=torch.int32))


def test_all_links_are_read_at_a_time() -> None:
    """Every 64 consecutive tiles contain each link's share of the tiles.

    The GPU starts tiles in order, so all links are in use at any time.
    """
    source = torch.empty(8, 2**14)
    pairs = [(torch.empty_like(row), row) for row in source]
    links = [0, 0, 0, 0, 0, 0, 1, 2]
    (table,), _ = build_tables(pairs, 1024, links)
    order = torch.tensor(links)[table.tiles[:, 0].long()]
    for stretch in order.split(64):
        assert [int((stretch == link).sum()) for link in (0, 1, 2)] == [48, 8, 8]
    natural = build_tables(pairs, 1024)[0][0].tiles
    assert natural.equal(natural[(natural[:, 0] * 2**20 + natural[:, 1]).argsort()]), (
        "the tiles of a single link keep their order"
    )


def test_torch_copies_where_the_kernel_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "verl_server.weight_sync.copying.copy_kernel", None)
    destination = torch.zeros(9)
    with pytest.warns(UserWarning, match="fused weight copy is off"):
        steps = fused_copy._device_steps([(destination, torch.ones(9))], torch.device("cpu"), [0])
    for copies, _ in steps:
        copies.run()
    assert destination.eq(1).all()


@pytest.mark.cuda
@pytest.mark.parametrize("start", FLOATS)
@pytest.mark.parametrize("to", FLOATS)
def test_kernel_equals_copy(to: torch.dtype, start: torch.dtype) -> None:
    pairs = make_pairs(to, start, "cuda")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a fallback from the kernel warns
        links = [i % 3 for i in range(len(pairs))]
        plan = CopyPlan([d for d, _ in pairs], [s for _, s in pairs], links=links)
    plan.run()
    torch.cuda.synchronize()
    check_copied(pairs)


@pytest.mark.cuda
def test_kernel_runs_on_the_current_stream_without_waiting() -> None:
    """The plan runs inside a CUDA graph capture, which fails on any call that waits for the device."""
    source = torch.randn(64, 96, device="cuda")
    destinations = [torch.full((64, 96), -7.0, device="cuda"), torch.full((64, 48), -7.0, device="cuda").bfloat16()]
    plan = CopyPlan(destinations, [source, source[:, 48:]])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.run()
    source.normal_()
    graph.replay()
    torch.cuda.synchronize()
    check_copied([(destinations[0], source), (destinations[1], source[:, 48:])])


@pytest.mark.cuda
@pytest.mark.gpu_alone
def test_kernel_counts_beyond_32_bits() -> None:
    if torch.cuda.get_device_properties(0).total_memory < 30 << 30:
        pytest.skip("needs a GPU of 30 GiB: the copies and their comparison take 26 GiB")
    source = torch.randint(-(2**15), 2**15, (2**16, 2**16 + 8), dtype=torch.int16, device="cuda")
    destinations = [torch.full_like(source, -7), torch.full((2**16, 2**15), -7, dtype=torch.int16, device="cuda")]
    CopyPlan(destinations, [source, source[:, 2**15 + 8 :]]).run()
    assert destinations[0].equal(source)
    assert destinations[1].equal(source[:, 2**15 + 8 :])


@pytest.mark.cuda
def test_checkpoints_in_host_memory_reach_the_gpu() -> None:
    source = matrix(torch.float32)
    destination = torch.full((48, 160), -7.0, dtype=torch.bfloat16, device="cuda")
    CopyPlan([destination], [source]).run()
    assert same(destination.cpu(), source.bfloat16())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_kernels_compile_ahead_of_the_first_plan(device: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compile_kernels(torch.device(device), torch.bfloat16)

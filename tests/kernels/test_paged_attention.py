"""The attention kernels agree with plain PyTorch, on a GPU, or in Triton's interpreter without one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.depth import at_depth
from tests.kernels.attention_reference import paged_attention

pytest.importorskip("triton")

from verl_server.kernels.attention_tiles import DecodeConfig, SharedConfig
from verl_server.kernels.paged_attention import PagedAttention, SharedKeys
from verl_server.kernels.shared_keys import ITEM, find_runs

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
PDL = CUDA and torch.cuda.get_device_capability() >= (9, 0)
"""True if kernels begin early (`kernels.dependent`). Indices come from the host, so no kernel writes them."""
HALF = torch.bfloat16 if CUDA else torch.float16  # the interpreter cannot multiply bf16
LIMITS = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""Bound on the relative error, which comes from rounding inputs and softmax weights to the dtype."""
SMALL = DecodeConfig(block=16, warps=4, stages=3, programs_per_sm=2)
"""Short blocks, so that programs also share the work on short sequences."""


class Problem:
    """Random queries, pool and page table.

    Slots that no entry may read are NaN: the rest of last pages, and pages that no entry has.
    """

    def __init__(
        self,
        cached: list[int],
        extend: list[int],
        *,
        num_heads: int = 4,
        kv_heads: int = 2,
        head_dim: int = 32,
        page_size: int = 16,
        dtype: torch.dtype = torch.float32,
        heads_first: bool = True,
        config: DecodeConfig | None = SMALL,
        shared_config: SharedConfig | None = None,
        shared: tuple[tuple[int, int, int], ...] = (),
    ) -> None:
        """Each (first entry, entries, pages) of `shared` makes these entries share that many leading pages."""
        generator = torch.Generator().manual_seed(0)
        self.cached, self.extend, self.page_size = cached, extend, page_size
        lens = [c + e for c, e in zip(cached, extend, strict=True)]
        pages = [-(-n // page_size) for n in lens]
        shape = (sum(pages) + 3, page_size, 2, kv_heads, head_dim)
        pool = torch.full(shape, float("nan"))
        order = torch.randperm(len(pool) - 1, generator=generator).tolist()
        self.table = torch.full((len(lens) + 2, max(pages) + 1), len(pool) - 1, dtype=torch.int32)
        self.rows = torch.randperm(len(lens) + 1, generator=generator)[: len(lens)].tolist()
        for row, length, count in zip(self.rows, lens, pages, strict=True):
            mine = [order.pop() for _ in range(count)]
            self.table[row, :count] = torch.tensor(mine, dtype=torch.int32)
            for i, page in enumerate(mine):
                there = min(page_size, length - i * page_size)
                pool[page, :there] = torch.randn(there, *shape[2:], generator=generator)
        if heads_first:  # as in the model runner: a head's keys in a page are contiguous
            pool = pool.permute(0, 2, 3, 1, 4).contiguous().permute(0, 3, 1, 2, 4)
        for first, count, common in shared:
            mine = [self.rows[entry] for entry in range(first, first + count)]
            self.table[mine, :common] = self.table[mine[0], :common]
        self.q = torch.randn(sum(extend), num_heads, head_dim, generator=generator).to(DEVICE, dtype)
        self.pool = pool.to(DEVICE, dtype)
        self.table = self.table.to(DEVICE)
        self.attention = PagedAttention(
            num_heads=num_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            page_size=page_size,
            dtype=dtype,
            device=DEVICE,
            decode_config=config,
            shared_config=shared_config,
            max_shared_entries=len(lens),
            pdl=PDL,
        )

    def expected(self) -> Tensor:
        return paged_attention(self.q, self.pool, self.table, self.rows, self.cached, self.extend)

    def decode(self) -> Tensor:
        assert set(self.extend) == {1}
        lens = np.array(self.cached) + 1
        meta = torch.from_numpy(self.attention.host_metadata(lens)).to(DEVICE)
        return self.attention.decode(self.q, self.pool, self.table, _ints(self.rows), _ints(lens.tolist()), meta)

    def shared_keys(self, cached: list[int] | None = None) -> SharedKeys:
        """Return the plan of all keys that may be shared, for the given numbers of cached tokens."""
        table, lens = self.table.long().cpu().numpy(), np.array(cached or self.cached) + 1
        runs = find_runs(table, np.array(self.rows), lens, self.page_size, min_keys=self.page_size)
        assert runs.saved
        return self.attention.shared_keys(runs)

    def decode_shared(self, keys: SharedKeys | None = None) -> Tensor:
        lens, keys = np.array(self.cached) + 1, keys or self.shared_keys()
        assert len(keys.items) <= self.attention.max_items_length(len(lens))
        meta = torch.from_numpy(self.attention.host_metadata(lens - keys.starts)).to(DEVICE)
        on_device = SharedKeys(*(_ints(part.tolist()) for part in keys))
        return self.attention.decode(
            self.q, self.pool, self.table, _ints(self.rows), _ints(lens.tolist()), meta, shared=on_device
        )

    def prefill(self) -> Tensor:
        starts = _ints(np.cumsum([0, *self.extend]).tolist())
        return self.attention.extend(
            self.q, self.pool, self.table, _ints(self.rows), _ints(self.cached), starts, max(self.extend)
        )


def _ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def assert_agrees(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert found.dtype == dtype and found.shape == expected.shape
    error = torch.linalg.vector_norm(found.float() - expected) / torch.linalg.vector_norm(expected)
    assert error < LIMITS[dtype], f"relative error {error:.2e}"  # also fails for NaN


LAYOUTS: dict[str, dict[str, Any]] = {
    "pairs": dict(num_heads=4, kv_heads=2),
    "groups of seven": dict(num_heads=14, kv_heads=2, head_dim=64),
    "groups of twenty": dict(num_heads=20, kv_heads=1),
    "odd head size": dict(head_dim=80),
    "odd pages": dict(page_size=5),
    "tokens first": dict(heads_first=False),
    "half precision": dict(dtype=HALF, head_dim=128),
    "measured choice": dict(dtype=HALF, head_dim=128, config=None),
    "heads of one": dict(num_heads=2, kv_heads=2),
    "groups of three": dict(num_heads=6, kv_heads=2, head_dim=64),
    "groups of eight": dict(num_heads=8, kv_heads=1, head_dim=128),
    "token pages": dict(page_size=1),
    "long pages": dict(page_size=64),
    "fp16": dict(dtype=torch.float16, head_dim=64),
    "large heads": dict(dtype=HALF, head_dim=256, config=None),
}
QUICK_LAYOUTS = 8
"""The first layouts have each kind of group, of head and page size, and of dtype. The others are exhaustive."""


@pytest.mark.parametrize("layout", at_depth(LAYOUTS.values(), QUICK_LAYOUTS), ids=LAYOUTS)
def test_decode_agrees_with_plain_attention(layout: dict[str, Any]) -> None:
    problem = Problem([0, 14, 15, 16, 129, 40], [1] * 6, **layout)
    assert_agrees(problem.decode(), problem.expected(), problem.q.dtype)


@pytest.mark.parametrize(
    "lens",
    at_depth([[1], [2], [1] * 20, [1, 700, 1], [600, 3, 300, 3]], quick=3),
    ids=["one token", "two tokens", "many short", "a straggler", "mixed"],
)
def test_decode_balances_any_lengths(lens: list[int]) -> None:
    problem = Problem([n - 1 for n in lens], [1] * len(lens))
    expected = problem.expected()
    assert_agrees(problem.decode(), expected, torch.float32)
    assert_agrees(problem.decode(), expected, torch.float32)  # the workspaces are ready for the next layer


SMALL_SHARED = SharedConfig(rows=16, keys=16, warps=4, stages=3, programs_per_sm=2)
"""Tiles of eight entries and short blocks."""
SHARED: dict[str, tuple[list[int], tuple[tuple[int, int, int], ...]]] = {
    "groups and others": ([40, 33, 90, 70, 200, 160, 5], ((0, 2, 2), (4, 2, 9))),
    "two levels": ([90, 100, 130, 129, 140, 20], ((0, 5, 3), (0, 2, 5), (2, 3, 8))),
    "more than a tile": ([70] * 9, ((0, 9, 4),)),
    "long": ([330, 335, 250], ((0, 3, 13), (0, 2, 19))),
    "nothing of its own but the newest": ([64, 64, 65], ((0, 3, 4),)),
}


@pytest.mark.parametrize(("cached", "shared"), SHARED.values(), ids=SHARED)
def test_decode_of_shared_keys_agrees(cached: list[int], shared: tuple[tuple[int, int, int], ...]) -> None:
    problem = Problem(cached, [1] * len(cached), shared=shared, shared_config=SMALL_SHARED)
    assert_agrees(problem.decode_shared(), problem.expected(), torch.float32)


def test_workspaces_of_shared_keys_are_ready_for_the_next_layer() -> None:
    cached, shared = SHARED["long"]
    problem = Problem(cached, [1] * len(cached), shared=shared, shared_config=SMALL_SHARED)
    keys = problem.shared_keys()
    items = keys.items[2:].reshape(-1, ITEM)
    assert (items[:, 5] > 1).any(), "no tile is cut into chunks"
    first = problem.decode_shared(keys)
    assert torch.equal(problem.decode_shared(keys), first)


SAME_PATH = {"pairs", "tokens first", "fp16"}
"""Layouts for which the kernel of shared keys does nothing that it does not do for another layout."""


@pytest.mark.parametrize("name", at_depth([name for name in LAYOUTS if name not in SAME_PATH], quick=4))
def test_decode_of_shared_keys_in_any_layout(name: str) -> None:
    layout = LAYOUTS[name]
    pages = 128 // layout.get("page_size", 16)
    problem = Problem([150, 131, 190, 12], [1] * 4, shared=((0, 3, pages // 2), (1, 2, pages)), **layout)
    assert problem.shared_keys().levels.tolist() == [1, 2, 2, 0]
    assert_agrees(problem.decode_shared(), problem.expected(), problem.q.dtype)


def test_shared_keys_of_more_entries_than_there_is_memory_for() -> None:
    problem = Problem([70] * 3, [1] * 3, shared=((0, 3, 4),))
    runs = find_runs(np.tile(np.arange(1, 6), (4, 1)), np.arange(4), np.full(4, 70), 16, 16)
    with pytest.raises(ValueError, match="4 decodes"):
        problem.attention.shared_keys(runs)


def test_wide_groups_have_room_for_their_items() -> None:
    """A tile holds two entries, but runs have three, on both levels: there is more than one item for each entry."""
    entries = np.arange(300)
    attention = PagedAttention(
        num_heads=64, kv_heads=2, head_dim=32, page_size=16, dtype=HALF, device=DEVICE, max_shared_entries=len(entries)
    )
    table = np.stack([np.ones_like(entries), 2 + entries // 3, 200 + entries], axis=1)
    keys = attention.shared_keys(find_runs(table, entries, np.full(len(entries), 40), 16, 16))
    assert set(keys.levels) == {2} and len(keys.items) > 2 + ITEM * len(entries)
    assert len(keys.items) <= attention.max_items_length(len(entries))


def test_entries_that_share_do_not_spoil_each_other() -> None:
    problem = Problem([80, 90, 100, 85], [1] * 4, shared=((0, 4, 5),))
    problem.q[1::2] = float("nan")
    assert_agrees(problem.decode_shared()[::2], problem.expected()[::2], torch.float32)


def test_decode_reads_scores_of_any_size() -> None:
    problem = Problem([200, 90], [1, 1])
    problem.q *= 100.0  # one-hot softmax; parts with far lower maxima must vanish, not overflow
    assert_agrees(problem.decode(), problem.expected(), torch.float32)


def test_entries_do_not_spoil_each_other() -> None:
    problem = Problem([20, 5, 70, 40, 9], [1] * 5)
    problem.q[1::2] = float("nan")
    found, expected = problem.decode()[::2], problem.expected()[::2]
    assert_agrees(found, expected, torch.float32)


def test_entries_without_work_are_not_touched() -> None:
    problem = Problem([30, 17, 8], [1, 1, 1])
    lens = np.array(problem.cached) + 1
    meta = torch.from_numpy(problem.attention.host_metadata(lens[:2])).to(DEVICE)
    out = torch.full((3, 4 * 32), 7.0, device=DEVICE)
    rows = _ints(problem.rows)
    problem.attention.decode(problem.q, problem.pool, problem.table, rows, _ints(lens.tolist()), meta, out)
    assert_agrees(out[:2], problem.expected()[:2], torch.float32)
    assert (out[2] == 7.0).all()


@pytest.mark.parametrize("lens", [[1], [5000], [1, 2, 3], [100] * 300, [1] * 255 + [30000]])
def test_work_is_dealt_out_evenly_and_whole(lens: list[int]) -> None:
    attention = PagedAttention(
        num_heads=4, kv_heads=2, head_dim=32, page_size=16, dtype=torch.float32, device=DEVICE, decode_config=SMALL
    )
    meta = attention.host_metadata(np.array(lens))
    share, larger, active, last_entry = meta[:4].tolist()
    first = meta[4:].reshape(-1, 3)[:active].tolist()
    units = [(e, h, b) for e, n in enumerate(lens) for h in range(2) for b in range(-(-n // SMALL.block))]
    assert last_entry == len(lens) - 1
    assert share * active + larger == len(units) and 0 <= larger < active
    assert [tuple(at) for at in first] == [units[p * share + min(p, larger)] for p in range(active)]
    assert len(meta) == len(attention.host_metadata(np.array([3, 4])))


@pytest.mark.parametrize("layout", at_depth(LAYOUTS.values(), QUICK_LAYOUTS), ids=LAYOUTS)
def test_extend_agrees_with_plain_attention(layout: dict[str, Any]) -> None:
    problem = Problem([0, 16, 7, 64, 0], [20, 1, 50, 16, 1], **layout)
    assert_agrees(problem.prefill(), problem.expected(), problem.q.dtype)


@pytest.mark.parametrize(
    ("cached", "extend"),
    [([0], [1]), ([0], [300]), ([250], [130]), ([0, 200, 3], [129, 2, 64]), ([5] * 12, [2] * 12)],
    ids=["one token", "long prompt", "later chunk", "mixed", "many short"],
)
def test_extend_of_any_lengths(cached: list[int], extend: list[int]) -> None:
    problem = Problem(cached, extend)
    assert_agrees(problem.prefill(), problem.expected(), torch.float32)


def test_extend_and_decode_agree_on_single_tokens() -> None:
    problem = Problem([0, 40, 200], [1, 1, 1], dtype=HALF, head_dim=64)
    assert_agrees(problem.decode(), problem.prefill().float(), HALF)


@pytest.mark.cuda
@pytest.mark.parametrize("group", [1, 2, 4])
@pytest.mark.parametrize(("cached", "extend"), [([0, 300], [3000, 5]), ([1000, 40], [2048, 2100]), ([5000], [400])])
def test_extend_of_long_chunks(cached: list[int], extend: list[int], group: int) -> None:
    problem = Problem(cached, extend, num_heads=2 * group, head_dim=128, dtype=torch.bfloat16)
    assert_agrees(problem.prefill(), problem.expected(), torch.bfloat16)


@pytest.mark.cuda
def test_decode_replays_in_a_graph_with_other_lengths() -> None:
    problem = Problem([500, 30, 1200, 7], [1] * 4, dtype=torch.bfloat16, head_dim=128, config=None)
    attention, rows = problem.attention, _ints(problem.rows)
    shorter = np.array([3, 31, 700, 1])
    lens = _ints(shorter.tolist())
    meta = torch.from_numpy(attention.host_metadata(shorter)).to(DEVICE)
    attention.decode(problem.q, problem.pool, problem.table, rows, lens, meta)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention.decode(problem.q, problem.pool, problem.table, rows, lens, meta)
    for wanted in (shorter, np.array(problem.cached) + 1, np.array([64, 1, 65, 8])):
        lens.copy_(_ints(wanted.tolist()))
        meta.copy_(torch.from_numpy(attention.host_metadata(wanted)))
        out.fill_(float("nan"))
        graph.replay()
        before = (wanted - 1).tolist()
        expected = paged_attention(problem.q, problem.pool, problem.table, problem.rows, before, [1] * 4)
        assert_agrees(out, expected, torch.bfloat16)


@pytest.mark.cuda
def test_decode_of_shared_keys_replays_in_a_graph_with_others() -> None:
    """The graph is replayed with plans of other runs, items and chunks, and at last with an empty plan."""
    cached = [4000, 4100, 3900, 700, 650, 5, 90, 4050]
    shared = ((0, 3, 200), (3, 2, 40), (6, 2, 4))
    problem = Problem(cached, [1] * 8, shared=shared, num_heads=16, kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    attention, rows = problem.attention, _ints(problem.rows)
    lens, meta = torch.empty_like(rows), _ints([0] * len(attention.host_metadata(np.ones(1))))
    room = attention.max_items_length(len(cached))
    keys = SharedKeys(*(_ints([0] * n) for n in (8, 8, 8, room)))

    def write(before: list[int], plan: SharedKeys) -> None:
        wanted = np.array(before) + 1
        lens.copy_(_ints(wanted.tolist()))
        meta.copy_(torch.from_numpy(attention.host_metadata(wanted - plan.starts)))
        for there, part in zip(keys, plan, strict=True):
            there[: len(part)] = _ints(part.tolist())

    nothing = np.zeros(8, dtype=np.int64)
    write(cached, SharedKeys(nothing, nothing, nothing, np.zeros(2, dtype=np.int64)))
    attention.decode(problem.q, problem.pool, problem.table, rows, lens, meta, shared=keys)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention.decode(problem.q, problem.pool, problem.table, rows, lens, meta, shared=keys)
    shorter = [3000, 40, 3100, 690, 641, 0, 90, 70]
    for before, plan in (
        (cached, problem.shared_keys()),
        (shorter, problem.shared_keys(shorter)),
        (cached, problem.shared_keys()),
        (cached, SharedKeys(nothing, nothing, nothing, np.zeros(2, dtype=np.int64))),
    ):
        write(before, plan)
        out.fill_(float("nan"))
        graph.replay()
        expected = paged_attention(problem.q, problem.pool, problem.table, problem.rows, before, [1] * 8)
        assert_agrees(out, expected, torch.bfloat16)


@pytest.mark.cuda
def test_decode_gives_the_same_bits_every_time() -> None:
    lens = [1500, 64, 3000, 900, 20] * 8
    problem = Problem([n - 1 for n in lens], [1] * len(lens), dtype=torch.bfloat16, head_dim=128, config=None)
    first = problem.decode()
    for _ in range(50):
        assert torch.equal(problem.decode(), first)

"""Merging the descriptions of several ranks into one."""

from __future__ import annotations

import pytest
import torch

from tests.weight_sync.reading import read
from verl_server.errors import BadRequestError
from verl_server.weight_sync.handles import WeightsDescription
from verl_server.weight_sync.trainer.description import merge, merged_id
from verl_server.weight_sync.trainer.sender import WeightSender
from verl_server.weight_sync.trainer.shards import TensorShard


def describe(**tensors: torch.Tensor | TensorShard) -> WeightsDescription:
    """Describe the tensors of one rank, and keep the tensors alive beyond the test."""
    alive.append(tensors)
    return WeightSender().describe(list(tensors.items())).description


alive: list[object] = []
FULL = torch.arange(24.0).reshape(6, 4)


def rows(start: int, stop: int) -> TensorShard:
    return TensorShard(FULL[start:stop].clone(), (6, 4), (start, 0))


def test_shards_of_several_ranks_make_one_tensor() -> None:
    merged = merge([describe(w=rows(0, 2)), describe(w=rows(2, 6))])
    assert torch.equal(read(merged)["w"], FULL)


def test_copies_keep_the_order_of_ranks() -> None:
    ranks = [describe(w=torch.full((2,), float(rank))) for rank in range(3)]
    (source,) = merge(ranks).tensors
    assert [shard.allocation for shard in source.shards] == [0, 1, 2]


def test_an_engine_reads_its_own_ranks_where_they_hold_all() -> None:
    """Two engines with two ranks each: `shared` is cut over all four ranks, `own` differs between the engines."""
    ranks = [
        describe(own=torch.full((4,), float(rank // 2)), shared=rows(rank, rank + (3 if rank == 3 else 1)))
        for rank in range(4)
    ]
    for engine in range(2):
        merged = merge(ranks, readers=[2 * engine, 2 * engine + 1])
        assert torch.equal(read(merged)["own"], torch.full((4,), float(engine)))
        assert torch.equal(read(merged)["shared"], FULL)
        own, shared = merged.tensors
        assert len(own.shards) == 2 and len(shared.shards) == 4


def test_what_is_not_read_is_not_opened() -> None:
    ranks = [describe(w=torch.full((4,), float(rank))) for rank in range(3)]
    assert [allocation.id for allocation in merge(ranks, readers=[1]).allocations] == [ranks[1].allocations[0].id]


def test_ranks_may_bring_different_tensors() -> None:
    """Pipeline stages hold different layers."""
    merged = merge([describe(a=FULL), describe(b=FULL + 1)])
    assert torch.equal(read(merged)["b"], FULL + 1)
    assert [source.name for source in merged.tensors] == ["a", "b"]


def test_the_id_is_that_of_all_ranks_memory() -> None:
    assert merged_id(["a"]) == "a"
    assert merged_id(["a", "b"]) == merged_id(["a", "b"])
    assert len({merged_id(["a", "b"]), merged_id(["b", "a"]), merged_id(["ab"]), merged_id(["a"])}) == 4
    ranks = [describe(w=rows(0, 2)), describe(w=rows(2, 6))]
    assert merge(ranks).id == merged_id([rank.id for rank in ranks])


@pytest.mark.parametrize("other", [FULL.double(), FULL[:, :2]])
def test_contradictions_are_refused(other: torch.Tensor) -> None:
    with pytest.raises(BadRequestError, match=r"'w' is float32 .6, 4. on rank 0, but .* on rank 1"):
        merge([describe(w=FULL), describe(w=other.clone())])


def test_a_gap_says_what_is_missing_and_why() -> None:
    with pytest.raises(BadRequestError, match=r"'w' \(20 of 24 elements\).*[Ss]hards on ranks outside"):
        merge([describe(w=rows(0, 2)), describe(w=rows(3, 6))])
    with pytest.raises(BadRequestError, match="12 of 24"):
        merge([describe(w=rows(0, 3)), describe(w=rows(0, 3))])  # copies do not count twice

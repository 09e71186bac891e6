"""Boxes of DTensors agree with torch's own splitting of a numbered tensor."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from verl_server.errors import BadRequestError
from verl_server.weight_sync.trainer.shards import TensorShard, parts_of, sharded_parts


def split(full: torch.Tensor, mesh: tuple[int, ...], coordinate: tuple[int, ...], placements: Any) -> torch.Tensor:
    """Return the local tensor of one rank as torch splits it."""
    local = full
    for count, index, placement in zip(mesh, coordinate, placements, strict=True):
        if not isinstance(placement, Replicate):
            local = placement._split_tensor(local, count, with_padding=False)[0][index]
    return local


LAYOUTS: list[tuple[tuple[int, ...], tuple[Placement, ...]]] = [
    ((1,), (Shard(0),)),
    ((4,), (Shard(0),)),
    ((4,), (Shard(1),)),
    ((3,), (Replicate(),)),
    ((2, 3), (Replicate(), Shard(0))),
    ((2, 3), (Shard(0), Shard(1))),
    ((2, 3), (Shard(1), Shard(0))),
    ((2, 2), (Shard(0), Shard(0))),
    ((3, 2), (_StridedShard(0, split_factor=2), Shard(0))),
    ((2, 3), (_StridedShard(1, split_factor=3), Shard(1))),
    ((2, 4), (_StridedShard(0, split_factor=4), Shard(0))),
    ((2, 1), (_StridedShard(0, split_factor=2), Replicate())),
    ((4,), (_StridedShard(0, split_factor=3),)),
    ((2, 2, 2), (Replicate(), _StridedShard(0, split_factor=2), Shard(0))),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("shape", [(8, 6), (7, 5), (3, 1), (1, 4), (16,), (5,), (2, 3, 4), (0, 4), (9, 12)])
def test_boxes_are_where_torch_puts_them(layout: tuple[Any, Any], shape: tuple[int, ...]) -> None:
    mesh, placements = layout
    if any(getattr(p, "dim", 0) >= len(shape) for p in placements):
        pytest.skip("no such dimension")
    full = torch.arange(torch.Size(shape).numel()).reshape(shape)
    seen = torch.zeros(shape, dtype=torch.int64)
    for coordinate in itertools.product(*map(range, mesh)):
        local = split(full, mesh, coordinate, placements)
        boxes = sharded_parts("w", shape, mesh, coordinate, placements)
        for box in boxes:
            there = tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))
            here = tuple(slice(o, o + n) for o, n in zip(box.local_offset, box.shape, strict=True))
            assert torch.equal(full[there], local[here])
            seen[there] += 1
        assert sum(torch.Size(box.shape).numel() for box in boxes) == local.numel(), (
            "the boxes cover all of the local tensor"
        )
    copies = [count for count, p in zip(mesh, placements, strict=True) if isinstance(p, Replicate)]
    assert (seen == torch.Size(copies).numel()).all()


def test_neighbouring_pieces_are_one_box() -> None:
    assert len(sharded_parts("w", (8, 4), (2, 2), (1, 1), (Shard(0), Shard(0)))) == 1
    assert len(sharded_parts("w", (8, 4), (2, 2), (1, 1), (_StridedShard(0, split_factor=2), Shard(0)))) == 1
    assert len(sharded_parts("w", (8, 4), (2,), (1,), (_StridedShard(0, split_factor=2),))) == 2


def test_sums_that_no_rank_holds_are_refused() -> None:
    with pytest.raises(BadRequestError, match=r"'w' has placements .*Redistribute"):
        sharded_parts("w", (4,), (2,), (0,), (Partial(),))


def test_plain_tensors_are_whole_and_scalars_too() -> None:
    shape, (box,) = parts_of("w", torch.zeros(3, 4))
    assert (shape, box.shape, box.offset) == ((3, 4), (3, 4), (0, 0))
    shape, (box,) = parts_of("w", torch.tensor(1.0))
    assert (shape, box.shape) == ((), ())
    assert parts_of("w", torch.zeros(0, 4)) == ((0, 4), [])


def test_declared_shards() -> None:
    shape, (box,) = parts_of("w", TensorShard(torch.zeros(2, 4), shape=(6, 4), offset=(4, 0)))
    assert (shape, box.shape, box.offset, box.local_offset) == ((6, 4), (2, 4), (4, 0), (0, 0))
    assert parts_of("w", TensorShard(torch.zeros(0, 4), shape=(6, 4), offset=(6, 0)))[1] == []
    for shape, offset in [((6, 4), (5, 0)), ((6,), (0,)), ((6, 4), (-1, 0)), ((6, 4), (0,))]:
        with pytest.raises(BadRequestError, match="no box"):
            parts_of("w", TensorShard(torch.zeros(2, 4), shape=shape, offset=offset))
    with pytest.raises(BadRequestError, match="plain tensor"):
        parts_of("w", TensorShard([1.0], shape=(1,), offset=(0,)))  # type: ignore[arg-type]

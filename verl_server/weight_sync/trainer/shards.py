"""Finds the parts of a full tensor that lie in this rank's memory, without any collective.

`sender` calls this module for every pushed tensor. From the mesh and placements of a `DTensor`, each rank computes the
boxes of its local tensor alone. A `TensorShard` declares its box. A plain tensor is a whole tensor.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from verl_server.errors import BadRequestError

Interval = tuple[int, int]
"""(start, stop) along one dimension of the full tensor."""


@dataclass(frozen=True)
class TensorShard:
    """A plain tensor that is one box (a range in each dimension) of a full tensor, for trainers without `DTensor`.

    One rank may pass several shards of one name, and several ranks may pass copies of one box. The boxes of all ranks
    together must cover the full tensor. Megatron's shards have this form.
    """

    tensor: torch.Tensor
    """This rank's part of the full tensor."""
    shape: Sequence[int]
    """Shape of the full tensor."""
    offset: Sequence[int]
    """Start of the box in the full tensor."""


@dataclass(frozen=True)
class LocalPart:
    """A box of a full tensor that is also a box of this rank's local tensor."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    """Start in the full tensor."""
    local_offset: tuple[int, ...]
    """Start in the local tensor."""


def parts_of(name: str, value: torch.Tensor | TensorShard) -> tuple[tuple[int, ...], list[LocalPart]]:
    """Return (shape of the full tensor, boxes of it that `value` has on this rank). The list is empty if it has none.

    Raise BadRequestError for `Partial` placements, and for boxes that do not fit.
    """
    if isinstance(value, TensorShard):
        return tuple(value.shape), _declared(name, value)
    shape = tuple(value.shape)
    if not isinstance(value, DTensor):
        return shape, _products([[(0, size)] for size in shape])
    coordinate = value.device_mesh.get_coordinate()
    if coordinate is None:
        return shape, []  # the mesh is of other ranks
    boxes = sharded_parts(name, shape, value.device_mesh.shape, coordinate, value.placements)
    held = tuple(local_tensor(value).shape)
    if boxes and held != _extent(boxes):
        raise BadRequestError(
            f"'{name}' has placements {value.placements} on a mesh of {tuple(value.device_mesh.shape)}, by which this "
            f"rank holds {list(_extent(boxes))} of {list(shape)}, but its local tensor has {list(held)}."
        )
    return shape, boxes


def local_tensor(value: torch.Tensor | TensorShard) -> torch.Tensor:
    """Return this rank's local tensor of `value`, detached from autograd."""
    if isinstance(value, TensorShard):
        return value.tensor
    # to_local() records a view for autograd, which takes longer than all of a push's other checks together.
    return value._local_tensor if isinstance(value, DTensor) else value


def sharded_parts(
    name: str,
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    placements: Sequence[Placement],
) -> list[LocalPart]:
    """Return the boxes of the rank at `coordinate` of a mesh.

    The placements are applied in the order of mesh dimensions.
    """
    dims: list[list[Interval]] = [[(0, size)] for size in shape]
    for count, index, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if isinstance(placement, _StridedShard):
            pieces = (
                _chunk(dims[placement.dim], int(placement.split_factor), i) for i in range(placement.split_factor)
            )
            dims[placement.dim] = [part for piece in pieces for part in _chunk(piece, count, index)]
        elif isinstance(placement, Shard):
            dims[placement.dim] = _chunk(dims[placement.dim], count, index)
        elif not isinstance(placement, Replicate):
            raise BadRequestError(
                f"'{name}' has placements {tuple(placements)}: with {placement} no rank holds its values. "
                "Redistribute it to Shard or Replicate before pushing it."
            )
    return _products([_joined(intervals) for intervals in dims])


def _chunk(intervals: list[Interval], count: int, index: int) -> list[Interval]:
    """Concatenate the intervals, divide them into `count` chunks as `torch.chunk` does, and return chunk `index`."""
    size = -(-sum(stop - start for start, stop in intervals) // count)
    first, last, position, piece = index * size, (index + 1) * size, 0, []
    for start, stop in intervals:
        low, high = max(first - position, 0), min(last - position, stop - start)
        if low < high:
            piece.append((start + low, start + high))
        position += stop - start
    return piece


def _joined(intervals: list[Interval]) -> list[Interval]:
    """Merge adjacent intervals, so that there are fewer boxes to copy."""
    joined: list[Interval] = []
    for start, stop in intervals:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


def _products(dims: list[list[Interval]]) -> list[LocalPart]:
    """Return one part for each combination of intervals, [] if a dimension has no interval."""
    placed: list[list[tuple[int, int, int]]] = []
    for intervals in dims:
        local = itertools.accumulate((stop - start for start, stop in intervals), initial=0)
        placed.append([(stop - start, start, at) for (start, stop), at in zip(intervals, local, strict=False)])
    boxes = []
    for combination in itertools.product(*placed):
        if all(size for size, _, _ in combination):
            sizes, offsets, locals_ = zip(*combination, strict=True) if combination else ((), (), ())
            boxes.append(LocalPart(tuple(sizes), tuple(offsets), tuple(locals_)))
    return boxes


def _extent(boxes: list[LocalPart]) -> tuple[int, ...]:
    """Return the shape of the local tensor that contains the boxes."""
    ends = ([at + size for at, size in zip(box.local_offset, box.shape, strict=True)] for box in boxes)
    return tuple(max(dim) for dim in zip(*ends, strict=True))


def _declared(name: str, value: TensorShard) -> list[LocalPart]:
    tensor, shape, offset = value.tensor, tuple(value.shape), tuple(value.offset)
    if not isinstance(tensor, torch.Tensor) or isinstance(tensor, DTensor):
        raise BadRequestError(
            f"The TensorShard of '{name}' holds a {type(tensor).__name__}; it must hold a plain tensor."
        )
    box = tuple(tensor.shape)
    fits = len(shape) == len(offset) == len(box) and all(
        start >= 0 and start + size <= full for start, size, full in zip(offset, box, shape, strict=True)
    )
    if not fits:
        raise BadRequestError(
            f"The TensorShard of '{name}' has shape {list(box)} at offset {list(offset)}, which is no box of a tensor "
            f"of shape {list(shape)}."
        )
    return [LocalPart(box, offset, (0,) * len(box))] if tensor.numel() else []

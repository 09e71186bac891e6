"""Arithmetic of boxes: the place of a shard in its full tensor, intersections, and the check of a tiling.

`plan` and `sources` call it. A box has a half-open range for each dimension. Boxes from the wire are checked first, so
that the time of every function is bounded by the number of boxes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from verl_server.errors import WeightUpdateError

Box = tuple[tuple[int, int], ...]
"""(start, stop) in each dimension of the full tensor."""

_MOST_CELLS = 1 << 22
"""The most cells of the grid into which the borders of all shards divide a tensor. n shards of a mesh make n cells."""


def box_at(offset: Sequence[int], shape: Sequence[int]) -> Box:
    return tuple((start, start + size) for start, size in zip(offset, shape, strict=True))


def indexed_box(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """Return the box of a tensor of this shape that `tensor[index]` selects."""
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def volume(box: Box) -> int:
    return math.prod(stop - start for start, stop in box)


def common_box(a: Box, b: Box) -> Box | None:
    """Return the intersection of two boxes, or None if it is empty."""
    common = tuple((max(p[0], q[0]), min(p[1], q[1])) for p, q in zip(a, b, strict=True))
    return common if all(start < stop for start, stop in common) else None


def index_in(inner: Box, outer: Box) -> tuple[slice, ...]:
    """Return the index that selects the box `inner` from a tensor that holds the box `outer`."""
    return tuple(slice(p[0] - q[0], p[1] - q[0]) for p, q in zip(inner, outer, strict=True))


def check_tiling(shape: Sequence[int], boxes: Sequence[Box]) -> None:
    """Raise WeightUpdateError unless `boxes` (distinct, not empty, inside `shape`) are disjoint and cover `shape`.

    The borders of all boxes divide the tensor into a grid of cells. Each box marks its cells. A cell that is marked
    twice raises the error at once, so the time is bounded by the number of cells.
    """
    full = box_at([0] * len(shape), shape)
    if list(boxes) == [full] or volume(full) == 0:
        return
    cuts = [sorted({edge for box in boxes for edge in box[d]} | {0, shape[d]}) for d in range(len(shape))]
    if math.prod(len(edges) - 1 for edges in cuts) > _MOST_CELLS:
        raise WeightUpdateError(f"its {len(boxes)} shards have too irregular borders.")
    cell = [{edge: i for i, edge in enumerate(edges)} for edges in cuts]
    taken = np.zeros([len(edges) - 1 for edges in cuts], dtype=np.bool_)
    for i, box in enumerate(boxes):
        cells = tuple(slice(cell[d][start], cell[d][stop]) for d, (start, stop) in enumerate(box))
        if taken[cells].any():
            other = next(earlier for earlier in boxes[:i] if common_box(earlier, box))
            raise WeightUpdateError(f"its shards {spoken(other)} and {spoken(box)} overlap without being equal.")
        taken[cells] = True
    if not taken.all():
        raise WeightUpdateError(
            f"no shard covers {spoken(_first_gap(taken, cuts))} of {list(shape)}. Every rank that holds a part of "
            "the tensor must push it."
        )


def spoken(box: Box) -> str:
    """Return the box as text, like an index: [0:4, 8:16]."""
    return f"[{', '.join(f'{start}:{stop}' for start, stop in box)}]"


def _first_gap(taken: NDArray[np.bool_], cuts: list[list[int]]) -> Box:
    """Return the largest free box that begins at the first free cell, extended along the last dimension first."""
    gap = [slice(int(i), int(i) + 1) for i in np.unravel_index(int(taken.argmin()), taken.shape)]
    for d in reversed(range(len(gap))):
        while gap[d].stop < taken.shape[d]:
            beyond = [*gap[:d], slice(gap[d].stop, gap[d].stop + 1), *gap[d + 1 :]]
            if taken[tuple(beyond)].any():
                break
            gap[d] = slice(gap[d].start, gap[d].stop + 1)
    return tuple((cuts[d][part.start], cuts[d][part.stop]) for d, part in enumerate(gap))

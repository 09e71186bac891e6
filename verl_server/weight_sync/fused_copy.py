"""Many tensors into many tensors, in place, at the rate of one flat copy.

A `CopyPlan` is made once for a set of (destination, source) views, off the serving loop, and run at every
update. The `WeightReceiver` makes it from what it planned; `UpdatePlan.commit` runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


class CopyPlan:
    """Copies of `sources[i]` into `destinations[i]`, prepared once and run many times.

    A pair has one shape; dtypes may differ, then values are converted as `Tensor.copy_` does. Sources may lie in
    another process's memory, or on a peer GPU opened through CUDA IPC. Destinations may be views, but must not
    overlap each other or a source. The memory behind all of them must stay where it is while the plan is used.
    """

    nbytes: int
    """Bytes that one run writes."""

    def __init__(self, destinations: Sequence[Tensor], sources: Sequence[Tensor], *, fused: bool = True) -> None:
        """Prepare the copies. `fused=False` leaves them all to torch. ValueError if the pairs do not fit."""
        pairs = _checked_pairs(destinations, sources)
        self.nbytes = sum(destination.nbytes for destination, _ in pairs)
        self._steps: list[Callable[[], object]] = []
        if pairs:
            self._steps.append(lambda: torch._foreach_copy_([d for d, _ in pairs], [s for _, s in pairs]))

    def run(self) -> None:
        """Copy. On CUDA this only enqueues work on the current stream: synchronize before the sources change."""
        for step in self._steps:
            step()


def _checked_pairs(destinations: Sequence[Tensor], sources: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """The pairs that have bytes, detached: an update in place is no business of autograd's."""
    if len(destinations) != len(sources):
        raise ValueError(
            f"{len(destinations)} destinations for {len(sources)} sources: give one of each for every copy."
        )
    for i, (destination, source) in enumerate(zip(destinations, sources, strict=True)):
        if destination.shape != source.shape:
            raise ValueError(f"Copy {i}: shape {list(source.shape)} does not fit into {list(destination.shape)}.")
    return [(d.detach(), s.detach()) for d, s in zip(destinations, sources, strict=True) if d.numel()]

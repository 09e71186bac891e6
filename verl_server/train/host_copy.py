"""`HostCopy`: a copy of one rank's shards in host memory, from which a checkpoint is written while the steps go on.

`checkpoint_writer` takes one before each save. The memory is allocated by the first copy and used again by the later
ones, so that a run has one copy at most: the fp32 weights of the rank's shards and what their optimizers store.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from verl_server.train.ranks import cpu_mesh


class HostCopy:
    def __init__(self) -> None:
        """Allocate nothing yet. All ranks call it together."""
        self._mesh = cpu_mesh()
        self._memory: dict[tuple[Any, ...], Tensor] = {}
        """Keys and indices that lead to a tensor of the state -> the memory for its copy."""

    @torch.no_grad()
    def take(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return `state` with a copy of each tensor, which is complete when this returns.

        `state` has nested dictionaries and lists (`checkpoints.state_of`). A DTensor becomes one on the CPU. On CUDA,
        the copies are ordered behind what the current stream has launched, and later kernels may write the tensors. The
        result is overwritten by the next call.
        """
        copied: dict[str, Any] = self._copy((), state)
        return copied

    def _copy(self, place: tuple[Any, ...], value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._copy((*place, key), found) for key, found in value.items()}
        if isinstance(value, list):
            return [self._copy((*place, index), found) for index, found in enumerate(value)]
        if isinstance(value, DTensor):
            local = self._tensor(place, value.to_local())
            shape, stride = value.shape, value.stride()
            return DTensor.from_local(local, self._mesh, value.placements, run_check=False, shape=shape, stride=stride)
        return self._tensor(place, value) if isinstance(value, Tensor) else value

    def _tensor(self, place: tuple[Any, ...], tensor: Tensor) -> Tensor:
        memory = self._memory.get(place)
        if memory is None or memory.shape != tensor.shape or memory.dtype != tensor.dtype:
            memory = self._memory[place] = torch.empty(tensor.shape, dtype=tensor.dtype)
        # The memory is not pinned, so a copy from a GPU returns when it has ended.
        return memory.copy_(tensor)

"""Reads described memory as a server does, for tests of the trainer's side."""

from __future__ import annotations

import torch

from verl_server.weight_sync.handles import TensorHandle, WeightsDescription
from verl_server.weight_sync.receiver.open_memory import FLOATING, OpenAllocations


def read_handle(handle: TensorHandle) -> torch.Tensor:
    """Return a copy of the tensor's current values."""
    return OpenAllocations(torch.device("cpu")).view("t", handle).clone()


def read(description: WeightsDescription) -> dict[str, torch.Tensor]:
    """Return copies of the full tensors, assembled from their shards. Elements that no shard covers are NaN."""
    memory = OpenAllocations(torch.device("cpu"))
    tensors = {}
    for source in description.tensors:
        full = torch.full(source.shape, torch.nan, dtype=FLOATING[source.dtype])
        for shard in source.shards:
            handle = TensorHandle(
                allocation=description.allocations[shard.allocation],
                dtype=source.dtype,
                shape=shard.shape,
                stride=shard.stride,
                storage_offset=shard.storage_offset,
            )
            box = tuple(slice(o, o + n) for o, n in zip(shard.offset, shard.shape, strict=True))
            full[box] = memory.view(source.name, handle)
        tensors[source.name] = full
    return tensors

"""Turns tensors and the regions of their storages into a `WeightsDescription`: shapes, parts, strides, offsets.

Called by `sender` when a set of tensors is new or has moved. Whether memory moved, and how it is made readable,
is decided elsewhere.
"""

from __future__ import annotations

import uuid
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from verl_server.errors import BadRequestError
from verl_server.weight_sync.handles import Allocation, DescribedTensor, Shard, WeightsDescription
from verl_server.weight_sync.trainer.exports import Region
from verl_server.weight_sync.trainer.shards import LocalPart, TensorShard, local_tensor, parts_of

Pushed = tuple[str, torch.Tensor | TensorShard]

PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Types whose memory is their own, without any wrapper."""


def readable_memory(name: str, value: Any) -> torch.Tensor:
    """The plain tensor that this rank holds of a value. Raises BadRequestError if it has no plain memory."""
    tensor = value if type(value) in PLAIN else _inner(name, value)
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_neg() or tensor.is_quantized:
        raise BadRequestError(f"'{name}' ({tensor.layout}, device '{tensor.device}') has no plain memory to share.")
    return tensor


def _inner(name: str, value: Any) -> torch.Tensor:
    tensor = local_tensor(value) if isinstance(value, torch.Tensor | TensorShard) else value
    if not isinstance(tensor, torch.Tensor):
        raise BadRequestError(f"'{name}' is a {type(tensor).__name__}, not a torch.Tensor.")
    if is_traceable_wrapper_subclass(tensor):
        raise BadRequestError(f"'{name}' is a {type(tensor).__name__}, which has no memory of its own to share.")
    return tensor


def describe_memory(tensors: list[Pushed], regions: dict[int, Region]) -> WeightsDescription:
    """A description of `tensors`, under a new id. `regions` has the region of each storage by its `_cdata`.

    Raises BadRequestError for what has no memory, does not fit its declared box, or comes twice.
    """
    allocations: list[Allocation] = []
    places: dict[str, int] = {}
    sources: dict[str, DescribedTensor] = {}
    for name, value in tensors:
        shape, boxes = parts_of(name, value)
        memory = local_tensor(value)
        dtype = str(memory.dtype).removeprefix("torch.")
        _check_memory(name, memory)
        source = DescribedTensor(name=name, dtype=dtype, shape=list(shape), shards=[])
        if name in sources:
            source = _another_shard(sources[name], source, value, boxes)
        sources[name] = source
        if boxes:
            region = regions[memory.untyped_storage()._cdata]
            index = places.setdefault(region.allocation.id, len(allocations))
            allocations.extend([region.allocation] if index == len(allocations) else [])
            source.shards.extend(_shard(box, memory, region, index) for box in boxes)
    return WeightsDescription(id=uuid.uuid4().hex, allocations=allocations, tensors=list(sources.values()))


def _shard(box: LocalPart, memory: torch.Tensor, region: Region, allocation: int) -> Shard:
    stride = memory.stride()
    start = region.offset // memory.element_size() + memory.storage_offset()
    start += sum(at * step for at, step in zip(box.local_offset, stride, strict=True))
    return Shard(
        allocation=allocation,
        shape=list(box.shape),
        offset=list(box.offset),
        stride=list(stride),
        storage_offset=int(start),
    )


def _check_memory(name: str, memory: torch.Tensor) -> None:
    """Memory that was freed under its tensor cannot be read."""
    last = sum((size - 1) * step for size, step in zip(memory.shape, memory.stride(), strict=True))
    end = (memory.storage_offset() + last + 1) * memory.element_size()
    if memory.numel() and end > memory.untyped_storage().nbytes():
        raise BadRequestError(
            f"'{name}' has no memory any more: its storage was freed or resized under it (a parameter that FSDP has "
            "resharded, or that was offloaded). Read the parameters from the module again."
        )


def _another_shard(
    first: DescribedTensor, second: DescribedTensor, value: Any, boxes: list[LocalPart]
) -> DescribedTensor:
    """A name may come more than once in shards of one tensor; anything else is a mistake."""
    same = (first.dtype, first.shape) == (second.dtype, second.shape)
    known = [(shard.shape, shard.offset) for shard in first.shards]
    if not (isinstance(value, TensorShard) and same) or any((list(b.shape), list(b.offset)) in known for b in boxes):
        raise BadRequestError(f"'{first.name}' comes twice. (Only TensorShards of different boxes may share a name.)")
    return first

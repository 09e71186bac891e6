"""Descriptions of weights: of the memory of one rank, and merged from several ranks.

`sender` calls `describe_memory` when a set of tensors is new or has moved. `engine.push` calls `merge` on the first
rank. Shards of one name are in the order of ranks. The server's ranks rely on this order when they choose among equal
boxes of replicas.
"""

from __future__ import annotations

import hashlib
import math
import uuid
from typing import Any

import msgspec
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from verl_server.errors import BadRequestError
from verl_server.weight_sync.handles import Allocation, DescribedTensor, Shard, WeightsDescription
from verl_server.weight_sync.trainer.exports import Region
from verl_server.weight_sync.trainer.shards import LocalPart, TensorShard, local_tensor, parts_of

Pushed = tuple[str, torch.Tensor | TensorShard]

_LISTED = 4
"""The most tensors that an error names."""
PLAIN = (torch.Tensor, torch.nn.Parameter)
"""Types of plain tensors, as opposed to wrappers."""


def readable_memory(name: str, value: Any) -> torch.Tensor:
    """Return this rank's part of a value as a plain tensor. Raise BadRequestError if the value has no plain memory."""
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
    """Describe `tensors` under a new id. `regions` maps the `_cdata` of a storage to its region.

    Raise BadRequestError for a tensor that has no memory, does not fit its declared box, or occurs twice.
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
    """Raise BadRequestError if the memory of the tensor was freed, so that it cannot be read."""
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
    """Add a second shard of the same tensor to `first`, and return the result.

    Raise BadRequestError if the second is no other shard of this tensor.
    """
    same = (first.dtype, first.shape) == (second.dtype, second.shape)
    known = [(shard.shape, shard.offset) for shard in first.shards]
    if not (isinstance(value, TensorShard) and same) or any((list(b.shape), list(b.offset)) in known for b in boxes):
        raise BadRequestError(f"'{first.name}' comes twice. (Only TensorShards of different boxes may share a name.)")
    return first


# -- several ranks ------------------------------------------------------------------------------------------------


def merged_id(ids: list[str]) -> str:
    """Return the id of the merged description, which changes if the id of any rank changes.

    With one rank it is that rank's id.
    """
    return ids[0] if len(ids) == 1 else hashlib.blake2b(" ".join(ids).encode(), digest_size=16).hexdigest()


def merge(descriptions: list[WeightsDescription], readers: list[int] | None = None) -> WeightsDescription:
    """Return the shards of all ranks by name. Raise BadRequestError if ranks contradict each other, or leave gaps.

    `readers` are the trainer ranks of the engine that reads the shards; None means all ranks. If these ranks together
    hold a full tensor, only their shards are listed. The copies on the ranks of other engines are further away, and may
    be intended for those engines.
    """
    readers = list(range(len(descriptions))) if readers is None else readers
    held: dict[str, dict[int, DescribedTensor]] = {}
    for rank, description in enumerate(descriptions):
        for source in description.tensors:
            held.setdefault(source.name, {})[rank] = source
    merged = _Merged(descriptions)
    gaps = []
    for name, by_rank in held.items():
        near = {rank: source for rank, source in by_rank.items() if rank in readers}
        chosen = near if _gap(near) == 0 else by_rank
        merged.add(name, chosen)
        if (gap := _gap(chosen)) != 0:
            size = math.prod(next(iter(chosen.values())).shape)
            gaps.append(f"'{name}' ({size - gap:,} of {size:,} elements)")
    _refuse_gaps(gaps, len(descriptions))
    id = merged_id([description.id for description in descriptions])
    return WeightsDescription(id=id, allocations=merged.allocations, tensors=merged.tensors)


class _Merged:
    def __init__(self, descriptions: list[WeightsDescription]) -> None:
        self.allocations: list[Allocation] = []
        self.tensors: list[DescribedTensor] = []
        self._descriptions = descriptions
        self._numbers: dict[tuple[int, int], int] = {}
        """(rank, index of an allocation in the rank's description) -> index in the merged description."""

    def add(self, name: str, by_rank: dict[int, DescribedTensor]) -> None:
        (first, source), *others = by_rank.items()
        for rank, other in others:
            if (other.dtype, other.shape) != (source.dtype, source.shape):
                raise BadRequestError(
                    f"'{name}' is {source.dtype} {source.shape} on rank {first}, but {other.dtype} {other.shape} on "
                    f"rank {rank}: all ranks must push the same tensors."
                )
        shards = [self._renumbered(shard, rank) for rank, held in by_rank.items() for shard in held.shards]
        self.tensors.append(DescribedTensor(name=name, dtype=source.dtype, shape=source.shape, shards=shards))

    def _renumbered(self, shard: Shard, rank: int) -> Shard:
        number = self._numbers.setdefault((rank, shard.allocation), len(self.allocations))
        if number == len(self.allocations):
            self.allocations.append(self._descriptions[rank].allocations[shard.allocation])
        return msgspec.structs.replace(shard, allocation=number)


def _gap(by_rank: dict[int, DescribedTensor]) -> int:
    """Return the number of elements of a tensor that none of these ranks holds. Without ranks it is positive."""
    boxes = {(tuple(shard.offset), tuple(shard.shape)) for source in by_rank.values() for shard in source.shards}
    size = math.prod(next(iter(by_rank.values())).shape) if by_rank else 1
    return max(0, size - sum(math.prod(shape) for _, shape in boxes))


def _refuse_gaps(gaps: list[str], ranks: int) -> None:
    """Raise BadRequestError if the shards leave gaps.

    The server refuses gaps, too, but its error cannot name the trainer's ranks.
    """
    if gaps:
        rest = f" and {len(gaps) - _LISTED} more" if len(gaps) > _LISTED else ""
        raise BadRequestError(
            f"The {ranks} rank(s) that push do not hold all of {', '.join(gaps[:_LISTED])}{rest}. Shards on ranks "
            "outside of the engine cannot be read: make one engine for all ranks that share the parameters, let every "
            "engine of a mesh read all of its ranks (VerlEngine's read_all_ranks=True), or push full tensors."
        )

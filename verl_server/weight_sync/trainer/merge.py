"""One description of what several trainer ranks own, made by the first of them.

Called by `pusher`. Shards of one name are collected in the order of ranks, so that equal boxes of replicas are
listed as the server's ranks choose among them.
"""

from __future__ import annotations

import hashlib
import math

from verl_server.errors import BadRequestError
from verl_server.weight_sync.handles import Allocation, Shard, TensorSource, WeightsDescription

_LISTED = 4


def merged_id(ids: list[str]) -> str:
    """An id that changes whenever the memory of one of the ranks does; of one rank, its own."""
    return ids[0] if len(ids) == 1 else hashlib.blake2b(" ".join(ids).encode(), digest_size=16).hexdigest()


def merge(descriptions: list[WeightsDescription]) -> WeightsDescription:
    """The shards of all ranks by name. Raises BadRequestError where ranks contradict each other, or leave gaps."""
    allocations: list[Allocation] = []
    sources: dict[str, TensorSource] = {}
    first_rank: dict[str, int] = {}
    for rank, description in enumerate(descriptions):
        for source in description.tensors:
            merged = sources.setdefault(source.name, _without_shards(source))
            before = first_rank.setdefault(source.name, rank)
            if (merged.dtype, merged.shape) != (source.dtype, source.shape):
                raise BadRequestError(
                    f"'{source.name}' is {merged.dtype} {merged.shape} on rank {before}, but {source.dtype} "
                    f"{source.shape} on rank {rank}: all ranks must push the same tensors."
                )
            merged.shards.extend(_renumbered(shard, len(allocations)) for shard in source.shards)
        allocations.extend(description.allocations)
    _check_complete(list(sources.values()), len(descriptions))
    id = merged_id([description.id for description in descriptions])
    return WeightsDescription(id=id, allocations=allocations, tensors=list(sources.values()))


def _without_shards(source: TensorSource) -> TensorSource:
    return TensorSource(name=source.name, dtype=source.dtype, shape=source.shape, shards=[])


def _renumbered(shard: Shard, first: int) -> Shard:
    return Shard(
        allocation=shard.allocation + first,
        shape=shard.shape,
        offset=shard.offset,
        stride=shard.stride,
        storage_offset=shard.storage_offset,
    )


def _check_complete(sources: list[TensorSource], ranks: int) -> None:
    """The server refuses gaps too, but does not know of which ranks the trainer consists."""
    gaps = []
    for source in sources:
        boxes = {(tuple(shard.offset), tuple(shard.shape)) for shard in source.shards}
        held = sum(math.prod(shape) for _, shape in boxes)
        if held < math.prod(source.shape):
            gaps.append(f"'{source.name}' ({held:,} of {math.prod(source.shape):,} elements)")
    if gaps:
        rest = f" and {len(gaps) - _LISTED} more" if len(gaps) > _LISTED else ""
        raise BadRequestError(
            f"The {ranks} rank(s) of this engine do not hold all of {', '.join(gaps[:_LISTED])}{rest}. Shards on ranks "
            "outside of the engine cannot be read: make one engine for all ranks that share the parameters, shard "
            "only among an engine's ranks (replicate across engines), or push full tensors."
        )

"""One description of what several trainer ranks own, made by the first of them.

Called by `engine.push`. Shards of one name are collected in the order of ranks, so that equal boxes of replicas are
listed as the server's ranks choose among them.
"""

from __future__ import annotations

import hashlib
import math

import msgspec

from verl_server.errors import BadRequestError
from verl_server.weight_sync.handles import Allocation, DescribedTensor, Shard, WeightsDescription

_LISTED = 4


def merged_id(ids: list[str]) -> str:
    """An id that changes whenever the memory of one of the ranks does; of one rank, its own."""
    return ids[0] if len(ids) == 1 else hashlib.blake2b(" ".join(ids).encode(), digest_size=16).hexdigest()


def merge(descriptions: list[WeightsDescription], own: list[int] | None = None) -> WeightsDescription:
    """The shards of all ranks by name. Raises BadRequestError where ranks contradict each other, or leave gaps.

    `own` are the ranks of the engine that will read them (all): of a tensor that these hold in full, only their shards
    are taken. Its copies on other engines' ranks lie further away, and may be meant for those.
    """
    own = list(range(len(descriptions))) if own is None else own
    held: dict[str, dict[int, DescribedTensor]] = {}
    for rank, description in enumerate(descriptions):
        for source in description.tensors:
            held.setdefault(source.name, {})[rank] = source
    merged = _Merged(descriptions)
    gaps = []
    for name, by_rank in held.items():
        ours = {rank: source for rank, source in by_rank.items() if rank in own}
        chosen = ours if _gap(ours) == 0 else by_rank
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
        """(rank, its number there) -> number of an allocation here."""

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
    """Elements of a tensor that none of these ranks holds; more than none if there are no ranks."""
    boxes = {(tuple(shard.offset), tuple(shard.shape)) for source in by_rank.values() for shard in source.shards}
    size = math.prod(next(iter(by_rank.values())).shape) if by_rank else 1
    return max(0, size - sum(math.prod(shape) for _, shape in boxes))


def _refuse_gaps(gaps: list[str], ranks: int) -> None:
    """The server refuses them too, but does not know of which ranks the trainer consists."""
    if gaps:
        rest = f" and {len(gaps) - _LISTED} more" if len(gaps) > _LISTED else ""
        raise BadRequestError(
            f"The {ranks} rank(s) that push do not hold all of {', '.join(gaps[:_LISTED])}{rest}. Shards on ranks "
            "outside of the engine cannot be read: make one engine for all ranks that share the parameters, let every "
            "engine of a mesh read all of its ranks (VerlEngine's read_all_ranks=True), or push full tensors."
        )

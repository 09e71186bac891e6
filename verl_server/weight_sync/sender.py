"""The trainer's side: tensors in, a description of their memory out, the same one while nothing moved.

Held by `pusher` for each engine. A push of the same tensors costs a comparison of pointers; what moved, grew or
was replaced is seen and described anew under another id. `exports` makes the memory readable for others, `shards`
says which part of a full tensor it is. Whoever pushes keeps the tensors alive, and does not write to them, until
the update was answered.
"""

from __future__ import annotations

import collections
import hashlib
import logging
import threading
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from verl_server.errors import BadRequestError
from verl_server.weight_sync.cuda_memory import wait_for_writes
from verl_server.weight_sync.exports import Exports, Region
from verl_server.weight_sync.handles import (
    Allocation,
    LocalSerializedTensor,
    Shard,
    TensorHandle,
    TensorSource,
    WeightsDescription,
)
from verl_server.weight_sync.shards import Box, TensorShard, boxes_of, local_tensor
from verl_server.weight_sync.trainer_modules import gathered_by_fsdp

logger = logging.getLogger(__name__)

Pushed = tuple[str, torch.Tensor | TensorShard]
Mapping = Callable[[str, torch.Tensor], Iterable[Pushed]]
"""(name, tensor) as the trainer has them -> the tensors or shards that the server knows, for example the parts of a
fused projection. Views are pushed as fast as the tensor itself; what it computes anew is copied at every push."""

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_REMEMBERED = 16
"""Sets of names of which a sender remembers the description: a version may come in several pushes."""
_MOVES_BEFORE_WARNING = 3


@dataclass(frozen=True)
class Described:
    """What is known of one set of tensors, as long as they stay where they are."""

    description: WeightsDescription
    names_id: str
    """Names the set of names, wherever the tensors lie."""
    storages: list[torch.UntypedStorage]
    """Strong references, for the time of a push."""
    can_be_kept: bool
    """Whether a server may keep this memory open: changes of all of it would be noticed."""


@dataclass
class _Known:
    """The last look at one set of names, without strong references to its memory."""

    description: WeightsDescription
    names_id: str
    prints: list[Any]
    """One `_fingerprint` for each tensor."""
    regions: dict[int, Region]
    """By storage. Their weak references pin the StorageImpls that the fingerprints compare."""
    segments: list[Region]
    """One region of each CUDA allocation."""
    moves: int = 0
    """How often in a row the set was found elsewhere."""

    def is_dead(self) -> bool:
        """Whether a tensor of the set was freed, so that it can never be found there again."""
        return any(region.is_freed() for region in self.regions.values())


class WeightSender:
    """Describes the memory of tensors for one engine. Thread-safe."""

    def __init__(self) -> None:
        self._known: collections.OrderedDict[tuple[str, ...], _Known] = collections.OrderedDict()
        self._lock = threading.Lock()

    def describe(self, tensors: list[Pushed]) -> Described:
        """The memory of `tensors` on this rank, with everything written that was queued on its devices.

        Raises BadRequestError for what cannot be pushed, WeightUpdateError when there is no shared memory left;
        every tensor then still holds its values.
        """
        memories = [_memory(name, value) for name, value in tensors]
        wait_for_writes({memory.device for memory in memories})
        storages = {s._cdata: s for s in (memory.untyped_storage() for memory in memories) if s.nbytes()}
        prints = _fingerprints(tensors, memories)
        names = tuple(name for name, _ in tensors)
        with self._lock:
            known = self._known.get(names)
            if known is None or not _is_current(known, prints, storages):
                known = self._look(names, tensors, memories, storages, known)
            self._known.move_to_end(names)
            for key, region in known.regions.items():
                region.refresh(storages[key])
        can_be_kept = all(region.can_be_kept for region in known.regions.values())
        return Described(known.description, known.names_id, list(storages.values()), can_be_kept)

    def _look(
        self,
        names: tuple[str, ...],
        tensors: list[Pushed],
        memories: list[torch.Tensor],
        storages: dict[int, torch.UntypedStorage],
        before: _Known | None,
    ) -> _Known:
        """Describe a set that is new or has moved, and remember it."""
        _refuse_gathered(tensors, storages)
        for dead in [key for key, other in self._known.items() if other.is_dead()]:
            del self._known[dead]  # with it goes the shared memory that its tensors were copied into
        regions = _exports.regions(storages.values())
        prints = _fingerprints(tensors, memories)  # again: on CPU, exporting a storage moves it
        segments = {region.allocation_id: region for region in regions.values() if region.allocation_id}
        known = _Known(_description(tensors, regions), _names_id(names), prints, regions, list(segments.values()))
        if before is not None:
            known.moves = before.moves + 1
            if known.moves == _MOVES_BEFORE_WARNING:
                _warn_of_moves(names, before.prints, prints)
        self._known[names] = known
        while len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return known


def _is_current(known: _Known, prints: list[Any], storages: dict[int, torch.UntypedStorage]) -> bool:
    """Whether every tensor lies where it was described. (Equal prints are about the same, living storages.)"""
    same = known.prints == prints and all(region.is_current(storages[key]) for key, region in known.regions.items())
    known.moves = 0 if same else known.moves
    return same and all(region.is_allocated() for region in known.segments)


def _fingerprints(tensors: list[Pushed], memories: list[torch.Tensor]) -> list[Any]:
    return [_fingerprint(value, memory) for (_, value), memory in zip(tensors, memories, strict=True)]


def _fingerprint(value: torch.Tensor | TensorShard, memory: torch.Tensor) -> tuple[Any, ...]:
    """Differs whenever the tensor lies elsewhere, or is another part, or is read in another way."""
    part: Any = None
    if isinstance(value, DTensor):
        part = value.shape, value.placements, value.device_mesh
    elif isinstance(value, TensorShard):
        part = tuple(value.shape), tuple(value.offset)
    storage = memory.untyped_storage()
    place = storage._cdata, storage.data_ptr(), storage.nbytes(), memory.storage_offset()
    return part, place, memory.shape, memory.stride(), memory.dtype, memory.is_neg()


def _memory(name: str, value: Any) -> torch.Tensor:
    """The plain tensor that this rank holds of a value, checked to be readable by others."""
    tensor = local_tensor(value) if isinstance(value, torch.Tensor | TensorShard) else value
    if not isinstance(tensor, torch.Tensor):
        raise BadRequestError(f"'{name}' is a {type(tensor).__name__}, not a torch.Tensor.")
    if type(tensor) not in _PLAIN and is_traceable_wrapper_subclass(tensor):
        raise BadRequestError(f"'{name}' is a {type(tensor).__name__}, which has no memory of its own to share.")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta or tensor.is_neg():
        raise BadRequestError(f"'{name}' ({tensor.layout}, device '{tensor.device}') has no plain memory to share.")
    return tensor


def _description(tensors: list[Pushed], regions: dict[int, Region]) -> WeightsDescription:
    allocations: list[Allocation] = []
    places: dict[str, int] = {}
    sources: dict[str, TensorSource] = {}
    for name, value in tensors:
        shape, boxes = boxes_of(name, value)
        memory = local_tensor(value)
        dtype = str(memory.dtype).removeprefix("torch.")
        _check_memory(name, memory)
        source = TensorSource(name=name, dtype=dtype, shape=list(shape), shards=[])
        if name in sources:
            source = _another_shard(sources[name], source, value, boxes)
        sources[name] = source
        if boxes:
            region = regions[memory.untyped_storage()._cdata]
            index = places.setdefault(region.allocation.id, len(allocations))
            allocations.extend([region.allocation] if index == len(allocations) else [])
            source.shards.extend(_shard(box, memory, region, index) for box in boxes)
    return WeightsDescription(id=uuid.uuid4().hex, allocations=allocations, tensors=list(sources.values()))


def _shard(box: Box, memory: torch.Tensor, region: Region, allocation: int) -> Shard:
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


def _another_shard(first: TensorSource, second: TensorSource, value: Any, boxes: list[Box]) -> TensorSource:
    """A name may come more than once in shards of one tensor; anything else is a mistake."""
    same = (first.dtype, first.shape) == (second.dtype, second.shape)
    known = [(shard.shape, shard.offset) for shard in first.shards]
    if not (isinstance(value, TensorShard) and same) or any((list(b.shape), list(b.offset)) in known for b in boxes):
        raise BadRequestError(f"'{first.name}' comes twice. (Only TensorShards of different boxes may share a name.)")
    return first


def _refuse_gathered(tensors: list[Pushed], storages: dict[int, torch.UntypedStorage]) -> None:
    """FSDP2's full parameters of the moment: after the optimizer's step they hold the old values."""
    gathered = gathered_by_fsdp().intersection(storages)
    names = [name for name, value in tensors if local_tensor(value).untyped_storage()._cdata in gathered]
    if names:
        raise BadRequestError(
            f"{names[:4]} ({len(names)} in all) are parameters that FSDP2 has gathered for the moment (a forward "
            "without backward leaves the root module so). They miss later optimizer steps. Call reshard() on the "
            "module and read its parameters again, or register_weights(module), which does both at every push."
        )


def _names_id(names: tuple[str, ...]) -> str:
    return hashlib.blake2b("\n".join(names).encode(), digest_size=16).hexdigest()


def _warn_of_moves(names: tuple[str, ...], before: list[Any], now: list[Any]) -> None:
    moved = [name for name, old, new in zip(names, before, now, strict=True) if old != new]
    logger.warning(
        "%d of %d pushed tensors lie in other memory at every push (%s ...), so all of them are opened and planned "
        "again each time. Push the parameters themselves, or views of them, instead of copies.",
        len(moved),
        len(names),
        ", ".join(moved[:4]),
    )


_exports = Exports()  # one for the process, as the memory is the process's


# -- handles for one update ---------------------------------------------------------------------------------------


def describe_tensors(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, LocalSerializedTensor]]:
    """Handles through which the schedulers of this host read whole tensors, in the order given.

    They are opened for one update and planned anew each time: `EngineBase.update_weights_from_tensor` and
    `register_weights` are faster, and read shards.
    """
    tensors = [(name, _memory(name, _whole(name, tensor))) for name, tensor in named_tensors]
    wait_for_writes({tensor.device for _, tensor in tensors})
    storages = {s._cdata: s for s in (tensor.untyped_storage() for _, tensor in tensors) if s.nbytes()}
    regions = _exports.regions(storages.values())
    for key, region in regions.items():
        region.refresh(storages[key])
    return [(name, LocalSerializedTensor(values=[_handle(tensor, regions)])) for name, tensor in tensors]


def _handle(tensor: torch.Tensor, regions: dict[int, Region]) -> TensorHandle:
    region = regions.get(tensor.untyped_storage()._cdata)
    return TensorHandle(
        allocation=Allocation(id="", kind="shm", nbytes=0) if region is None else region.allocation,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=list(tensor.shape),
        stride=list(tensor.stride()),
        storage_offset=(0 if region is None else region.offset // tensor.element_size()) + int(tensor.storage_offset()),
    )


def _whole(name: str, tensor: Any) -> Any:
    if isinstance(tensor, DTensor) and not is_whole(tensor):
        raise BadRequestError(
            f"'{name}' is a DTensor with placements {tensor.placements}: this rank holds only a part, which a handle "
            "cannot say. Push it through VerlEngine on every rank."
        )
    return tensor


def is_whole(tensor: DTensor) -> bool:
    """Whether this rank holds all of it."""
    return tensor.device_mesh.size() == 1 or all(placement.is_replicate() for placement in tensor.placements)


def gather_full_tensors(named_tensors: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """Replace sharded DTensors by full tensors; every rank of their mesh must call this with the same names."""
    return [
        (name, tensor.full_tensor() if isinstance(tensor, DTensor) and not is_whole(tensor) else tensor)
        for name, tensor in named_tensors
    ]

"""`WeightSender`: describes the memory of a trainer's tensors. The description is reused while no tensor moves.

`engine.push` has a `WeightSender` for each engine. A push of the same tensors costs a comparison of pointers. If a
tensor was moved, enlarged or replaced, the sender describes the set again under another id. `exports` makes the memory
readable for other processes. `shards` finds the parts of full tensors that this rank holds. Until the server has
answered the update, the caller must keep the tensors alive and must not write to them.
"""

from __future__ import annotations

import collections
import hashlib
import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from verl_server.errors import BadRequestError
from verl_server.weight_sync.handles import Allocation, LocalSerializedTensor, TensorHandle, WeightsDescription
from verl_server.weight_sync.trainer.description import Pushed, describe_memory, readable_memory
from verl_server.weight_sync.trainer.exports import Exports, Region, device_frees, wait_for_writes
from verl_server.weight_sync.trainer.memory_layout import LayoutGuard, MemoryLayout, NamedTensors
from verl_server.weight_sync.trainer.shards import local_tensor
from verl_server.weight_sync.trainer.trainer_modules import ModuleParameters, gathered_by_fsdp

logger = logging.getLogger(__name__)

Named = Iterable[tuple[str, Any]]
Origin = nn.Module | Named | Callable[[], Named]
"""Source of the pushed tensors: a module, a list of tensors, or a function that returns tensors at each push."""
Handles = list[tuple[str, LocalSerializedTensor]]

Mapping = Callable[[str, torch.Tensor], Iterable[Pushed]]
"""Converts the trainer's (name, tensor) into tensors or shards under the server's names.

For example, it splits a fused projection. A view of a tensor is pushed as fast as the tensor itself. A tensor that the
function computes is copied at every push.
"""

_REMEMBERED = 16
"""The most sets of names whose descriptions a sender keeps. One version may take several pushes with different names.
"""
_MOVES_BEFORE_WARNING = 3


@dataclass(frozen=True)
class Described:
    """The description of one set of tensors, valid while they stay where they are."""

    description: WeightsDescription
    names_id: str
    """Identifier of the set of names. It does not depend on the tensors' memory."""
    tensors: list[Pushed]
    """References to the memory, for the duration of a push."""
    can_be_kept: bool
    """True if a server may keep this memory open, because this process can detect every change of the memory."""
    handles: Handles | None = None
    """Handles for one update. If there are handles, the description is empty."""

    def storages(self) -> list[torch.UntypedStorage]:
        """Strong references to the storages of the tensors."""
        return list(_storages(self.tensors).values())


class _Known:
    """The last description of one set of names, without strong references to the memory."""

    def __init__(
        self, description: WeightsDescription, names_id: str, layout: MemoryLayout, regions: dict[int, Region]
    ) -> None:
        self.description, self.names_id = description, names_id
        self.layout = layout
        self.regions = regions
        """Storage -> region.

        The weak references in the regions keep the addresses of the StorageImpls, which layouts compare.
        """
        self.devices = list(dict.fromkeys(region.device for region in regions.values()))
        self.can_be_kept = all(region.can_be_kept for region in regions.values())
        self.is_copied = any(region.staging is not None for region in regions.values())
        self.moves = 0
        """Number of consecutive pushes in which the set was in other memory than before."""
        self._guard: LayoutGuard | None = None
        self._memories_alive = [r.memory_is_alive for r in regions.values() if r.memory_is_alive is not None]
        self._segments = {region.allocation_id: region for region in regions.values() if region.allocation_id}
        self._frees: tuple[int, ...] = ()
        """Result of `device_frees` right before the last check of each segment."""

    def is_current(self, tensors: list[Pushed]) -> bool:
        """Return True if every tensor is still in the described memory.

        Equal layouts have the same storages, which still exist.
        """
        if self._guard is not None and self._guard.is_same(tensors):
            return self._memory_is_there()
        self._guard = None
        return self.layout == MemoryLayout.at(tensors) and self._memory_is_there()

    def expect(self, tensors: list[Pushed]) -> None:
        """Create a guard for `tensors`, which are in the described memory.

        If the next push passes the same objects, the guard compares them. A guard does not read storages. So the memory
        of each tensor must be known to stay in place while its storage exists.
        """
        if self._guard is not None or not isinstance(tensors, NamedTensors) or not tensors:
            return
        if all(region.memory_is_alive or region.allocation_id for region in self.regions.values()):
            self._guard = LayoutGuard(tensors, self.layout)

    def _memory_is_there(self) -> bool:
        """Return True if the described memory is still there."""
        return all(alive() is not None for alive in self._memories_alive) and self._segments_are_there()

    def _segments_are_there(self) -> bool:
        """Return False if CUDA memory of the set was returned to the driver, so that its address may be reused."""
        if not self._segments:
            return True
        frees = device_frees(self.devices)
        if frees and frees == self._frees:
            return True
        there = all(region.is_allocated() for region in self._segments.values())
        self._frees = frees if there else ()
        return there

    def is_dead(self) -> bool:
        """Return True if a tensor of the set was freed, so that no later push can use this description."""
        return any(region.is_freed() for region in self.regions.values())


class WeightSender:
    """Describes the memory of tensors for one engine. Thread-safe."""

    def __init__(self) -> None:
        self._known: collections.OrderedDict[tuple[str, ...], _Known] = collections.OrderedDict()
        self._lock = threading.Lock()

    def describe_source(self, source: Callable[[], Named], mapping: Mapping | None) -> Described:
        """Describe the tensors of `source`, after `mapping` has converted their names and parts. See `describe`.

        If one of the tensors is a `LocalSerializedTensor`, the result has handles of all tensors, in their order.
        """
        named = source()
        pairs: list[tuple[str, Any]] = named if isinstance(named, NamedTensors) else _checked(named)
        if mapping is not None:
            pairs = [entry for name, tensor in pairs for entry in mapping(name, tensor)]
        if isinstance(pairs, NamedTensors) or not any(isinstance(value, LocalSerializedTensor) for _, value in pairs):
            return self.describe(pairs)
        made = iter(describe_tensors([pair for pair in pairs if not isinstance(pair[1], LocalSerializedTensor)]))
        handles = [pair if isinstance(pair[1], LocalSerializedTensor) else next(made) for pair in pairs]
        nothing = WeightsDescription(id="", allocations=[], tensors=[])
        return Described(nothing, "", pairs, can_be_kept=True, handles=handles)

    def describe(self, tensors: list[Pushed]) -> Described:
        """Describe the memory of `tensors` on this rank, after all work that is queued on its devices has completed.

        Raise BadRequestError for a tensor that cannot be pushed, and WeightUpdateError if there is no shared memory
        left. After an error every tensor still has its values.
        """
        names = tensors.names if isinstance(tensors, NamedTensors) else tuple(name for name, _ in tensors)
        with self._lock:
            known = self._known.get(names)
            if known is None or not known.is_current(tensors):
                known = self._describe_anew(names, tensors, known)
            else:
                known.moves = 0
                wait_for_writes(known.devices)
            known.expect(tensors)
            self._known.move_to_end(names)
            if known.is_copied:
                storages = _storages(tensors)
                for key, region in known.regions.items():
                    region.refresh(storages[key])
        return Described(known.description, known.names_id, tensors, known.can_be_kept)

    def _describe_anew(self, names: tuple[str, ...], tensors: list[Pushed], before: _Known | None) -> _Known:
        """Describe a set of tensors that is new or whose memory has moved. Keep the description."""
        storages = _storages(tensors)
        _refuse_gathered(tensors, storages)
        for dead in [key for key, other in self._known.items() if other.is_dead()]:
            del self._known[dead]  # with it goes the shared memory that its tensors were copied into
        wait_for_writes({storage.device for storage in storages.values()})  # before CPU storages are moved
        regions = _exports.regions(storages.values())
        layout = MemoryLayout.at(tensors)  # after the export, which moves storages
        known = _Known(describe_memory(tensors, regions), _names_id(names), layout, regions)
        if before is not None:
            known.moves = before.moves + 1
            if known.moves == _MOVES_BEFORE_WARNING:
                _warn_of_moves(names, before.layout, layout)
        self._known[names] = known
        while len(self._known) > _REMEMBERED:
            self._known.popitem(last=False)
        return known


def tensor_source(origin: Origin) -> Callable[[], Named]:
    """Return a function that returns the current tensors of `origin`."""
    if isinstance(origin, nn.Module):
        return ModuleParameters(origin).named
    if callable(origin):
        return origin
    pairs = list(origin)
    if all(_is_pair(pair) and not isinstance(pair[1], LocalSerializedTensor) for pair in pairs):
        pairs = NamedTensors(pairs)
    return lambda: pairs


def _checked(named: Named) -> list[tuple[str, Any]]:
    pairs = list(named)
    for pair in pairs:
        if not _is_pair(pair):
            raise BadRequestError(
                f"named_tensors must yield (name, tensor) pairs, not {type(pair).__name__}: pass "
                "model.named_parameters() or model.state_dict().items()."
            )
    return pairs


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2 and isinstance(value[0], str)


def _storages(tensors: list[Pushed]) -> dict[int, torch.UntypedStorage]:
    """Return {`_cdata`: storage} of the tensors."""
    found = {}
    for name, value in tensors:
        storage = readable_memory(name, value).untyped_storage()
        if storage.nbytes():
            found[storage._cdata] = storage
    return found


def _refuse_gathered(tensors: list[Pushed], storages: dict[int, torch.UntypedStorage]) -> None:
    """Raise BadRequestError for FSDP2's gathered parameters, which have the old values after the optimizer's step."""
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


def _warn_of_moves(names: tuple[str, ...], before: MemoryLayout, now: MemoryLayout) -> None:
    moved = [names[i] for i in now.differences(before)]
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
    """Return handles through which the schedulers of this host read whole tensors, in the order of the argument.

    The server opens the handles for one update, and plans each update anew. `EngineBase.update_weights_from_tensor` and
    `register_weights` are faster, and can read shards.
    """
    tensors = [(name, readable_memory(name, _whole(name, tensor))) for name, tensor in named_tensors]
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
    """Return True if this rank holds the whole tensor."""
    return tensor.device_mesh.size() == 1 or all(placement.is_replicate() for placement in tensor.placements)

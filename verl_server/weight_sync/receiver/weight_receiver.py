"""The server's side of a push: turns named sources into checked plans, which replace weights in place.

Held by each rank's `WeightSources`, which knows the requests; this module knows tensors and descriptions only, so it
runs inside the workers of other engines, too. The stager's threads call it: it opens the trainers' memory and checks
everything that can be checked (names, shapes, dtypes, bounds, coverage) without writing a byte. It is thread-safe.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from verl_server.errors import WeightUpdateError
from verl_server.models.loader import WeightMap
from verl_server.weight_sync.handles import Allocation, LocalSerializedTensor, TensorHandle, WeightsDescription
from verl_server.weight_sync.receiver.names import ModelNames
from verl_server.weight_sync.receiver.open_memory import HeldMemory, OpenAllocations, fault_in
from verl_server.weight_sync.receiver.plan import UpdatePlan
from verl_server.weight_sync.receiver.registrations import Registrations
from verl_server.weight_sync.receiver.sources import Source, described_source, handle_source, tensor_source
from verl_server.weight_sync.sglang.payloads import give_back

logger = logging.getLogger(__name__)
T = TypeVar("T")

REGISTRATIONS = 16
"""Registrations that are kept: enough for the sets of tensors of one trainer, few enough to bound mapped memory."""


class WeightReceiver:
    """Opens what trainers describe and plans its way into this rank's parameters."""

    def __init__(
        self, weight_map: WeightMap, rank: int, size: int, device: torch.device, *, fused: bool = True
    ) -> None:
        """`fused=False` copies with torch alone (`ServerArgs.fused_weight_copy`)."""
        self._map, self._names = weight_map, ModelNames(weight_map)
        self._rank, self._size, self._device, self._fused = rank, size, device, fused
        self._gpu = _plain_uuid(str(torch.cuda.get_device_properties(device).uuid)) if device.type == "cuda" else ""
        self._memory = OpenAllocations(device)
        self.registrations = Registrations(REGISTRATIONS, device)
        """The plans that later pushes name by id. The loop looks them up and closes them."""
        self._warned = ""

    def stage(
        self,
        description: WeightsDescription,
        *,
        strict_dtype: bool,
        partial: bool,
        checksums: Mapping[str, str] | None = None,
        keep: bool = False,
    ) -> UpdatePlan:
        """Check an update that travels as a description, and open what this rank reads of it.

        `keep` registers it under the description's id, as long as that is safe: what cannot be kept is opened for
        this update only, and the sender will describe it again. Raise WeightUpdateError.
        """
        plan = self._described(description)
        self._check(plan, strict_dtype, partial, checksums)
        if keep:
            try:
                self._keep(description.id, plan)
            except WeightUpdateError as error:
                self._warn(f"Weights are not kept for pushes by id, so each is opened and planned anew: {error}")
        return plan

    def stage_named(
        self,
        named_tensors: Sequence[tuple[str, LocalSerializedTensor | TensorHandle]],
        *,
        strict_dtype: bool,
        partial: bool,
        checksums: Mapping[str, str] | None = None,
    ) -> UpdatePlan:
        """Check an update that travels as one handle for each tensor, or one for each rank, and open its memory."""
        memory = self._memory.hold()
        try:
            plan = self._plan(
                named_tensors, lambda name, value: handle_source(name, self._handle(name, value), memory), memory
            )
        finally:  # opening a pickled handle releases its reference; release those that are not opened
            pickled = {value.allocation: None for _, value in named_tensors if isinstance(value, TensorHandle)}
            give_back(allocation for allocation in pickled if allocation not in memory)
        self._check(plan, strict_dtype, partial, checksums)
        return plan

    def compared(self, named_tensors: Sequence[tuple[str, Tensor]]) -> list[Tensor]:
        """Return the full tensors whose values `plan` compares: an embedding, and a tied head that comes beside it."""
        names = self._names.settle([name for name, _ in named_tensors])
        given = {known: tensor for known, (_, tensor) in zip(names, named_tensors, strict=True) if known is not None}
        pairs = [(alias, slot) for alias, slot in self._map.aliases.items() if alias in given and slot in given]
        return [given[name] for pair in pairs for name in pair]

    def plan(self, named_tensors: Sequence[tuple[str, Tensor]], *, strict_dtype: bool, partial: bool) -> UpdatePlan:
        """Check full tensors of this process (a checkpoint's, or received ones) against the model.

        Tensors on the meta device are only checked. The rest may be filled later, except what `compared` returns.
        """
        memory = self._memory.hold()
        plan = self._plan(named_tensors, lambda name, tensor: tensor_source(name, tensor, memory), memory)
        plan.check(strict_dtype=strict_dtype, partial=partial)
        return plan

    def register(self, description: WeightsDescription, *, strict_dtype: bool) -> None:
        """Open and plan a description now, for pushes by its id. Raise WeightUpdateError if it cannot be kept."""
        plan = self._described(description)
        self._check(plan, strict_dtype, True, None)
        self._keep(description.id, plan)

    def _described(self, description: WeightsDescription) -> UpdatePlan:
        memory = self._memory.hold()
        return self._plan(
            [(tensor.name, tensor) for tensor in description.tensors],
            lambda _, tensor: described_source(tensor, description.allocations, memory, self._nearest),
            memory,
        )

    def _plan(
        self, named: Sequence[tuple[str, T]], source: Callable[[str, T], Source], memory: HeldMemory
    ) -> UpdatePlan:
        """Plan from the `source` of each of `named` that the model has. `memory` is the one that the sources read."""
        names = self._names.settle([name for name, _ in named])
        sources = [
            (known, source(name, value)) for known, (name, value) in zip(names, named, strict=True) if known is not None
        ]
        return UpdatePlan(self._map, sources, memory, fused=self._fused)

    def _check(self, plan: UpdatePlan, strict_dtype: bool, partial: bool, checksums: Mapping[str, str] | None) -> None:
        plan.check(strict_dtype=strict_dtype, partial=partial)
        fault_in(plan.views())
        if checksums:
            plan.verify(checksums)

    def _keep(self, id: str, plan: UpdatePlan) -> None:
        if plan.changes_under_its_names:
            raise WeightUpdateError(plan.changes_under_its_names)
        if plan.scattered:  # the loop would read it at every push
            raise WeightUpdateError(f"The elements of '{plan.scattered}' lie far apart in memory. Make it contiguous.")
        self.registrations.put(id, plan)

    def _handle(self, name: str, value: LocalSerializedTensor | TensorHandle) -> TensorHandle:
        if isinstance(value, TensorHandle):
            return value
        if len(value.values) not in (1, self._size):
            raise WeightUpdateError(
                f"'{name}' has {len(value.values)} values, but this server has {self._size} tensor-parallel rank(s): "
                "it must have one value for all, or one for each."
            )
        return value.get(self._rank)

    def _nearest(self, copies: Sequence[Allocation]) -> int:
        """Index of a copy on this rank's own GPU, else of one that as few other ranks as possible read."""
        for i, allocation in enumerate(copies):
            if self._gpu and _plain_uuid(allocation.device_uuid) == self._gpu:
                return i
        return self._rank % len(copies)

    def _warn(self, message: str) -> None:
        """Log a warning unless it repeats the last one, which every push would do."""
        if message != self._warned:
            self._warned = message
            logger.warning(message)


def _plain_uuid(uuid: str) -> str:
    """Return the UUID without the prefix that only some drivers and tools write."""
    return uuid.removeprefix("GPU-")

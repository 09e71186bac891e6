"""The server's side of a push: converts named sources into checked plans, which replace weights in place.

Each rank's `WeightSources` has a `WeightReceiver`. `WeightSources` handles the requests. This module handles tensors
and descriptions only, so it also runs in the workers of other engines. The stager's threads call the receiver, which is
thread-safe. The receiver opens the trainers' memory, and checks names, shapes, dtypes, bounds and coverage, without
writing a byte of the weights.
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
"""The most registrations that are kept. One trainer needs fewer, and the number bounds the mapped memory."""


class WeightReceiver:
    """Opens memory that trainers describe, and plans the copies into this rank's parameters."""

    def __init__(
        self, weight_map: WeightMap, rank: int, size: int, device: torch.device, *, fused: bool = True
    ) -> None:
        """`fused=False` copies with torch alone (`ServerArgs.fused_weight_copy`)."""
        self._map, self._names = weight_map, ModelNames(weight_map)
        self._rank, self._size, self._device, self._fused = rank, size, device, fused
        self._gpu = _plain_uuid(str(torch.cuda.get_device_properties(device).uuid)) if device.type == "cuda" else ""
        self._memory = OpenAllocations(device)
        self.registrations = Registrations(REGISTRATIONS, device)
        """The plans that later pushes use by id. The scheduler's loop looks plans up and closes them."""
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
        """Check an update that arrived as a description, and open the memory that this rank reads.

        With `keep`, the plan is registered under the description's id if that is safe. If the plan cannot be kept, the
        memory is opened for this update only, and the sender must describe the tensors again at the next push. Raise
        WeightUpdateError for a wrong update.
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
        """Check an update that arrived as handles, one for each tensor or one for each tensor and rank.

        Open its memory.
        """
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
        """Return the tensors whose values `plan` compares: embedding and tied head, if the update has both."""
        names = self._names.settle([name for name, _ in named_tensors])
        given = {known: tensor for known, (_, tensor) in zip(names, named_tensors, strict=True) if known is not None}
        pairs = [(alias, slot) for alias, slot in self._map.aliases.items() if alias in given and slot in given]
        return [given[name] for pair in pairs for name in pair]

    def plan(self, named_tensors: Sequence[tuple[str, Tensor]], *, strict_dtype: bool, partial: bool) -> UpdatePlan:
        """Check full tensors of this process (of a checkpoint, or received) against the model, and plan their copies.

        Tensors on the meta device are only checked. The values of the other tensors may be written after this call. The
        tensors that `compared` returns must have their values before it.
        """
        memory = self._memory.hold()
        plan = self._plan(named_tensors, lambda name, tensor: tensor_source(name, tensor, memory), memory)
        plan.check(strict_dtype=strict_dtype, partial=partial)
        return plan

    def register(self, description: WeightsDescription, *, strict_dtype: bool) -> None:
        """Open a description and plan its copies, for later pushes by its id.

        Raise WeightUpdateError if the plan cannot be kept.
        """
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
        """Plan the copies of the tensors in `named` that the model has. `source` converts a tensor into a `Source`.

        The sources read from `memory`.
        """
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
        """Return the index of a copy on this rank's own GPU, else of one that as few other ranks as possible read."""
        for i, allocation in enumerate(copies):
            if self._gpu and _plain_uuid(allocation.device_uuid) == self._gpu:
                return i
        return self._rank % len(copies)

    def _warn(self, message: str) -> None:
        """Log a warning, unless it equals the last warning. Otherwise every push would repeat the warning."""
        if message != self._warned:
            self._warned = message
            logger.warning(message)


def _plain_uuid(uuid: str) -> str:
    """Return a GPU's UUID without the prefix "GPU-", which only some drivers and tools write."""
    return uuid.removeprefix("GPU-")

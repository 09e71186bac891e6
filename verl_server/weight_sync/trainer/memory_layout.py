"""The places of pushed tensors in memory, and the check with which a push detects that a tensor moved.

`sender` calls this module at every push, so every loop over the tensors runs in C. A `MemoryLayout` is a full record. A
`LayoutGuard` is a cheaper check of tensors that are known to be the same objects: it compares only properties that can
change in place.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._dynamo.guards import TensorGuards
from torch.distributed.tensor import DTensor

from verl_server.weight_sync.trainer.description import PLAIN, Pushed, readable_memory
from verl_server.weight_sync.trainer.shards import TensorShard, local_tensor

_storage: Callable[[torch.Tensor], torch.UntypedStorage] = torch.Tensor.untyped_storage
_address: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr
_stride: Callable[[torch.Tensor], tuple[int, ...]] = torch.Tensor.stride
_shape, _dtype, _cdata = operator.attrgetter("shape"), operator.attrgetter("dtype"), operator.attrgetter("_cdata")
_local, _spec = operator.attrgetter("_local_tensor"), operator.attrgetter("_spec")


class NamedTensors(list[Pushed]):
    """(name, tensor) pairs. The list is never changed, so the same list always has the same tensors."""

    def __init__(self, pairs: Iterable[Pushed]) -> None:
        super().__init__(pairs)
        self.names = tuple(name for name, _ in self)


@dataclass(frozen=True)
class MemoryLayout:
    """The addresses, shapes, strides and dtypes of tensors, and their places in full tensors.

    Two layouts are equal if nothing of this has changed. The caller must know that the storages still exist, because an
    address may be reused.
    """

    parts: list[Any]
    storages: list[int]
    addresses: list[int]
    shapes: list[torch.Size]
    strides: list[tuple[int, ...]]
    dtypes: list[torch.dtype]

    @classmethod
    def at(cls, tensors: list[Pushed]) -> MemoryLayout:
        """Return the layout of `tensors` now. Raise BadRequestError for a tensor without plain memory."""
        memories, parts = _memories(tensors)
        try:
            return cls(
                parts,
                [*map(_cdata, map(_storage, memories))],
                [*map(_address, memories)],
                [*map(_shape, memories)],
                [*map(_stride, memories)],
                [*map(_dtype, memories)],
            )
        except (RuntimeError, NotImplementedError):
            _explain(tensors)
            raise

    def differences(self, other: MemoryLayout) -> Iterator[int]:
        """Return the indices of the tensors that differ between two layouts of one set."""
        now, then = (zip(x.storages, x.addresses, x.shapes, x.strides, x.dtypes, strict=True) for x in (self, other))
        return (i for i, (a, b) in enumerate(zip(now, then, strict=True)) if a != b)


class LayoutGuard:
    """Detects that tensors of a known layout were changed in place, for example by `.data`, `set_`, `resize_` or `t_`.

    It uses the guard that torch puts before compiled functions. This guard compares types, dtypes, devices, shapes and
    strides of all tensors in one call, in a fifth of the time that it takes to read them in Python. The guard of torch
    does not compare addresses, so this class compares them in addition.
    """

    def __init__(self, tensors: NamedTensors, layout: MemoryLayout) -> None:
        memories, _ = _memories(tensors)
        self._tensors = weakref.ref(tensors)
        self._parts, self._addresses = layout.parts, layout.addresses
        shapes: list[Any] = [*map(list, layout.shapes)]
        strides: list[Any] = [*map(list, layout.strides)]
        self._guard: Any = TensorGuards(*memories, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides)

    def is_same(self, tensors: list[Pushed]) -> bool:
        """Return True if the tensors are the same objects, with unchanged addresses, shapes, strides and dtypes.

        False may also mean that the guard cannot decide. In this case, compare layouts.
        """
        if self._tensors() is not tensors:
            return False
        memories, parts = _memories(tensors)
        return (
            all(map(operator.is_, parts, self._parts))
            and self._guard.check(*memories)
            and [*map(_address, memories)] == self._addresses
        )


def _memories(tensors: list[Pushed]) -> tuple[list[Any], list[Any]]:
    """Return (this rank's plain tensors, place of each in its full tensor). The second is [] if no tensor is sharded.

    A place is the spec of a `DTensor` (shape, placements, mesh), (full shape, offset) of a `TensorShard`, or None for a
    plain tensor. Raise BadRequestError if a tensor has no plain memory.
    """
    values: list[Any] = [value for _, value in tensors]
    kinds = set(map(type, values))
    if kinds.issubset(PLAIN):
        return values, []
    if kinds == {DTensor}:
        memories, parts = [*map(_local, values)], [*map(_spec, values)]
    else:
        memories, parts = [*map(local_tensor, values)], [*map(_part, values)]
    if not set(map(type, memories)).issubset(PLAIN):
        _explain(tensors)
    return memories, parts


def _part(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value._spec  # shape, placements and mesh; the same object as long as nothing changes
    return (tuple(value.shape), tuple(value.offset)) if isinstance(value, TensorShard) else None


def _explain(tensors: list[Pushed]) -> None:
    """Raise BadRequestError if a tensor has no plain memory."""
    for name, value in tensors:
        readable_memory(name, value)

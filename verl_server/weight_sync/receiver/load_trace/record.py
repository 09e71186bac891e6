"""`record`: runs a model's loader on tensors without memory, and records the source and destination of each copy.

Prior system: vLLM's `sharded_rdt` records its loaders from fake tensors, too. The loader copies views of the
checkpoint's tensors to views of the parameters. Views of meta tensors keep their storage, so each copy identifies the
regions of the source tensor and of the parameter. Values that the loader computes are recorded as computed. Copies
cannot write a parameter with such values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from verl_server.weight_sync.receiver.load_trace.regions import LoadedCopy, Region, as_copy

_aten = torch.ops.aten
_SAME_VALUES = (_aten._to_copy.default, _aten.clone.default)
"""Operations whose result is a copy of the argument in new storage, perhaps in another dtype."""
_CONSTANTS = (_aten.fill_.Scalar, _aten.zero_.default)
"""Operations that write the same values at every load, such as the padding of a vocabulary."""


@dataclass
class LoadTrace:
    """The record of a loader's copies from tensors of the checkpoint to parameters."""

    copies: dict[str, list[LoadedCopy]] = field(default_factory=dict)
    """Parameter -> its copies in their order."""
    computed: dict[str, str] = field(default_factory=dict)
    """Parameter that copies alone cannot restore -> the operation that computes its values."""
    feeds: dict[str, set[str]] = field(default_factory=dict)
    """Tensor of the checkpoint -> parameters that depend on it, by copies or by computation."""
    read: dict[str, str] = field(default_factory=dict)
    """Tensor of the checkpoint on whose values the loader branches -> the operation that reads the values."""
    overwritten: set[str] = field(default_factory=set)
    """Tensors of the checkpoint that the loader itself changes, so that it must get copies."""


def record(
    load: Callable[[Iterable[tuple[str, Tensor]]], object],
    sources: Mapping[str, Tensor],
    parameters: Mapping[str, Tensor],
) -> LoadTrace:
    """Run `load` on the pairs of `sources`, and return the record of its copies to `parameters`.

    All tensors are on the meta device.
    """
    recorder = _Recorder(sources, parameters)
    with recorder:
        load(sources.items())
    for name, parameter in parameters.items():
        if recorder.parameter_of(parameter) != name:
            recorder.trace.computed[name] = "it is replaced"
    return recorder.trace


def _storage(tensor: Tensor) -> int:
    """Return the identity of a tensor's storage, which views share. Meta tensors have no address."""
    identity: int = tensor.untyped_storage()._cdata
    return identity


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, sources: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = LoadTrace()
        self._shapes = {name: tuple(tensor.shape) for name, tensor in sources.items()}
        self._sources = {_storage(tensor): name for name, tensor in sources.items()}
        self._parameters = {_storage(tensor): name for name, tensor in parameters.items()}
        self._same: dict[int, Tensor] = {}
        """Storage of a converted copy -> the view that was converted. The copy has the shape of this view."""
        self._copies: dict[int, Tensor] = {}
        """Storage of a converted copy -> the copy."""
        self._mixed: dict[int, set[str]] = {}
        """Storage of a computed tensor -> the tensors of the checkpoint on which the values depend."""
        self._kept: list[Tensor] = [*sources.values(), *parameters.values()]
        """References to all storages, so that no two storages have the same identity."""

    def parameter_of(self, tensor: Tensor) -> str | None:
        return self._parameters.get(_storage(tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [value for value in _flat([*args, *kwargs.values()]) if isinstance(value, Tensor)]
        if func is _aten.copy_.default and self._copies_weights(args[0], args[1]):
            self._copy(args[0], args[1])
            return args[0]
        if func is _aten._local_scalar_dense.default and (names := self._depends(tensors)):
            self.trace.read.update(dict.fromkeys(names, str(func)))
            return 0.0
        result = func(*args, **kwargs)
        written = [
            value
            for value, argument in zip(args, func._schema.arguments, strict=False)
            if isinstance(value, Tensor) and argument.is_write
        ]
        for tensor in written:
            self._write(tensor, func, tensors)
        known = {_storage(tensor) for tensor in tensors}
        for made in _flat([result]):
            if isinstance(made, Tensor) and _storage(made) not in known:
                self._make(made, func, args, tensors)
        return result

    def _copies_weights(self, destination: Tensor, source: Tensor) -> bool:
        return self.parameter_of(destination) is not None or bool(self._depends([source]))

    def _copy(self, destination: Tensor, source: Tensor) -> None:
        """Record a copy. The copy itself is skipped, because the tensors have no memory."""
        names = self._depends([source])
        parameter = self.parameter_of(destination)
        if parameter is None:
            self._kept.append(destination)
            self._mixed.setdefault(_storage(destination), set()).update(names)
            if not destination.is_meta:  # the loader knows it from elsewhere, and the engine may compute with it
                self.trace.read.update(dict.fromkeys(names, f"{_aten.copy_.default} to another tensor"))
            return
        for name in names:
            self.trace.feeds.setdefault(name, set()).add(parameter)
        found = self._original(source.expand(destination.shape))
        if found is None:
            self.trace.computed[parameter] = "its values are computed"
            return
        name, region = found
        copy = as_copy(name, self._shapes[name], region, Region.of(destination))
        if copy is None:
            self.trace.computed[parameter] = f"it takes elements of {name} in another order"
        else:
            self.trace.copies.setdefault(parameter, []).append(copy)

    def _original(self, view: Tensor) -> tuple[str, Region] | None:
        """Return (checkpoint's tensor, region) from which `view` has its values, or None if they are computed."""
        storage = _storage(view)
        if storage in self._sources:
            return self._sources[storage], Region.of(view)
        if storage not in self._same:
            return None
        whole, copied = self._copies[storage], self._same[storage]
        if not whole.is_contiguous():
            return None
        part = as_copy("", tuple(whole.shape), Region.of(view), Region.of(torch.empty_like(view, device="meta")))
        if part is None or tuple(view.shape) != tuple(s.stop - s.start for s in part.index):
            return None
        return self._original(copied[part.index])

    def _depends(self, tensors: Iterable[Tensor]) -> set[str]:
        """Return the names of the checkpoint's tensors on which the values of `tensors` depend."""
        names: set[str] = set()
        for storage in map(_storage, tensors):
            if storage in self._sources:
                names.add(self._sources[storage])
            elif storage in self._same:
                names |= self._depends([self._same[storage]])
            else:
                names |= self._mixed.get(storage, set())
        return names

    def _write(self, tensor: Tensor, func: Any, tensors: list[Tensor]) -> None:
        """Record an operation that changes `tensor` in place."""
        parameter, names = self.parameter_of(tensor), self._depends(tensors)
        if parameter is not None:
            for name in names:
                self.trace.feeds.setdefault(name, set()).add(parameter)
            if func not in _CONSTANTS:
                self.trace.computed[parameter] = f"it is changed by {func}"
        elif names:
            storage = _storage(tensor)
            if storage in self._sources:
                self.trace.read[self._sources[storage]] = str(func)
                self.trace.overwritten.add(self._sources[storage])
            self._kept.append(tensor)
            self._same.pop(storage, None)
            self._mixed[storage] = names

    def _make(self, made: Tensor, func: Any, args: Any, tensors: list[Tensor]) -> None:
        """Record the origin of a tensor with new storage."""
        names = self._depends(tensors)
        if not names:
            return
        self._kept.append(made)
        if func in _SAME_VALUES and made.shape == args[0].shape:
            self._kept.append(args[0])
            self._same[_storage(made)], self._copies[_storage(made)] = args[0], made
        else:
            self._mixed[_storage(made)] = names


def _flat(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value

"""`LiveModel`: the tensors of an engine's model on one worker, by name, and how the engine itself loads them.

`ServedModel`, `LoadPlan`, `load_proof` and `ModuleLoader` use it. Each engine has one subclass, which runs the engine's
loader: without memory for a trace, and on some modules for a reload.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from verl_server.models.loader import WeightSlot
from verl_server.weight_sync.checksum import tensor_checksums
from verl_server.weight_sync.receiver.load_trace.record import LoadTrace


class LiveModel:
    engine: str
    """Name of the engine for messages."""

    def __init__(self, device: torch.device, dtype: torch.dtype, config: Any) -> None:
        """`config` is transformers' config of the language model."""
        self.device, self.dtype = device, dtype
        self.ties_embeddings: bool = config.tie_word_embeddings
        self._pinned: list[tuple[str, Any, str, int]] = []
        """Tensors that updates write: name, module, attribute, address."""

    @property
    def model(self) -> torch.nn.Module:
        raise NotImplementedError

    def trace(self, slots: Mapping[str, WeightSlot]) -> tuple[LoadTrace, dict[str, Tensor]]:
        """Record the operations of the engine's loader on all tensors of the checkpoint.

        Return (trace, parameters in the format in which they are loaded, on the meta device). The live tensors are
        restored in any case. Errors of the loader pass through.
        """
        raise NotImplementedError

    def reload(self, modules: Iterable[dict[str, Tensor]]) -> None:
        """Load modules through the engine. An item has all tensors of the checkpoint of one group of modules."""
        raise NotImplementedError

    def kernels(self) -> dict[str, dict[str, object]]:
        """Return {module: its functions and kernels by attribute}.

        A kernel that a reload replaces may have weights in a layout of its own, which no tensor of the module shows.
        """
        return {path: held_kernels(module) for path, module in self.model.named_modules()}

    def groups(self, names: Iterable[str]) -> dict[str, str]:
        """Return {tensor of the checkpoint: module that contains it}, derived from the names only.

        It is used if the loader cannot be traced. The experts of a layer are one module.
        """
        packed = getattr(self.model, "packed_modules_mapping", None) or {}
        fused = {part: whole for whole, parts in packed.items() for part in parts}
        modules = {}
        for name in names:
            path = name.split(".")[:-1]
            if "experts" in path:
                path = path[: path.index("experts") + 1]
            elif path:
                path[-1] = fused.get(path[-1], path[-1])
            modules[name] = ".".join(path)
        return modules

    def tensors(self) -> dict[str, Tensor]:
        """Return by name all parameters, all buffers, and tensors that modules have as plain attributes.

        A shared tensor, such as the head of a tied embedding, is listed under its first name only.
        """
        found: dict[int, tuple[str, Tensor]] = {}
        for path, module in self.model.named_modules():
            attributes = {name: value for name, value in vars(module).items() if isinstance(value, Tensor)}
            for name, tensor in (module._parameters | module._buffers | attributes).items():
                if tensor is not None and tensor.numel() > 0:
                    found.setdefault(tensor.data_ptr(), (join(path, name), tensor.detach()))
        return dict(found.values())

    def digests(self) -> dict[str, str]:
        """Return a checksum of each of `tensors`."""
        live = self.tensors()
        return dict(zip(live, tensor_checksums(tensor.contiguous() for tensor in live.values()), strict=True))

    def pin(self, names: Iterable[str]) -> None:
        """Record the addresses of these tensors for `moved`."""
        modules = dict(self.model.named_modules())
        for name in names:
            path, _, attribute = name.rpartition(".")
            module = modules[path]
            self._pinned.append((name, module, attribute, getattr(module, attribute).data_ptr()))

    def moved(self) -> str | None:
        """Return the name of a pinned tensor that the engine has replaced since, None if there is none."""
        for name, module, attribute, address in self._pinned:
            if getattr(module, attribute).data_ptr() != address:
                return name
        return None


def held_kernels(holder: object) -> dict[str, object]:
    """Return the attributes of `holder` that can be called."""
    return {name: value for name, value in vars(holder).items() if callable(value)}


def tensors_on_meta(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of the parameters and buffers of `model` that are on the meta device.

    A shared tensor is yielded under its first name only, as in `LiveModel.tensors`.
    """
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, tensor in (module._parameters | module._buffers).items():
            if tensor is not None and tensor.is_meta and id(tensor) not in seen:
                seen.add(id(tensor))
                yield join(path, name), tensor


def on_meta(parameter: Tensor) -> Tensor:
    """Return a tensor of the class of `parameter` on the meta device, with its attributes, such as its loader."""
    meta = torch.Tensor._make_subclass(type(parameter), parameter.detach().to("meta"), False)
    meta.__dict__.update(parameter.__dict__)
    return meta


def join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name

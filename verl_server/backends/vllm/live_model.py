"""`LiveModel`: the tensors of vLLM's model on one worker, by name, and a trace of vLLM's loader.

`load_plan` and `load_proof` read them. Nothing in vLLM is patched: vLLM's layerwise reload replaces the parameters by
tensors in the checkpoint's format on the meta device, and restores the live tensors afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from verl_server.models.loader import WeightSlot
from verl_server.weight_sync.checksum import tensor_checksums
from verl_server.weight_sync.receiver.load_trace.record import LoadTrace, record


class LiveModel:
    def __init__(self, model_runner: Any) -> None:
        """`model_runner` is vLLM's model runner, with a loaded model."""
        self.runner = model_runner
        self.device: torch.device = model_runner.device
        self._pinned: list[tuple[str, Any, str, int]] = []
        """Tensors that updates write: name, module, attribute, address."""

    @property
    def model(self) -> Any:
        return self.runner.get_model()

    def tensors(self) -> dict[str, Tensor]:
        """Return by name all parameters, all buffers, and tensors that modules have as plain attributes.

        A shared tensor, such as the head of a tied embedding, is listed under its first name only.
        """
        found: dict[int, tuple[str, Tensor]] = {}
        for path, module in self.model.named_modules():
            attributes = {name: value for name, value in vars(module).items() if isinstance(value, Tensor)}
            for name, tensor in (module._parameters | module._buffers | attributes).items():
                if tensor is not None and tensor.numel() > 0:
                    found.setdefault(tensor.data_ptr(), (_join(path, name), tensor.detach()))
        return dict(found.values())

    def kernels(self) -> dict[str, dict[str, object]]:
        """Return {module: its functions and kernels by attribute}.

        A kernel that a reload replaces may have weights in a layout of its own, which no tensor of the module shows.
        """
        found = {}
        for path, module in self.model.named_modules():
            held = dict(vars(module))
            method = getattr(module, "quant_method", None)
            if method is not None and self.device.type == "cpu":  # the kernels of experts have packed weights there
                held |= vars(method)
            found[path] = {name: value for name, value in held.items() if callable(value)}
        return found

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
        """Return the name of a pinned tensor that vLLM has replaced since, None if there is none."""
        for name, module, attribute, address in self._pinned:
            if getattr(module, attribute).data_ptr() != address:
                return name
        return None

    def trace(self, slots: Mapping[str, WeightSlot]) -> tuple[LoadTrace, dict[str, Tensor]]:
        """Record the operations of vLLM's loader on all tensors of the checkpoint.

        Return (trace, parameters in the format in which they are loaded, on the meta device). The live tensors are
        restored in any case. Errors of the loader pass through.
        """
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        model = self.model
        initialize_layerwise_reload(model)
        try:
            parameters = dict(_unloaded(model))
            for parameter in parameters.values():
                if hasattr(parameter, "weight_loader"):
                    parameter.weight_loader = _own_loader(parameter.weight_loader)  # type: ignore[attr-defined]
            sources = {name: torch.empty(slot.shape, dtype=slot.dtype, device="meta") for name, slot in slots.items()}
            return record(model.load_weights, sources, parameters), parameters
        finally:
            finalize_layerwise_reload(model, self.runner.model_config)


def _unloaded(model: Any) -> Iterator[tuple[str, Tensor]]:
    for path, module in model.named_modules():
        for name, tensor in (module._parameters | module._buffers).items():
            if tensor is not None and tensor.is_meta:
                yield _join(path, name), tensor


def _own_loader(loader: Callable[..., Any]) -> Callable[..., Any]:
    """Return a parameter's loader without the wrappers that defer it until its module is complete."""
    while loader.__name__ == "online_process_loader":
        loader = loader.__wrapped__  # type: ignore[attr-defined]
    return loader


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name

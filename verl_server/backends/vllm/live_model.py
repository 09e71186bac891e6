"""`VllmModel`: vLLM's model on one worker, as a `LiveModel`.

Nothing in vLLM is patched. vLLM's layerwise reload replaces the parameters by tensors in the checkpoint's format on the
meta device, loads a module as soon as all of its tensors have arrived, processes it as at the start (fusing, sharding,
repacking), and copies the result into the live storage, whose addresses CUDA graphs use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from verl_server.backends.process.live_model import LiveModel, held_kernels, tensors_on_meta
from verl_server.models.loader import WeightSlot
from verl_server.weight_sync.receiver.load_trace.record import LoadTrace, record


class VllmModel(LiveModel):
    engine = "vLLM"

    def __init__(self, model_runner: Any) -> None:
        """`model_runner` is vLLM's model runner, with a loaded model."""
        config = model_runner.model_config
        super().__init__(model_runner.device, config.dtype, config.hf_text_config)
        self._runner = model_runner

    @property
    def model(self) -> torch.nn.Module:
        model: torch.nn.Module = self._runner.get_model()
        return model

    def kernels(self) -> dict[str, dict[str, object]]:
        found = super().kernels()
        for path, method in self._packing_methods():
            found[path] |= held_kernels(method)
        return found

    def trace(self, slots: Mapping[str, WeightSlot]) -> tuple[LoadTrace, dict[str, Tensor]]:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        model: Any = self.model
        initialize_layerwise_reload(model)
        try:
            parameters = dict(tensors_on_meta(model))
            for parameter in parameters.values():
                if hasattr(parameter, "weight_loader"):
                    parameter.weight_loader = _own_loader(parameter.weight_loader)  # type: ignore[attr-defined]
            sources = {name: torch.empty(slot.shape, dtype=slot.dtype, device="meta") for name, slot in slots.items()}
            return record(model.load_weights, sources, parameters), parameters
        finally:
            finalize_layerwise_reload(model, self._runner.model_config)

    def reload(self, modules: Iterable[dict[str, Tensor]]) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        try:
            self._runner.reload_weights(weights_iterator=self._to_reload(modules))
        except BaseException:
            # Otherwise the next reload would go on where this one ended, with tensors of this one.
            finalize_layerwise_reload(self.model, self._runner.model_config)
            raise

    def _to_reload(self, modules: Iterable[dict[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for tensors in modules:
            paths = set(self.groups(tensors).values())
            for path, method in self._packing_methods():
                if any(f"{path}.".startswith(f"{module}.") for module in paths):
                    method.moe_kernel = None
            yield from tensors.items()

    def _packing_methods(self) -> Iterator[tuple[str, Any]]:
        """Yield (module, method) of the methods that pack weights when they create their kernel, and not at a reload.

        In vLLM 0.32, the methods of experts on a CPU are such methods. A captured CUDA graph would keep the old kernel.
        """
        for path, module in self.model.named_modules() if self.device.type == "cpu" else ():
            method = getattr(module, "quant_method", None)
            if hasattr(method, "moe_kernel"):
                yield path, method


def _own_loader(loader: Callable[..., Any]) -> Callable[..., Any]:
    """Return a parameter's loader without the wrappers that defer it until its module is complete."""
    while loader.__name__ == "online_process_loader":
        loader = loader.__wrapped__  # type: ignore[attr-defined]
    return loader

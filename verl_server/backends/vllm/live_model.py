"""`VllmModel`: vLLM's model on one worker, as a `LiveModel`.

Nothing in vLLM is patched. vLLM's layerwise reload replaces the parameters by tensors in the checkpoint's format on the
meta device, loads a module as soon as all of its tensors have arrived, processes it as at the start (fusing, sharding,
repacking), and copies the result into the live storage, whose addresses CUDA graphs use.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from verl_server.backends.process.live_model import LiveModel, held_kernels, on_meta, tensors_on_meta
from verl_server.models.loader import WeightSlot
from verl_server.weight_sync.receiver.load_trace.record import LoadTrace, record


class VllmModel(LiveModel):
    engine = "vLLM"

    def __init__(self, model_runner: Any) -> None:
        """`model_runner` is vLLM's model runner, with a loaded model."""
        config = model_runner.model_config
        super().__init__(model_runner.device, config.dtype, config.hf_text_config)
        self._runner = model_runner
        self._fed: dict[str, set[str]] = {}
        """Tensor of the checkpoint -> modules whose parameters depend on it."""

    @property
    def model(self) -> torch.nn.Module:
        model: torch.nn.Module = self._runner.get_model()
        return model

    def kernels(self) -> dict[str, dict[str, object]]:
        found = super().kernels()
        for path, method in self._packing_methods():
            found[path] |= held_kernels(method)
        for path, module, owner in self._packed_twins():
            found[owner] |= {f"{path}.{name}": kernel for name, kernel in held_kernels(module).items()}
        return found

    def trace(self, slots: Mapping[str, WeightSlot]) -> tuple[LoadTrace, dict[str, Tensor]]:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        model: Any = self.model
        initialize_layerwise_reload(model)
        try:
            with _live_parameters_on_meta(model):
                parameters = dict(tensors_on_meta(model))
                for parameter in parameters.values():
                    if hasattr(parameter, "weight_loader"):
                        parameter.weight_loader = _own_loader(parameter.weight_loader)  # type: ignore[attr-defined]
                sources = {
                    name: torch.empty(slot.shape, dtype=slot.dtype, device="meta") for name, slot in slots.items()
                }
                trace = record(model.load_weights, sources, parameters)
        finally:
            finalize_layerwise_reload(model, self._runner.model_config)
        self._fed = {source: {name.rpartition(".")[0] for name in names} for source, names in trace.feeds.items()}
        return trace, parameters

    def reload(self, modules: Iterable[dict[str, Tensor]]) -> None:
        remaining, kernels = iter(modules), [(method, method.moe_kernel) for _, method in self._packing_methods()]
        while True:
            incomplete: list[dict[str, Tensor]] = []
            self._load(self._until_incomplete(remaining, incomplete))
            if not incomplete:
                break
            self._load(iter(incomplete[0].items()), self._layers_of(incomplete[0]))
        for method, kernel in kernels:
            method.moe_kernel = method.moe_kernel or kernel  # unless the loader made a new one
        for _, module, _ in self._packed_twins():
            module.quant_method.process_weights_after_loading(module)
        self._runner.reset_encoder_cache()
        self._runner.reset_mm_cache()

    def _until_incomplete(
        self, modules: Iterator[dict[str, Tensor]], incomplete: list[dict[str, Tensor]]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of modules, until vLLM has not processed a module whose tensors have all been yielded.

        The last tensors are then added to `incomplete`. vLLM counts what the loaders of parameters write. It does not
        count what a model's loader writes into a parameter itself, as that of gpt-oss does with experts and sinks.
        """
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        for tensors in modules:
            paths = set(self.groups(tensors).values())
            for path, method in self._packing_methods():
                if any(f"{path}.".startswith(f"{module}.") for module in paths):
                    method.moe_kernel = None
            yield from tensors.items()
            infos = [get_layerwise_info(layer) for layer in self._layers_of(tensors)]
            if any(info.can_load() and info.load_numel_total for info in infos):
                incomplete.append(tensors)
                return

    def _load(self, weights: Iterator[tuple[str, Tensor]], layers: Collection[torch.nn.Module] = ()) -> None:
        """Load by vLLM's layerwise reload. `layers` have memory from the beginning, so that anything may write it."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
        from vllm.model_executor.model_loader.reload.meta import materialize_layer

        model: Any = self.model
        initialize_layerwise_reload(model)
        try:
            for layer in layers:
                materialize_layer(layer, get_layerwise_info(layer))
            model.load_weights(weights)
            for info in map(get_layerwise_info, layers):
                if info.can_load() and info.load_numel == 0:
                    # vLLM processes a layer at the end if some of its elements were counted, but not all.
                    info.load_numel = info.load_numel_total / 2
        finally:
            # After an error, too: the next reload would go on where this one ended, with tensors of this one.
            finalize_layerwise_reload(model, self._runner.model_config)

    def _layers_of(self, tensors: Iterable[str]) -> list[torch.nn.Module]:
        """Return the modules whose parameters depend on `tensors` of the checkpoint, as far as a trace showed it."""
        paths = {path for name in tensors for path in self._fed.get(name, ())}
        return [module for path, module in self.model.named_modules() if path in paths]

    def _packing_methods(self) -> Iterator[tuple[str, Any]]:
        """Yield (module, method) of the methods that pack weights when they create their kernel, and not at a reload.

        In vLLM 0.32, the methods of experts on a CPU are such methods. A captured CUDA graph would keep the old kernel.
        """
        for path, module in self.model.named_modules() if self.device.type == "cpu" else ():
            method = getattr(module, "quant_method", None)
            if hasattr(method, "moe_kernel"):
                yield path, method

    def _packed_twins(self) -> Iterator[tuple[str, Any, str]]:
        """Yield (module, its object, module that loads its weight) of modules that pack the weight of another module.

        On a CPU, a tied head has a kernel of its own, packed from the weight of the embedding. vLLM's reload of the
        embedding does not renew it.
        """
        owners: dict[int, str] = {}
        for path, module in self.model.named_modules() if self.device.type == "cpu" else ():
            weight = module._parameters.get("weight")
            if weight is None or weight.numel() == 0:  # a packed weight leaves an empty one behind
                continue
            owner = owners.setdefault(id(weight), path)
            if owner != path and hasattr(module, "quant_method"):
                yield path, module, owner


@contextlib.contextmanager
def _live_parameters_on_meta(model: torch.nn.Module) -> Iterator[None]:
    """Replace the parameters that vLLM's layerwise reload leaves in place by parameters on the meta device.

    vLLM leaves the corrections of a router's scores in place, and since 0.32 each bias. Its loaders write them, too.
    """
    kept = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and not parameter.is_meta
    ]
    replaced: dict[int, Tensor] = {}
    try:
        for module, name, parameter in kept:
            module._parameters[name] = replaced.setdefault(id(parameter), on_meta(parameter))  # type: ignore[assignment]
        yield
    finally:
        for module, name, parameter in kept:
            module._parameters[name] = parameter


def _own_loader(loader: Callable[..., Any]) -> Callable[..., Any]:
    """Return a parameter's loader without the wrappers that defer it until its module is complete."""
    while loader.__name__ == "online_process_loader":
        loader = loader.__wrapped__  # type: ignore[attr-defined]
    return loader

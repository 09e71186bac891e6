"""`SglangModel`: SGLang's model on one worker, as a `LiveModel`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from verl_server.backends.process.live_model import LiveModel, on_meta, tensors_on_meta
from verl_server.models.loader import WeightSlot
from verl_server.weight_sync.receiver.load_trace.record import LoadTrace, record


class SglangModel(LiveModel):
    engine = "SGLang"

    def __init__(self, model_runner: Any) -> None:
        """`model_runner` is SGLang's model runner, with a loaded model."""
        device = next(model_runner.model.parameters()).device
        super().__init__(device, model_runner.dtype, model_runner.model_config.hf_text_config)
        self._runner = model_runner

    @property
    def model(self) -> torch.nn.Module:
        model: torch.nn.Module = self._runner.model
        return model

    def trace(self, slots: Mapping[str, WeightSlot]) -> tuple[LoadTrace, dict[str, Tensor]]:
        model: Any = self.model
        with _parameters_on_meta(model):
            sources = {name: torch.empty(slot.shape, dtype=slot.dtype, device="meta") for name, slot in slots.items()}
            parameters = dict(tensors_on_meta(model))
            return record(model.load_weights, sources, parameters), parameters

    def reload(self, modules: Iterable[dict[str, Tensor]]) -> None:
        model: Any = self.model
        for tensors in modules:
            model.load_weights(tensors.items())


@contextlib.contextmanager
def _parameters_on_meta(model: torch.nn.Module) -> Iterator[None]:
    """Replace each parameter by one of its class on the meta device, with the same attributes, such as its loader.

    A shared parameter is shared there, too. Dictionaries of parameters that a model keeps are hidden meanwhile.
    """
    replaced: dict[int, Tensor] = {}
    found = [(module, name, p) for module in model.modules() for name, p in module._parameters.items() if p is not None]
    attributes = [(module, dict(vars(module))) for module in model.modules()]
    for module, _ in attributes:
        for name, value in list(vars(module).items()):
            has_parameters = isinstance(value, dict) and any(isinstance(p, torch.nn.Parameter) for p in value.values())
            if has_parameters and name != "_parameters":
                del vars(module)[name]
    try:
        for module, name, parameter in found:
            module._parameters[name] = replaced.setdefault(id(parameter), on_meta(parameter))  # type: ignore[assignment]
        yield
    finally:
        for module, name, parameter in found:
            module._parameters[name] = parameter
        for module, before in attributes:
            vars(module).clear()
            vars(module).update(before)

"""SGLang's loader is traced on parameters without memory, and the live model is unchanged afterwards.

Needs no SGLang: its models are torch modules whose parameters have the attribute `weight_loader`.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from verl_server.backends.sglang.live_model import SglangModel, _parameters_on_meta
from verl_server.models.loader import WeightSlot


class LoadedParameter(nn.Parameter):
    """A parameter of a class of its own, as SGLang's quantized layers have."""


def write(parameter: Tensor, loaded: Tensor) -> None:
    parameter.data.copy_(loaded)


class Model(nn.Module):
    """A model with a tied head, a buffer, and a dictionary of its parameters, as SGLang's models keep one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(4, 2)
        self.head = nn.Linear(2, 4, bias=False)
        self.head.weight = self.embed.weight
        self.proj = nn.Linear(2, 2)
        self.proj.weight = LoadedParameter(torch.ones(2, 2), requires_grad=False)
        self.proj.weight.weight_loader = write  # type: ignore[assignment]
        self.proj.weight.output_dim = 0  # type: ignore[assignment]
        self.register_buffer("scale", torch.ones(1))
        self.sizes = {"hidden": 2}
        self.params_dict = dict(self.named_parameters())

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        if "params_dict" not in vars(self):
            self.params_dict = dict(self.named_parameters())
        for name, tensor in weights:
            parameter = self.params_dict[name]
            getattr(parameter, "weight_loader", write)(parameter, tensor)


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
def live(model: Model) -> SglangModel:
    config = SimpleNamespace(hf_text_config=SimpleNamespace(tie_word_embeddings=True))
    return SglangModel(SimpleNamespace(model=model, dtype=torch.float32, model_config=config))


def state(model: nn.Module) -> list[Any]:
    """All attributes, parameters and buffers of the modules by identity and in order, and the values of the tensors."""
    found: list[Any] = []
    for path, module in model.named_modules():
        for held in (vars(module), module._parameters, module._buffers):
            found.append((path, [(name, id(value)) for name, value in held.items()]))
    for name, tensor in model.state_dict(keep_vars=True).items():
        found.append((name, tensor.device.type, tensor.data_ptr(), tensor.tolist(), dict(vars(tensor))))
    found.append([(name, id(parameter)) for name, parameter in vars(model)["params_dict"].items()])
    return found


def test_parameters_are_on_the_meta_device_inside(model: Model) -> None:
    live = model.proj.weight
    with _parameters_on_meta(model):
        parameters = dict(model.named_parameters())
        assert {p.device.type for p in parameters.values()} == {"meta"}
        assert parameters.keys() == {"embed.weight", "proj.weight", "proj.bias"}
        proj = parameters["proj.weight"]
        assert type(proj) is LoadedParameter and vars(proj) == vars(live)
        assert (proj.shape, proj.dtype) == (live.shape, live.dtype)
        assert model.head.weight is model.embed.weight, "the head is tied"
        assert "params_dict" not in vars(model), "the loader would write the live parameters in it"
        assert model.sizes == {"hidden": 2} and model.scale.device.type == "cpu"


def test_the_model_is_the_same_afterwards(model: Model) -> None:
    before = state(model)
    with _parameters_on_meta(model):
        assert model.embed.weight.is_meta
    assert state(model) == before


def change(model: Model) -> None:
    """Change what a loader may change."""
    model.params_dict = dict(model.named_parameters())
    model.proj.weight = nn.Parameter(torch.zeros(2, 2))
    model.head.weight.was_loaded = True  # type: ignore[assignment]
    model.proj.scales = torch.zeros(1)
    del model.sizes


def test_changes_of_a_loader_are_undone(model: Model) -> None:
    before = state(model)
    with _parameters_on_meta(model):
        change(model)
    assert state(model) == before


def test_changes_before_an_error_are_undone(model: Model) -> None:
    before = state(model)
    with pytest.raises(KeyError, match="an unknown tensor"), _parameters_on_meta(model):
        change(model)
        raise KeyError("an unknown tensor")
    assert state(model) == before


def test_a_trace_records_the_copies_of_the_loader(model: Model, live: SglangModel) -> None:
    before = state(model)
    slots = {name: WeightSlot(name, tuple(p.shape), p.dtype, []) for name, p in model.named_parameters()}
    trace, parameters = live.trace(slots)
    assert parameters.keys() >= slots.keys() and all(parameter.is_meta for parameter in parameters.values())
    for name in ("proj.weight", "proj.bias"):
        assert [copy.source for copy in trace.copies[name]] == [name]
    assert trace.feeds.keys() == slots.keys() and not trace.read
    assert state(model) == before


def test_an_error_of_the_loader_passes_through_a_trace(model: Model, live: SglangModel) -> None:
    before = state(model)
    with pytest.raises(KeyError, match="unknown"):
        live.trace({"unknown": WeightSlot("unknown", (2,), torch.float32, [])})
    assert state(model) == before


def test_a_reload_goes_through_the_loader(model: Model, live: SglangModel) -> None:
    address = model.proj.weight.data_ptr()
    with torch.no_grad():
        live.reload([{"proj.weight": torch.full((2, 2), 5.0)}, {"embed.weight": torch.full((4, 2), 7.0)}])
    assert model.proj.weight.unique().tolist() == [5.0] and model.proj.weight.data_ptr() == address
    assert model.head.weight.unique().tolist() == [7.0]

"""A trace covers what vLLM's reload leaves in place, and a reload packs a tied head. vLLM is not needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from verl_server.backends.process.live_model import tensors_on_meta
from verl_server.backends.vllm.live_model import VllmModel, _live_parameters_on_meta


class Packed(nn.Linear):
    """A layer with a kernel that vLLM makes from its weight."""

    quant_method = "packs"

    def pack(self) -> None:
        weight = self.weight.detach().clone()
        self.cpu_linear = lambda x: x @ weight.T


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.proj = Packed(2, 4, bias=False), nn.Linear(2, 2)
        self.head = Packed(2, 4, bias=False)
        self.head.weight = self.embed.weight
        self.proj.bias.weight_loader = len  # type: ignore[attr-defined]


def test_parameters_that_are_left_in_place_are_on_the_meta_device_inside() -> None:
    model = Model()
    live = dict(model.named_parameters())
    model.proj.weight = nn.Parameter(torch.empty(2, 2, device="meta"))  # vLLM has replaced this one
    replaced = model.proj.weight
    with _live_parameters_on_meta(model):
        found = dict(tensors_on_meta(model))
        assert found.keys() == live.keys() == {"embed.weight", "proj.weight", "proj.bias"}
        assert found["proj.weight"] is replaced
        assert model.head.weight is model.embed.weight and vars(found["proj.bias"]) == {"weight_loader": len}
    assert model.embed.weight is model.head.weight is live["embed.weight"] and model.proj.bias is live["proj.bias"]
    assert model.proj.weight is replaced


def test_the_kernel_of_a_tied_head_belongs_to_the_module_that_loads_its_weight() -> None:
    model: Any = Model()
    model.embed.pack()
    model.head.pack()
    config = SimpleNamespace(dtype=torch.float32, hf_text_config=SimpleNamespace(tie_word_embeddings=True))
    runner = SimpleNamespace(device=torch.device("cpu"), model_config=config, get_model=lambda: model)
    live = VllmModel(runner)
    assert [(path, owner) for path, _, owner in live._packed_twins()] == [("head", "embed")]
    assert live.kernels()["embed"]["head.cpu_linear"] is model.head.cpu_linear
    runner.device = torch.device("meta")
    assert not list(VllmModel(runner)._packed_twins()), "only a CPU packs heads"

"""A module that neither copies nor the engine's own loader writes is noticed at the start."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from verl_server.backends.process.live_model import LiveModel
from verl_server.backends.process.load_plan import LoadPlan
from verl_server.backends.process.load_proof import unwritten_modules
from verl_server.models.loader import WeightSlot
from verl_server.weight_sync.receiver.load_trace.record import LoadTrace

NAMES = ("proj.weight", "gate.weight", "norm.weight")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj, self.gate = nn.Linear(3, 2, bias=False), nn.Linear(3, 2, bias=False)
        self.norm = nn.RMSNorm(3)


class FakeLive(LiveModel):
    """An engine that loads a tensor again into its parameter, or packs it into a kernel, or does neither."""

    engine = "vLLM"

    def __init__(self, packed: set[str], ignored: set[str]) -> None:
        super().__init__(torch.device("cpu"), torch.float32, SimpleNamespace(tie_word_embeddings=False))
        self._model, self._packed, self._ignored = Model(), packed, ignored

    @property
    def model(self) -> nn.Module:
        return self._model

    @torch.no_grad()
    def reload(self, modules: Iterable[dict[str, Tensor]]) -> None:
        for tensors in modules:
            for name, tensor in tensors.items():
                if name in self._packed:
                    weight = tensor.clone()
                    self._model.get_submodule(name.rpartition(".")[0]).kernel = lambda x, w=weight: x @ w.T
                elif name not in self._ignored:
                    self._model.get_parameter(name).copy_(tensor)


@pytest.mark.parametrize(
    ("packed", "ignored", "expected"),
    [
        (set(), set(), []),
        ({"proj.weight"}, set(), []),
        (set(), {"gate.weight"}, ["gate"]),
        (set(), {"norm.weight"}, []),  # it is copied, so no update needs its loader
    ],
    ids=["written", "packed", "ignored", "copied"],
)
def test_reloaded_modules_that_stay_as_they_are(packed: set[str], ignored: set[str], expected: list[str]) -> None:
    live = FakeLive(packed, ignored)
    plan = LoadPlan(LoadTrace(feeds={name: {name} for name in NAMES}), live.tensors(), live.tensors())
    plan.reload("proj", "it is packed")
    plan.reload("gate", "its loader writes other bytes than the copies")
    slots = {name: WeightSlot(name, tuple(tensor.shape), tensor.dtype, []) for name, tensor in live.tensors().items()}
    found = unwritten_modules(live, plan, slots, lambda tensors: live.reload({name: t} for name, t in tensors))
    assert found == expected

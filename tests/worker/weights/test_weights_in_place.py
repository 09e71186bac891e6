"""Updates write into the storage of the served parameters: captured CUDA graphs and open handles name its addresses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.parity.harness import make_runner
from verl_server.ipc.tp_group import TpGroup
from verl_server.messages.weight_requests import (
    ReleaseMemoryOccupationReq,
    ResumeMemoryOccupationReq,
    UpdateWeightsFromDiskReq,
    UpdateWeightsFromTensorReq,
)
from verl_server.models.tiny import make_model_folder
from verl_server.server_args import ServerArgs
from verl_server.weight_sync.trainer.sender import describe_tensors
from verl_server.worker.model_runner import ModelRunner
from verl_server.worker.weights.weight_sources import WeightSources
from verl_server.worker.weights.weight_updater import WeightUpdater


class Updated:
    """A model with what updates it, as a scheduler process has them."""

    def __init__(self, folder: Path) -> None:
        self.runner: ModelRunner = make_runner(folder)
        args = ServerArgs(model_path=str(folder), device="cpu")
        self._sources = WeightSources(self.runner, TpGroup(), args)
        self._updater = WeightUpdater(self.runner, TpGroup(), self._sources, args)

    def update(self, req: Any) -> None:
        staged = isinstance(req, UpdateWeightsFromTensorReq | UpdateWeightsFromDiskReq)
        reply = self._updater.handle(req, self._sources.prepare(req) if staged else None)
        assert reply.success, reply.message

    def storages(self) -> dict[str, int]:
        """Return the address of every parameter and buffer."""
        tensors = [*self.runner.model.named_parameters(), *self.runner.model.named_buffers()]
        return {name: tensor.data_ptr() for name, tensor in tensors}

    def contents(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.runner.model.named_parameters()}


@pytest.mark.parametrize("tied", [False, True], ids=["a head of its own", "a tied head"])
def test_no_update_moves_a_parameter(tmp_path: Path, tied: bool) -> None:
    old, new = (
        make_model_folder(tmp_path / str(seed), "qwen3", seed=seed, tie_word_embeddings=tied) for seed in (0, 1)
    )
    updated = Updated(old)
    addresses, first = updated.storages(), updated.contents()
    weights = load_file(new / "model.safetensors")
    updates: list[tuple[str, Any]] = [
        ("a push", UpdateWeightsFromTensorReq(named_tensors=describe_tensors(weights.items()))),
        ("a checkpoint", UpdateWeightsFromDiskReq(model_path=str(old))),
        ("a release", ReleaseMemoryOccupationReq()),
        ("a resume", ResumeMemoryOccupationReq()),
        ("a push after it", UpdateWeightsFromTensorReq(named_tensors=describe_tensors(weights.items()), partial=False)),
    ]
    for name, req in updates:
        updated.update(req)
        assert updated.storages() == addresses, f"{name} moved parameters"
        if name == "a push":
            second = updated.contents()
            assert not any(torch.equal(first[part], second[part]) for part in first if "proj" in part)
        if name == "a checkpoint":
            assert all(torch.equal(first[part], tensor) for part, tensor in updated.contents().items())
    assert all(torch.equal(second[part], tensor) for part, tensor in updated.contents().items())

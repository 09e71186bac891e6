"""Models that people train, through vLLM: log-probabilities of the start and after pushes are transformers'."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests import fork_server
from tests.backends.conftest import OTHERS
from tests.backends.served import DEVICE, ENGINES
from tests.backends.trained_models import MODELS, Checkpoint, gaps
from verl_server import HttpServerEngineAdapter, WeightUpdateError

BOUNDS = {"float32": 1e-4, "bfloat16": 0.4}
"""Largest difference of a log-probability from transformers in float32, by the dtype of the engine. Between the two
checkpoints of a model it is larger than 1."""
PUSHES = 10


class Trained:
    def __init__(self, adapter: HttpServerEngineAdapter, checkpoints: list[Checkpoint], dtype: str) -> None:
        self.adapter, self.checkpoints, self.bound = adapter, checkpoints, BOUNDS[dtype]

    def check(self, checkpoint: int, version: str | None = None) -> None:
        found = gaps(self.adapter, self.checkpoints[checkpoint].reference)
        assert found.largest < self.bound, found
        assert version in (None, found.version)


@pytest.fixture(scope="module", params=MODELS if "vllm" in OTHERS else [])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    """A model and two checkpoints of it. vLLM serves the first one from its start."""
    name = request.param
    dtype = MODELS[name].cpu_dtype if DEVICE == "cpu" else "bfloat16"
    checkpoints = [Checkpoint(tmp_path_factory.mktemp(name), name, seed, dtype) for seed in (0, 9)]
    settings: dict[str, Any] = ENGINES["vllm"] | {"dtype": dtype, "model_path": str(checkpoints[0].folder)}
    with fork_server.real_processes():
        adapter = HttpServerEngineAdapter(**settings)
    with adapter:
        yield Trained(adapter, checkpoints, dtype)


def test_ten_pushes(trained: Trained) -> None:
    trained.check(0)
    assert gaps(trained.adapter, trained.checkpoints[1].reference).largest > 1, "the checkpoints differ"
    for i in range(1, PUSHES + 1):
        trained.checkpoints[i % 2].push(trained.adapter, f"push {i}")
        trained.check(i % 2, f"push {i}")


def test_tensors_as_transformers_names_them(trained: Trained) -> None:
    """A trainer pushes the parameters of its model and the buffers of its checkpoint, with experts stacked."""
    for checkpoint in (1, 0):
        named = trained.checkpoints[checkpoint].reference.state_dict()
        trained.adapter.update_weights_from_tensor(list(named.items()), partial=False)
        trained.check(checkpoint)


def test_a_push_that_lacks_a_tensor_is_refused(trained: Trained) -> None:
    """vLLM reads each tensor of these checkpoints. So a push without a bias, a sink or a correction is not whole."""
    trained.checkpoints[0].push(trained.adapter, "first")
    weights = trained.checkpoints[1].weights
    lost = [name for name in weights if name.endswith(("bias", "sinks", "A_log", "norm.weight"))]
    for name in (lost[0], lost[-1]):
        with pytest.raises(WeightUpdateError, match="lacks 1 of"):
            rest = [(other, tensor) for other, tensor in weights.items() if other != name]
            trained.adapter.update_weights_from_tensor(rest, partial=False)
    trained.check(0, "first")

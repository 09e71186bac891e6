"""Engines of the contract suite: the embedded one, and each engine that is installed beside this package.

`make test` runs the suite with the embedded engine, `make test-vllm` and `make test-sglang` with other engines in
environments of their own. An engine starts once for each model, because vLLM takes half a minute.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import fork_server
from tests.backends.served import ENGINES, Served
from verl_server import HttpServerEngineAdapter
from verl_server.models.tiny import make_model_folder

# By default vLLM pins a worker to the cores on which it computes: to one, if there are two. Its main thread spins
# there, and under some kernels (seen with Linux 6.18) no other process or thread on that core runs meanwhile.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

OTHERS = [name for name in ENGINES if name != "embedded" and importlib.util.find_spec(name)]
"""Engines of other projects that are installed."""
INSTALLED = ["embedded", *OTHERS]
UNREAD = "model.layers.0.self_attn.rotary_emb.inv_freq"
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"arch": "qwen3", "head_dim": 32, "max_position_embeddings": 8192},
    "qwen3_moe": {
        "arch": "qwen3_moe",
        "head_dim": 32,
        "max_position_embeddings": 8192,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
    },
}


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """Two checkpoints of each model. Those of the model with experts also have a tensor that no engine reads."""
    found = {
        name: [make_model_folder(tmp_path_factory.mktemp(name), seed=seed, **shape) for seed in (0, 9)]
        for name, shape in MODELS.items()
    }
    for folder in found["qwen3_moe"]:
        file = folder / "model.safetensors"
        save_file(load_file(file) | {UNREAD: torch.ones(16)}, file, {"format": "pt"})
    return found


@pytest.fixture(scope="session", params=[(engine, "qwen3") for engine in INSTALLED], ids=lambda param: "-".join(param))
def served(request: pytest.FixtureRequest, folders: dict[str, list[Path]]) -> Iterator[Served]:
    yield from _serve(*request.param, folders)


@pytest.fixture(
    scope="session",
    params=[(engine, "qwen3_moe") for engine in OTHERS],
    ids=lambda param: "-".join(param),
)
def served_experts(request: pytest.FixtureRequest, folders: dict[str, list[Path]]) -> Iterator[Served]:
    yield from _serve(*request.param, folders)


def _serve(engine: str, model: str, folders: dict[str, list[Path]]) -> Iterator[Served]:
    with fork_server.real_processes() if engine != "embedded" else nullcontext():
        adapter = HttpServerEngineAdapter(model_path=str(folders[model][0]), **ENGINES[engine])
    with adapter:
        yield Served(adapter, engine, folders[model])


@pytest.fixture
def fresh(served: Served) -> Iterator[Served]:
    """The shared engine, which serves the first checkpoint as version "first"."""
    served.serve_first()
    yield served
    served.adapter.abort_request(abort_all=True)
    served.adapter.continue_generation()

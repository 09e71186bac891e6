"""Environments of verifiers without a network: packages of this folder, played by verifiers' own chat program.

`make test-verifiers` runs these tests in an environment of its own, which has the package.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "NO_PROXY": "*",
    "HOME": tempfile.mkdtemp(prefix="verl-verifiers-"),  # no settings and keys of the user; verifiers works below it
    "PATH": f"{HERE / 'bin'}:{os.environ['PATH']}",
    "PYTHONPATH": f"{HERE / 'packages'}:{HERE.parents[1]}",  # for verifiers' processes
    "VERL_TEST_PYTHON": sys.executable,
}

import pytest
import torch

from tests.compat.serve_tiny import model_folder
from verl_server.engine.http import HttpServerEngineAdapter
from verl_server.rollout.agents.types import Server

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random model, whose template has tools."""
    return model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def server(model: Path) -> Iterator[Server]:
    """A server with a key."""
    engine = HttpServerEngineAdapter(
        model_path=str(model), port=0, api_key="owner", dtype="float32", kv_cache_gib=0.1, cpu_threads=1
    )
    yield Server(str(engine.url), "owner")
    engine.shutdown()

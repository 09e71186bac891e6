"""Fixtures shared by all tests, such as tiny model folders that are made once for each test session."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read at import, so that a test that would use the network fails at once

import pytest
import torch

if not torch.cuda.is_available():  # kernels run in Triton's interpreter, chosen before any kernel is defined
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tests import fork_server
from verl_server.kernels.cpu.kernels import CpuKernels
from verl_server.kernels.cpu.library import KernelsUnavailableError
from verl_server.models.tiny import make_model_folder


def pytest_sessionstart(session: pytest.Session) -> None:
    if os.environ.get("VERL_SERVER_TEST_PROCESSES") == "real" or torch.cuda.is_available():
        return
    if hasattr(session.config, "workerinput"):  # a worker of pytest-xdist, which inherits the address
        fork_server.use_forks()
    else:
        fork_server.install()


@pytest.fixture
def real_processes() -> Iterator[None]:
    """Start the children of this test as fresh interpreters, as they are started outside tests."""
    with fork_server.real_processes():
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
        for item in items:
            if "cuda" in item.keywords:
                item.add_marker(skip)


@pytest.fixture(scope="session")
def cpu_kernels() -> CpuKernels:
    try:
        return CpuKernels()
    except KernelsUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="session")
def tiny_qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("qwen2"), "qwen2", tie_word_embeddings=True)


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("qwen3"), "qwen3")

"""Fixtures shared by all tests, such as tiny model folders that are made once for each test session."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read at import, so that a test that would use the network fails at once

import pytest
import torch

if not torch.cuda.is_available():  # kernels run in Triton's interpreter, chosen before any kernel is defined
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tests import fork_server, gpu_plugin
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


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a job in the background of a shell, as `make test &`
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.pluginmanager.register(gpu_plugin, "gpu_plugin")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        if item.get_closest_marker("cuda") is None:
            continue
        if gpus == 0:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))
        elif gpus == 1 and item.get_closest_marker("two_gpus") is not None:
            item.add_marker(pytest.mark.skip(reason="needs two GPUs"))


@pytest.fixture(
    params=[
        pytest.param(
            "cpu",
            marks=pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
        ),
        pytest.param("cuda", marks=pytest.mark.cuda),
    ]
)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device on which Triton's kernels run: a GPU, and without one the CPU, in Triton's interpreter."""
    return torch.device(request.param)


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.cuda)], ids=["", "pdl"])
def pdl(request: pytest.FixtureRequest) -> bool:
    """Without and with programmatic dependent launch, for tests of kernels that can begin early.

    A test must wait for the device before such a launch: what the kernel reads first may not be written meanwhile.
    """
    if request.param and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs Hopper or later")
    return bool(request.param)


@pytest.fixture(scope="session")
def cpu_kernels() -> CpuKernels:
    try:
        return CpuKernels()
    except KernelsUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config and a byte tokenizer, but no weights, for servers without a model."""
    return make_model_folder(tmp_path_factory.mktemp("text"), weights=False)


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="session")
def tiny_qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("qwen2"), "qwen2", tie_word_embeddings=True)


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("qwen3"), "qwen3")

"""Which kernels run: by device, dtype and switches; what cannot be had is refused, or replaced with a warning."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from verl_server.errors import BadRequestError
from verl_server.kernels import draw
from verl_server.kernels.cpu.kernels import CpuKernels
from verl_server.kernels.cpu.library import KernelsUnavailableError
from verl_server.models.ops import TORCH_OPS
from verl_server.server_args import ServerArgs
from verl_server.worker import kernel_choice
from verl_server.worker.kernel_choice import KernelChoice, choose_kernels

CPU = torch.device("cpu")


def choose(dtype: torch.dtype = torch.float32, head_dim: int = 64, **changes: Any) -> KernelChoice:
    return choose_kernels(ServerArgs(model_path="model", **changes), CPU, dtype, head_dim)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, cpu_kernels: CpuKernels) -> None:
    monkeypatch.setattr(kernel_choice, "CpuKernels", lambda: cpu_kernels)


def test_the_cpu_takes_compiled_kernels(compiled: None) -> None:
    choice = choose()
    assert choice.attention == "cpp" and choice.ops(CPU) is not TORCH_OPS and choice.choose is not draw.choose


def test_each_switch_for_itself(compiled: None) -> None:
    attends = choose(fused_kernels=False)
    assert attends.attention == "cpp" and attends.ops(CPU) is TORCH_OPS and attends.choose is draw.choose
    fused = choose(attention_backend="torch")
    assert fused.attention == "torch" and fused.ops(CPU) is not TORCH_OPS
    assert choose(attention_backend="torch", fused_kernels=False) == KernelChoice()


def test_what_is_not_compiled_runs_on_pytorch(compiled: None) -> None:
    assert choose(torch.bfloat16) == KernelChoice()
    odd = choose(head_dim=24)
    assert odd.attention == "torch" and odd.ops(CPU) is not TORCH_OPS
    for wrong in ({"dtype": torch.bfloat16}, {"head_dim": 24}):
        with pytest.raises(BadRequestError, match="attention_backend='cpp' takes float32 and a head_dim of"):
            choose(**wrong, attention_backend="cpp")


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def missing() -> CpuKernels:
        raise KernelsUnavailableError("no C++ compiler was found; install one (apt install g++) or name it in CXX.")

    monkeypatch.setattr(kernel_choice, "CpuKernels", missing)
    with caplog.at_level(logging.WARNING):
        assert choose() == KernelChoice()
    assert "apt install g++" in caplog.text
    with pytest.raises(BadRequestError, match="has to be compiled: no C\\+\\+ compiler"):
        choose(attention_backend="cpp")


def test_backends_of_the_other_device() -> None:
    with pytest.raises(BadRequestError, match="needs a CUDA device"):
        choose(attention_backend="triton")
    with pytest.raises(BadRequestError, match="'cpp' is the CPU's"):
        choose_kernels(
            ServerArgs(model_path="model", attention_backend="cpp"), torch.device("cuda"), torch.bfloat16, 64
        )

"""The kernels that are chosen for a device, a dtype and switches.

A kernel that is not available is refused, or replaced with a warning.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from verl_server.errors import BadRequestError
from verl_server.ipc.tp_group import TpGroup
from verl_server.kernels import gpu
from verl_server.kernels.cpu.kernels import CpuKernels
from verl_server.kernels.cpu.library import KernelsUnavailableError
from verl_server.models.config import ModelConfig
from verl_server.models.ops import TORCH_OPS, linear
from verl_server.sampling.distribution import SamplingOps
from verl_server.server_args import ServerArgs
from verl_server.worker import kernel_choice
from verl_server.worker.cpu_choice import CpuChoice, make_choice
from verl_server.worker.cpu_measurement import product_shapes
from verl_server.worker.kernel_choice import KernelChoice, choose_kernels

CPU, GPU = torch.device("cpu"), torch.device("meta")

CONFIG = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=320,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    norm_eps=1e-6,
    max_position_embeddings=512,
    rope={"rope_theta": 1e4, "rope_type": "default"},
    dtype=torch.float32,
    tie_word_embeddings=False,
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    qk_norm=True,
)


def choose(
    dtype: torch.dtype = torch.float32, head_dim: int = 64, tp: TpGroup | None = None, **changes: Any
) -> KernelChoice:
    args, config = ServerArgs(model_path="model", **changes), dataclasses.replace(CONFIG, head_dim=head_dim)
    return choose_kernels(args, CPU, dtype, config, tp or TpGroup())


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, cpu_kernels: CpuKernels, tmp_path: Path) -> list[CpuChoice]:
    """Replace the measurement by a fake, with a cache folder of its own. Return the list of the fake's choices."""
    kernels, given = copy.copy(cpu_kernels), list[CpuChoice]()
    kernels.library = dataclasses.replace(kernels.library, folder=tmp_path)

    def measure(_: CpuKernels, config: ModelConfig, tp: TpGroup, *, attends: bool) -> CpuChoice:
        products = {shape: ["torch", "cpp", "torch"] for shape in product_shapes(config, tp)}
        given.append(make_choice(products, "torch", ["torch", "cpp"] if attends else ["torch"]))
        return given[-1]

    monkeypatch.setattr(kernel_choice, "CpuKernels", lambda: kernels)
    monkeypatch.setattr(kernel_choice, "measure_choice", measure)
    return given


def test_the_cpu_takes_compiled_kernels(compiled: list[CpuChoice]) -> None:
    choice = choose()
    assert choice.attention == "cpp" and choice.ops(CPU) is not TORCH_OPS and choice.sampling != SamplingOps()


def test_each_switch_for_itself(compiled: list[CpuChoice]) -> None:
    attends = choose(fused_kernels=False)
    assert attends.attention == "cpp" and attends.ops(CPU) is TORCH_OPS and attends.sampling == SamplingOps()
    fused = choose(attention_backend="torch")
    assert fused.attention == "torch" and fused.ops(CPU) is not TORCH_OPS
    assert choose(attention_backend="torch", fused_kernels=False) == KernelChoice()


def test_what_is_not_compiled_runs_on_pytorch(compiled: list[CpuChoice]) -> None:
    assert choose(torch.bfloat16) == KernelChoice()
    odd = choose(head_dim=24)
    assert odd.attention == "torch" and odd.ops(CPU) is not TORCH_OPS
    for wrong in ({"dtype": torch.bfloat16}, {"head_dim": 24}):
        with pytest.raises(BadRequestError, match="attention_backend='cpp' needs float32 and a head_dim of"):
            choose(**wrong, attention_backend="cpp")


def runs_compiled(choice: KernelChoice, rows: int) -> bool:
    """Return True if a product of `rows` rows has the bits of the compiled kernel's product."""
    assert choice.cpu is not None
    x, weight = (torch.randn(n, 64, generator=torch.Generator().manual_seed(n)) for n in (rows, 256))
    got = choice.ops(CPU).linear(x, weight, None)
    torch.testing.assert_close(got, x @ weight.T, atol=1e-4, rtol=1e-4)
    return torch.equal(got, choice.cpu.linear(x, weight, None))


def test_measured_once_for_all_starts(compiled: list[CpuChoice]) -> None:
    first, second = choose(), choose()
    assert len(compiled) == 1
    for choice in (first, second):
        assert choice.attention == "cpp" and choice.cpu_attends is not None
        assert [choice.cpu_attends(n) for n in (0, 1, 2, 64)] == [False, False, True, True]
        assert runs_compiled(choice, 2)
    choose(cpu_threads=1, page_size=32)
    assert len(compiled) == 2  # the page size is another


def test_attention_that_is_asked_for_by_name_is_not_measured_away(compiled: list[CpuChoice]) -> None:
    assert choose(attention_backend="cpp").cpu_attends is None
    assert choose(attention_backend="torch").attention == "torch"


@pytest.mark.parametrize("rows", [1, 2, 300])
def test_the_choice_can_be_fixed(compiled: list[CpuChoice], rows: int) -> None:
    ours, theirs = choose(cpu_kernel_choice="cpp"), choose(cpu_kernel_choice="torch")
    assert ours.attention == "cpp" and ours.cpu_attends is None and runs_compiled(ours, rows)
    assert theirs.attention == "torch" and theirs.cpu_linear is linear and theirs.sampling != SamplingOps()
    assert choose(cpu_kernel_choice="torch", attention_backend="cpp").attention == "cpp"
    assert not compiled


def test_the_choice_can_be_exported_and_named(compiled: list[CpuChoice], tmp_path: Path) -> None:
    file = str(tmp_path / "choice.json")
    choose(cpu_kernel_choice=file)
    named = choose(cpu_kernel_choice=file)
    assert len(compiled) == 1 and named.cpu_attends is not None and named.cpu_attends(2)
    with pytest.raises(BadRequestError, match="it has no kernels for 64x64, 128x64"):
        choose(cpu_kernel_choice=file, head_dim=16)


@dataclass(frozen=True)
class LaterRank(TpGroup):
    """Rank 1 of two ranks, which receives `heard` from rank 0."""

    rank: int = 1
    size: int = 2
    heard: bytes = b""

    def gather(self, data: bytes) -> list[bytes]:
        assert data == b""
        return [self.heard, data]


def test_ranks_take_the_choice_of_rank_0(compiled: list[CpuChoice]) -> None:
    products = {shape: ["torch"] for shape in product_shapes(CONFIG, TpGroup(1, 2))}
    heard = msgspec.json.encode(make_choice(products, "cpp", ["cpp", "torch"]))
    choice = choose(tp=LaterRank(heard=heard))
    assert not compiled and choice.cpu_attends is not None
    assert [choice.cpu_attends(n) for n in (0, 1, 2)] == [True, True, False]
    assert choose(tp=LaterRank()) == KernelChoice()  # rank 0 has no compiler


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def missing() -> CpuKernels:
        raise KernelsUnavailableError("no C++ compiler was found. Install one (apt install g++) or name it in CXX.")

    monkeypatch.setattr(kernel_choice, "CpuKernels", missing)
    with caplog.at_level(logging.WARNING):
        assert choose() == KernelChoice()
    assert "apt install g++" in caplog.text
    for name in ("attention_backend", "cpu_kernel_choice"):
        with pytest.raises(BadRequestError, match=rf"{name}='cpp' must be compiled: no C\+\+ compiler"):
            choose(**{name: "cpp"})
    assert choose(cpu_kernel_choice="torch") == KernelChoice()


def test_backends_of_the_other_device() -> None:
    with pytest.raises(BadRequestError, match="needs a CUDA device"):
        choose(attention_backend="triton")
    with pytest.raises(BadRequestError, match="'cpp' needs device='cpu'"):
        choose_kernels(
            ServerArgs(model_path="model", attention_backend="cpp"),
            torch.device("cuda"),
            torch.bfloat16,
            CONFIG,
            TpGroup(),
        )


@pytest.mark.parametrize(("capability", "pdl"), [(80, False), (90, True), (120, False)])
def test_kernels_begin_early_on_hopper_only(capability: int, pdl: bool) -> None:
    """Where it was measured: `dependent` says what a kernel must keep, and what else was seen to fail."""
    pytest.importorskip("triton")
    with gpu.assumed(132, capability, 2**17):
        args = ServerArgs(model_path="model")
        assert choose_kernels(args, GPU, torch.bfloat16, CONFIG, TpGroup()).pdl is pdl
        assert not choose_kernels(args.replace(disable_pdl=True), GPU, torch.bfloat16, CONFIG, TpGroup()).pdl


def test_gpus_before_ampere_run_on_pytorch(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("triton")
    with gpu.assumed(68, 75, 2**16):
        args = ServerArgs(model_path="model")
        assert choose_kernels(args, GPU, torch.float16, CONFIG, TpGroup()) == KernelChoice()
        assert "8.0 (Ampere) or newer; this one has 7.5" in caplog.text
        with pytest.raises(BadRequestError, match=r"'triton' needs a GPU of compute capability 8\.0"):
            choose_kernels(args.replace(attention_backend="triton"), GPU, torch.float16, CONFIG, TpGroup())

"""`choose_kernels`: chooses the kernels of a rank by its device, its dtype and the settings in `ServerArgs`.

`ModelRunner` calls it once, before it builds the model. If a setting names a kernel that the machine lacks, it
raises BadRequestError. If `auto` would choose such a kernel, a warning names the remedy, and plain PyTorch runs
instead. On the CPU, `auto` chooses the kernels that were measured to be the fastest (`cpu_choice`).
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import torch

from verl_server.errors import BadRequestError
from verl_server.ipc.tp_group import TpGroup
from verl_server.kernels import gpu
from verl_server.kernels.cpu.kernels import HEAD_DIMS, CpuKernels
from verl_server.kernels.cpu.library import KernelsUnavailableError
from verl_server.models.config import ModelConfig
from verl_server.models.ops import (
    CPU_NAME,
    TORCH_OPS,
    Linear,
    Ops,
    cpu_linears,
    cpu_ops,
    cuda_ops,
    linear,
    linear_by_shape,
)
from verl_server.sampling.distribution import SamplingOps
from verl_server.server_args import ServerArgs
from verl_server.worker.cpu_choice import CpuChoice, choose_on_cpu
from verl_server.worker.cpu_measurement import measure_choice, product_shapes

logger = logging.getLogger(__name__)

_LEAST_CAPABILITY = 80
"""Compute capability from which Triton uses tensor cores: attention for older ones keeps most of its tile in memory."""
_PDL_CAPABILITY = 90
"""Compute capability of GPUs on which programmatic dependent launch is used: Hopper, where it was measured.

Blackwell has such launches, too, but other projects saw CUDA graph captures with them fail on consumer GPUs (capability
120).
"""


@dataclass(frozen=True)
class KernelChoice:
    """The kernels of one rank."""

    attention: Literal["triton", "cpp", "torch"] = "torch"
    fused: bool = False
    """True if this package's kernels compute elementwise operators, products of few rows and the draw."""
    cpu: CpuKernels | None = None
    """The compiled kernels. None on CUDA, and if the compiled kernels are not used."""
    cpu_linear: Linear = linear
    """Function for products on the CPU, if `fused`."""
    cpu_attends: Callable[[int], bool] | None = None
    """A function that returns True if "cpp" computes attention in a step with this number of decoded tokens.

    None means that "cpp" computes attention in every step.
    """
    pdl: bool = False
    """True if kernels begin while the kernel before them ends (`kernels.dependent`)."""

    def ops(self, device: torch.device) -> Ops:
        """Return the operators of the model's layers."""
        if not self.fused:
            return TORCH_OPS
        return cuda_ops(device, pdl=self.pdl) if self.cpu is None else cpu_ops(self.cpu, self.cpu_linear)

    @property
    def sampling(self) -> SamplingOps:
        """The functions with which the sampler computes."""
        if not self.fused:
            return SamplingOps()
        if self.cpu is not None:
            return SamplingOps(self.cpu.choose)
        from verl_server.sampling.fused import FusedOps

        return FusedOps()


def choose_kernels(
    server_args: ServerArgs, device: torch.device, dtype: torch.dtype, config: ModelConfig, tp: TpGroup
) -> KernelChoice:
    """Return the kernels of this rank. All ranks of `tp` must call it together, because rank 0 measures for all.

    Raise BadRequestError if a setting names kernels that this rank cannot run.
    """
    wanted, fused = server_args.attention_backend, server_args.fused_kernels
    if device.type == "cpu":
        if wanted == "triton":
            raise BadRequestError("attention_backend='triton' needs a CUDA device. Use 'auto', 'cpp' or 'torch'.")
        return _for_cpu(server_args, dtype, config, tp)
    if wanted == "cpp":
        raise BadRequestError("attention_backend='cpp' needs device='cpu'. Use 'auto', 'triton' or 'torch' on CUDA.")
    if importlib.util.find_spec("triton") is None:
        if wanted == "triton":
            raise BadRequestError("attention_backend='triton' needs Triton: pip install triton, or use 'torch'.")
        logger.warning(
            "Triton is not installed, so steps run on plain PyTorch, several times slower. Run pip install triton."
        )
        return KernelChoice()
    capability = gpu.capability(device)
    if 0 < capability < _LEAST_CAPABILITY:
        old = f"a GPU of compute capability {_LEAST_CAPABILITY / 10} (Ampere) or newer; this one has {capability / 10}"
        if wanted == "triton":
            raise BadRequestError(f"attention_backend='triton' needs {old}. Use 'auto' or 'torch'.")
        logger.warning("This package's kernels need %s, so steps run on plain PyTorch, several times slower.", old)
        return KernelChoice()
    pdl = capability == _PDL_CAPABILITY and not server_args.disable_pdl
    return KernelChoice("torch" if wanted == "torch" else "triton", fused, pdl=pdl)


def _for_cpu(server_args: ServerArgs, dtype: torch.dtype, config: ModelConfig, tp: TpGroup) -> KernelChoice:
    wanted, fused, setting = server_args.attention_backend, server_args.fused_kernels, server_args.cpu_kernel_choice
    attends = wanted != "torch" and dtype == torch.float32 and config.head_dim in HEAD_DIMS
    if wanted == "cpp" and not attends:
        raise BadRequestError(
            f"attention_backend='cpp' needs float32 and a head_dim of {HEAD_DIMS}, not {dtype} and {config.head_dim}. "
            "Use 'auto'."
        )
    if dtype != torch.float32 or not (attends or fused):
        return KernelChoice()
    kernels = _compiled({"attention_backend": wanted, "cpu_kernel_choice": setting})
    if setting not in ("cpp", "torch"):
        return _measured(kernels, server_args, config, tp, attends)
    if kernels is None:
        return KernelChoice()
    if setting == "cpp":
        return KernelChoice("cpp" if attends else "torch", fused, kernels, kernels.linear)
    return KernelChoice("cpp" if wanted == "cpp" else "torch", fused, kernels)


def _compiled(settings: dict[str, str]) -> CpuKernels | None:
    """Return the compiled kernels. If they cannot be compiled, log a warning and return None.

    Raise `BadRequestError` instead if a setting requires the compiled kernels.
    """
    try:
        return CpuKernels()
    except KernelsUnavailableError as error:
        for name, value in settings.items():
            if value == "cpp":
                raise BadRequestError(f"{name}='cpp' must be compiled: {error}") from error
        logger.warning("Steps run on plain PyTorch, at about half the speed: %s", error)
        return None


def _measured(
    kernels: CpuKernels | None, server_args: ServerArgs, config: ModelConfig, tp: TpGroup, attends: bool
) -> KernelChoice:
    """Return rank 0's choice, or plain PyTorch if this rank or rank 0 has no compiled kernels."""
    shapes, encoded = product_shapes(config, tp), b""
    if tp.rank == 0 and kernels is not None:
        heads = (config.num_heads, config.num_kv_heads, config.head_dim, server_args.page_size) if attends else None
        machine = kernels.library.name, CPU_NAME, torch.__version__, torch.backends.cpu.get_cpu_capability()
        model = config.num_layers, tp.size, shapes, heads
        choice = choose_on_cpu(
            None if server_args.cpu_kernel_choice == "auto" else Path(server_args.cpu_kernel_choice).expanduser(),
            kernels.library.folder,
            repr((machine, kernels.threads, model)),
            shapes,
            lambda: measure_choice(kernels, config, tp, attends=attends),
        )
        encoded = msgspec.json.encode(choice)
    (encoded, *_) = tp.gather(encoded)
    if kernels is None or not encoded:
        return KernelChoice()
    choice = msgspec.json.decode(encoded, type=CpuChoice)
    product = linear_by_shape(cpu_linears(kernels), choice.linears(shapes))
    chosen = None if server_args.attention_backend == "cpp" else choice.attends
    return KernelChoice("cpp" if attends else "torch", server_args.fused_kernels, kernels, product, chosen)

"""`choose_kernels`: which kernels a rank runs, by its device, its dtype and what `ServerArgs` asks for.

`ModelRunner` asks once, before it builds anything. What is asked for by name and cannot be had is refused; what `auto`
would take and the machine lacks is a warning that names the remedy, and plain PyTorch runs instead.
"""

from __future__ import annotations

import importlib.util
import logging
from dataclasses import dataclass
from typing import Literal

import torch

from verl_server.errors import BadRequestError
from verl_server.kernels import draw
from verl_server.kernels.cpu.kernels import HEAD_DIMS, CpuKernels
from verl_server.kernels.cpu.library import KernelsUnavailableError
from verl_server.models.ops import TORCH_OPS, Ops, cpu_ops, cuda_ops
from verl_server.server_args import ServerArgs

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class KernelChoice:
    attention: Literal["triton", "cpp", "torch"] = "torch"
    fused: bool = False
    """Whether elementwise operators, products of few rows and the draw are kernels of our own."""
    cpu: CpuKernels | None = None

    def ops(self, device: torch.device) -> Ops:
        if not self.fused:
            return TORCH_OPS
        return cuda_ops(device) if self.cpu is None else cpu_ops(self.cpu)

    @property
    def choose(self) -> draw.Choose:
        """How the sampler draws."""
        if not self.fused:
            return draw.choose
        if self.cpu is not None:
            return self.cpu.choose
        from verl_server.kernels import sampling

        return sampling.choose


def choose_kernels(server_args: ServerArgs, device: torch.device, dtype: torch.dtype, head_dim: int) -> KernelChoice:
    wanted, fused = server_args.attention_backend, server_args.fused_kernels
    if device.type == "cpu":
        if wanted == "triton":
            raise BadRequestError("attention_backend='triton' needs a CUDA device. Use 'auto', 'cpp' or 'torch'.")
        return _for_cpu(wanted, fused, dtype, head_dim)
    if wanted == "cpp":
        raise BadRequestError("attention_backend='cpp' is the CPU's. Use 'auto', 'triton' or 'torch' on CUDA.")
    if importlib.util.find_spec("triton") is None:
        if wanted == "triton":
            raise BadRequestError("attention_backend='triton' needs Triton: pip install triton, or use 'torch'.")
        logger.warning("Triton is not installed: steps run on plain PyTorch, several times slower. pip install triton.")
        return KernelChoice()
    return KernelChoice("torch" if wanted == "torch" else "triton", fused)


def _for_cpu(wanted: str, fused: bool, dtype: torch.dtype, head_dim: int) -> KernelChoice:
    attends = wanted != "torch" and dtype == torch.float32 and head_dim in HEAD_DIMS
    if wanted == "cpp" and not attends:
        raise BadRequestError(
            f"attention_backend='cpp' takes float32 and a head_dim of {HEAD_DIMS}, not {dtype} and {head_dim}. "
            "Use 'auto'."
        )
    if dtype != torch.float32 or not (attends or fused):
        return KernelChoice()
    try:
        kernels = CpuKernels()
    except KernelsUnavailableError as error:
        if wanted == "cpp":
            raise BadRequestError(f"attention_backend='cpp' has to be compiled: {error}") from error
        logger.warning("Steps run on plain PyTorch, at about half the speed: %s", error)
        return KernelChoice()
    return KernelChoice("cpp" if attends else "torch", fused, kernels)

"""`record_jobs`: finds the Triton kernels that an engine launches, without a GPU and without compiling them.

Called by `compile_process`. The engine's own `ModelRunner` runs its steps on the device "meta", whose tensors have
shapes, dtypes and alignment, but no memory. Triton's hook before a compilation records each specialization and prevents
the compilation, and with it the launch. The model has one layer, because all layers launch the same kernels.

The engine's own code determines every specialization. This module chooses only the steps: every step that can be
captured as a CUDA graph, and prompts of many lengths.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl_server.ipc.tp_group import TpGroup
from verl_server.kernels import gpu as assumed_gpu
from verl_server.kernels import token_mask
from verl_server.models.config import ModelConfig
from verl_server.sampling.fused import record_kernels
from verl_server.server_args import ServerArgs
from verl_server.weight_sync.copying import fused_copy
from verl_server.worker.cuda_context import GpuKind
from verl_server.worker.forward_batch import ForwardBatch
from verl_server.worker.model_runner import ModelRunner

_META = torch.device("meta")


@dataclass(frozen=True)
class Job:
    """One kernel to compile."""

    kernel: Any
    """The `triton.JITFunction`."""
    specialization: str
    """Argument of `JITFunction.preload`: signature, constants and options, as JSON."""

    @property
    def name(self) -> str:
        return str(self.kernel.fn.__qualname__)


@torch.inference_mode()
def record_jobs(server_args: ServerArgs, gpu: GpuKind) -> list[Job]:
    """Return the kernels of a rank, the slowest compilations first. The process must not use Triton for anything else.

    Raise VerlServerError if the settings do not fit the model.
    """
    with recorded(gpu) as jobs:
        _run_steps(server_args)
    # Attention takes seconds to compile, everything else tenths of a second.
    return sorted(jobs.values(), key=lambda job: "attention" not in job.kernel.module)


@contextlib.contextmanager
def recorded(gpu: GpuKind) -> Iterator[dict[str, Job]]:
    """Within the block, record what Triton would compile for the GPU, by specialization, instead of compiling it.

    Nothing is launched. The results of launches are undefined.
    """
    from triton import knobs
    from triton.runtime.driver import driver

    jobs: dict[str, Job] = {}

    def record(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        jobs.setdefault(compile["specialization_data"], Job(fn.jit_function, compile["specialization_data"]))
        return True  # do not compile

    driver.set_active(TargetOnly(gpu))
    knobs.runtime.jit_cache_hook = record
    try:
        with assumed_gpu.assumed(gpu.multiprocessors, gpu.capability, gpu.shared_memory):
            yield jobs
    finally:
        knobs.runtime.jit_cache_hook = None


class TargetOnly:
    """A replacement of Triton's driver, for a process that compiles for a GPU and launches nothing."""

    def __init__(self, gpu: GpuKind) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", gpu.capability, 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        """Return a number that differs between targets, because Triton keeps the kernels of each device."""
        return int(self._target.arch)

    def get_current_stream(self, device: int) -> int:
        return 0


class _OneLayerRunner(ModelRunner):
    """The engine's runner on the device "meta", with the first layer of its model."""

    def _load_config(self, folder: Path) -> ModelConfig:
        return dataclasses.replace(super()._load_config(folder), num_layers=1)

    def _load_weights(self, folder: Path) -> None: ...

    def _known(self, ids: Tensor, rows: Tensor) -> Tensor:
        return ids  # no kernel depends on them, and torch takes a second to import what `where` needs on "meta"

    def run_steps(self) -> None:
        """Run each kind of step, and the draw from its logits."""
        if self._graphs is not None:
            self._graphs.run_each_once()
        longest = min(self._args.prefill_chunk("cuda"), self.context_length)
        for tokens in sorted({*(2**i for i in range(longest.bit_length())), longest}):
            hidden = self._run_eagerly([tokens])
            self._draw(self.model.logits(hidden[-1:]))
        for entries in sorted({2**i for i in range(self.max_rows.bit_length())}):
            self._draw(self.model.logits(self._run_eagerly([1] * entries)))

    def _run_eagerly(self, lengths: list[int]) -> Tensor:
        """Compute the first `lengths[i]` tokens of each request operator by operator. Return the hidden states."""
        rows, tokens = list(range(len(lengths))), sum(lengths)
        batch = ForwardBatch(
            rows=rows,
            cached_lens=[0] * len(rows),
            extend_lens=lengths,
            input_ids=[0] * tokens,
            page_updates=[],
            sample=rows,
            prompt_logprobs=[],
        )
        return self._hidden(self.kv.place(batch))

    def _draw(self, logits: Tensor) -> None:
        """Sample from the model's logits, with every kind of sampling parameters."""
        if self._args.fused_kernels:
            record_kernels(logits)


def _run_steps(server_args: ServerArgs) -> None:
    tp = _Alone(size=server_args.tp_size)
    runner = _OneLayerRunner(server_args.replace(max_total_tokens=None), tp, _META)
    runner.run_steps()
    token_mask.compile_kernel(runner.vocab_size, runner.dtype, _META)
    if server_args.fused_weight_copy:
        fused_copy.record_kernels(runner.dtype)


class _Alone(TpGroup):
    """A group of `size` ranks of which only the first exists.

    The results of collectives have the shapes of the full group.
    """

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor

    def all_gather_last_dim(self, tensor: Tensor) -> Tensor:
        return tensor.repeat(*[1] * (tensor.dim() - 1), self.size)

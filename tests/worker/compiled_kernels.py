"""Run by `test_compile_ahead`, outside Triton's interpreter: `python compiled_kernels.py drift|fill MODEL_FOLDER`.

`drift` compares the kernels that `compile_jobs` records with those that a runner launches on the CPU, where Triton's
hook keeps them from being compiled. `fill` compiles three kernels for a GPU that this machine lacks, twice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.parity.harness import Driver, random_prompt
from verl_server.ipc.tp_group import TpGroup
from verl_server.kernels import compilation, multiprocessors
from verl_server.models import triton_attention
from verl_server.server_args import ServerArgs
from verl_server.worker import compile_process, kernel_choice, model_runner, step_graphs
from verl_server.worker.compile_ahead import compile_request
from verl_server.worker.compile_jobs import Job, TargetOnly, record_jobs
from verl_server.worker.cuda_context import GpuKind
from verl_server.worker.model_runner import ModelRunner

GPU = GpuKind(90, 132)


class Graph:
    """A stand-in for a CUDA graph, whose step is computed at its capture."""

    def replay(self) -> None: ...

    def pool(self) -> tuple[int, int]:
        return (0, 0)


@contextlib.contextmanager
def capture(*_: object, **__: object) -> Iterator[None]:
    yield


@dataclasses.dataclass(frozen=True)
class FirstToken(kernel_choice.KernelChoice):
    """Launches the draw and takes token 0, because no kernel computes anything here."""

    @property
    def choose(self) -> Any:
        def chosen(logits: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
            from verl_server.kernels import sampling

            sampling.choose(logits, *args)
            return torch.zeros(len(logits), dtype=torch.int64), torch.zeros(len(logits))

        return chosen


def launched_kernels(args: ServerArgs, *, graphs: bool) -> set[str]:
    """Return the specializations that a runner with all of its layers launches in steps of many kinds."""
    from triton import knobs
    from triton.runtime.driver import driver

    found: set[str] = set()

    def record(*, compile: dict[str, Any], **_: Any) -> bool:
        found.add(compile["specialization_data"])
        return True

    model_runner.choose_kernels = lambda *_: FirstToken("triton", fused=True)  # type: ignore[assignment]
    torch.cuda.CUDAGraph, torch.cuda.graph = Graph, capture  # type: ignore[assignment, misc]
    triton_attention._MIN_RUN_KEYS, triton_attention._MIN_SAVED_BYTES = 4, 1
    step_graphs.MOST_GRAPH_TOKENS = 32
    driver.set_active(TargetOnly(GPU))
    multiprocessors.assume(GPU.multiprocessors)
    knobs.runtime.jit_cache_hook = record
    cpu = args.replace(device="cpu", max_total_tokens=8192, cpu_threads=1, disable_cuda_graph=not graphs)
    runner = ModelRunner(cpu, TpGroup(), torch.device("cpu"))
    assert runner._attention.paged is not None
    runner._attention.paged._fused = True  # as on a GPU
    steps = Driver(runner)
    first = steps.add(random_prompt(40, seed=1))
    steps.finish([first], 3)  # a prompt above the largest graph, then decodes of one request
    others = [steps.add(first.spec.prompt_ids + random_prompt(n, seed=n), shared=first) for n in (1, 2, 200)]
    steps.finish([first, *others], 6, chunk=150)
    many = [steps.add(random_prompt(n % 7 + 1, seed=n), temperature=n % 2, top_k=5 if n % 3 else -1) for n in range(40)]
    steps.finish(many, 4, chunk=64)
    for tokens, count in enumerate((19, 5, 3), 5):
        steps.finish(many[:count], tokens)
    knobs.runtime.jit_cache_hook = None
    return found


def drift(folder: Path) -> dict[str, Any]:
    args = ServerArgs(model_path=str(folder), load_format="dummy", device="cuda", dtype="bfloat16", page_size=4)
    ahead = {job.specialization for job in record_jobs(args, GPU)}
    launched = launched_kernels(args, graphs=True) | launched_kernels(args, graphs=False)
    return {"missing": sorted(launched - ahead), "launched": len(launched), "ahead": len(ahead)}


def fill(folder: Path) -> dict[str, Any]:
    args = ServerArgs(model_path=str(folder), load_format="dummy", device="cuda", dtype="bfloat16")
    small = ("_silu_mul_block", "_norm_row", "_mask_tile")

    def few(*given: Any) -> list[Job]:
        return [job for job in record_jobs(*given) if job.name in small]

    compile_process.record_jobs = few
    request = compile_request(args, GPU)
    before = Path(request.stamp).exists()
    runs = [compile_process.compile_all(request) for _ in range(2)]
    # A launch, as the engine does it, finds the kernel in the cache.
    from verl_server.kernels.activation import _BLOCK, _silu_mul_block

    compilation.share()
    gate_up = torch.empty(3, 2 * SIZE, dtype=torch.bfloat16)
    _silu_mul_block.warmup(gate_up, gate_up[:, :SIZE].contiguous(), SIZE, _BLOCK, grid=(1,), num_warps=4)
    found = compilation.num_compiled()
    _silu_mul_block.warmup(gate_up, gate_up[:, :SIZE].contiguous(), SIZE, _BLOCK, grid=(1,), num_warps=2)
    return {
        "runs": [[sorted(run.compiled), run.cached, run.failed] for run in runs],
        "stamp": [before, Path(request.stamp).exists()],
        "launches": [found, compilation.num_compiled()],
    }


SIZE = 128
"""Intermediate size of the tiny models."""

if __name__ == "__main__":
    result = {"drift": drift, "fill": fill}[sys.argv[1]](Path(sys.argv[2]))
    print(json.dumps(result))

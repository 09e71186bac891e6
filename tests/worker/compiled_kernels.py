"""Run by `test_compile_ahead`, outside Triton's interpreter: `python compiled_kernels.py drift|fill MODEL_FOLDER`.

`drift` compares the kernels that `compile_jobs` records with those that a runner launches on the CPU, where Triton's
hook keeps them from being compiled. `fill` compiles three kernels for a GPU that this machine lacks, twice.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.parity.harness import Driver, random_prompt
from verl_server.ipc.tp_group import TpGroup
from verl_server.kernels import compilation, dependent, gpu, sampling
from verl_server.models import triton_attention
from verl_server.server_args import ServerArgs
from verl_server.worker import graph_sizes, model_runner
from verl_server.worker.cuda_context import GpuKind
from verl_server.worker.kernel_choice import KernelChoice
from verl_server.worker.model_runner import ModelRunner
from verl_server.worker.startup import compile_process
from verl_server.worker.startup.compile_ahead import compile_request
from verl_server.worker.startup.compile_jobs import Job, TargetOnly, record_jobs

GPU = GpuKind.of(90, 132)


class Graph:
    """A stand-in for a CUDA graph, whose step is computed at its capture."""

    def replay(self) -> None: ...

    def pool(self) -> tuple[int, int]:
        return (0, 0)


@contextlib.contextmanager
def capture(*_: object, **__: object) -> Iterator[None]:
    yield


def take_first_tokens() -> None:
    """Let each draw be launched and return token 0, because no kernel computes anything here."""
    draw_rows = sampling.draw_rows

    def drawn(logits: torch.Tensor, *args: Any, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        ids, logprobs = draw_rows(logits, *args, **more)
        return torch.zeros_like(ids), torch.zeros_like(logprobs)

    sampling.draw_rows = drawn


def launched_kernels(args: ServerArgs, *, graphs: bool) -> set[str]:
    """Return the specializations that a runner with all of its layers launches in steps of many kinds."""
    from triton import knobs
    from triton.runtime.driver import driver

    found: set[str] = set()

    def record(*, compile: dict[str, Any], **_: Any) -> bool:
        found.add(compile["specialization_data"])
        return True

    model_runner.choose_kernels = lambda *_: KernelChoice("triton", fused=True, pdl=True)
    take_first_tokens()
    torch.cuda.CUDAGraph, torch.cuda.graph = Graph, capture  # type: ignore[assignment, misc]
    triton_attention._MIN_RUN_KEYS, triton_attention._MIN_SAVED_BYTES = 4, 1
    graph_sizes.MOST_GRAPH_TOKENS = 32
    driver.set_active(TargetOnly(GPU))
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
    kinds: list[dict[str, Any]] = [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"presence_penalty": 0.5}]
    many = [steps.add(random_prompt(n % 7 + 1, seed=n), temperature=n % 2, **kinds[n % 5]) for n in range(40)]
    steps.finish(many, 4, chunk=64)
    for tokens, count in enumerate((19, 5, 3), 5):
        steps.finish(many[:count], tokens)
    for tokens, kind in enumerate(range(5), 8):
        steps.finish(many[kind::5], tokens)
    scored = [steps.add(random_prompt(n, seed=n)) for n in (9, 150)]
    batch = steps.batch([(each, len(each.tokens)) for each in scored])
    batch.prompt_logprobs, batch.prompt_next_ids = [(0, 0, 0, None), (1, 3, 0, None)], [-1, -1]
    runner.launch(batch, [each.spec for each in scored]).result()
    knobs.runtime.jit_cache_hook = None
    return found


def drift(folder: Path) -> dict[str, Any]:
    args = ServerArgs(model_path=str(folder), load_format="dummy", device="cuda", dtype="bfloat16", page_size=4)
    ahead = {job.specialization: job.name for job in record_jobs(args, GPU)}
    with gpu.assumed(GPU.multiprocessors, GPU.capability, GPU.shared_memory):
        launched = launched_kernels(args, graphs=True) | launched_kernels(args, graphs=False)
    unused = {name for specialization, name in ahead.items() if specialization not in launched}
    return {"missing": sorted(launched - ahead.keys()), "unused": sorted(unused)}


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
    given = (gate_up, gate_up[:, :SIZE].contiguous(), SIZE, _BLOCK)
    launch = dependent.options(True)
    _silu_mul_block.warmup(*given, grid=(1,), num_warps=4, **launch)
    found = compilation.num_compiled()
    _silu_mul_block.warmup(*given, grid=(1,), num_warps=2, **launch)
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

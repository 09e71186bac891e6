"""A GRPO training step with its rollout server on the same device: tokens per second, memory of both, push time.

    python -m benchmarks.train_step --device cpu --shape tiny
    python -m benchmarks.train_step --device cuda --shape 0.6b
    python -m benchmarks.train_step --device cuda --shape 0.6b --micro-batch-tokens 32768 --recompute yes

The server samples the trajectories (16 groups of 16 x 1,024 tokens; `tiny`: 2 groups of 4 x 48), rewards are 0 and 1,
and `PolicyTrainer.update` trains on them: fp32 weights and Adam, passes in bf16 on CUDA, one epoch. Each setting of
`--recompute` (gradient checkpointing; "yes" first, since it needs less memory) is measured in the same process.
Afterwards the new weights are pushed.

`limit` of the training rate counts arithmetic only, at the rate of a large matrix product on this machine, measured in
the same run (`gemm_ceiling`; one H200 reaches about 790 TFLOP/s in bf16): 6 x N FLOP for each token (8 x N with
gradient checkpointing), the same multiples for causal attention, and 6 x head for each sampled token, where N is the
number of weights of the layers. The second computation of the logits in the backward pass is not counted.

On CUDA, the server's memory is the used memory of the device less that of this process's allocator; at the end this
includes a few hundred MB of this process for NCCL and kernels. On the CPU it is the server's resident bytes. The
trainer's peak is that of its allocator on CUDA, and the resident peak of the process on the CPU. Progress goes to
stderr with its time. After `--time-limit` seconds the process ends in any case.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import resource
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.footprint import device_used_bytes, footprint
from benchmarks.options import engine_settings, make_parser, report, report_run
from benchmarks.processes import process_tree
from benchmarks.shapes import SHAPES, shape_folder
from benchmarks.workload import Ceilings, measure_ceilings, training_flop
from verl_server.engine.http import HttpServerEngineAdapter
from verl_server.engine.verl_engine import VerlEngine
from verl_server.rollout.trajectory import StopReason, Task, Trajectory
from verl_server.train.batches import Sample, sampled_positions
from verl_server.train.dtypes import dtype_name, passes_dtype
from verl_server.train.grpo import PolicyTrainer, group_advantages
from verl_server.train.options import GRPOConfig
from verl_server.train.policy import load_policy
from verl_server.train.ranks import launch_engine, setup_ranks
from verl_server.weight_version import WeightVersion, new_incarnation

_WORK = {"tiny": (2, 4, 16, 48), "0.6b": (16, 16, 128, 1024), "8b": (16, 16, 128, 1024)}
"""Shape -> (groups, trajectories of a group, tokens of a prompt, tokens of a trajectory)."""
_PUSHES = 5


@dataclass(frozen=True)
class Work:
    groups: int
    group_size: int
    prompt: int
    tokens: int
    """Tokens of a trajectory, its prompt included."""


class Progress:
    """Prints lines to stderr with the seconds since the start."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def __call__(self, text: str) -> None:
        print(f"[{time.perf_counter() - self._start:6.1f} s] {text}", file=sys.stderr, flush=True)


class Memory:
    """Measures the bytes that trainer and server hold. Create it before the server is started."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._outside = 0
        self.at_start = 0
        """Bytes that the server held when it became ready."""
        if device.type == "cuda":
            self._outside = device_used_bytes(device) - torch.cuda.memory_reserved(device)

    def server(self, engine: VerlEngine) -> int:
        """Bytes that the server holds now."""
        if self._device.type == "cuda":
            return device_used_bytes(self._device) - torch.cuda.memory_reserved(self._device) - self._outside
        assert isinstance(engine.engine, HttpServerEngineAdapter) and engine.engine.pid is not None
        return footprint(process_tree(engine.engine.pid))["private_bytes"]

    def reset_peak(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)

    def trainer_tensors(self) -> dict[str, float]:
        """Peak GiB of tensors, as a field of the report; on the CPU, where it is not known, no field."""
        if self._device.type != "cuda":
            return {}
        return {"tensors_gib": round(torch.cuda.max_memory_allocated(self._device) / 2**30, 4)}

    def trainer_peak(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_reserved(self._device)
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def sample(engine: VerlEngine, work: Work, vocabulary: int, timeout: float) -> list[Trajectory]:
    """Let the server sample the trajectories. In each group, every second trajectory has a reward of 1."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(5, vocabulary, (work.groups, work.prompt), generator=generator).tolist()
    rows = [prompt for prompt in prompts for _ in range(work.group_size)]
    sampling = [
        {"max_new_tokens": work.tokens - work.prompt, "ignore_eos": True, "temperature": 1.0, "sampling_seed": i}
        for i in range(len(rows))
    ]
    results = engine.generate(input_ids=rows, sampling_params=sampling, return_logprob=True, timeout=timeout)
    trajectories = []
    for row, (prompt, result) in enumerate(zip(rows, results, strict=True)):
        trajectory = Trajectory(task=Task(seed=row // work.group_size, group=row // work.group_size))
        trajectory.append_observation({}, prompt)
        tokens, meta = result["output_ids"], result["meta_info"]
        logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
        trajectory.append_output(tokens, logprobs, [str(meta["weight_version"])] * len(tokens))
        trajectory.turns[0].reward = float(row % 2)
        trajectory.finish(StopReason.DONE)
        assert len(trajectory.tokens) == work.tokens, "the server did not generate the requested number of tokens"
        trajectories.append(trajectory)
    return trajectories


def least_flop(shape: dict[str, Any], samples: list[Sample], recompute: bool) -> float:
    """FLOP of one forward and backward pass over `samples`, without padding."""
    lengths = [(len(item.trajectory.tokens), len(sampled_positions(item.trajectory))) for item in samples]
    return training_flop(shape, lengths, recompute)


def measure(
    args: argparse.Namespace,
    folder: Path,
    device: torch.device,
    engine: VerlEngine,
    memory: Memory,
    ceilings: Ceilings,
    recompute: bool,
    progress: Progress,
) -> None:
    """Train, push and report with or without gradient checkpointing. The trainer is freed afterwards."""
    work = Work(args.groups, args.group_size, args.prompt, args.tokens)
    mode = {"recompute": recompute, "micro_batch_tokens": args.micro_batch_tokens}
    progress(f"loading the trainer, gradient checkpointing {'on' if recompute else 'off'}")
    policy = load_policy(str(folder), device, gradient_checkpointing=recompute, logprob_chunk=args.logprob_chunk)
    config = GRPOConfig(
        groups=work.groups,
        group_size=work.group_size,
        epochs=1,
        minibatches=args.minibatches,
        micro_batch_tokens=args.micro_batch_tokens,
        track_entropy=args.entropy,
        learning_rate=1e-6,
        warmup_steps=0,
    )
    trainer = PolicyTrainer(policy, config, 1000, device)
    version = WeightVersion(0, new_incarnation())
    push_ms = push(engine, trainer, version, 1)  # the first push opens memory and plans the copies
    report("first_push", push_ms[0], "ms", **mode)
    memory.reset_peak()
    progress(
        f"sampling {work.groups} x {work.group_size} trajectories of {work.tokens} tokens, at most "
        f"{args.generate_timeout:g} s"
    )
    start = time.perf_counter()
    trajectories = sample(engine, work, SHAPES[args.shape]["vocab_size"], args.generate_timeout)
    seconds = time.perf_counter() - start
    sampled = sum(t.sampled_tokens for t in trajectories)
    report("rollout_tokens_per_s", sampled / seconds, "tokens/s", **mode)
    progress("comparing log-probabilities")
    gap = trainer.compare_logprobs(trajectories, str(version))
    assert gap is not None, "no token was sampled under the pushed weights"
    report("logprob_gap", 1e6 * gap.largest, "1e-6 nats", **mode)
    samples = group_advantages(trajectories, normalize_std=False)
    flop = least_flop(SHAPES[args.shape], samples, recompute)
    rates = []
    for step in range(args.steps + 1):
        progress(f"training step {step} of {args.steps}" + (" (warm-up)" if step == 0 else ""))
        start = time.perf_counter()
        learned = trainer.update(samples, step)
        synchronize(device)
        seconds = time.perf_counter() - start
        assert all(value == value for value in learned.losses.values()), f"losses are not finite: {learned.losses}"
        if step > 0:
            rates.append(learned.tokens / seconds)
            report("train_tokens_per_s_run", rates[-1], "tokens/s", run=step, seconds=round(seconds, 4), **mode)
    limit = learned.tokens * ceilings.flop_per_s / flop
    median = statistics.median(rates)
    report(
        "train_tokens_per_s",
        median,
        "tokens/s",
        limit=round(limit, 1),
        of_limit=round(median / limit, 4),
        spread=round(max(rates) / min(rates) - 1, 4),
        flop_per_token=round(flop / learned.tokens),
        padding=round(learned.padded_tokens / learned.tokens - 1, 4),
        **mode,
    )
    report("trainer_peak_gib", memory.trainer_peak() / 2**30, "GiB", **memory.trainer_tensors(), **mode)
    progress(f"pushing {_PUSHES} times")
    pushes = push(engine, trainer, version.next(), _PUSHES)
    report("push", statistics.median(pushes), "ms", worst=round(max(pushes), 3), **mode)
    del trainer, policy
    gc.collect()
    report("server_gib", memory.server(engine) / 2**30, "GiB", at_start=round(memory.at_start / 2**30, 4), **mode)


def push(engine: VerlEngine, trainer: PolicyTrainer, version: WeightVersion, times: int) -> list[float]:
    """Push `times` times. Returns the milliseconds of each push."""
    milliseconds = []
    for _ in range(times):
        synchronize(trainer.device)
        start = time.perf_counter()
        engine.update_weights_from_tensor(trainer.policy.named_weights(), weight_version=str(version), partial=False)
        milliseconds.append(1e3 * (time.perf_counter() - start))
    return milliseconds


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def benchmark(args: argparse.Namespace, temporary: Path, progress: Progress) -> None:
    device = setup_ranks(args.device, args.time_limit)
    ceilings = measure_ceilings(args.device, dict(args.settings).get("cpu_threads"))
    report("gemm_ceiling", ceilings.flop_per_s / 1e12, "TFLOP/s")
    progress(f"writing random weights in the shape {args.shape}")
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    folder = shape_folder(temporary / "model", args.shape, weights=True, dtype=dtype)
    memory = Memory(device)
    settings = engine_settings(args, folder, mem_fraction_static=args.mem_fraction_static, weight_version="start")
    progress(f"starting the server, at most {args.startup_timeout:g} s")
    with launch_engine(**settings | {"device": device, "startup_timeout": args.startup_timeout}) as engine:
        progress(f"the server is ready at {engine.url}")
        memory.at_start = memory.server(engine)
        for recompute in {"no": [False], "yes": [True], "both": [True, False]}[args.recompute]:
            measure(args, folder, device, engine, memory, ceilings, recompute, progress)
    progress("done")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser("benchmarks.train_step", __doc__)
    parser.add_argument("--groups", type=int, help="groups of a step (16; tiny: 2)")
    parser.add_argument("--group-size", type=int, help="trajectories of a group (16; tiny: 4)")
    parser.add_argument("--prompt", type=int, help="tokens of a prompt (128; tiny: 16)")
    parser.add_argument("--tokens", type=int, help="tokens of a trajectory with its prompt (1024; tiny: 48)")
    parser.add_argument("--steps", type=int, default=3, help="measured training steps, after a warm-up step (3)")
    parser.add_argument("--minibatches", type=int, default=4, help="optimizer steps of a training step (4)")
    parser.add_argument("--micro-batch-tokens", type=int, default=16384, help="most tokens of a forward pass (16384)")
    parser.add_argument("--logprob-chunk", type=int, default=2048, help="tokens with logits in memory at once (2048)")
    parser.add_argument(
        "--recompute", choices=["no", "yes", "both"], default="both", help="gradient checkpointing (both)"
    )
    parser.add_argument(
        "--entropy", action=argparse.BooleanOptionalAction, default=True, help="compute the policy's entropy (yes)"
    )
    parser.add_argument(
        "--mem-fraction-static", type=float, default=0.3, help="share of GPU memory for the server (0.3)"
    )
    parser.add_argument("--startup-timeout", type=float, default=180.0, help="seconds until the server is ready (180)")
    parser.add_argument("--generate-timeout", type=float, default=180.0, help="seconds for the trajectories (180)")
    parser.add_argument("--time-limit", type=float, default=560.0, help="seconds after which the process ends (560)")
    args = parser.parse_args(argv)
    for name, default in zip(("groups", "group_size", "prompt", "tokens"), _WORK[args.shape], strict=True):
        if getattr(args, name) is None:
            setattr(args, name, default)
    if args.tp != 1:
        parser.error("--tp must be 1, because trainer and server share one device in this benchmark.")
    passes = dtype_name(passes_dtype("auto", torch.device(args.device)))
    if (served := dict(args.settings).get("dtype", passes)) != passes:
        parser.error(f"--set dtype={served}: the trainer's passes are {passes}, and both sides compute in one dtype.")
    if args.group_size < 2 or not 0 < args.prompt < args.tokens or args.steps < 1:
        parser.error("--group-size must be at least 2, --prompt from 1 to --tokens - 1, and --steps at least 1.")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs an NVIDIA GPU, but torch sees none.")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    report_run("benchmarks.train_step", args, argv)
    faulthandler.dump_traceback_later(args.time_limit, exit=True, file=sys.__stderr__ or 2)
    try:
        with tempfile.TemporaryDirectory(prefix="verl-train-step-") as temporary:
            benchmark(args, Path(temporary), Progress())
    finally:
        faulthandler.cancel_dump_traceback_later()
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()

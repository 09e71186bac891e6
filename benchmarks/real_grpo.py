"""GRPO trains a real model on a real task: learning curves, and held-out rewards before and after.

    python examples/real_model.py smollm2
    python -m benchmarks.real_grpo --model smollm2 --seeds 0 1 2 --out runs/sums
    python -m benchmarks.real_grpo --model smollm2 --task reasoning-gym --out runs/chain_sum
    python -m benchmarks.real_grpo --model smollm2 --out runs/fast -- --grpo.group-size 32 --grpo.epochs 1
    python -m benchmarks.real_grpo --model smollm2 --trainer async_grpo --out runs/async -- --max-staleness 4

First the untrained model plays held-out tasks, 16 episodes each: a task that it never solves in 16 episodes is hard to
learn from rewards. Then each seed is a run of `verl_server.train.grpo` (or of another --trainer) in a process of its
own, on one GPU, which ends with SIGTERM after --seconds if its steps are not complete by then. A run whose folder has
a checkpoint is resumed. At last each trained model plays the held-out tasks. Options after `--` are those of the
trainer.

Writes OUT/summary.json, OUT/curves.html and a picture of each curve after every run, and prints one JSON line for each
played set and each run.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import itertools
import json
import os
import queue
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro

from benchmarks.curves import COLOURS, MEAN_OF, as_file, draw_curves
from verl_server.rollout.environments.env_server import EnvServer
from verl_server.train.checkpoints import latest_checkpoint
from verl_server.watch import charts
from verl_server.watch.page import legend, page, section

HELD_OUT = 2**30
"""First seed of the held-out tasks. All training seeds are smaller."""
TASKS: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "sums": (f"{Path(__file__).parents[1] / 'examples' / 'sums.py'}:Sums", {}, 3, 16),
    "reasoning-gym": (
        "verl_server.rollout.environments.games:ReasoningGym",
        {"task": "chain_sum", "min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2},
        1,
        32,
    ),
}
"""Name -> (environment, its arguments, most turns of an episode, most tokens of a turn)."""


@dataclass(frozen=True)
class Args:
    model: str
    """Model folder or hub id."""
    out: Path = Path("runs/real_grpo")
    """Folder for the runs, summary.json and curves.html."""
    trainer: Literal["grpo", "async_grpo"] = "grpo"
    """Module of verl_server.train that trains."""
    all_gpus: bool = False
    """Let a run see all GPUs, for a trainer and a server on two of them (--server.base-gpu-id 1 in OPTIONS)."""
    task: Literal["sums", "reasoning-gym"] = "sums"
    """sums: the game of examples/sums.py. reasoning-gym: its task chain_sum with small numbers, one turn."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of the runs."""
    steps: int = 80
    """Training steps of a run."""
    learning_rate: float = 5e-5
    """Learning rate of the runs. --grpo.learning-rate in OPTIONS wins."""
    seconds: float = 480.0
    """A run that takes longer is ended with SIGTERM. It is saved, and can be resumed."""
    at_once: int = 1
    """Runs at one time. They take the visible GPUs in turn."""
    held_out: int = 128
    """Held-out tasks. Each is played 16 times. 0 plays none."""
    mem_fraction_static: float = 0.3
    """Share of the GPU that each rollout server takes."""
    options: tyro.conf.Positional[tuple[str, ...]] = ()
    """Options of the trainer, after `--`."""


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    args.out.mkdir(parents=True, exist_ok=True)
    environment, kwargs, _, _ = TASKS[args.task]
    gpus: queue.Queue[int] = queue.Queue()
    for gpu in itertools.islice(itertools.cycle(range(max(1, torch.cuda.device_count()))), max(1, args.at_once)):
        gpus.put(gpu)
    with EnvServer(environment, kwargs=kwargs) as server, concurrent.futures.ThreadPoolExecutor(args.at_once) as pool:
        before = (
            _note(args.out / "before.json", lambda: _play(args, args.model, server.url, 0)) if args.held_out else {}
        )

        def work(seed: int) -> dict[str, Any]:
            gpu = gpus.get()
            try:
                return _run(args, seed, server.url, gpu)
            finally:
                gpus.put(gpu)

        runs = []
        for run in pool.map(work, args.seeds):  # each run that ends is written, in case a later one is cut off
            runs.append(run)
            summary = {"task": args.task, "model": args.model, "options": args.options, "before": before, "runs": runs}
            (args.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
            _write_curves(args)


def _run(args: Args, seed: int, url: str, gpu: int) -> dict[str, Any]:
    """Train one seed, play the held-out tasks with its result, and return its figures."""
    out = args.out / str(seed)
    began = time.monotonic()
    with (args.out / f"{seed}.log").open("a") as log:
        process = subprocess.Popen(
            _command(args, seed, url, out),
            stdout=log,
            stderr=subprocess.STDOUT,
            env=None if args.all_gpus else _on_gpu(gpu),
            text=True,
        )
        try:
            status = process.wait(args.seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
            process.kill()
            status = process.wait()
    seconds = time.monotonic() - began
    steps = [step for step in _metrics(out) if step["skipped"] is None]
    figures: dict[str, Any] = {
        "seed": seed,
        "exit_status": status,
        "steps": len(steps),
        "seconds": round(seconds, 1),
        "reward_by_10_steps": [round(_reward(steps[i : i + 10]), 3) for i in range(0, len(steps), 10)],
        "logprob_gap_mean": _largest(steps, "logprob_gap_mean"),
        "logprob_gap": _largest(steps, "logprob_gap"),
        "logprob_kl": _largest(steps, "logprob_kl"),
        "rollout_seconds": _median(steps, "rollout_seconds"),
        "train_seconds": _median(steps, "train_seconds"),
        "sync_seconds": _median(steps, "sync_seconds"),
        "over_time": _over_time(out, steps),
        "ages": dict(sum((collections.Counter(step["ages"]) for step in steps), collections.Counter())),
        "version_spans": dict(
            sum((collections.Counter(step["version_spans"]) for step in steps), collections.Counter())
        ),
        "idle": {
            who: _mean([step["idle"][who] for step in steps if who in step["idle"]]) for who in ("trainer", "servers")
        },
        "losses": {
            name: _mean([step["losses"][name] for step in steps]) for name in (steps[-1]["losses"] if steps else {})
        },
    }
    if args.held_out and (out / "model").exists():
        figures["after"] = _play(args, str(out / "model"), url, gpu)
    print(json.dumps(figures), flush=True)
    return figures


def _command(args: Args, seed: int, url: str, out: Path) -> list[str]:
    _, _, turns, tokens = TASKS[args.task]
    options: dict[str, Any] = {
        "--model-path": args.model,
        "--env-url": url,
        "--out": out,
        "--steps": args.steps,
        "--max-turns": turns,
        "--max-new-tokens": tokens,
        "--server.mem-fraction-static": args.mem_fraction_static,
        "--grpo.seed": seed,
        "--grpo.groups": 32,
        "--grpo.micro-batch-tokens": 16384,
        "--grpo.learning-rate": args.learning_rate,
    }
    words = [str(word) for option in options.items() for word in option]
    resume = ["--resume"] if latest_checkpoint(out) is not None else []
    return [sys.executable, "-m", f"verl_server.train.{args.trainer}", *words, *resume, *args.options]


def _play(args: Args, model: str, url: str, gpu: int) -> dict[str, Any]:
    """Play the held-out tasks, 16 episodes each, in a process of its own, which frees its GPU at its end."""
    words = [model, url, args.task, str(args.held_out), str(args.mem_fraction_static)]
    code = "import sys; from benchmarks.real_grpo import played; played(*sys.argv[1:])"
    played = subprocess.run(
        [sys.executable, "-c", code, *words], env=_on_gpu(gpu), stdout=subprocess.PIPE, text=True, check=True
    )
    figures: dict[str, Any] = json.loads(played.stdout.splitlines()[-1])
    print(json.dumps({"model": model} | figures), flush=True)
    return figures


def played(model: str, url: str, task: str, count: str, memory: str) -> None:
    """Print the figures of `count` held-out tasks as one JSON line."""
    from transformers import AutoTokenizer

    from verl_server import HttpServerEngineAdapter
    from verl_server.rollout.agent_loop import AgentLoop
    from verl_server.rollout.episode import Limits
    from verl_server.rollout.renderer import ChatRenderer
    from verl_server.rollout.trajectory import Task

    samples = 16
    _, _, turns, tokens = TASKS[task]
    cuda = torch.cuda.is_available()
    settings: dict[str, Any] = {"dtype": "bfloat16"} if cuda else {"device": "cpu", "dtype": "float32"}
    settings |= {"mem_fraction_static": float(memory)} if cuda else {"max_total_tokens": 16384}
    tasks = [
        Task(seed=HELD_OUT + i // samples, group=i // samples, episode_id=f"held-out-{i}", sampling_seed=HELD_OUT + i)
        for i in range(int(count) * samples)
    ]
    with (
        HttpServerEngineAdapter(model_path=model, port=0, log_level="warning", **settings) as engine,
        AgentLoop(
            engine,
            url,
            ChatRenderer(AutoTokenizer.from_pretrained(model)),
            sampling_params={"temperature": 1.0},
            limits=Limits(max_turns=turns, max_new_tokens=tokens),
        ) as loop,
    ):
        trajectories = loop.run(tasks).trajectories
    rewards = [float(t.reward or 0.0) for t in trajectories]
    best = [max(rewards[i : i + samples]) for i in range(0, len(rewards), samples)]
    figures = {
        "reward": round(statistics.mean(rewards), 4),
        "pass_at_1": round(statistics.mean(reward >= 1 for reward in rewards), 4),
        "pass_at_16": round(statistics.mean(reward >= 1 for reward in best), 4),
        "failed": sum(t.reward is None for t in trajectories),
        "tasks": int(count),
    }
    print(json.dumps(figures), flush=True)


def _on_gpu(gpu: int) -> dict[str, str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    chosen = visible[gpu] if gpu < len(visible) and visible[0] else str(gpu)
    return os.environ | {"CUDA_VISIBLE_DEVICES": chosen, "OMP_NUM_THREADS": "4"}


def _note(file: Path, measure: Any) -> dict[str, Any]:
    """Return the figures of `file`, which is made if it is missing."""
    if not file.exists():
        file.write_text(json.dumps(measure()))
    figures: dict[str, Any] = json.loads(file.read_text())
    return figures


def _over_time(out: Path, steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the reward by 20 seconds since the first push, and the episodes trained in each second of this time."""
    events = out / "events.jsonl"
    begun = [e["time"] for e in map(json.loads, events.read_text().splitlines()) if e["kind"] == "push_ended"][:1]
    if not begun or not steps:
        return {}
    bins: dict[int, list[float]] = {}
    for step in steps:
        bins.setdefault(int((step["time"] - begun[0]) // 20), []).append(step["reward"])
    seconds = steps[-1]["time"] - begun[0]
    return {
        "seconds": round(seconds, 1),
        "episodes_per_s": round(sum(step["trajectories"] for step in steps) / seconds, 1),
        "reward_by_20_s": {20 * at: _mean(rewards) for at, rewards in sorted(bins.items())},
    }


def _mean(values: Sequence[float]) -> float | None:
    return round(statistics.mean(values), 4) if values else None


def _metrics(out: Path) -> list[dict[str, Any]]:
    file = out / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _reward(steps: Sequence[dict[str, Any]]) -> float:
    return float(statistics.mean(step["reward"] for step in steps)) if steps else 0.0


def _largest(steps: Sequence[dict[str, Any]], name: str) -> float | None:
    return max((step[name] for step in steps if step[name] is not None), default=None)


def _median(steps: Sequence[dict[str, Any]], name: str) -> float | None:
    return round(statistics.median(step[name] for step in steps), 3) if steps else None


def _write_curves(args: Args) -> None:
    """Draw the runs so far: OUT/curves.html, and its reward and gap as pictures of their own."""
    runs = {seed: [step for step in _metrics(args.out / str(seed)) if step["skipped"] is None] for seed in args.seeds}
    colours = dict(zip(runs, itertools.cycle(COLOURS), strict=False))
    names = [(f"seed {seed}", colour) for seed, colour in colours.items()]
    note = f"One line a seed, mean over {MEAN_OF} steps."
    body = ""
    for name, title in (
        ("reward", "Reward by training step"),
        ("logprob_gap_mean", "Mean gap of log-probabilities of server and trainer"),
        ("logprob_kl", "KL divergence per token between server and trainer (k3)"),
    ):
        curves = [
            (colours[seed], [step[name] for step in steps if step[name] is not None]) for seed, steps in runs.items()
        ]
        largest = (
            1.0 if name == "reward" else max((value for _, values in curves for value in values), default=0.0) or 1.0
        )
        top = charts.ticks(largest)[-1]
        drawing = draw_curves(curves, args.steps, top, f"{name} by training step")
        (args.out / f"{name}.svg").write_text(as_file(drawing, names))
        body += section(title, drawing + legend(names), note)
    (args.out / "curves.html").write_text(page(f"GRPO on {args.task} with {Path(args.model).name}", body))


if __name__ == "__main__":
    main()

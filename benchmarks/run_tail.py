"""Measure what it costs to follow the metrics and events of a long run.

    python -m benchmarks.run_tail --steps 100000

writes the files of a run of so many steps, follows them in a process of its own, and prints one JSON line: CPU seconds
and memory of the first read, and CPU seconds of a call that finds nothing, of one that finds a line, and of questions.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from verl_server.files.segments import Segments
from verl_server.watch.index.run_tail import RunTail

INCARNATION = "00000001"
_MEANS = ("reward", "turns", "forced_share", "tokens_per_s", "logprob_gap", "logprob_gap_mean", "logprob_kl")
_SECONDS = ("rollout_seconds", "generate_seconds", "env_seconds", "train_seconds", "sync_seconds")
_COUNTS = ("trajectories", "failed", "trainable", "kept", "sampled_tokens", "trained_tokens", "padded_tokens")
_LOSSES = ("loss", "clip_fraction", "behaviour_kl", "entropy", "effective_sample_size", "grad_norm")


@dataclass(frozen=True)
class Args:
    steps: int = 100_000
    folder: Path | None = None
    """A folder that has the files already: follow them only."""


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    if args.folder is not None:
        print(json.dumps(measure(args.folder)))
        return
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), args.steps)
        # The memory of a process that has not written the files.
        command = [sys.executable, "-m", "benchmarks.run_tail", "--folder", folder]
        found = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        print(json.dumps({"steps": args.steps, **found}))


def write(folder: Path, steps: int) -> None:
    """Write the metrics and the events of a run."""
    draw = random.Random(0).random
    metrics, events = Segments(folder / "metrics.jsonl"), Segments(folder / "events.jsonl")
    start = {"kind": "run_started", "ranks": 1, "version": "1", "next_step": 0}
    events.append([_line(start | {"time": 1e9, "incarnation": INCARNATION})])
    for step in range(steps):
        metrics.append([metrics_line(step, draw)])
        label = {"step": step, "incarnation": INCARNATION}
        phases = {phase: draw() for phase in ("rollout", "train", "sync", "record")}
        events.append(
            [
                _line({"kind": "step_began", **label, "time": 1e9 + step}),
                _line({"kind": "step_ended", **label, "time": 1e9 + step + 0.9, "phases": phases, "skipped": None}),
            ]
        )
    metrics.close()
    events.close()


def metrics_line(step: int, draw: Callable[[], float]) -> bytes:
    content: dict[str, Any] = {"step": step, "rank": 0, "incarnation": INCARNATION, "time": 1e9 + step}
    content |= {"weight_version": f"{step}@{INCARNATION}", "ranks": 1, "skipped": None, "loss_scale": None}
    content |= {name: draw() for name in (*_MEANS, *_SECONDS)} | {name: int(9999 * draw()) for name in _COUNTS}
    content |= {"losses": {name: draw() for name in _LOSSES}, "stop_reasons": {"done": 200, "max_turns": 56}}
    content |= {"age": draw(), "age_max": 2, "ages": {"0": 100, "1": 100, "2": 56}, "version_spans": {"1": 256}}
    content |= {"waits": {"episodes": draw()}, "idle": {"trainer": draw(), "servers": draw()}, "replaced_tokens": None}
    content |= {"unsampled": 0, "replaced": 0, "failures": {"policy": 3}, "original_reward": draw(), "success": draw()}
    return _line(content)


def measure(folder: Path) -> dict[str, Any]:
    before = _memory()
    tail = RunTail(folder)
    found: dict[str, Any] = {"first_read_seconds": _seconds(tail.poll), "megabytes": tail.progress[1] >> 20}
    found["memory_megabytes"], found["process_megabytes"] = _memory() - before, _memory()
    found["idle_poll_seconds"] = _seconds(tail.poll)
    Segments(folder / "metrics.jsonl").append([metrics_line(len(tail.steps()), random.random)])
    found["one_line_seconds"] = _seconds(tail.poll)
    found["one_figure_seconds"] = _seconds(lambda: tail.metrics(["reward"]))
    found["one_figure_again_seconds"] = _seconds(lambda: tail.metrics(["losses.entropy"]))
    found["page_of_events_seconds"] = _seconds(lambda: tail.events(["step_ended"], after=len(tail.steps()), limit=1000))
    found["window_of_steps_seconds"] = _seconds(lambda: tail.steps_between(1e9, 2e9, limit=1000))
    return found | {"most_process_megabytes": _memory("VmHWM")}


def _seconds(call: Callable[[], object]) -> float:
    began = time.process_time()
    call()
    return round(time.process_time() - began, 4)


def _memory(field: str = "VmRSS") -> int:
    """Return megabytes of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) >> 10


def _line(content: dict[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode() + b"\n"


if __name__ == "__main__":
    main()

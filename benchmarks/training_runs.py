"""The demo and some steps of GRPO with an engine: `verl-server demo --engine` and `train.grpo --server.engine`.

    python -m benchmarks.training_runs --demo-steps 3 --steps 2
    python -m benchmarks.training_runs --device cuda --engine sglang

Both run as a user starts them, each as a process with a bound. GRPO trains on the demo's game, with the demo's initial
model. The lines `demo` and `grpo` have the exit status, the seconds, and what the run wrote about itself: rates of
success, the time of pushes, and the largest gap between the log-probabilities of server and trainer. The demo's exit
status may be 1 (the policy has not learned the game) if it has fewer than its 140 steps. `--only` runs one of the two.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.engines import ENGINES, HEAD_DIM
from benchmarks.options import report
from verl_server.rollout.environments.env_server import EnvServer
from verl_server.train.demo import make_policy_folder, server_settings

_GAME = "verl_server.rollout.environments.games:GuessNumber"
_ALL_STEPS = 140
_REPORTED = (
    "eval_success_before",
    "eval_success_after",
    "steps",
    "train_seconds",
    "seconds_to_ready",
    "weight_pushes",
    "push_ms_median",
    "push_ms_max",
    "max_logprob_gap",
    "episodes_failed",
    "lockstep_ratio",
)


def run(command: list[str], bound: float) -> tuple[int | None, float, str]:
    """Run a module. Returns (exit status, or None if it was killed at the bound; seconds; end of its output)."""
    start = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-m", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=bound,
        )
        code, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as late:
        code, output = None, (late.stdout or b"").decode(errors="replace")
    return code, time.monotonic() - start, output[-2000:]


def run_demo(args: argparse.Namespace, out: Path) -> bool:
    """Run the demo, report, and return True if it ended as expected."""
    command = ["verl_server", "demo", "--engine", args.engine, "--device", args.device, "--out", str(out)]
    command += ["--steps", str(args.demo_steps), "--episodes", "256", "--pace-episodes", "128"]
    code, seconds, output = run(command, args.bound)
    summary = json.loads((out / "summary.json").read_text()) if (out / "summary.json").exists() else {}
    is_ok = code == 0 or (code == 1 and bool(summary) and args.demo_steps < _ALL_STEPS)
    more: dict[str, Any] = {name: summary.get(name) for name in _REPORTED}
    report("demo", seconds, "s", engine=args.engine, code=code, **more, **({} if is_ok else {"output": output}))
    return is_ok


def run_grpo(args: argparse.Namespace, folder: Path) -> bool:
    """Run the steps of GRPO, report, and return True if all of them were made."""
    out = folder / "grpo"
    options: dict[str, Any] = {
        "--model-path": make_policy_folder(folder / "policy", 0, HEAD_DIM),
        "--out": out,
        "--steps": args.steps,
        "--device": args.device,
        "--max-turns": 5,
        "--max-new-tokens": 1,
        "--grpo.groups": 16,
    }
    for name, value in server_settings(args.engine, args.device).items():
        options[f"--server.{name.replace('_', '-')}"] = json.dumps(value) if isinstance(value, dict) else value
    with EnvServer(_GAME, kwargs={"latency": 0.01}) as environment:
        options["--env-url"] = environment.url
        words = [str(word) for option in options.items() for word in option]
        code, seconds, output = run(["verl_server.train.grpo", *words, "--no-chat"], args.bound)
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()] if code == 0 else []
    is_ok: bool = len(metrics) == args.steps
    more: dict[str, Any] = {"output": output}
    if is_ok:
        more = {
            "push_ms_median": round(1e3 * statistics.median(m["sync_seconds"] for m in metrics), 3),
            "rollout_seconds": round(statistics.median(m["rollout_seconds"] for m in metrics), 3),
            "train_seconds": round(statistics.median(m["train_seconds"] for m in metrics), 3),
            "max_logprob_gap": max(m["logprob_gap"] or 0.0 for m in metrics),
            "trainable": sum(m["trainable"] for m in metrics),
        }
    report("grpo", seconds, "s", engine=args.engine, code=code, steps=len(metrics), **more)
    return is_ok


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.training_runs",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="device of trainer and server (cpu)")
    parser.add_argument("--engine", choices=list(ENGINES), default="embedded", help="engine (embedded)")
    parser.add_argument("--demo-steps", type=int, default=_ALL_STEPS, help=f"most steps of the demo ({_ALL_STEPS})")
    parser.add_argument("--steps", type=int, default=5, help="steps of GRPO (5)")
    parser.add_argument("--only", choices=["demo", "grpo"], help="run only this one (both)")
    parser.add_argument("--bound", type=float, default=420.0, help="most seconds of each of the two (420)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    given = sys.argv[1:] if argv is None else argv
    print(json.dumps({"name": "run", "command": " ".join(["python -m benchmarks.training_runs", *given])}), flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        is_ok = args.only == "grpo" or run_demo(args, folder / "demo")
        is_ok &= args.only == "demo" or run_grpo(args, folder)
    if not is_ok:
        sys.exit("A run failed: see `code` and `output` of its line.")


if __name__ == "__main__":
    main()

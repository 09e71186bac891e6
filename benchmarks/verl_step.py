"""The steps of verl's GRPO trainer with our rollout, and with verl's own rollouts where they are installed.

    python -m benchmarks.verl_step --device cpu                                # a smoke test
    python -m benchmarks.verl_step --device cuda --shape 0.6b --variant gathered
    python -m benchmarks.verl_step --device cuda --shape 0.6b --variant shards --trainer-gpus 2
    python -m benchmarks.verl_step --device cuda --shape 0.6b --variant separate --trainer-gpus 1 --rollout-gpus 1
    python -m benchmarks.verl_step --device cuda --shape 0.6b --rollout vllm --variant gathered

It runs `python -m verl.trainer.main_ppo` on generated prompts with random weights, in the environment of this command,
which needs verl (docs/verl.md). Variants: "gathered" (verl's FSDP engine, full tensors), "shards" (our FSDP engine),
"offload" (the same with parameters and optimizer in host memory), "separate" (rollout on GPUs of its own, by memory
handles) and "separate-group" (the same over a process group). verl's own rollouts have "gathered", "offload" and
"separate". Prints one JSON line per figure of verl's `timing_s/*` and per part of an update
(`verl_spans`): the median of the last ones, and all. "span flat_copy" is the lower limit of a push: a copy from float32
to bfloat16, on one GPU, of the parameters that one of the `--tp` ranks of a server holds.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from benchmarks.shapes import SHAPES, shape_folder
from benchmarks.verl_run import VARIANTS, VerlRun, Workload, work_folder

_WORKLOADS = {
    "cpu": Workload(prompts=4, samples=2, prompt_tokens=64, response_tokens=16, steps=3),
    "cuda": Workload(prompts=64, samples=8, prompt_tokens=512, response_tokens=512, steps=5),
}
_MEASURED = 3
"""Steps that count: the last ones. Earlier ones compile, capture and allocate."""
_PREFIX = "timing_s/"
_PACKAGES = ("verl", "verl-server", "torch", "transformers", "ray", "vllm", "sglang")


def main(argv: list[str] | None = None) -> None:
    args = _parse(argv)
    load = _WORKLOADS[args.device]
    given = {name: getattr(args, name) for name in ("prompts", "samples", "prompt_tokens", "response_tokens", "steps")}
    load = Workload(**vars(load) | {"micro_batch": args.micro_batch} | {k: v for k, v in given.items() if v})
    with work_folder() as work:
        dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
        run = VerlRun(
            model=shape_folder(work / "model", args.shape, weights=True, dtype=dtype),
            work=work,
            load=load,
            device=args.device,
            rollout=args.rollout,
            variant=args.variant,
            trainer_gpus=args.trainer_gpus,
            rollout_gpus=args.rollout_gpus,
            tp=args.tp,
            memory=args.memory,
            overrides=tuple(args.overrides),
            has_spans=True,
        )
        _print_run(args, sys.argv[1:] if argv is None else argv, load)
        try:
            run.steps(args.timeout)
        finally:  # also after an error: a run takes minutes
            if args.log and run.log.exists():
                shutil.copy(run.log, args.log)
            _print_spans(run.spans)
            _print_steps(run.finished_steps())


def _print_steps(steps: list[dict[str, float]]) -> None:
    """Print verl's own timings, and the rewards."""
    for name in sorted({name for step in steps for name in step if name.startswith(_PREFIX)}):
        values = [step[name] for step in steps if name in step][-_MEASURED:]
        _print_figure(name, statistics.median(values), "s", steps=[round(value, 4) for value in values])
    if rewards := [step["critic/rewards/mean"] for step in steps]:
        _print_figure("reward", rewards[-1], "mean of the last step", steps=[round(value, 5) for value in rewards])


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.verl_step",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where trainer and rollout run (cpu)")
    parser.add_argument("--shape", choices=list(SHAPES), default="tiny", help="shape of the model (tiny)")
    parser.add_argument(
        "--rollout", choices=["verl_server", "vllm", "sglang"], default="verl_server", help="rollout (verl_server)"
    )
    parser.add_argument("--variant", choices=VARIANTS, default="shards", help="how weights reach the rollout (shards)")
    parser.add_argument("--trainer-gpus", type=int, default=1, help="ranks of the trainer (1)")
    parser.add_argument("--rollout-gpus", type=int, default=1, help="GPUs of the rollout, in separate variants (1)")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks of a rollout server (1)")
    parser.add_argument("--memory", type=float, default=0.5, help="share of the GPU for the rollout server (0.5)")
    parser.add_argument("--prompts", type=int, help="prompts in a step (cpu: 4, cuda: 64)")
    parser.add_argument("--samples", type=int, help="answers to each prompt (cpu: 2, cuda: 8)")
    parser.add_argument("--prompt-tokens", type=int, help="most tokens of a prompt (cpu: 64, cuda: 512)")
    parser.add_argument("--response-tokens", type=int, help="tokens of an answer (cpu: 16, cuda: 512)")
    parser.add_argument("--steps", type=int, help="training steps, of which the last three count (cpu: 3, cuda: 5)")
    parser.add_argument("--micro-batch", type=int, default=4, help="sequences that a rank trains on at once (4)")
    parser.add_argument("--timeout", type=float, default=1800.0, help="most seconds of the run (1800)")
    parser.add_argument("--log", type=Path, help="file that receives a copy of the trainer's log, also after an error")
    parser.add_argument("overrides", nargs="*", help="further overrides of verl's configuration, NAME=VALUE")
    args = parser.parse_args(argv)
    if args.rollout != "verl_server" and args.variant in ("shards", "separate-group"):
        parser.error(f"--variant {args.variant} is a feature of --rollout verl_server")
    return args


def _print_run(args: argparse.Namespace, argv: list[str], load: Workload) -> None:
    """Print the first line: command, versions, machine and workload."""
    machine = "cpu"
    if args.device == "cuda":  # in another process: a CUDA context here would take memory of the GPU
        code = "import torch; print(torch.cuda.device_count(), torch.cuda.get_device_name())"
        machine = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
    line: dict[str, Any] = {"name": "run", "command": " ".join(["python -m benchmarks.verl_step", *argv])}
    line |= {package: version for package in _PACKAGES if (version := _version(package))}
    print(json.dumps(line | {"machine": machine, "workload": vars(load)}), flush=True)


def _print_spans(path: Path) -> None:
    """Print the seconds of each part of the updates, over the processes that took part: the last ones count."""
    spans: dict[str, list[float]] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        span = json.loads(line)
        name = " ".join(["span", span["call"], *span.get("tags", [])])
        spans.setdefault(name, []).append(span.get("best", span["seconds"]))
    for name, values in spans.items():
        _print_figure(name, statistics.median(values[-_MEASURED:]), "s", all=[round(value, 5) for value in values])


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _print_figure(name: str, value: float, unit: str, **more: Any) -> None:
    print(json.dumps({"name": name, "value": round(value, 4), "unit": unit} | more), flush=True)


if __name__ == "__main__":
    main()

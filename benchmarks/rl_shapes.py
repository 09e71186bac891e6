"""Measures the sampling settings of RL: throughput of the offline workload with each, as a share of plain sampling.

    python -m benchmarks.rl_shapes --device cuda --shape 0.6b
    python -m benchmarks.rl_shapes --device cuda --shape 0.6b --only top_p top_logprobs
    python -m benchmarks.rl_shapes --device cuda --shape 0.6b --only prompt_logprobs --prompts 1024 128 --runs 6

The prefix cache is on, and each output token has its log-probability. Each setting is run twice and the second run is
the figure. Plain sampling runs between the settings, and a share is relative to the runs before and after.
`prompt_logprobs` are prompt tokens per second of prompts without output, beside the same prompts without
log-probabilities, by turns. `allocator_retries` says how often the allocator had to free its cache: each time costs
milliseconds.
`benchmarks.offline --sampling` runs some of them beside the workload without them.
`benchmarks.peers.vllm_rl_shapes` runs the same settings on vLLM.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.options import engine_settings, make_parser, report, report_run
from benchmarks.shapes import shape_folder
from benchmarks.workload import Workload, make_workload, uniform_workload
from verl_server import Engine


@dataclass(frozen=True)
class Setting:
    """Sampling settings of one row, and options of `generate`."""

    params: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    vllm: dict[str, Any] | None = None
    """The settings under vLLM's names, if they differ. Empty: vLLM has no such setting."""


SETTINGS = {
    "plain": Setting(),
    "without_logprobs": Setting(options={"return_logprob": False}, vllm={}),
    "top_p": Setting({"top_p": 0.95}),
    "top_p_top_k": Setting({"top_p": 0.95, "top_k": 20}),
    "min_p": Setting({"min_p": 0.05}),
    "repetition_penalty": Setting({"repetition_penalty": 1.05}),
    "presence_penalty": Setting({"presence_penalty": 0.5}),
    "logit_bias": Setting({"logit_bias": {"7": 1.0, "8": -1.0}}, vllm={"logit_bias": {7: 1.0, 8: -1.0}}),
    "top_logprobs": Setting(options={"top_logprobs_num": 5}),
    "token_ids_logprob": Setting(options={"token_ids_logprob": [3, 5, 7, 11, 13]}, vllm={}),
}
"""Name -> settings, besides the workload's temperature and lengths. The others are compared to the first one."""
PROMPTS = {"tiny": (8, 128), "0.6b": (64, 2048), "8b": (64, 2048)}
"""Shape -> (number of prompts, tokens of each) for `prompt_logprobs`."""


def output_rate(engine: Engine, work: Workload, setting: Setting) -> float:
    """Return output tokens per second of the workload, submitted at once."""
    engine.flush_cache(timeout=10)
    options = {"return_logprob": True} | setting.options
    params = [own | setting.params for own in work.sampling_params()]
    start = time.perf_counter()
    results = engine.generate(input_ids=work.prompts, sampling_params=params, **options)
    seconds = time.perf_counter() - start
    assert [len(result["output_ids"]) for result in results] == work.output_lens
    return work.output_tokens / seconds


def prompt_rate(engine: Engine, prompts: list[list[int]], logprobs: bool) -> float:
    """Return prompt tokens per second of prompts that get no output."""
    engine.flush_cache(timeout=10)
    options: dict[str, Any] = {"return_logprob": True, "logprob_start_len": 0} if logprobs else {}
    start = time.perf_counter()
    results = engine.generate(input_ids=prompts, sampling_params={"max_new_tokens": 0}, **options)
    seconds = time.perf_counter() - start
    assert all(result["meta_info"]["prompt_tokens"] == len(ids) for result, ids in zip(results, prompts, strict=True))
    return sum(map(len, prompts)) / seconds


def report_settings(engine: Engine, work: Workload, names: list[str], runs: int) -> None:
    """Report the rate of each of `names`, with the rate of plain sampling in runs between its own (`limit`).

    Both are medians of `runs` runs that take turns, after one of each that captures graphs and compiles kernels.
    `of_plain` is their ratio, and `spread` are the least and the largest ratio of neighbouring runs.
    """
    gc.freeze()  # a collection while results are built visits no module of this program
    rates = [output_rate(engine, work, SETTINGS["plain"]) for _ in range(runs)]
    report("plain", rates[-1], "tokens/s", first=round(rates[0], 1))
    for name in names:
        output_rate(engine, work, SETTINGS[name])
        pairs = [
            (output_rate(engine, work, SETTINGS["plain"]), output_rate(engine, work, SETTINGS[name]))
            for _ in range(runs)
        ]
        ratios = [rate / plain for plain, rate in pairs]
        rate, limit = statistics.median(rate for _, rate in pairs), statistics.median(plain for plain, _ in pairs)
        spread = [round(min(ratios), 3), round(max(ratios), 3)]
        report(name, rate, "tokens/s", limit=round(limit, 1), of_plain=round(rate / limit, 3), spread=spread)


def report_prompts(engine: Engine, prompts: list[list[int]], runs: int) -> None:
    """Report the rates of prompts without and with log-probabilities, medians of `runs` pairs that take turns."""
    prompt_rate(engine, prompts, True)  # compiles kernels
    pairs = [(prompt_rate(engine, prompts, False), prompt_rate(engine, prompts, True)) for _ in range(runs)]
    ratios = [rate / plain for plain, rate in pairs]
    plain, rate = statistics.median(plain for plain, _ in pairs), statistics.median(rate for _, rate in pairs)
    spread = [round(min(ratios), 3), round(max(ratios), 3)]
    report("prompts", plain, "prompt tokens/s")
    report("prompt_logprobs", rate, "prompt tokens/s", of_plain=round(rate / plain, 3), spread=spread)


def benchmark(args: argparse.Namespace, folder: Path) -> None:
    work = make_workload(args.shape).first(args.requests)
    names = [name for name in SETTINGS if name in args.only and name != "plain"]
    with Engine(**engine_settings(args, folder, max_running_requests=256)) as engine:
        report_settings(engine, work, names, args.runs)
        if "prompt_logprobs" in args.only:
            count, length = args.prompts or PROMPTS[args.shape]
            report_prompts(engine, uniform_workload(count, length, 1).prompts, args.runs)
        if args.device == "cuda":
            (state,) = engine.get_server_info()["internal_states"]
            report("allocator_retries", state["memory"]["allocator_retries"], "times since the start")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser("benchmarks.rl_shapes", __doc__)
    names = [*SETTINGS, "prompt_logprobs"]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="settings to run, besides plain (all)")
    parser.add_argument("--runs", type=int, default=2, help="runs of each setting; the last run is the figure (2)")
    parser.add_argument("--requests", type=int, help="number of requests of the workload (its own)")
    parser.add_argument(
        "--prompts", type=int, nargs=2, metavar=("COUNT", "TOKENS"), help="prompts of prompt_logprobs (the shape's own)"
    )
    args = parser.parse_args(argv)
    if args.shape not in PROMPTS:
        parser.error(f"--shape {args.shape} has no workload here: choose one of {', '.join(PROMPTS)}.")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    report_run("benchmarks.rl_shapes", args, argv)
    with tempfile.TemporaryDirectory() as temporary:
        benchmark(args, shape_folder(temporary, args.shape))


if __name__ == "__main__":
    main()

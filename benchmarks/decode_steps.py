"""Times decode steps of one GPU by their number of requests, and names the kernels that take the time.

    python -m benchmarks.decode_steps --device cuda --shape 0.6b --rows 1 16 64 256
    python -m benchmarks.decode_steps --device cuda --shape 8b --rows 1 --kernels

The model runner is driven without a scheduler and without HTTP: every request has `--context` tokens, which nothing has
computed, and each step is the same. The figure is the time of a step from the launch of its CUDA graph to the drawn
tokens, in microseconds, the median of several series. With `--kernels`, each kernel's time in one step follows, with
its number of launches and its time for one launch; kernels that run beside each other are counted twice.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import torch

from benchmarks.options import engine_settings, make_parser, report, report_run
from benchmarks.shapes import shape_folder
from verl_server.ipc.tp_group import TpGroup
from verl_server.sampling.spec import SampleSpec
from verl_server.sampling_params import SamplingParams
from verl_server.server_args import ServerArgs
from verl_server.worker.forward_batch import ForwardBatch
from verl_server.worker.model_runner import ModelRunner

_SERIES = 5
_STEPS = 20
"""Steps of a series."""


class Decodes:
    """A step that decodes the same requests again and again."""

    def __init__(self, runner: ModelRunner, rows: int, context: int) -> None:
        self._runner = runner
        pages = -(-context // runner.page_size)
        self._batch = ForwardBatch(
            rows=list(range(rows)),
            cached_lens=[context - 1] * rows,
            extend_lens=[1] * rows,
            input_ids=[7] * rows,
            page_updates=[(row, 0, list(range(row * pages, (row + 1) * pages))) for row in range(rows)],
            sample=list(range(rows)),
        )
        params = SamplingParams.parse({"temperature": 0.6})
        self._specs = [SampleSpec(params, row, [7] * context, [], [], return_logprob=True) for row in range(rows)]

    def run(self, steps: int) -> float:
        """Run the step so often. Return the seconds that one takes."""
        self._runner.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            last = self._runner.launch(self._batch, self._specs)
        last.result()
        return (time.perf_counter() - start) / steps

    def kernels(self, steps: int) -> dict[str, tuple[float, float]]:
        """Return by kernel: (microseconds in a step, launches in a step)."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            self.run(steps)
        times: dict[str, list[float]] = defaultdict(list)
        for event in profile.events():
            times[event.name].append(event.device_time)
        return {name: (sum(each) / steps, len(each) / steps) for name, each in times.items()}


def benchmark(args: argparse.Namespace, folder: Path) -> None:
    settings = engine_settings(args, folder, max_running_requests=max(args.rows))
    device = torch.device("cuda:0" if args.device == "cuda" else "cpu")
    runner = ModelRunner(ServerArgs(**settings), TpGroup(), device)
    for rows in args.rows:
        decodes = Decodes(runner, rows, args.context)
        decodes.run(3)
        report("decode_step", 1e6 * statistics.median(decodes.run(_STEPS) for _ in range(_SERIES)), "us", rows=rows)
        if args.kernels:
            kernels = sorted(decodes.kernels(_STEPS).items(), key=lambda item: -item[1][0])
            for name, (total, launches) in kernels[: args.kernels]:
                report(
                    name[:60],
                    total,
                    "us a step",
                    rows=rows,
                    launches=round(launches, 2),
                    each=round(total / launches, 2),
                )


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser("benchmarks.decode_steps", __doc__)
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[1, 16, 64, 256], help="requests of a step (1 16 64 256)"
    )
    parser.add_argument("--context", type=int, default=512, help="tokens of each request (512)")
    parser.add_argument("--kernels", type=int, nargs="?", const=20, default=0, help="print so many kernels (20)")
    args = parser.parse_args(argv)
    if args.tp != 1:
        parser.error("--tp must be 1: the model runner is driven on one GPU, without other ranks.")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    report_run("benchmarks.decode_steps", args, argv)
    with tempfile.TemporaryDirectory() as temporary:
        benchmark(args, shape_folder(temporary, args.shape))


if __name__ == "__main__":
    main()

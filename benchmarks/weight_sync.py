"""The time of a weight push, measured in the trainer, and its effect on requests that are generating.

    python -m benchmarks.weight_sync --device cpu --shape tiny
    python -m benchmarks.weight_sync --device cuda --shape 8b --generate 64
    python -m benchmarks.weight_sync --device cuda --shape 8b --trainer-ranks 4 --tp 2
    python -m benchmarks.weight_sync --device cuda --shape 8b --trainer-ranks 4 --engines 2 --tp 2
    python -m benchmarks.weight_sync --device cuda --shape 30b-a3b --engine vllm --generate 32
    python -m benchmarks.weight_sync --device cuda --shape 30b-a3b --engine vllm --separate
    python -m benchmarks.weight_sync --device cuda --shape 8b --engine vllm --trainer-ranks 2 --tp 2
    python -m benchmarks.weight_sync --device cuda --shape 8b --engine sglang --generate 32

The trainer has one process for each rank (with FSDP2 if there are several), and launches a server of random weights
through `VerlEngine`. With `--generate` the server first captures its CUDA graphs. Before each push the trainer writes
every parameter in place, as an optimizer does. After the push, outside the measured time, it compares the checksum of
every parameter on every server rank with its own. A difference ends the run with exit code 1.

Prints one JSON line per figure. `push` has these fields: `median_ms` and `worst_ms` of the whole call in the slowest
rank; `http_ms`, the time of its HTTP request; `commit_ms`, the server's part (votes, copy, device synchronization);
`bytes` of the trainer's parameters; `limit_ms`, the time of plain flat copies of the same bytes over the same links in
this run (with conversion if the dtypes differ; the better of two measurements, before and after); and `ratio`, the
quotient of `median_ms` and `limit_ms`. The other fields are medians of the stages of a push, in the order in which
they happen, on the trainer's rank 0:

    skew_ms     from the first trainer rank's call to the last one's
    inspect_ms  the rank looks whether its tensors moved, and waits for the writes that are queued on its device
    meet_ms     the ranks exchange what they found; includes the wait for a rank that began or inspected later
    http_ms     the request, which consists of the next five
    send_ms       from the trainer to the start of the update on the server's rank 0
    agree_ms      the server's ranks look up the update and vote
    copy_ms       the copy of the slowest rank until its device is done; device_ms is that of rank 0 on the device
    settle_ms     the second vote; includes the difference between the starts of the copies
    answer_ms     from the end of the update to the trainer
    outcome_ms  the trainer's other ranks get the outcome and confirm it

With `--generate`, `token_gap` has the milliseconds between two tokens of any of N streaming requests: the `quiet` gaps,
the gaps that overlap a push, and the time that each push added to its longest gap, and the same for registrations. With
`--leaks`, `leak` has the resources of trainer and server after the warm-up and their growth until the end. Progress
goes to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import math
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.multiprocessing import Pipe
from torch.multiprocessing.spawn import spawn

from benchmarks.copy_limit import Limit, Traffic, better, measure
from benchmarks.engines import ENGINES, settings_of_engine
from benchmarks.push_trainer import Job, Ready, Result, run_rank
from benchmarks.served_slices import tensors_of_engine, traffic
from benchmarks.shapes import SHAPES, shape_folder
from benchmarks.token_gaps import Outcome, Streams, gap_figures
from verl_server import __version__

_PROMPT_LEN = 64
_QUIET_SECONDS = 3.0
_START_SECONDS = 900.0
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

Report = Callable[..., None]


def benchmark(args: argparse.Namespace, folder: Path, report: Report) -> bool:
    """Run the benchmark and report. Returns False if a request was lost, or aborted or restarted in mode="in_place"."""
    job = make_job(args, folder)
    elements = elements_read(args, folder)
    progress("measuring plain copies of the same bytes")
    before = measure(args.device, elements, job.trainer_dtype, job.server_dtype)
    progress("starting trainer and server")
    ours, theirs = Pipe()
    ranks: Any = spawn(run_rank, (job, theirs), nprocs=args.trainer_ranks, join=False)  # type: ignore[no-untyped-call]
    theirs.close()

    def next_message() -> Any:
        """The next message of the trainer's first rank. Raises the error of a rank that failed."""
        with contextlib.suppress(EOFError):
            while not ours.poll(0.2):
                ranks.join(timeout=0)
            return ours.recv()
        ranks.join()
        raise RuntimeError("The trainer ended before the benchmark was complete.")

    ready = next_message()
    assert isinstance(ready, Ready)
    streams = start_streams(args, ready) if args.generate else None
    ours.send("go")
    result = next_message()
    assert isinstance(result, Result)
    outcome = streams.stop() if streams is not None else None
    ours.send("end")
    while not ranks.join():
        pass
    limit = better(before, measure(args.device, elements, job.trainer_dtype, job.server_dtype))
    report_pushes(report, args, result, limit)
    if args.leaks:
        report_leaks(report, result)
    if outcome is not None:
        report_gaps(report, args, result, outcome)
    if outcome is None:
        return True
    untouched = not outcome.aborted and not outcome.restarted
    return not outcome.lost and (untouched or args.mode != "in_place")


def elements_read(args: argparse.Namespace, folder: Path) -> Traffic:
    """(reading GPU, owning GPU) -> number of elements that one push reads."""
    served = tensors_of_engine(args.engine, folder, args.tp)
    if args.source == "group":  # every server rank receives all elements; its GPU comes after those of the trainer
        total = sum(math.prod(tensor.shape) for tensor in served)
        return {(args.trainer_ranks + rank, 0): total for rank in range(args.tp)}
    ranks_of_engine = args.trainer_ranks // args.engines
    elements = traffic(served, args.trainer_ranks)
    first = args.trainer_ranks if args.separate else 0
    return {
        (first + engine * ranks_of_engine + reader, owner): count
        for engine in range(args.engines)
        for (reader, owner), count in elements.items()
    }


def make_job(args: argparse.Namespace, folder: Path) -> Job:
    on_gpu = args.device == "cuda"
    server_dtype = torch.bfloat16 if on_gpu else torch.float32
    settings: dict[str, Any] = {
        "model_path": str(folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "device": args.device,
        "dtype": str(server_dtype).removeprefix("torch."),
        "tp_size": args.tp,
        "mem_fraction_static": args.mem_fraction_static,
        "max_running_requests": max(args.generate, 8),
        "log_level": args.log_level,
    }
    # Without requests no step runs, so captures of CUDA graphs would only take time.
    settings |= settings_of_engine(args.engine, kv_cache_gib=0.5, graphs=args.generate > 0)
    if on_gpu and args.separate:
        gpus = range(args.trainer_ranks, args.trainer_ranks + args.tp)
        settings["gpu_uuids"] = tuple(str(torch.cuda.get_device_properties(gpu).uuid) for gpu in gpus)
    return Job(
        folder=folder,
        device=args.device,
        ranks=args.trainer_ranks,
        engines=args.engines,
        tp=args.tp,
        trainer_dtype=_DTYPES[args.trainer_dtype] if args.trainer_dtype else server_dtype,
        server_dtype=server_dtype,
        source=args.source,
        mode=args.mode,
        updates=args.updates,
        warmup=args.warmup,
        check_every=args.check_every,
        interval=args.interval if args.generate else 0.0,
        settings=settings,
        engine=args.engine,
        unchecked=tuple(args.unchecked),
    )


def start_streams(args: argparse.Namespace, ready: Ready) -> Streams:
    """Start `--generate` requests whose lengths fit the KV cache, so that no request is retracted for lack of pages."""
    shape = SHAPES[args.shape]
    room = min(shape["max_position_embeddings"], int(0.9 * ready.token_capacity) // args.generate)
    output_len = min(512, room - _PROMPT_LEN - 32)
    if output_len < 32:
        sys.exit(
            f"--generate {args.generate}: the KV cache of {ready.token_capacity} tokens is too small for so many "
            "requests. Use fewer requests or a larger --mem-fraction-static."
        )
    progress(f"starting {args.generate} streams of {_PROMPT_LEN} + {output_len} tokens")
    streams = Streams(ready.url, args.generate, _PROMPT_LEN, output_len, shape["vocab_size"])
    streams.start(_START_SECONDS)
    time.sleep(_QUIET_SECONDS)
    return streams


def report_pushes(report: Report, args: argparse.Namespace, result: Result, limit: Limit) -> None:
    median, worst = statistics.median(result.milliseconds), max(result.milliseconds)
    report(
        "push",
        median,
        "ms",
        bytes=result.bytes,
        median_ms=round(median, 3),
        worst_ms=round(worst, 3),
        GB_per_s=round(result.bytes / 1e6 / median, 2),
        limit_ms=round(limit["all_ms"], 3),
        ratio=round(median / limit["all_ms"], 3),
        first_ms=round(result.first_ms, 3),
        **{stage: round(statistics.median(times), 3) for stage, times in result.stages.items() if times},
        updates=len(result.pushes),
        checked=result.checked,
    )
    for link, rate in limit["links"].items():
        report("link", rate, "GB/s", gpus=link)
    if args.device == "cuda":
        for gpu, extra in enumerate(result.extra_device_bytes):
            report("extra_device_memory", extra / 2**20, "MiB", gpu=gpu)


def report_leaks(report: Report, result: Result) -> None:
    for what, before in result.before.items():
        report("leak", result.after[what] - before, "bytes" if what.endswith("bytes") else "", what=what, before=before)


def report_gaps(report: Report, args: argparse.Namespace, result: Result, outcome: Outcome) -> None:
    events = {"push": result.pushes, "register": result.registrations}
    gaps = gap_figures(outcome.arrivals, events, result.busy)
    longest = gaps["push"].get("longest", 0.0)
    report("token_gap", longest, "ms", requests=args.generate, mode=args.mode, **gaps)
    report(
        "lost_requests",
        len(outcome.lost),
        "requests",
        completed=outcome.completed,
        aborted=outcome.aborted,
        restarted=outcome.restarted,
        errors=outcome.lost[:3],
    )


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def reporter(args: argparse.Namespace, argv: list[str]) -> Report:
    """A function that prints a figure with the command, the versions and the machine."""
    run: dict[str, Any] = {
        "command": "python -m benchmarks.weight_sync " + " ".join(argv),
        "versions": {
            "verl_server": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "machine": torch.cuda.get_device_name() if args.device == "cuda" else f"{platform.machine()} CPU",
    }
    if args.device == "cuda":
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            run["versions"]["triton"] = importlib.metadata.version("triton")

    def report(name: str, value: float, unit: str, **more: Any) -> None:
        print(json.dumps({"name": name, "value": round(value, 4), "unit": unit} | more | run), flush=True)

    return report


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.weight_sync",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="device of trainer and server (cpu)")
    parser.add_argument("--shape", choices=list(SHAPES), default="tiny", help="shape of the model (tiny)")
    parser.add_argument("--engine", choices=list(ENGINES), default="embedded", help="engine (embedded)")
    parser.add_argument(
        "--unchecked", nargs="+", default=[], metavar="PART", help="compare no parameter whose name contains PART"
    )
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks of the server (1)")
    parser.add_argument("--trainer-ranks", type=int, default=1, help="trainer processes; two or more use FSDP2 (1)")
    parser.add_argument("--engines", type=int, default=1, help="servers; each reads the shards of all ranks (1)")
    parser.add_argument("--trainer-dtype", choices=list(_DTYPES), help="dtype of the parameters (that of the server)")
    parser.add_argument("--updates", type=int, default=50, help="measured pushes (50)")
    parser.add_argument("--warmup", type=int, default=5, help="pushes before the measured ones (5)")
    parser.add_argument(
        "--check-every", type=int, default=1, metavar="K", help="compare checksums after every K-th push (1)"
    )
    parser.add_argument("--generate", type=int, default=0, metavar="N", help="requests in flight at any time (0)")
    parser.add_argument(
        "--interval", type=float, default=0.2, help="with --generate, idle seconds before and after each push (0.2)"
    )
    parser.add_argument(
        "--mode",
        choices=["in_place", "retract", "wait", "abort"],
        default="in_place",
        help="treatment of running requests in a push (in_place)",
    )
    parser.add_argument(
        "--source",
        choices=["registered", "named", "disk", "group"],
        default="registered",
        help="registered: register_weights once, then push_weights; named: named tensors at every push; disk: a "
        "checkpoint that is written before each push; group: a process group, as for another host (registered)",
    )
    parser.add_argument(
        "--separate",
        action="store_true",
        help="the server has GPUs of its own, after those of the trainer; always so with --source group, because NCCL "
        "needs a GPU for each rank",
    )
    parser.add_argument("--log-level", default="warning", help="log level of the server (warning)")
    parser.add_argument("--leaks", action="store_true", help="report resources of trainer and server before and after")
    parser.add_argument(
        "--mem-fraction-static", type=float, default=0.5, help="share of GPU memory for the server (0.5)"
    )
    args = parser.parse_args(argv)
    for name in ("tp", "trainer_ranks", "engines", "updates", "warmup", "check_every"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1.")
    if args.device == "cpu" and args.shape in ("8b", "30b-a3b"):
        parser.error(f"--shape {args.shape} needs a GPU: on the CPU, it would need 33 GB or more. Use --shape 0.6b.")
    if args.shape == "30b-a3b" and args.tp > 1:
        parser.error("--shape 30b-a3b is measured with --tp 1: how several ranks cut experts is not known here.")
    if args.engine == "embedded" and args.shape == "30b-a3b":
        parser.error("--shape 30b-a3b needs --engine vllm or sglang: the embedded engine has no experts.")
    args.separate = args.separate or args.source == "group"
    if args.trainer_ranks % args.engines or (args.engines > 1 and args.separate):
        parser.error("--engines must divide --trainer-ranks, and must be 1 with --separate and with --source group.")
    if args.device == "cuda" and args.engines > 1 and args.tp * args.engines > args.trainer_ranks:
        parser.error("--engines on GPUs: each engine is on the GPUs of its trainer ranks, which must be --tp or more.")
    gpus = args.tp + args.trainer_ranks if args.separate else max(args.tp, args.trainer_ranks)
    if args.device == "cuda" and torch.cuda.device_count() < gpus:
        parser.error(
            f"--source {args.source} --tp {args.tp} --trainer-ranks {args.trainer_ranks} needs {gpus} GPUs, but torch "
            f"sees {torch.cuda.device_count()}."
        )
    return args


def main(argv: list[str] | None = None) -> None:
    given = sys.argv[1:] if argv is None else argv
    args = parse_args(given)
    with tempfile.TemporaryDirectory(prefix="verl-weight-sync-") as temporary:
        folder = shape_folder(temporary, args.shape)
        if not benchmark(args, folder, reporter(args, given)):
            sys.exit("Requests were lost, aborted or restarted: see the figure lost_requests.")


if __name__ == "__main__":
    main()

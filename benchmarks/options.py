"""Command-line options and JSON output of the engine's benchmarks.

Every line of output is one object. The first line has `name` "run" with the command, the versions and the machine. Each
later line is a figure with `name`, `value` and `unit`. Some figures also have the value of another engine on a machine
of this kind (`peer`, `peer_value`) and the value that the hardware allows (`limit`).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
import torch
import transformers

from benchmarks.shapes import SHAPES
from benchmarks.workload import Ceilings, measure_ceilings
from verl_server import EngineBase, __version__
from verl_server.models.ops import CPU_NAME
from verl_server.server_args import ServerArgs

_MOST_GRAPH_SECONDS = 90.0
_POLL_SECONDS = 0.5
"""Time between two looks at the number of graphs. The engine must be idle between them to capture."""


def make_parser(module: str, doc: str | None) -> argparse.ArgumentParser:
    """A parser with the options of every engine benchmark. `doc`, the module's docstring, is its description."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}", description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where the engine runs (cpu)")
    parser.add_argument(
        "--shape", choices=list(SHAPES), default="tiny", help="shape of the model, which decides the workload (tiny)"
    )
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks (1)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        type=parse_setting,
        dest="settings",
        help="set a field of ServerArgs, for example --set disable_cuda_graph=true; may be repeated",
    )
    return parser


def parse_setting(text: str) -> tuple[str, Any]:
    """Parse "name=value". Returns (field of ServerArgs, value of the field's type)."""
    name, equals, value = text.partition("=")
    kinds = get_type_hints(ServerArgs)
    if not equals or name not in kinds:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE with a field of ServerArgs: {', '.join(kinds)}.")
    try:
        return name, msgspec.convert(value, kinds[name], strict=False)
    except msgspec.ValidationError as error:
        raise argparse.ArgumentTypeError(f"{name}: {error}.") from None


def engine_settings(args: argparse.Namespace, folder: Path, **defaults: Any) -> dict[str, Any]:
    """Keyword arguments of `Engine` for random weights in the shape of `folder`.

    `defaults` override them, and the options `--set` override both.
    """
    settings: dict[str, Any] = {
        "model_path": str(folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "device": args.device,
        "dtype": "bfloat16" if args.device == "cuda" else "float32",
        "tp_size": args.tp,
        "log_level": "warning",
        "random_seed": 0,
    }
    return settings | defaults | dict(args.settings)


def report(name: str, value: float, unit: str, **more: Any) -> None:
    """Print the line of a figure, with `more` fields."""
    print(json.dumps({"name": name, "value": round(value, 4), "unit": unit} | more), flush=True)


def gpus_of(args: argparse.Namespace) -> list[int]:
    """Ordinals of the GPUs that the engine uses. Empty on the CPU, whose ranks share one machine."""
    first = dict(args.settings).get("base_gpu_id", 0)
    return list(range(first, first + args.tp)) if args.device == "cuda" else []


def measured_ceilings(args: argparse.Namespace) -> Ceilings:
    """Measure the rates of the slowest GPU that the engine uses, or of the CPU with the threads of all its ranks."""
    threads = dict(args.settings).get("cpu_threads")
    return measure_ceilings(args.device, threads and threads * args.tp, gpus_of(args))


def report_graphs(engine: EngineBase) -> None:
    """Print the number of captured CUDA graphs, of the rank with the fewest. An engine that does not count: nothing."""
    memory = engine.get_internal_state().get("memory", {})
    ranks = memory.get("ranks") or [memory]
    if all("cuda_graphs" in rank for rank in ranks):
        counts = [rank["cuda_graphs"] for rank in ranks]
        names = ("cuda_graphs_to_capture", "cuda_graph_capture_seconds", "steps_without_cuda_graph")
        more = {name: memory.get(name) for name in (*names, "cuda_graphs_without_memory")}
        report("cuda_graphs", min(counts), "graphs", ranks=counts, **more)
    if "decode_cuda_graphs" in memory:
        in_all = memory["decode_cuda_graphs_in_all"]
        report("decode_cuda_graphs", memory["decode_cuda_graphs"], "graphs", in_all=in_all)


def report_capacity(engine: EngineBase) -> None:
    """Print the capacity of the KV cache. An engine that does not say: nothing."""
    capacity = engine.get_internal_state().get("memory", {}).get("token_capacity")
    if capacity is not None:
        report("kv_cache_tokens", capacity, "tokens")


def wait_for_graphs(engine: EngineBase) -> None:
    """Wait until idle time has captured every CUDA graph, at most `_MOST_GRAPH_SECONDS`. Report the seconds."""
    start = time.monotonic()
    while engine.get_internal_state().get("memory", {}).get("cuda_graphs_to_capture"):
        if time.monotonic() - start > _MOST_GRAPH_SECONDS:
            break  # `report_graphs` says how many are left
        time.sleep(_POLL_SECONDS)
    report("seconds_to_graphs", time.monotonic() - start, "s")


def report_run(module: str, args: argparse.Namespace, argv: list[str] | None) -> None:
    """Print the first line: command, versions and machine."""
    machine = f"{CPU_NAME}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    line: dict[str, Any] = {
        "name": "run",
        "command": " ".join(["python -m", module, *(sys.argv[1:] if argv is None else argv)]),
        "verl_server": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "machine": torch.cuda.get_device_name() if args.device == "cuda" else machine,
    }
    if args.device == "cuda":
        line["gpus"] = getattr(args, "tp", 1) * getattr(args, "replicas", 1)
    print(json.dumps(line), flush=True)


def switches() -> dict[str, Any]:
    """Field of `ServerArgs` -> the value that turns the optimization off."""
    off = {
        "disable_cuda_graph": True,
        "disable_overlap_schedule": True,
        "fused_kernels": False,
        "disable_pdl": True,
        "attention_backend": "torch",
        "disable_cascade_attention": True,
        "disable_custom_all_reduce": True,
    }
    known = {field.name for field in dataclasses.fields(ServerArgs)}
    return {name: value for name, value in off.items() if name in known}

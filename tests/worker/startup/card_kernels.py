"""Run by `test_cards`, outside Triton's interpreter: the kernels of a server for GPUs that no machine here has.

`python -m tests.worker.startup.card_kernels record` prints the names of the functions that these kernels consist of.
`compile` compiles the kernels in TRITON_CACHE_DIR, which must be empty, because only a compiler says what it did. It
prints a line of JSON for each kernel.

The engine's own code chooses the kernels and their tiles (`compile_jobs.record_jobs`), from a model folder, settings
and the properties of a GPU.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import inspect
import io
import itertools
import json
import multiprocessing
import os
import re
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from verl_server.models.tiny import make_model_folder
from verl_server.server_args import ServerArgs
from verl_server.weight_sync.copying import fused_copy
from verl_server.weight_sync.copying.copy_kernel import requested
from verl_server.weight_sync.copying.copy_table import build_tables
from verl_server.worker.cuda_context import GpuKind
from verl_server.worker.startup.compile_jobs import Job, TargetOnly, record_jobs, recorded

CARDS = {
    card.capability: card
    for card in (
        GpuKind.of(80, 108),  # A100
        GpuKind.of(86, 82),  # RTX 3090
        GpuKind.of(89, 128),  # RTX 4090
        GpuKind.of(90, 132),  # H100 SXM, H200
        GpuKind.of(100, 148),  # B200
        GpuKind.of(120, 170),  # RTX 5090
    )
}


@dataclass(frozen=True)
class Model:
    """A shape of a model and the settings of its server. Layers do not matter, because all launch the same kernels."""

    head_dim: int
    heads: int
    kv_heads: int
    dtype: str = "bfloat16"
    page_size: int = 16
    hidden: int = 1024
    vocab: int = 32000
    arch: Any = "qwen3"

    @property
    def name(self) -> str:
        return f"{self.dtype} {self.heads}/{self.kv_heads} heads of {self.head_dim}, pages of {self.page_size}"

    def server_args(self, folder: Path) -> ServerArgs:
        path = folder / "-".join(str(value) for value in vars(self).values())
        if not path.exists():
            shape = {"head_dim": self.head_dim, "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads}
            sizes = {"hidden_size": self.hidden, "intermediate_size": 2048, "vocab_size": self.vocab}
            make_model_folder(path, self.arch, weights=False, num_hidden_layers=1, **shape, **sizes)
        return ServerArgs(
            model_path=str(path), load_format="dummy", device="cuda", dtype=self.dtype, page_size=self.page_size
        )


QWEN3_8B = Model(128, 32, 8, hidden=4096, vocab=151936)
"""All kernels of this shape are compiled, and of the others those of attention, in whose tiles they differ."""
MODELS = {
    QWEN3_8B: CARDS,
    Model(64, 14, 2, arch="qwen2"): CARDS,
    Model(256, 16, 16): CARDS,
    # Their tiles are chosen anew, and Hopper's are known to keep much of fp32 outside of registers.
    Model(128, 16, 8, "float32"): {86},
    Model(64, 14, 2, "float32", arch="qwen2"): {86},
    Model(256, 16, 16, "float32"): {86},
    # Their tiles are those of a shape above, with other masks, instructions or padding.
    Model(128, 16, 8, "float16"): {86},
    Model(80, 32, 32, page_size=1): {86},
    Model(96, 32, 32, page_size=64): {86},
    Model(128, 40, 2): {86},
    Model(128, 64, 1): {86},
}
"""Shapes -> cards for which `make test-all` compiles them. 86 stands for the cards that read factors from registers: it
has the least shared memory of them. `--every` compiles all shapes for all cards."""


class Found(NamedTuple):
    """A kernel of a card."""

    card: int
    model: str
    job: Job


def find(cards: Iterable[int], folder: Path, *, shape: str = "", every: bool = False) -> list[Found]:
    """Return each kernel of each card once, for models with `shape` in their name, the slowest compilations first."""
    found: dict[tuple[int, str], Found] = {}
    for card in cards:
        for model, of_cards in MODELS.items():
            if shape in model.name and (every or card in of_cards):
                jobs = record_jobs(model.server_args(folder), CARDS[card])
                kept = [job for job in jobs if every or model is QWEN3_8B or is_attention(job)]
                found |= {(card, job.specialization): Found(card, model.name, job) for job in kept}
        for job in copy_jobs(CARDS[card]):
            found[card, job.specialization] = Found(card, "weight updates", job)
    return sorted(found.values(), key=lambda kernel: not is_attention(kernel.job))


def is_attention(job: Job) -> bool:
    return "attention" in job.kernel.module


def copy_jobs(card: GpuKind) -> list[Job]:
    """Return the kernels that copy weights between all dtypes, in the widest words and element by element."""
    numbers = torch.float64, torch.float32, torch.float16, torch.bfloat16
    dtypes = [*itertools.product(numbers, numbers), *((dtype, dtype) for dtype in (torch.float8_e4m3fn, torch.int8))]
    pairs = [(torch.empty(33, dtype=to), torch.empty(33, dtype=source)) for to, source in dtypes]
    with recorded(card) as jobs:
        for table in build_tables(pairs, fused_copy.TILE_BYTES)[0]:
            requested(table, torch.zeros(len(table.pairs), dtype=torch.int32), fused_copy.NUM_WARPS)
    return list(jobs.values())


@dataclass(frozen=True)
class Compiled:
    """The figures that ptxas and Triton report of a kernel. The bytes of spills are those of a thread."""

    card: int
    model: str
    name: str
    constants: dict[str, Any]
    warps: int
    shared: int
    registers: int
    spill_stores: int
    spill_loads: int
    newer: list[str]
    """Instructions and options that GPUs of capability 8.0 lack."""
    seconds: float


NEWER = re.compile(
    r"\b(wgmma|tcgen05|griddepcontrol|setmaxnreg|mapa|multimem|cp\.async\.bulk|cp\.reduce\.async\.bulk|barrier\.cluster"
    r"|fence\.proxy|tensormap|stmatrix|elect\.sync|red\.async|st\.async|e4m3x2|e5m2x2)\b"
)
"""Names in PTX of what came with capability 8.9 or later (PTX ISA, target notes of each instruction)."""


def compile_one(index: int) -> Compiled:
    from triton import knobs
    from triton.runtime.driver import driver

    card, model, job = _found[index]
    driver.set_active(TargetOnly(CARDS[card]))
    knobs.nvidia.dump_ptxas_log = True
    said, start = io.StringIO(), time.process_time()
    with contextlib.redirect_stdout(said):
        kernel = job.kernel.preload(job.specialization)
    stores, loads = _number(said, r"(\d+) bytes spill stores"), _number(said, r"(\d+) bytes spill loads")
    options = ["launch_pdl"] * kernel.metadata.launch_pdl + ["num_ctas"] * (kernel.metadata.num_ctas > 1)
    return Compiled(
        card=card,
        model=model,
        name=job.name,
        constants=constants(job),
        warps=kernel.metadata.num_warps,
        shared=kernel.metadata.shared,
        registers=_number(said, r"Used (\d+) registers"),
        spill_stores=stores,
        spill_loads=loads,
        newer=sorted({*NEWER.findall(kernel.asm["ptx"]), *options}),
        seconds=round(time.process_time() - start, 2),
    )


def _number(said: io.StringIO, pattern: str) -> int:
    found = re.search(pattern, said.getvalue())
    assert found, f"ptxas said {said.getvalue()!r} without {pattern!r}"
    return int(found[1])


def constants(job: Job) -> dict[str, Any]:
    """Return the constants of a kernel by name, without those that are part of a shape."""
    data = json.loads(job.specialization)
    values = zip(data["constant_keys"], data["constant_vals"], strict=True)
    named = {job.kernel.params[key[0]].name: value for key, value in values}
    return {name: value for name, value in named.items() if isinstance(value, int | str) and name.isupper()}


_found: list[Found] = []
"""The kernels to compile, which the forked processes inherit."""


def reached(kernels: Iterable[Any]) -> set[str]:
    """Return the names of functions of Triton that the kernels call, and their own."""
    from triton import JITFunction

    left, names = list(kernels), set()
    while left:
        function = left.pop()
        if full_name(function) in names:
            continue
        names.add(full_name(function))
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function.fn)))):
            value = None
            if isinstance(node, ast.Name):
                value = function.fn.__globals__.get(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                value = getattr(function.fn.__globals__.get(node.value.id), node.attr, None)
            if isinstance(value, JITFunction) and value.fn.__module__.startswith("verl_server."):
                left.append(value)
    return names


def full_name(function: Any) -> str:
    return f"{function.fn.__module__}.{function.fn.__name__}"


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=("record", "compile"))
    parser.add_argument("--cards", type=int, nargs="+", default=list(CARDS), choices=CARDS)
    parser.add_argument("--shape", default="", help="only models with this text in their name")
    parser.add_argument("--kernel", default="", help="compile only kernels with this text in their name")
    parser.add_argument("--every", action="store_true", help="compile every kernel of every shape for every card")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        found = find(args.cards, Path(folder), shape=args.shape, every=args.every)
    if args.command == "record":
        print(json.dumps(sorted(reached(kernel.job.kernel for kernel in found))))
        return
    _found[:] = [kernel for kernel in found if args.kernel in kernel.job.name]
    with ProcessPoolExecutor(args.processes, multiprocessing.get_context("fork")) as pool:
        for compiled in pool.map(compile_one, range(len(_found))):
            print(json.dumps(asdict(compiled)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])

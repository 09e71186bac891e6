"""Every kernel compiles for cards that are not at hand, fits into them, and needs nothing of a newer card.

Nothing is run: `docs/performance.md` names the cards on which the engine was run.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
if sys.platform != "linux":
    pytest.skip("Triton compiles on Linux only", allow_module_level=True)

from tests.worker.startup.card_kernels import CARDS, QWEN3_8B, full_name
from verl_server.errors import BadRequestError
from verl_server.worker.cuda_context import GpuKind

ROOT = Path(__file__).parents[3]
MOST_SPILLED = 4 * 255
"""Most bytes that a thread may store because it lacks registers: as much as all of its registers hold.

A kernel beyond that has a tile that is too large for the card, or too few warps for its tile.
"""


def run(*arguments: str, cache: Path, timeout: float) -> list[Any]:
    """Run `card_kernels` without Triton's interpreter, which the tests of this process use."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.worker.startup.card_kernels", *arguments],
        env=env | {"TRITON_CACHE_DIR": str(cache)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def complaints(kernel: dict[str, Any]) -> list[str]:
    """Return what is wrong with a compiled kernel."""
    card, limit = kernel["card"], CARDS[kernel["card"]].shared_memory
    found = []
    if kernel["shared"] > limit:
        found.append(f"needs {kernel['shared']} bytes of shared memory, and the card has {limit}")
    if kernel["spill_stores"] > MOST_SPILLED:
        found.append(f"spills {kernel['spill_stores']} bytes")
    if kernel["newer"] and card < 90:
        found.append(f"needs {kernel['newer']} of newer cards")
    if "launch_pdl" in kernel["newer"] and card != 90:
        found.append("begins early, which was measured on Hopper only")
    where = f"{kernel['name']} for {card}, {kernel['model']}, {kernel['constants']}, {kernel['warps']} warps"
    return [f"{where}: {problem}" for problem in found]


def test_a_kernel_for_three_cards(tmp_path: Path) -> None:
    """The same checks as for all kernels, in a few seconds."""
    arguments = "compile", "--cards", "86", "90", "120", "--kernel", "_skinny", "--shape", QWEN3_8B.name
    compiled = run(*arguments, cache=tmp_path, timeout=120)
    assert {kernel["card"] for kernel in compiled} == {86, 90, 120}
    assert {kernel["card"] for kernel in compiled if "launch_pdl" in kernel["newer"]} == {90}, "it begins early"
    assert all(kernel["shared"] > 2**15 and kernel["registers"] > 0 for kernel in compiled)
    assert [problem for kernel in compiled for problem in complaints(kernel)] == []


@pytest.mark.exhaustive
@pytest.mark.timeout(1800)
def test_every_kernel_fits_every_card(tmp_path: Path) -> None:
    compiled = run("compile", cache=tmp_path, timeout=1700)
    assert {kernel["card"] for kernel in compiled} == set(CARDS)
    assert [problem for kernel in compiled for problem in complaints(kernel)] == []


def test_no_kernel_is_missing(tmp_path: Path) -> None:
    """Every function of Triton in the package is a kernel that is compiled, or a part of one."""
    sources = [path for path in (ROOT / "verl_server").rglob("*.py") if "triton.jit" in path.read_text()]
    modules = [importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts)) for path in sources]
    functions = {value for module in modules for value in vars(module).values() if hasattr(value, "fn")}
    names = {full_name(function) for function in functions if full_name(function).startswith("verl_server.")}
    assert len(names) > 20
    (found,) = run("record", "--cards", "86", "--shape", QWEN3_8B.name, cache=tmp_path, timeout=120)
    assert names == set(found)


@pytest.mark.parametrize("problem", ["shared", "spill_stores", "newer"])
def test_what_does_not_fit_is_noticed(problem: str) -> None:
    fits = {"card": 86, "shared": 99 * 1024, "spill_stores": MOST_SPILLED, "newer": []}
    kernel = {"name": "kernel", "model": "model", "constants": {}, "warps": 4} | fits
    assert complaints(kernel) == []
    (text,) = complaints(kernel | {problem: ["wgmma"] if problem == "newer" else fits[problem] + 1})  # type: ignore[operator]
    assert text.startswith("kernel for 86, model, {}, 4 warps: ")


def test_cards_are_named_in_errors() -> None:
    assert GpuKind.of(86, 82).shared_memory == 101376, "what the driver states on an RTX 3090"
    with pytest.raises(BadRequestError, match=r"compute capability 7\.5.*8\.6 for RTX 3090"):
        GpuKind.of(75, 40)
    with pytest.raises(BadRequestError, match="at least 1 multiprocessor"):
        GpuKind.of(86, 0)

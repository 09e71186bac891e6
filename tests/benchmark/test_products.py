"""The benchmark of products measures what it says, in Triton's interpreter, and refuses a machine without a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from benchmarks import products
from benchmarks.products import Bench, Case, parse_args, tiles_for, weights_of
from tests.benchmark.lines import all_lines
from verl_server.kernels.gpu import HOPPER

WEIGHTS = {"qkv": (384, 256), "o": (256, 256), "gate_up": (512, 256), "down": (256, 256)}
if torch.cuda.is_available():
    pytest.skip("the interpreter runs on the CPU", allow_module_level=True)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A layer of small weights. A replay takes as many microseconds as it has run before."""
    runs: list[None] = []

    def timed(run: Callable[[], object]) -> float:
        run()
        runs.append(None)
        return float(len(runs))

    monkeypatch.setattr(products, "graph_us", timed)
    monkeypatch.setattr(products, "_MIN_BYTES", 2**18)
    monkeypatch.setattr(products, "TILES", [(64, 64, 3, 4), (64, 128, 3, 4), (128, 64, 3, 4)])
    return Bench(WEIGHTS, torch.device("cpu"), torch.half)  # the interpreter computes no products of bf16


def test_a_weight(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    Case(bench, "o", 3).measure(time.monotonic() + 3600, all_lines=True)
    found = all_lines(capsys)
    grid = [line for line in found if line["by"] == "grid"]
    assert len(grid) == len(list(tiles_for(3, 256, 256, HOPPER, 8))) > 3
    engine, best = (next(line for line in found if line["by"] == by) for by in ("engine", "best"))
    assert [line["by"] for line in found if line["by"] != "grid"] == ["torch", "engine", "best"]
    assert engine["tile"] == {"block_n": 64, "block_k": 128, "stages": 5, "split": 1, "warps": 4}
    assert best["tile"] == grid[0]["tile"], "it took the least time in both measurements"
    assert best["of_engine"] == pytest.approx(best["value"] / engine["value"], abs=1e-3)
    assert best["gb_per_s"] == round(2 * (256 * 256 + 3 * 512) / best["value"] / 1e3)


def test_no_time_for_the_grid(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    Case(bench, "o", 3).measure(time.monotonic() - 1, all_lines=False)
    found = all_lines(capsys)
    assert [line.get("by") for line in found] == ["torch", "engine", None]
    assert found[-1]["name"] == "left_out" and found[-1]["value"] > 3


def test_a_wrong_product_is_no_figure(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight) * 1.1

    with pytest.raises(RuntimeError, match="something else for o and 3 rows"):
        Case(bench, "o", 3)._us(wrong)


def test_a_layer(bench: Bench) -> None:
    assert bench.layer_us(2, early=False) == 1 / bench.layers


@pytest.mark.parametrize("shape", ["0.6b", "8b"])
@pytest.mark.parametrize("rows", [2, 16, 32])
def test_the_grid_fits_an_h200(shape: str, rows: int) -> None:
    for n, k in weights_of(shape).values():
        tiles = list(tiles_for(rows, n, k, HOPPER, 132))
        assert tiles and len(set(tiles)) == len(tiles)
        for tile in tiles:
            assert n % tile.block_n == 0 and k // tile.block_k >= 2 * tile.split
            assert n // tile.block_n * tile.split <= 8 * 132


@pytest.mark.parametrize(
    ("argv", "message"),
    [(["--device", "cpu"], "NVIDIA GPU"), ([], "NVIDIA GPU"), (["--rows", "1"], "--rows must be 2 to 32")],
)
def test_what_cannot_be_measured(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_args(argv)
    assert message in capsys.readouterr().err

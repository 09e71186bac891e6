"""The products of a few rows against other launch parameters, torch, and the launches between them, on one GPU.

    python -m benchmarks.products --shape 8b
    python -m benchmarks.products --shape 0.6b --rows 8 --weights o down --all

For each number of rows, first `layer`: the four products of a decoder layer with the norms and the activation between
them, without attention, in microseconds a layer. On Hopper there are two lines: in the second one the products begin
early (`kernels.dependent`). Norms and activation do in both.

Then, for each weight of a layer, `product`: the microseconds of one product with torch, as the engine computes it
(`by` "engine", and "engine, early" with products that follow each other at once), and with the fastest launch
parameters of a grid ("best"). The three fastest of the grid are measured again, by turns with the others, and the
figures are medians. `--all` prints all of the grid, too. `gb_per_s` counts the weight, x and the result.

Each time is that of replays of a CUDA graph, over several weights, which exceed the L2 cache. Within --seconds
everything ends: what is left of the grid then is counted in `left_out`.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.runtime.errors import OutOfResources

from benchmarks.attention import graph_us
from benchmarks.options import report, report_run
from benchmarks.shapes import SHAPES
from verl_server.kernels import gpu
from verl_server.kernels.activation import silu_mul
from verl_server.kernels.norms import add_rms_norm, rms_norm
from verl_server.kernels.skinny import SkinnyProduct, Tile

_MIN_BYTES = 240 * 2**20
"""Minimum size of the weights of a graph, which is several times the L2 cache."""
_TURNS = 3
_MOST_PROGRAMS = 8
"""Most programs of a grid for each multiprocessor."""
_EPS = 1e-6
_HOPPER = 90

TILES = [
    *[(64, 64, stages, 4) for stages in (4, 8, 12)],
    *[(64, 128, stages, 4) for stages in (3, 4, 5, 6, 8)],
    *[(64, 256, stages, 4) for stages in (3, 4)],
    *[(128, 64, stages, 4) for stages in (4, 6)],
    *[(128, 128, stages, 4) for stages in (3, 4, 5)],
    *[(64, 128, 5, 8), (128, 128, 3, 8), (128, 128, 4, 8)],
]
"""Rows of the weight, columns of a block, stages and warps. Each is compiled for up to 16 rows of x, and for 32."""
_SPLITS = (1, 2, 4, 8, 16)

Product = Callable[[Tensor, Tensor], Tensor]
"""(x [rows, in], weight [out, in]) -> x @ weight.T [rows, out]."""


def weights_of(shape: str) -> dict[str, tuple[int, int]]:
    """Return the weights of a decoder layer: name -> [out, in]."""
    model = SHAPES[shape]
    hidden, size, dim = model["hidden_size"], model["intermediate_size"], model["head_dim"]
    heads, kv_heads = model["num_attention_heads"], model["num_key_value_heads"]
    return {
        "qkv": ((heads + 2 * kv_heads) * dim, hidden),
        "o": (hidden, heads * dim),
        "gate_up": (2 * size, hidden),
        "down": (hidden, size),
    }


def tiles_for(rows: int, n: int, k: int, limits: gpu.Limits, multiprocessors: int) -> Iterator[Tile]:
    """Yield the launch parameters of the grid that divide a weight [n, k] of 16-bit numbers and fit into the GPU.

    Each program has at least two blocks, and no more stages than its blocks fill, except for three. The programs occupy
    at least a third of the multiprocessors.
    """
    block_m = 16 if rows <= 16 else 32
    for block_n, block_k, stages, warps in TILES:
        if n % block_n or k % block_k or stages * (block_n + block_m) * block_k * 2 > limits.shared_memory:
            continue
        for split in _SPLITS:
            blocks, programs = k // block_k // split, n // block_n * split
            fills = multiprocessors // 3 <= programs <= _MOST_PROGRAMS * multiprocessors
            if blocks >= 2 and fills and stages <= max(3, blocks + 1):
                yield Tile(block_n, block_k, stages, split, warps)


class Bench:
    """The products of a layer's weights, as `weights_of` returns them, on one device."""

    def __init__(
        self, weights: dict[str, tuple[int, int]], device: torch.device, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self.weights, self.device, self.dtype = weights, device, dtype
        self.limits, self.multiprocessors = gpu.limits(self.device), gpu.multiprocessors(self.device, interpreted=8)
        self.early = gpu.capability(self.device) == _HOPPER
        # Programs of 128 rows of a weight need twice the room, and the largest grid has `_MOST_PROGRAMS`.
        self.skinny = SkinnyProduct(self.device, parts=2 * _MOST_PROGRAMS * self.multiprocessors)
        layer = sum(n * k for n, k in self.weights.values())
        self.layers = max(4, -(-_MIN_BYTES // (2 * layer)))
        self.numbers = self.random(self.layers * layer)

    def random(self, *size: int) -> Tensor:
        return torch.randn(size, device=self.device, dtype=self.dtype)

    def layer_us(self, rows: int, *, early: bool) -> float:
        """Return the microseconds of the products, norms and activation of a layer."""
        parts = torch.split(self.numbers, [n * k for n, k in self.weights.values()] * self.layers)
        weights = [part.view(size) for part, size in zip(parts, [*self.weights.values()] * self.layers, strict=True)]
        hidden, attended = self.weights["o"]
        residual, heads = self.random(rows, hidden), self.random(rows, attended)
        scales = {size: torch.ones(size, device=self.device, dtype=self.dtype) for size in (hidden, attended)}
        add_norm = partial(add_rms_norm, residual=residual, weight=scales[hidden], eps=_EPS, pdl=self.early)

        def product(x: Tensor, weight: Tensor) -> Tensor:
            return self.skinny(x, weight, pdl=early) if self.skinny.is_faster(x, weight) else F.linear(x, weight)

        def run() -> None:
            x = rms_norm(residual, scales[hidden], _EPS)
            for qkv, o, gate_up, down in zip(*[iter(weights)] * 4, strict=True):
                product(x, qkv)
                x = rms_norm(heads, scales[attended], _EPS, pdl=self.early)  # in the place of attention
                x = add_norm(product(x, o))
                x = silu_mul(product(x, gate_up), pdl=self.early)
                x = add_norm(product(x, down))

        return graph_us(run) / self.layers


class Case:
    """One weight and one number of rows."""

    def __init__(self, bench: Bench, name: str, rows: int) -> None:
        self._bench, self._name, (self._n, self._k) = bench, name, bench.weights[name]
        number = -(-_MIN_BYTES // (2 * self._n * self._k))
        self._weights = bench.numbers[: number * self._n * self._k].view(number, self._n, self._k).unbind(0)
        self._x = bench.random(rows, self._k)
        self._exact = F.linear(self._x, self._weights[0]).float()

    def measure(self, deadline: float, *, all_lines: bool) -> None:
        """Report the figures of this case. After `deadline`, the rest of the grid is left out."""
        bench, times, left_out = self._bench, dict[Tile, float](), 0
        for tile in tiles_for(len(self._x), self._n, self._k, bench.limits, bench.multiprocessors):
            us = self._grid_us(tile) if time.monotonic() < deadline else None
            if us is None:
                left_out += 1
                continue
            times[tile] = us
            if all_lines:
                self._report("grid", us, tile)
        best = sorted(times, key=lambda tile: times[tile])[:3]
        engine, early = (bench.skinny.tile(self._x, self._weights[0], pdl=pdl) for pdl in (False, True))
        finals: list[tuple[str, Tile | None, Product]] = [("torch", None, F.linear), ("engine", engine, bench.skinny)]
        if bench.early:
            finals.append(("engine, early", early, partial(bench.skinny, pdl=True)))
        finals += [("best", tile, self._of_tile(tile)) for tile in best]
        turns = [[self._us(product) for _, _, product in finals] for _ in range(_TURNS)]
        medians = [statistics.median(each) for each in zip(*turns, strict=True)]
        for (by, parameters, _), us in zip(finals, medians, strict=True):
            if by != "best" or us == min(medians[-len(best) :]):
                self._report(by, us, parameters, of_engine=round(us / medians[1], 3))
        if left_out:
            report("left_out", left_out, "tiles", weight=self._name, rows=len(self._x))

    def _us(self, product: Product) -> float:
        """Return the microseconds of a product. Raise RuntimeError if it is wrong."""
        got = product(self._x, self._weights[0]).float()
        if not (got - self._exact).norm() < 0.01 * self._exact.norm():
            raise RuntimeError(f"{product} computes something else for {self._name} and {len(self._x)} rows.")

        def run() -> None:
            for weight in self._weights:
                product(self._x, weight)

        return graph_us(run) / len(self._weights)

    def _grid_us(self, tile: Tile) -> float | None:
        """Return the microseconds of a product with other launch parameters, None if a program exceeds the GPU."""
        try:
            return self._us(self._of_tile(tile))
        except OutOfResources:
            return None

    def _of_tile(self, tile: Tile) -> Product:
        return partial(self._bench.skinny.compute, bias=None, tile=tile)

    def _report(self, by: str, us: float, tile: Tile | None, **more: object) -> None:
        rows, n, k = len(self._x), self._n, self._k
        rate = round(2 * (n * k + rows * (n + k)) / us / 1e3)
        parameters = {} if tile is None else {"tile": dataclasses.asdict(tile)}
        sizes = {"weight": self._name, "rows": rows, "out": n, "in": k}
        report("product", us, "us", by=by, gb_per_s=rate, **sizes, **parameters, **more)


def benchmark(args: argparse.Namespace) -> None:
    deadline = time.monotonic() + args.seconds
    bench = Bench(weights_of(args.shape), torch.device("cuda", torch.cuda.current_device()))
    for rows in args.rows:
        kinds = [False, True] if bench.early else [False]
        turns = [[bench.layer_us(rows, early=early) for early in kinds] for _ in range(_TURNS)]
        for early, us in zip(kinds, zip(*turns, strict=True), strict=True):
            report("layer", statistics.median(us), "us", rows=rows, early=early)
        for name in args.weights:
            Case(bench, name, rows).measure(deadline, all_lines=args.all)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.products", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cuda", help="must be cuda, whose kernels these are"
    )
    parser.add_argument("--shape", choices=["0.6b", "8b"], default="8b", help="shape of the model (8b)")
    parser.add_argument("--rows", type=int, nargs="+", default=[2, 4, 8, 16, 32], help="rows of x (2 4 8 16 32)")
    names = list(weights_of("8b"))
    parser.add_argument("--weights", nargs="+", choices=names, default=names, help="weights of a layer (all)")
    parser.add_argument("--seconds", type=float, default=50, help="after so many seconds no tile is tried (50)")
    parser.add_argument("--all", action="store_true", help="print the figures of every tile of the grid")
    args = parser.parse_args(argv)
    if wrong := [rows for rows in args.rows if not 2 <= rows <= 32]:
        parser.error(f"--rows must be 2 to 32, the rows of these kernels, not {wrong[0]}.")
    if args.device != "cuda" or not torch.cuda.is_available():
        parser.error("the products are kernels of a GPU: use --device cuda on a machine with an NVIDIA GPU.")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    report_run("benchmarks.products", args, argv)
    benchmark(args)


if __name__ == "__main__":
    main()

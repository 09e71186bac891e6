"""`measure_choice`: finds the fastest kernels on this processor for one model's products.

`kernel_choice` calls it if no `CpuChoice` is stored. Each case takes a few milliseconds, and all cases together take
about a second. It needs no weights, because times do not depend on the values. Attention is not measured, because the
compiled kernel was the fastest wherever it was measured.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from verl_server.ipc.tp_group import TpGroup
from verl_server.kernels.cpu.kernels import CpuKernels
from verl_server.models.config import ModelConfig
from verl_server.models.ops import Linear, cpu_linears
from verl_server.models.transformer import Decoder
from verl_server.worker.cpu_choice import MOST_ROWS, CpuChoice, Shape, counts, make_choice

logger = logging.getLogger(__name__)

_CASE_SECONDS = 0.002
"""Seconds to measure one case."""
_ALL_SECONDS = 3.0
"""Seconds after which the remaining cases use the preferred kernel, because the machine is busy with other work."""
_FEWEST_ROUNDS = 3
_MARGIN = 0.9
"""A kernel replaces the preferred one only if it takes less than this fraction of the preferred kernel's time."""
_CASE_PRODUCTS = 10**8
"""Multiplications in one run of a product, which take some milliseconds. Larger weights are multiplied in part."""
_WEIGHT_BYTES = 2**24, 2**26
"""(least, most) bytes of the weights through which the runs of a product cycle. They exceed a core's own cache, as in a
step, where attention evicts the weights before the next product."""

_CPU = torch.device("cpu")


def product_shapes(config: ModelConfig, tp: TpGroup) -> list[Shape]:
    """Return the shapes [out, in] of a rank's weight matrices, including embedding and output head, sorted."""
    with torch.device("meta"):
        layer = Decoder(replace(config, num_layers=1), tp, 1, _CPU)
    return sorted({(p.shape[0], p.shape[1]) for p in layer.parameters() if p.dim() == 2})


def measure_choice(kernels: CpuKernels, config: ModelConfig, tp: TpGroup, *, attends: bool) -> CpuChoice:
    """Measure all cases with torch's current number of threads, and return the fastest kernels.

    If `attends`, the compiled kernel computes attention. The call takes up to 100 MB of memory.
    """
    end = time.perf_counter() + _ALL_SECONDS
    unmeasured = 0

    def choose(runs: Mapping[str, Callable[[], object]], preferred: str) -> str:
        nonlocal unmeasured
        if time.perf_counter() < end:
            return fastest(runs, preferred, _CASE_SECONDS)
        unmeasured += 1
        return preferred

    with torch.inference_mode():
        products = {}
        weights = torch.ones(_WEIGHT_BYTES[1] // 4)
        for shape in product_shapes(config, tp):
            mine = weights[: max(_WEIGHT_BYTES[0] // 4, config.num_layers * math.prod(shape))]
            products[shape] = [
                choose(_product_runs(kernels, shape, rows, mine), "cpp" if 1 < rows <= 64 else "torch")
                for rows in counts(MOST_ROWS)
            ]
    if unmeasured:
        logger.warning(
            "The machine is too busy to measure its CPU kernels in %g s: %d cases use the kernel that is usually "
            "the fastest. To measure all of them, remove the file of the choice and start again on an idle machine.",
            _ALL_SECONDS,
            unmeasured,
        )
    attention = "cpp" if attends else "torch"
    return make_choice(products, attention, [attention])


def fastest(
    runs: Mapping[str, Callable[[], object]],
    preferred: str,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> str:
    """Return the name of the fastest run. Return `preferred` if no other run is clearly faster.

    The runs alternate, so that other work on the machine slows all of them. A run that takes three times as long as the
    fastest is not repeated. The measurement takes `seconds`, or three rounds if these take longer.
    """
    for run in runs.values():
        run()
    best = dict.fromkeys(runs, math.inf)
    end, rounds = clock() + seconds, 0
    while len(best) > 1 and (rounds < _FEWEST_ROUNDS or clock() < end):
        for name in best:
            start = clock()
            runs[name]()
            best[name] = min(best[name], clock() - start)
        rounds += 1
        if rounds >= _FEWEST_ROUNDS:
            bound = 3 * min(best.values())
            best = {name: taken for name, taken in best.items() if taken <= bound}
    winner = min(best, key=best.__getitem__)
    return preferred if best.get(preferred, math.inf) * _MARGIN <= best[winner] else winner


def _product_runs(kernels: CpuKernels, shape: Shape, rows: int, weights: Tensor) -> dict[str, Callable[[], object]]:
    """Return, for each kernel, a function that multiplies `rows` rows with weights of `shape`.

    If the weights are too large for one run, only a part of the outputs is computed. The runs cycle through `weights`.
    As in a step, a compiled operator runs before each product, because threads of a library and of the compiled kernels
    may slow each other.
    """
    outputs, size = shape
    taken = min(outputs, weights.numel() // size, max(64, _CASE_PRODUCTS // (rows * size)))
    count = min(256, weights.numel() // (taken * size))
    parts = itertools.cycle(weights[: count * taken * size].view(count, taken, size).unbind())
    x, other, scale = torch.ones(rows, size), torch.ones(128, 256), torch.ones(256)

    def run(linear: Linear) -> None:
        kernels.rms_norm(other, scale, 1e-6)
        linear(x, next(parts), None)

    return {name: partial(run, linear) for name, linear in cpu_linears(kernels).items()}

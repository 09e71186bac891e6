"""`measure_choice`: finds the fastest kernels on this processor for one model's products and attention.

`kernel_choice` calls it if no `CpuChoice` is stored. Each case takes a few milliseconds, and all cases together take
one or two seconds. It needs no weights, because times do not depend on the values.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from verl_server.ipc.tp_group import TpGroup
from verl_server.kernels.cpu.kernels import CpuKernels
from verl_server.kernels.device_arrays import Ints, to_device, token_positions
from verl_server.models.attention import AttentionStep, Placement, plan_attention
from verl_server.models.config import ModelConfig
from verl_server.models.cpu_attention import CpuAttention
from verl_server.models.layers import RMSNorm, RotaryEmbedding
from verl_server.models.ops import Linear, cpu_linears
from verl_server.models.transformer import Decoder
from verl_server.worker.cpu_choice import MOST_DECODES, MOST_ROWS, CpuChoice, Shape, counts, make_choice

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
_POOL_BYTES = 2**25
"""Bytes of keys and values for the measurement of attention."""
_KEYS = 256
"""Largest number of keys for each decoded token."""
_PROMPT = 128
"""Tokens of the measured prompt."""

_CPU = torch.device("cpu")


def product_shapes(config: ModelConfig, tp: TpGroup) -> list[Shape]:
    """Return the shapes [out, in] of a rank's weight matrices, including embedding and output head, sorted."""
    with torch.device("meta"):
        layer = Decoder(replace(config, num_layers=1), tp, 1, _CPU)
    return sorted({(p.shape[0], p.shape[1]) for p in layer.parameters() if p.dim() == 2})


def measure_choice(
    kernels: CpuKernels, config: ModelConfig, tp: TpGroup, page_size: int, *, attends: bool
) -> CpuChoice:
    """Measure all cases with torch's current number of threads, and return the fastest kernels.

    Attention is measured only if `attends`; otherwise the choice is "torch". The call takes up to 150 MB of memory.
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
        prompts, decodes = "torch", ["torch"]
        if attends:
            attention = _AttentionCases.build(kernels, config, tp, page_size)
            prompts = choose(attention.prompts(), "cpp")
            decodes = [choose(attention.decodes(count), "cpp") for count in counts(MOST_DECODES)]
            del attention
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
    return make_choice(products, prompts, decodes)


def fastest(
    runs: Mapping[str, Callable[[], object]],
    preferred: str,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> str:
    """Return the name of the run with the shortest time; `preferred` unless another run is clearly faster.

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


@dataclass
class _Heads:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None


@dataclass
class _Pool:
    """Keys and values of one layer, laid out as in `KVCache`. Rows of the page table share pages if they are few."""

    kv_heads: int
    page_size: int
    layers: list[Tensor]
    page_table: Ints

    @classmethod
    def build(cls, kv_heads: int, head_dim: int, page_size: int) -> _Pool:
        pages = max(1, _POOL_BYTES // (2 * kv_heads * head_dim * 4) // page_size)
        layer = torch.zeros(pages + 1, 2, kv_heads, page_size, head_dim).permute(0, 3, 1, 2, 4)
        table = np.arange(MOST_DECODES * -(-_KEYS // page_size)).reshape(MOST_DECODES, -1) % pages
        return cls(kv_heads, page_size, [layer], table)

    @property
    def tokens(self) -> int:
        return (len(self.layers[0]) - 1) * self.page_size

    def trimmed_table(self, rows: Ints, lens: Ints) -> Ints:
        pages = -(-lens // self.page_size)
        columns = np.arange(int(pages.max()))
        return np.where(columns < pages[:, None], self.page_table[rows, : len(columns)], len(self.layers[0]) - 1)


@dataclass
class _AttentionCases:
    """The attention steps that are measured."""

    kernel: CpuAttention
    heads: _Heads
    pool: _Pool
    rotary: RotaryEmbedding
    layers: int
    """Number of layers, at most four, that use one plan. The time of the plan is divided among them."""

    @classmethod
    def build(cls, kernels: CpuKernels, config: ModelConfig, tp: TpGroup, page_size: int) -> _AttentionCases:
        """Make the cases for the heads of one rank."""
        heads = _Heads(config.num_heads // tp.size, max(1, config.num_kv_heads // tp.size), config.head_dim, None, None)
        if config.qk_norm:
            heads.q_norm, heads.k_norm = (RMSNorm(config.head_dim, config.norm_eps) for _ in range(2))
        pool = _Pool.build(heads.num_kv_heads, config.head_dim, page_size)
        rotary = RotaryEmbedding(config.head_dim, _KEYS, config.rope, _CPU)
        kernel = CpuAttention(kernels, rotary, pool, heads.num_heads)
        return cls(kernel, heads, pool, rotary, min(4, config.num_layers))

    def prompts(self) -> dict[str, Callable[[], object]]:
        return self._runs(np.zeros(1, np.int64), np.full(1, _PROMPT))

    def decodes(self, count: int) -> dict[str, Callable[[], object]]:
        """Return a function for each kernel that decodes `count` requests, whose keys fit the pool."""
        keys = min(_KEYS, max(16, self.pool.tokens // count))
        return self._runs(np.full(count, keys - 1), np.ones(count, np.int64))

    def _runs(self, cached: Ints, extend: Ints) -> dict[str, Callable[[], object]]:
        """Return a function for each kernel that plans a step and attends in each layer.

        `cached` [n] and `extend` [n] are the numbers of cached and new tokens of n requests.
        """
        rows, positions = np.arange(len(cached)), token_positions(cached, extend)
        row_of, page = np.repeat(rows, extend), self.pool.page_size
        slots = self.pool.page_table[row_of, positions // page] * page + positions % page
        decodes = len(cached) if (extend == 1).all() else 0
        placement = Placement(rows, cached, extend, np.zeros_like(positions), positions, slots, decodes)
        width = (self.heads.num_heads + 2 * self.heads.num_kv_heads) * self.heads.head_dim
        qkv = torch.ones(len(positions), width)

        def attend(step: AttentionStep) -> None:
            for _ in range(self.layers):
                step.attend(qkv, self.heads, self.pool.layers[0])

        return {"cpp": lambda: attend(self.kernel.plan(placement)), "torch": lambda: attend(self._plain(placement))}

    def _plain(self, placement: Placement) -> AttentionStep:
        table = self.pool.trimmed_table(placement.rows, placement.cached + placement.extend)
        angles = self.rotary.at(to_device(placement.positions, _CPU))
        lens = placement.cached, placement.extend
        return plan_attention(*lens, placement.slots, table, self.heads.num_heads, self.pool.layers[0], angles)

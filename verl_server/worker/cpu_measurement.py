"""`measure_choice`: the fastest kernels on this processor for one model's products and attention.

`kernel_choice` calls it where no `CpuChoice` is kept yet. Each case takes a few milliseconds, all of them a second or
two. It needs no weights: times do not depend on what is multiplied.
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
_ALL_SECONDS = 3.0
"""What is not measured by then, on a machine that is busy with something else, keeps the preferred kernel."""
_FEWEST_ROUNDS = 3
_MARGIN = 0.9
"""Another kernel than the preferred one must take less than so much of the preferred one's time."""
_CASE_PRODUCTS = 10**8
"""Multiplications in one run of a product: some milliseconds. Of larger weights a part is multiplied."""
_WEIGHT_BYTES = 2**24, 2**26
"""Least and most weights that the runs of a product take turns with. As in a step, they are not in a core's own cache,
for attention reads more than fits there before the next product."""
_POOL_BYTES = 2**25
"""Keys and values that attention is measured on."""
_KEYS = 256
"""Of each token that is decoded, at most."""
_PROMPT = 128

_CPU = torch.device("cpu")


def product_shapes(config: ModelConfig, tp: TpGroup) -> list[Shape]:
    """Shapes [out, in] of all weights of a rank's layers and of its embedding or output head, sorted."""
    with torch.device("meta"):
        layer = Decoder(replace(config, num_layers=1), tp, 1, _CPU)
    return sorted({(p.shape[0], p.shape[1]) for p in layer.parameters() if p.dim() == 2})


def measure_choice(
    kernels: CpuKernels, config: ModelConfig, tp: TpGroup, page_size: int, *, attends: bool
) -> CpuChoice:
    """Measures with as many threads as torch has now; attention only if `attends`, else it is PyTorch's. Takes memory
    for the time of the call: 150 MB at most."""
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
            "The machine is too busy to measure its CPU kernels in %g s: %d cases keep the kernel that is usually "
            "the fastest. Start again on an idle machine, with the file of the choice removed, to measure them all.",
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
    """The name of the run that took least at its best; the preferred one unless another is clearly faster.

    The runs take turns, so that a moment in which the machine is busy slows all of them. A run that takes three times
    as long as the best is not repeated. Takes `seconds`, or the time of three rounds if that is longer.
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
    """Products of `rows` rows with weights of that shape, or with as many of their outputs as a run may take.

    All runs take turns with parts of `weights`. As in a step, a compiled operator runs before each product: where a
    library has threads of its own, the two sets of threads are in each other's way.
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
    """Keys and values of one layer, see `KVCache`. Rows of the page table share pages where these are too few."""

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
    kernel: CpuAttention
    heads: _Heads
    pool: _Pool
    rotary: RotaryEmbedding
    layers: int
    """That a step's plan serves, at most four."""

    @classmethod
    def build(cls, kernels: CpuKernels, config: ModelConfig, tp: TpGroup, page_size: int) -> _AttentionCases:
        """With the heads of one rank."""
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
        """`count` requests of as many keys as the pool has for each."""
        keys = min(_KEYS, max(16, self.pool.tokens // count))
        return self._runs(np.full(count, keys - 1), np.ones(count, np.int64))

    def _runs(self, cached: Ints, extend: Ints) -> dict[str, Callable[[], object]]:
        """A step's plan, and attention in each of its layers: requests of cached tokens [n] with new ones [n]."""
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

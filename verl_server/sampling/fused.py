"""`FusedDistribution`: a softmax of rows of logits on CUDA, computed by kernels that read the logits in place.

The model's logits stay as they are, bf16 and for the whole batch; a row is a pointer into them and a temperature. One
pass over the rows gives the weight of each block of 64 tokens (`kernels.sampling.weigh`). Draws, normalizers, filters
and the most likely tokens follow from these weights and a few blocks.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import torch
from torch import Tensor

from verl_server.kernels import penalties_triton, sampling, top_triton
from verl_server.kernels.draw import LOWEST
from verl_server.kernels.filters_triton import lowest_kept
from verl_server.sampling.distribution import SamplingOps
from verl_server.sampling.filters import Filters
from verl_server.sampling.token_counts import IN_PROMPT


class FusedDistribution:
    """The same as `LogSoftmax`."""

    def __init__(
        self,
        logits: Tensor,
        scales: Tensor,
        index: Tensor,
        *,
        lowest: Tensor | None = None,
        before: FusedDistribution | None = None,
        weights: Tensor | None = None,
        norms: Tensor | None = None,
    ) -> None:
        """`kernels.sampling` defines the arguments. `before`: the rows before filters, if any. `weights` and `norms`
        are computed if they are not given."""
        self._logits, self._scales, self._index, self._lowest = logits, scales, index, lowest
        self._before = before
        self._weights = sampling.weigh(logits, scales, index, lowest) if weights is None else weights
        self._known_norms = norms

    @property
    def _norms(self) -> Tensor:
        if self._known_norms is None:
            self._known_norms = sampling.norms(self._weights)
        return self._known_norms

    def of(self, ids: Tensor) -> Tensor:
        return self._normalized(self._logits[self._index.unsqueeze(1), ids])

    def top(self, num: int) -> tuple[Tensor, Tensor]:
        if num <= top_triton.MOST:
            rows = self._logits, self._scales, self._index, self._lowest
            return top_triton.top(*rows, self._weights, self._norms, num)
        values, ids = self._scaled(self._logits.index_select(0, self._index)).topk(num, dim=-1)
        return self._relative(values), ids

    def at(self, rows: Tensor, columns: Tensor) -> Tensor:
        values = self._logits[self._index[rows], columns].float() * self._scales[rows]
        if self._lowest is not None:
            values = values.masked_fill_(values < self._lowest[rows], -torch.inf)
        return (values - self._norms[0, rows]).sub_(self._norms[1, rows]).clamp_(min=LOWEST)

    def select(self, rows: Tensor) -> FusedDistribution:
        return FusedDistribution(
            self._logits,
            self._scales[rows],
            self._index[rows],
            lowest=None if self._lowest is None else self._lowest[rows],
            weights=self._weights.index_select(1, rows),
            norms=self._norms.index_select(1, rows),
        )

    def filtered(self, filters: Filters) -> FusedDistribution:
        rows = self._logits, self._scales, self._index
        lowest, self._known_norms = lowest_kept(
            *rows,
            self._weights,
            filters.top_k,
            filters.top_p,
            filters.log_min_p,
            by_count=filters.by_count,
            by_mass=filters.by_mass,
        )
        return FusedDistribution(*rows, lowest=lowest, before=self)

    def draw(self, greedy: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        rows = self._index, self._lowest
        return sampling.draw_rows(
            self._logits, self._scales, greedy, keys, self._weights, *rows, norms=(self._before or self)._norms
        )

    def or_flags(self, logprobs: Tensor) -> Tensor:
        rest = self._norms[1]
        return torch.where(rest.isfinite(), logprobs, -rest)  # the logarithm of a sum of zeros is -inf

    def _normalized(self, logits: Tensor) -> Tensor:
        """Return the log-probabilities of tokens from their logits [n, m]."""
        return self._relative(self._scaled(logits))

    def _scaled(self, logits: Tensor) -> Tensor:
        """Return `logits` [n, m] times the scales, with -inf for removed tokens."""
        values = logits.float() * self._scales.unsqueeze(1)
        return values if self._lowest is None else values.masked_fill_(values < self._lowest.unsqueeze(1), -torch.inf)

    def _relative(self, values: Tensor) -> Tensor:
        largest, rest = self._norms[0].unsqueeze(1), self._norms[1].unsqueeze(1)
        return (values - largest).sub_(rest).clamp_(min=LOWEST)


class FusedOps(SamplingOps):
    """`SamplingOps` by kernels. The tokens of a row of logits must be contiguous."""

    def __init__(self) -> None:
        super().__init__(sampling.choose, _penalize)

    def distribution(self, logits: Tensor, index: Tensor | None, scales: Tensor) -> FusedDistribution:
        return FusedDistribution(logits, scales, _all_rows(logits) if index is None else index)

    def score(self, logits: Tensor, targets: Tensor) -> tuple[FusedDistribution, Tensor, Tensor]:
        ones, index = torch.ones(len(targets), device=logits.device), _all_rows(logits)
        weights = sampling.weigh(logits, ones, index, targets=targets)
        norms = sampling.norms(weights)
        logprobs = sampling.target_logprobs(logits, targets, norms)
        return FusedDistribution(logits, ones, index, weights=weights[:2], norms=norms[:2]), logprobs, norms[2]


def _penalize(logits: Tensor, index: Tensor | None, *columns: Any) -> Tensor:
    return penalties_triton.penalize(logits, _all_rows(logits) if index is None else index, *columns)


def _all_rows(logits: Tensor) -> Tensor:
    return torch.arange(len(logits), device=logits.device)


def record_kernels(logits: Tensor) -> None:
    """Launch each kernel of the sampler for `logits` [n, vocab] in the forms in which it is launched.

    Called for a device on which launches compute nothing (`worker.compile_jobs`).
    """
    n, vocab = logits.shape
    new = partial(torch.empty, device=logits.device)
    scales, greedy, keys, ids = new(n), new(n, dtype=torch.bool), new(n, dtype=torch.int64), new(n, dtype=torch.int64)
    sampling.choose(logits, scales, greedy, keys)
    norms = sampling.norms(sampling.weigh(logits, scales, ids, targets=ids))
    sampling.target_logprobs(logits, ids, norms)
    table = new(n, vocab, dtype=torch.int32)
    edited = penalties_triton.penalize(logits, ids, table, ids, scales, scales, scales, IN_PROMPT)
    for rows in (logits, edited):
        weights = sampling.weigh(rows, scales, ids)
        norms = sampling.norms(weights)
        sampling.draw_rows(rows, scales, greedy, keys, weights, ids, None, norms)
        for by_count, by_mass in itertools.product((False, True), repeat=2):
            columns = new(n, dtype=torch.int32), new(n, dtype=torch.float64), scales
            lowest, norms = lowest_kept(rows, scales, ids, weights, *columns, by_count=by_count, by_mass=by_mass)
        weights = sampling.weigh(rows, scales, ids, lowest)
        sampling.draw_rows(rows, scales, greedy, keys, weights, ids, lowest, norms)
        for num, kept in itertools.product(top_triton.SIZES, (None, lowest)):
            top_triton.top(rows, scales, ids, kept, weights, norms, min(num, vocab))

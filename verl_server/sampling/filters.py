"""`Filters`: top-k, top-p and min-p, for those rows of a batch that request them.

Each filter is applied to the unfiltered distribution, and a token stays if all filters keep it. Top-k keeps a token if
fewer than k tokens are more likely. Top-p keeps a token if the tokens that are more likely have a total probability
below p. Min-p keeps a token if it is at least min_p times as likely as the most likely token. So tokens of equal
probability (bf16 logits have many) are kept or removed together, and every filter amounts to a lowest logit. Lower
logits become -inf, and the draw chooses among the other tokens with the same noise as without filters. Top-k and top-p
also remove tokens that can never be drawn (`draw.SPAN`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from verl_server.kernels.device_arrays import to_device
from verl_server.kernels.draw import SPAN
from verl_server.sampling.spec import SampleSpec

_FIRST_CANDIDATES = 1024
"""Number of the largest logits that are tried on the CPU before all logits are sorted."""


class Filters:
    def __init__(
        self,
        top_k: Sequence[int],
        top_p: Sequence[float],
        min_p: Sequence[float],
        vocab_size: int,
        device: torch.device,
    ) -> None:
        """Take the filters of the n rows of a batch. At least `vocab_size`, at least 1 and 0 stand for no filter."""

        def column(values: Sequence[float], dtype: npt.DTypeLike) -> Tensor:
            return to_device(np.array(values, dtype=dtype), device)

        top_k = [min(k, vocab_size) for k in top_k]
        # Not 1: the sum of all probabilities may be rounded to more.
        top_p = [math.inf if p >= 1.0 else p for p in top_p]
        self.top_k, self.top_p = column(top_k, np.int32), column(top_p, np.float64)
        """[n] int32 and [n] fp64; `vocab_size` and infinity keep all tokens."""
        self.log_min_p = column([math.log(p) if p else -math.inf for p in min_p], np.float32)
        """[n] fp32; -inf keeps all tokens."""
        ranked = [i for i in range(len(top_k)) if top_k[i] < vocab_size or top_p[i] < 1.0]
        self._ranked = column(ranked, np.int64) if ranked else None
        """int64 indices of the rows with top-k or top-p, or None."""
        self._width = max((top_k[i] for i in ranked), default=0)
        self.by_count, self.by_mass = min(top_k) < vocab_size, min(top_p) < 1.0
        """True if any row has top-k, and top-p."""

    @classmethod
    def of(cls, specs: Sequence[SampleSpec], vocab_size: int, device: torch.device) -> Filters:
        """`specs` are the n rows of a batch. Greedy rows are not filtered, since the most likely token always stays."""
        params = [None if s.params.is_greedy else s.params for s in specs]
        return cls(
            [vocab_size if p is None else p.top_k for p in params],
            [1.0 if p is None else p.top_p for p in params],
            [0.0 if p is None else p.min_p for p in params],
            vocab_size,
            device,
        )

    def lowest(self, logits: Tensor, norms: Tensor) -> Tensor:
        """Return the lowest logit [n, 1] that all filters keep, -inf if they keep all, by definition.

        `logits` [n, vocab] are fp32, and `norms` [n, 1] are their logsumexp.
        """
        lowest = logits.amax(-1, keepdim=True) + self.log_min_p.unsqueeze(1)
        if self._ranked is not None:
            rows = self._ranked
            by_rank = self._lowest_by_rank(logits.index_select(0, rows), norms.index_select(0, rows))
            by_rank = torch.maximum(by_rank, logits.index_select(0, rows).amax(-1, keepdim=True) - SPAN)
            lowest.index_copy_(0, rows, torch.maximum(by_rank, lowest.index_select(0, rows)))
        return lowest

    def _lowest_by_rank(self, logits: Tensor, norms: Tensor) -> Tensor:
        """Return the lowest logit [rows, 1] that top-k and top-p keep, for the rows that have one of these filters."""
        vocab = logits.shape[1]
        if self._width < vocab:
            return self._lowest_of(logits.topk(self._width, dim=-1).values, norms)[0]
        if logits.is_cpu and vocab > _FIRST_CANDIDATES:  # on a GPU, the check below would wait for the device
            lowest, suffices = self._lowest_of(logits.topk(_FIRST_CANDIDATES, dim=-1).values, norms)
            if suffices.all():
                return lowest
        return self._lowest_of(logits.sort(dim=-1, descending=True).values, norms)[0]

    def _lowest_of(self, values: Tensor, norms: Tensor) -> tuple[Tensor, Tensor]:
        """(lowest kept logit [rows, 1], bool [rows]) of each row's largest logits `values`, in descending order.

        The bool is False if all of `values` are kept, so that further logits of the row may have to be kept as well.
        """
        assert self._ranked is not None
        before = (values - norms).double().exp_().cumsum(-1).roll(1, dims=-1)
        before[:, 0] = 0.0
        ranks = torch.arange(values.shape[1], device=values.device)
        top_k, top_p = (of.index_select(0, self._ranked).unsqueeze(1) for of in (self.top_k, self.top_p))
        kept = ((ranks < top_k) & (before < top_p)).sum(-1, keepdim=True)
        return values.gather(1, (kept - 1).clamp_(min=0)), kept.squeeze(1) < values.shape[1]

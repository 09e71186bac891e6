"""`Filters`: top-k, top-p and min-p, for those rows of a batch that ask for them.

Each cuts the unfiltered distribution on its own; a token stays if all of them keep it. What is cut becomes -inf, and
the draw decides among the others with the same noise as without filters.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from verl_server.models.attention import to_device
from verl_server.runtime.forward_batch import SampleSpec


class Filters:
    def __init__(self, specs: Sequence[SampleSpec], vocab_size: int, device: torch.device) -> None:
        """The rows of a batch. Greedy ones are not filtered: the most likely token always stays."""

        def column(values: npt.NDArray[np.generic]) -> Tensor:
            return to_device(values, device).unsqueeze(1)

        params = [s.params for s in specs]
        min_p = np.array([0.0 if p.is_greedy else p.min_p for p in params], dtype=np.float32)
        with np.errstate(divide="ignore"):
            self._log_min_p = column(np.log(min_p)) if min_p.any() else None
        ranked = [i for i, p in enumerate(params) if not p.is_greedy and (p.top_p < 1.0 or p.top_k < vocab_size)]
        self._ranked = to_device(np.array(ranked, dtype=np.int64), device) if ranked else None
        top_k = np.array([min(params[i].top_k, vocab_size) for i in ranked], dtype=np.int64)
        self._top_k, self._width = column(top_k), int(top_k.max(initial=0))
        self._top_p = column(np.array([params[i].top_p for i in ranked], dtype=np.float64))

    def __call__(self, logits: Tensor, norms: Tensor) -> Tensor:
        """`logits` [n, vocab] fp32 with -inf for what is cut; they are kept. `norms` [n, 1] are their logsumexp."""
        kept = logits
        if self._log_min_p is not None:
            kept = kept.masked_fill(logits < logits.amax(-1, keepdim=True) + self._log_min_p, -torch.inf)
        if self._ranked is not None:
            rows = self._ranked
            cut = self._cut_by_rank(logits.index_select(0, rows), norms.index_select(0, rows))
            kept = kept.index_copy(0, rows, kept.index_select(0, rows).masked_fill_(cut, -torch.inf))
        return kept

    def _cut_by_rank(self, logits: Tensor, norms: Tensor) -> Tensor:
        """bool [rows, vocab], for the rows with top-k or top-p."""
        if self._width < logits.shape[1]:
            values, order = logits.topk(self._width, dim=-1)
        else:
            values, order = logits.sort(dim=-1, descending=True, stable=True)
        before = (values - norms).double().exp_().cumsum(-1).roll(1, dims=-1)
        before[:, 0] = 0.0
        ranks = torch.arange(values.shape[1], device=values.device)
        cut = (ranks >= self._top_k) | (before >= self._top_p)
        cut[:, 0] = False
        return torch.ones_like(logits, dtype=torch.bool).scatter_(1, order, cut)

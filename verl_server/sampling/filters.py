"""`Filters`: top-k, top-p and min-p, for those rows of a batch that request them.

Each filter is applied to the unfiltered distribution, and a token stays if all filters keep it. Top-k keeps a token if
fewer than k tokens are more likely. Top-p keeps a token if the tokens that are more likely have a total probability
below p. Min-p keeps a token if it is at least min_p times as likely as the most likely token. So tokens of equal
probability (bf16 logits have many) are kept or removed together, and every filter amounts to a lowest logit. Lower
logits become -inf, and the draw chooses among the other tokens with the same noise as without filters.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from verl_server.kernels.device_arrays import to_device
from verl_server.sampling.spec import SampleSpec

_FIRST_CANDIDATES = 1024
"""Number of the largest logits that are tried on the CPU before all logits are sorted."""


class Filters:
    def __init__(self, specs: Sequence[SampleSpec], vocab_size: int, device: torch.device) -> None:
        """`specs` are the rows of a batch. Greedy rows are not filtered, since the most likely token always stays."""

        def column(values: npt.NDArray[np.generic]) -> Tensor:
            return to_device(values, device).unsqueeze(1)

        params = [s.params for s in specs]
        min_p = np.array([0.0 if p.is_greedy else p.min_p for p in params], dtype=np.float32)
        with np.errstate(divide="ignore"):
            self._log_min_p = column(np.log(min_p)) if min_p.any() else None
        ranked = [i for i, p in enumerate(params) if not p.is_greedy and (p.top_p < 1.0 or p.top_k < vocab_size)]
        self._ranked = to_device(np.array(ranked, dtype=np.int64), device) if ranked else None
        """int64 indices of the rows with top-k or top-p, or None. `_top_k` and `_top_p` [rows, 1] are for these rows.
        """
        if ranked:
            top_k = np.array([min(params[i].top_k, vocab_size) for i in ranked], dtype=np.int64)
            self._top_k, self._width = column(top_k), int(top_k.max())
            self._top_p = column(np.array([params[i].top_p for i in ranked], dtype=np.float64))

    def __call__(self, logits: Tensor, norms: Tensor) -> Tensor:
        """A copy of `logits` [n, vocab] fp32 with -inf for removed tokens. `norms` [n, 1] are the rows' logsumexp."""
        if self._log_min_p is not None:
            lowest = logits.amax(-1, keepdim=True) + self._log_min_p
        else:
            lowest = torch.full_like(norms, -torch.inf)
        if self._ranked is not None:
            rows = self._ranked
            by_rank = self._lowest_by_rank(logits.index_select(0, rows), norms.index_select(0, rows))
            lowest.index_copy_(0, rows, torch.maximum(by_rank, lowest.index_select(0, rows)))
        return logits.masked_fill(logits < lowest, -torch.inf)

    def _lowest_by_rank(self, logits: Tensor, norms: Tensor) -> Tensor:
        """The lowest logit [rows, 1] that top-k and top-p keep, for the rows that have one of these filters."""
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
        before = (values - norms).double().exp_().cumsum(-1).roll(1, dims=-1)
        before[:, 0] = 0.0
        ranks = torch.arange(values.shape[1], device=values.device)
        kept = ((ranks < self._top_k) & (before < self._top_p)).sum(-1, keepdim=True)
        return values.gather(1, (kept - 1).clamp_(min=0)), kept.squeeze(1) < values.shape[1]

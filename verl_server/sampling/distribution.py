"""`Distribution`: the softmax of rows of logits, from which the sampler draws and reads log-probabilities.

`LogSoftmax` is the definition, in PyTorch for any device. `fused.FusedDistribution` computes the same with kernels, and
holds no copy of the logits. `PointMass` is the distribution of a greedy row.

Minus infinity is returned as the lowest finite fp32 number. A row with NaN or +inf returns NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from verl_server.kernels import draw
from verl_server.kernels.draw import LOWEST
from verl_server.sampling.filters import Filters
from verl_server.sampling.penalties import Penalize, penalize


class Distribution(Protocol):
    """n rows over the vocabulary. All log-probabilities of a row come from one normalizer.

    So a token has the same log-probability, bit for bit, as the sampled token, among the most likely tokens and among
    the requested ids.
    """

    def of(self, ids: Tensor) -> Tensor:
        """Return the log-probabilities [n, m] of `ids` int64 [n, m].

        Row i of `ids` is for row i of the distribution.
        """
        ...

    def top(self, num: int) -> tuple[Tensor, Tensor]:
        """Return (log-probabilities, ids) of the `num` most likely tokens, [n, num], the most likely first."""
        ...

    def at(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Return the log-probabilities of the tokens `columns` [k] of the rows `rows` [k]."""
        ...

    def select(self, rows: Tensor) -> Distribution:
        """Return the distribution of `rows` int64 [m]."""
        ...


class Drawable(Distribution, Protocol):
    """A distribution with logits."""

    def filtered(self, filters: Filters) -> Drawable:
        """Return the distribution without the tokens that the filters remove."""
        ...

    def draw(self, greedy: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Draw one token for each row. The arguments are those of `draw.choose`.

        Return ids int64 [n] and their log-probabilities fp32 [n] before filters, with `or_flags`.
        """
        ...

    def or_flags(self, logprobs: Tensor) -> Tensor:
        """Return `logprobs` [n], but NaN for rows with NaN or +inf, and `NOTHING_ALLOWED` for rows of only -inf."""
        ...


class LogSoftmax:
    """The definition, for `logits` [n, vocab] fp32, which must not be changed afterwards."""

    def __init__(self, logits: Tensor, choose: draw.Choose = draw.choose, before: LogSoftmax | None = None) -> None:
        """`choose` is `draw.choose`, or a kernel with the same results.

        `before` has the unfiltered rows, or is None.
        """
        self.logits, self._choose, self._before = logits, choose, before
        # The largest logit and the rest of the normalizer are subtracted one after the other: their sum would lose the
        # digits of the rest at a low temperature.
        self._largest = logits.amax(-1, keepdim=True).clamp_(min=LOWEST)
        self._rest = (logits - self._largest).exp_().sum(-1, keepdim=True).log_()

    def of(self, ids: Tensor) -> Tensor:
        return self._normalized(self.logits.gather(1, ids), self._largest, self._rest)

    def top(self, num: int) -> tuple[Tensor, Tensor]:
        values, ids = self.logits.topk(num, dim=-1)
        return self._normalized(values, self._largest, self._rest), ids

    def at(self, rows: Tensor, columns: Tensor) -> Tensor:
        return self._normalized(self.logits[rows, columns], self._largest[rows, 0], self._rest[rows, 0])

    def select(self, rows: Tensor) -> LogSoftmax:
        return LogSoftmax(self.logits.index_select(0, rows), self._choose)

    def filtered(self, filters: Filters) -> LogSoftmax:
        lowest = filters.lowest(self.logits, self._largest + self._rest)
        return LogSoftmax(self.logits.masked_fill(self.logits < lowest, -torch.inf), self._choose, self)

    def draw(self, greedy: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        ones = torch.ones(len(greedy), device=greedy.device)
        ids, _ = self._choose(self.logits, ones, greedy, keys)
        rows = self._before or self
        return ids, rows.or_flags(rows.of(ids.unsqueeze(1)).squeeze(1))

    def or_flags(self, logprobs: Tensor) -> Tensor:
        rest = self._rest.squeeze(1)
        return torch.where(rest.isfinite(), logprobs, -rest)  # the logarithm of a sum of zeros is -inf

    @staticmethod
    def _normalized(values: Tensor, largest: Tensor, rest: Tensor) -> Tensor:
        return (values - largest).sub_(rest).clamp_(min=LOWEST)


class PointMass:
    """Rows in which the token `ids` [n] has all probability."""

    def __init__(self, ids: Tensor) -> None:
        self._ids = ids

    def of(self, ids: Tensor) -> Tensor:
        return self._logprobs(ids == self._ids.unsqueeze(1))

    def top(self, num: int) -> tuple[Tensor, Tensor]:
        """Return the token, followed by the other tokens in the order of their ids."""
        token, others = self._ids.unsqueeze(1), torch.arange(num - 1, device=self._ids.device)
        ids = torch.cat([token, others + (others >= token)], dim=1)
        return self.of(ids), ids

    def at(self, rows: Tensor, columns: Tensor) -> Tensor:
        return self._logprobs(columns == self._ids[rows])

    def select(self, rows: Tensor) -> PointMass:
        return PointMass(self._ids.index_select(0, rows))

    @staticmethod
    def _logprobs(is_token: Tensor) -> Tensor:
        return torch.where(is_token, 0.0, LOWEST)


@dataclass(frozen=True)
class SamplingOps:
    """The functions with which the sampler computes: those of PyTorch, or kernels with the same results."""

    choose: draw.Choose = draw.choose
    penalize: Penalize = penalize

    def distribution(self, logits: Tensor, index: Tensor | None, scales: Tensor) -> Drawable:
        """Return the distribution of the rows `index` int64 [n] of `logits` [rows, vocab] (None: all n), of any float
        dtype, multiplied by `scales` [n] fp32. The logits must not be changed afterwards."""
        rows = logits if index is None else logits.index_select(0, index)
        return LogSoftmax(rows.float() * scales.unsqueeze(1), self.choose)

    def score(self, logits: Tensor, targets: Tensor) -> tuple[Distribution, Tensor, Tensor]:
        """Return the distribution of `logits` [n, vocab], of any float dtype, and of the `targets` int64 [n] the
        log-probabilities fp32 [n] and the ranks [n], of any dtype.

        A rank is 1 plus the number of more likely tokens.
        """
        logits = logits.float()
        ranks = (logits > logits.gather(1, targets.unsqueeze(1))).sum(-1).add_(1)
        distribution = LogSoftmax(logits, self.choose)
        return distribution, distribution.of(targets.unsqueeze(1)).squeeze(1), ranks

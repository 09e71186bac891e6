"""Log-probabilities of rows of logits: of sampled tokens, most likely tokens, requested ids and prompt tokens.

All numbers of a row come from one `LogSoftmax`. So a token has the same log-probability, bit for bit, as the sampled
token, among the most likely tokens and among the requested ids. The other classes launch their work with a step and are
read after the step. In between, the results are copied to the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from verl_server.io_struct import PromptLogprobs, TokenLogprobs
from verl_server.kernels.device_arrays import to_device
from verl_server.kernels.draw import LOWEST


def to_host(tensor: Tensor) -> Tensor:
    """Copy to pinned memory on the host, without waiting. The result is valid once the submitted work is done."""
    return tensor if tensor.is_cpu else tensor.to("cpu", non_blocking=True)


class LogSoftmax:
    """Log-probabilities of the tokens of `logits` [n, vocab] fp32, which must not be changed afterwards.

    Minus infinity is returned as the lowest finite fp32 number. A row with NaN or +inf returns NaN.
    """

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits
        # The largest logit and the rest of the normalizer are subtracted one after the other: their sum would lose the
        # digits of the rest at a low temperature.
        self._largest = logits.amax(-1, keepdim=True).clamp_(min=LOWEST)
        self._rest = (logits - self._largest).exp_().sum(-1, keepdim=True).log_()

    @property
    def norms(self) -> Tensor:
        """Logsumexp of the rows, [n, 1]."""
        return self._largest + self._rest

    def of(self, ids: Tensor) -> Tensor:
        """Return the log-probabilities of `ids` int64 [n, m], for each row its own."""
        return self._normalized(self.logits.gather(1, ids), self._largest, self._rest)

    def top(self, rows: Tensor | None, num: int) -> tuple[Tensor, Tensor]:
        """Return (log-probabilities, ids) of the `num` most likely tokens of `rows` int64 [m] or of all, [m, num]."""
        parts = (self.logits, self._largest, self._rest)
        logits, largest, rest = parts if rows is None else (part.index_select(0, rows) for part in parts)
        values, ids = logits.topk(num, dim=-1)
        return self._normalized(values, largest, rest), ids

    def at(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Return the log-probabilities of the tokens `columns` [k] of the rows `rows` [k]."""
        return self._normalized(self.logits[rows, columns], self._largest[rows, 0], self._rest[rows, 0])

    def or_flags(self, logprobs: Tensor) -> Tensor:
        """Return `logprobs` [n], but NaN for rows with NaN or +inf, and `NOTHING_ALLOWED` for rows of only -inf."""
        rest = self._rest.squeeze(1)
        return torch.where(rest.isfinite(), logprobs, -rest)  # the logarithm of a sum of zeros is -inf

    @staticmethod
    def _normalized(values: Tensor, largest: Tensor, rest: Tensor) -> Tensor:
        return (values - largest).sub_(rest).clamp_(min=LOWEST)


class Candidates(Protocol):
    """Log-probabilities of several tokens for each row of a step."""

    def read(self) -> list[TokenLogprobs]:
        """One `TokenLogprobs` for each row. Call it after the step is done."""
        ...


class TopCandidates:
    """The `nums[i]` >= 1 most likely tokens of each of the rows `rows`, or of all rows, the most likely first."""

    def __init__(self, softmax: LogSoftmax, rows: Tensor | None, nums: Sequence[int]) -> None:
        values, ids = softmax.top(rows, min(max(nums), softmax.logits.shape[1]))
        self._values, self._ids, self._nums = to_host(values), to_host(ids), nums

    def read(self) -> list[TokenLogprobs]:
        rows = zip(self._values.tolist(), self._ids.tolist(), self._nums, strict=True)
        return [TokenLogprobs(values[:num], ids[:num]) for values, ids, num in rows]


class SamplingMasks:
    """All tokens that can be drawn from each row of filtered logits, the most likely first, up to `nums[i]` tokens.

    A row with more tokens returns none.
    """

    def __init__(self, softmax: LogSoftmax, nums: Sequence[int]) -> None:
        most = min(max(nums), softmax.logits.shape[1] - 1)
        self._candidates, self._nums = TopCandidates(softmax, None, [most + 1] * len(nums)), nums

    def read(self) -> list[TokenLogprobs]:
        result = []
        for candidates, num in zip(self._candidates.read(), self._nums, strict=True):
            count = sum(value > LOWEST for value in candidates.logprobs)
            kept = count if count <= num else 0
            result.append(TokenLogprobs(candidates.logprobs[:kept], candidates.token_ids[:kept]))
        return result


class RequestedTokens:
    """Token ids whose log-probabilities some rows request, as an index into [rows, vocab] on the device."""

    def __init__(self, requests: Sequence[tuple[int, list[int]]], device: torch.device) -> None:
        """`requests`: (row, token ids) of each row that requests log-probabilities."""
        self.ids = [ids for _, ids in requests]
        rows = [row for row, ids in requests for _ in ids]
        columns = [token for ids in self.ids for token in ids]
        self.rows, self.columns = to_device(np.array([rows, columns], dtype=np.int64), device)


class RequestedCandidates:
    """Log-probabilities of the requested tokens of each row, in the order of the request; one gather for all rows."""

    def __init__(self, softmax: LogSoftmax, requested: RequestedTokens) -> None:
        self._values, self._ids = to_host(softmax.at(requested.rows, requested.columns)), requested.ids

    def read(self) -> list[TokenLogprobs]:
        values, start, result = self._values.tolist(), 0, []
        for ids in self._ids:
            result.append(TokenLogprobs(values[start : start + len(ids)], list(ids)))
            start += len(ids)
        return result


class PromptCandidates:
    """Log-probabilities of the prompt tokens `targets` from the model's raw logits, launched chunk after chunk."""

    def __init__(self, targets: list[int], top_num: int, requested: list[int] | None) -> None:
        """Report the `top_num` most likely tokens and the token ids `requested` at each position."""
        self._targets, self._top_num, self._requested = targets, top_num, requested
        self._launched = 0
        self._values: list[Tensor] = []
        self._ranks: list[Tensor] = []
        self._top: list[Candidates] = []
        self._requested_candidates: list[Candidates] = []

    def launch(self, logits: Tensor) -> None:
        """`logits` [n, vocab], of any float dtype, predict the next n targets. They may be overwritten."""
        logits, n = logits.float(), logits.shape[0]
        targets = self._targets[self._launched : self._launched + n]
        self._launched += n
        ids = to_device(np.array(targets, dtype=np.int64), logits.device).unsqueeze(1)
        self._ranks.append(to_host((logits > logits.gather(1, ids)).sum(-1).add_(1)))
        softmax = LogSoftmax(logits)
        self._values.append(to_host(softmax.of(ids).squeeze(1)))
        if self._top_num:
            self._top.append(TopCandidates(softmax, None, [self._top_num] * n))
        if self._requested is not None:
            requested = RequestedTokens([(row, self._requested) for row in range(n)], logits.device)
            self._requested_candidates.append(RequestedCandidates(softmax, requested))

    def read(self) -> PromptLogprobs:
        """The log-probabilities of all chunks. Call it after the last step is done."""
        requested: list[TokenLogprobs | None] | None = None
        if self._requested is not None:
            requested = [c for chunk in self._requested_candidates for c in chunk.read()]
        return PromptLogprobs(
            token_ids=self._targets,
            logprobs=[value for chunk in self._values for value in chunk.tolist()],
            ranks=[rank for chunk in self._ranks for rank in chunk.tolist()],
            top=[c for chunk in self._top for c in chunk.read()] if self._top_num else None,
            requested=requested,
        )

"""Further log-probabilities: of the most likely tokens, of requested token ids, and of prompt tokens.

Each class launches its work with a step and is read after the step. In between, the results are copied to the host.
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


class Candidates(Protocol):
    """Log-probabilities of several tokens for each row of a step."""

    def read(self) -> list[TokenLogprobs]:
        """One `TokenLogprobs` for each row. Call it after the step is done."""
        ...


class TopCandidates:
    """The `nums[i]` >= 1 most likely tokens of each row i of logits [n, vocab] fp32, the most likely first.

    In this module, `norms` [n, 1] are the logsumexp of the rows.
    """

    def __init__(self, logits: Tensor, norms: Tensor, nums: Sequence[int]) -> None:
        values, ids = logits.topk(min(max(nums), logits.shape[1]), dim=-1)
        self._values, self._ids, self._nums = to_host((values - norms).clamp_(min=LOWEST)), to_host(ids), nums

    def read(self) -> list[TokenLogprobs]:
        rows = zip(self._values.tolist(), self._ids.tolist(), self._nums, strict=True)
        return [TokenLogprobs(values[:num], ids[:num]) for values, ids, num in rows]


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

    def __init__(self, logits: Tensor, norms: Tensor, requested: RequestedTokens) -> None:
        values = logits[requested.rows, requested.columns] - norms[requested.rows, 0]
        self._values, self._ids = to_host(values.clamp_(min=LOWEST)), requested.ids

    def read(self) -> list[TokenLogprobs]:
        values, start, result = self._values.tolist(), 0, []
        for ids in self._ids:
            result.append(TokenLogprobs(values[start : start + len(ids)], list(ids)))
            start += len(ids)
        return result


class PromptCandidates:
    """Log-probabilities of the prompt tokens `targets` from the model's raw logits, launched chunk after chunk."""

    def __init__(self, targets: list[int], top_num: int, requested: list[int] | None) -> None:
        """At each position, report the `top_num` most likely tokens and the token ids `requested`."""
        self._targets, self._top_num, self._requested = targets, top_num, requested
        self._launched = 0
        self._values: list[Tensor] = []
        self._top: list[Candidates] = []
        self._requested_candidates: list[Candidates] = []

    def launch(self, logits: Tensor) -> None:
        """`logits` [n, vocab], of any float dtype, predict the next n targets. They may be overwritten."""
        logits, n = logits.float(), logits.shape[0]
        targets = self._targets[self._launched : self._launched + n]
        self._launched += n
        ids = to_device(np.array(targets, dtype=np.int64), logits.device).unsqueeze(1)
        norms = logits.logsumexp(-1, keepdim=True)
        self._values.append(to_host((logits.gather(1, ids) - norms).squeeze(1)))
        if self._top_num:
            self._top.append(TopCandidates(logits, norms, [self._top_num] * n))
        if self._requested is not None:
            requested = RequestedTokens([(row, self._requested) for row in range(n)], logits.device)
            self._requested_candidates.append(RequestedCandidates(logits, norms, requested))

    def read(self) -> PromptLogprobs:
        """The log-probabilities of all chunks. Call it after the last step is done."""
        requested: list[TokenLogprobs | None] | None = None
        if self._requested is not None:
            requested = [c for chunk in self._requested_candidates for c in chunk.read()]
        return PromptLogprobs(
            token_ids=self._targets,
            logprobs=[value for chunk in self._values for value in chunk.tolist()],
            top=[c for chunk in self._top for c in chunk.read()] if self._top_num else None,
            requested=requested,
        )

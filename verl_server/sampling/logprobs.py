"""Log-probabilities beside the sampled token's: of the most likely tokens, of named ones, and of prompts.

Each is launched with a step and read when the step is done: between, its results are on their way to the host.
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
    """On the host as soon as the work submitted so far is done: into pinned memory, without waiting."""
    return tensor if tensor.is_cpu else tensor.to("cpu", non_blocking=True)


class Candidates(Protocol):
    def read(self) -> list[TokenLogprobs]:
        """One for each row it was launched with, once the step is done."""
        ...


class TopCandidates:
    """The `nums[i]` >= 1 most likely tokens of each row of logits [n, vocab], most likely first.

    `norms` [n, 1] are the rows' logsumexp, here and below.
    """

    def __init__(self, logits: Tensor, norms: Tensor, nums: Sequence[int]) -> None:
        values, ids = logits.topk(min(max(nums), logits.shape[1]), dim=-1)
        self._values, self._ids, self._nums = to_host((values - norms).clamp_(min=LOWEST)), to_host(ids), nums

    def read(self) -> list[TokenLogprobs]:
        rows = zip(self._values.tolist(), self._ids.tolist(), self._nums, strict=True)
        return [TokenLogprobs(values[:num], ids[:num]) for values, ids, num in rows]


class NamedTokens:
    """Token ids that some rows ask for, as the index that picks them from [rows, vocab] on the device."""

    def __init__(self, asked: Sequence[tuple[int, list[int]]], device: torch.device) -> None:
        """`asked`: (row, ids)."""
        self.ids = [ids for _, ids in asked]
        rows = [row for row, ids in asked for _ in ids]
        columns = [token for ids in self.ids for token in ids]
        self.rows, self.columns = to_device(np.array([rows, columns], dtype=np.int64), device)


class NamedCandidates:
    """Log-probabilities of the tokens that each row named, in its order; one gather for all rows."""

    def __init__(self, logits: Tensor, norms: Tensor, named: NamedTokens) -> None:
        values = logits[named.rows, named.columns] - norms[named.rows, 0]
        self._values, self._ids = to_host(values.clamp_(min=LOWEST)), named.ids

    def read(self) -> list[TokenLogprobs]:
        values, start, result = self._values.tolist(), 0, []
        for ids in self._ids:
            result.append(TokenLogprobs(values[start : start + len(ids)], list(ids)))
            start += len(ids)
        return result


class PromptCandidates:
    """Log-probabilities of the prompt tokens `targets` from the model's raw logits, launched chunk after chunk."""

    def __init__(self, targets: list[int], top_num: int, requested: list[int] | None) -> None:
        self._targets, self._top_num, self._requested = targets, top_num, requested
        self._launched = 0
        self._values: list[Tensor] = []
        self._top: list[Candidates] = []
        self._named: list[Candidates] = []

    def launch(self, logits: Tensor) -> None:
        """`logits` [n, vocab], of any float dtype, that the next n targets follow. They may be overwritten."""
        logits, n = logits.float(), logits.shape[0]
        targets = self._targets[self._launched : self._launched + n]
        self._launched += n
        ids = to_device(np.array(targets, dtype=np.int64), logits.device).unsqueeze(1)
        norms = logits.logsumexp(-1, keepdim=True)
        self._values.append(to_host((logits.gather(1, ids) - norms).squeeze(1)))
        if self._top_num:
            self._top.append(TopCandidates(logits, norms, [self._top_num] * n))
        if self._requested is not None:
            named = NamedTokens([(row, self._requested) for row in range(n)], logits.device)
            self._named.append(NamedCandidates(logits, norms, named))

    def read(self) -> PromptLogprobs:
        """All chunks together, once the step is done."""
        return PromptLogprobs(
            token_ids=self._targets,
            logprobs=[value for chunk in self._values for value in chunk.tolist()],
            top=[c for chunk in self._top for c in chunk.read()] if self._top_num else None,
            requested=None if self._requested is None else [c for chunk in self._named for c in chunk.read()],
        )

"""Log-probabilities of several tokens of a row: the most likely tokens, requested ids and prompt tokens.

The constructor of each class launches the computation and the copy to the host, as a part of a step. After the step has
run, `read` returns the results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from verl_server.kernels.device_arrays import to_device
from verl_server.kernels.draw import LOWEST
from verl_server.messages.packed import ITEM, PromptLogprobs, TokenLogprobs, pack_array, pack_ids
from verl_server.sampling.distribution import Distribution, SamplingOps


def to_host(tensor: Tensor) -> Tensor:
    """Copy to pinned memory on the host, without waiting. The result is valid once the submitted work is done."""
    return tensor if tensor.is_cpu else tensor.to("cpu", non_blocking=True)


class Candidates(Protocol):
    """Log-probabilities of several tokens for each row of a step."""

    def read(self) -> list[TokenLogprobs]:
        """One `TokenLogprobs` for each row. Call it after the step is done."""
        ...


class TopCandidates:
    """The `nums[i]` >= 1 most likely tokens of each row, the most likely first."""

    def __init__(self, distribution: Distribution, nums: Sequence[int], vocab_size: int) -> None:
        values, ids = distribution.top(min(max(nums), vocab_size))
        self._values, self._ids, self._nums = to_host(values), to_host(ids), nums

    def read(self) -> list[TokenLogprobs]:
        return TokenLogprobs.rows(self._values.numpy(), self._ids.numpy(), self._nums)


class SamplingMasks:
    """All tokens that can be drawn from each row, the most likely first, up to `nums[i]` tokens.

    The list of a row is empty if more than `nums[i]` tokens can be drawn from the row.
    """

    def __init__(self, distribution: Distribution, nums: Sequence[int], vocab_size: int) -> None:
        values, ids = distribution.top(min(max(nums), vocab_size - 1) + 1)
        self._values, self._ids, self._nums = to_host(values), to_host(ids), nums

    def read(self) -> list[TokenLogprobs]:
        values = self._values.numpy()
        counts = (values > LOWEST).sum(axis=1).tolist()
        kept = [count if count <= num else 0 for count, num in zip(counts, self._nums, strict=True)]
        return TokenLogprobs.rows(values, self._ids.numpy(), kept)


class RequestedTokens:
    """Token ids whose log-probabilities some rows request, as an index into [rows, vocab] on the device."""

    def __init__(self, requests: Sequence[tuple[int, list[int]]], device: torch.device) -> None:
        """Take `requests`: (row, token ids) of each row that requests log-probabilities."""
        self.packed_ids = [pack_ids(ids) for _, ids in requests]
        rows = [row for row, ids in requests for _ in ids]
        columns = [token for _, ids in requests for token in ids]
        self.rows, self.columns = to_device(np.array([rows, columns], dtype=np.int64), device)


class RequestedCandidates:
    """Log-probabilities of the requested tokens of each row, in the order of the request; one gather for all rows."""

    def __init__(self, distribution: Distribution, requested: RequestedTokens) -> None:
        self._values = to_host(distribution.at(requested.rows, requested.columns))
        self._packed_ids = requested.packed_ids

    def read(self) -> list[TokenLogprobs]:
        packed, start, result = pack_array(self._values.numpy()), 0, []
        for ids in self._packed_ids:
            result.append(TokenLogprobs(packed[start : start + len(ids)], ids))
            start += len(ids)
        return result


class PromptCandidates:
    """Log-probabilities of the prompt tokens `targets` from the model's raw logits, launched chunk after chunk.

    The targets of all entries of a step that request the same number of tokens are computed together, because a product
    with the vocabulary reads all of its weights, for a short prompt too.
    """

    def __init__(
        self,
        ops: SamplingOps,
        targets: Mapping[int, npt.NDArray[np.int64]],
        top_num: int,
        requested: list[int] | None,
        device: torch.device,
    ) -> None:
        """Take the `targets` of each entry. Report the `top_num` most likely tokens and the token ids `requested` at
        each position."""
        self._ops, self._top_num, self._requested = ops, top_num, requested
        self._lengths = {entry: len(ids) for entry, ids in targets.items()}
        self._host_targets = np.concatenate([*targets.values()])
        self._targets = to_device(self._host_targets, device)
        self._launched = 0
        self._values: list[Tensor] = []
        self._ranks: list[Tensor] = []
        self._top: list[Candidates] = []
        self._requested_candidates: list[Candidates] = []

    def launch(self, logits: Tensor) -> None:
        """`logits` [n, vocab], of any float dtype, predict the next n targets, entry after entry. They may be
        overwritten."""
        n, vocab_size = logits.shape
        targets = self._targets[self._launched : self._launched + n]
        self._launched += n
        distribution, logprobs, ranks = self._ops.score(logits, targets)
        self._values.append(to_host(logprobs))
        self._ranks.append(to_host(ranks))
        if self._top_num:
            self._top.append(TopCandidates(distribution, [self._top_num] * n, vocab_size))
        if self._requested is not None:
            requested = RequestedTokens([(row, self._requested) for row in range(n)], logits.device)
            self._requested_candidates.append(RequestedCandidates(distribution, requested))

    def read(self) -> dict[int, PromptLogprobs]:
        """Return the log-probabilities of each entry. Call it after the last step is done."""
        ids = pack_array(self._host_targets)
        logprobs = b"".join([pack_array(chunk.numpy()) for chunk in self._values])
        ranks = b"".join([pack_array(chunk.to(torch.int32).numpy()) for chunk in self._ranks])
        top = [c for chunk in self._top for c in chunk.read()]
        requested = [c for chunk in self._requested_candidates for c in chunk.read()]
        parts, start = {}, 0
        for entry, length in self._lengths.items():
            end = start + length
            packed = slice(start * ITEM, end * ITEM)
            parts[entry] = PromptLogprobs(
                packed_ids=ids[packed],
                packed_logprobs=logprobs[packed],
                packed_ranks=ranks[packed],
                top=[*top[start:end]] if self._top_num else None,
                requested=[*requested[start:end]] if self._requested is not None else None,
            )
            start = end
        return parts

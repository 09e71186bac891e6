"""`Sampler`: from logits to next tokens and log-probabilities, for a mixed batch, without waiting for the device.

The sampler runs on rank 0. Log-probabilities of output tokens are `logits - logsumexp(logits)` in fp32, where `logits`
are (model logits + penalties + bias) / temperature over the full vocabulary, before top-k, top-p and min-p. Temperature
0 counts as 1. The mask of stop tokens by `min_new_tokens` counts as a penalty. Log-probabilities of prompt tokens
(`logprobs.PromptCandidates`) are computed from the model's raw logits.

The order of operations is SGLang's. First, a token that a grammar forbids gets the logit -inf, which no later operation
changes, so all log-probabilities are over the allowed tokens. Then repetition penalty (prompt and output tokens),
frequency and presence penalty (output tokens), `logit_bias`, `min_new_tokens`, temperature. Then top-k, top-p
(cumulated over the unfiltered distribution) and min-p (relative to the largest probability) each filter the same
distribution.

A draw (`kernels.draw`) is a function of the request's seed, the position of the token and the distribution. It does not
depend on the other rows of the batch or on earlier steps.

A row whose logits contain NaN or +inf, or no finite value, gets a valid token id and log-probability NaN; the scheduler
finishes such a request. Minus infinity is reported as the lowest finite fp32 number.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from verl_server.io_struct import TokenLogprobs
from verl_server.kernels import draw, token_mask
from verl_server.kernels.device_arrays import Ints, to_device
from verl_server.sampling.filters import Filters
from verl_server.sampling.logprobs import Candidates, RequestedCandidates, RequestedTokens, TopCandidates, to_host
from verl_server.sampling.penalties import Penalties
from verl_server.sampling.spec import ForwardOutput, SampleSpec, TokenMasks


@dataclass
class Sampled:
    """The result of `Sampler.launch`, which may still be computed by the device."""

    ids: Tensor
    """int64 [n] token ids on the device, from which the next step can read its inputs."""
    host_ids: Tensor
    """Copy of `ids` on the host, valid once the step is done."""
    host_logprobs: Tensor
    """fp32 [n] log-probabilities of `ids` on the host, valid once the step is done."""
    top: tuple[list[int], Candidates] | None = None
    """(row indices, top-k log-probabilities) of the rows that requested them."""
    requested: tuple[list[int], Candidates] | None = None
    """(row indices, log-probabilities of requested token ids) of the rows that requested them."""

    def read(self) -> ForwardOutput:
        """The result as Python lists. Call it after the device has done the work that `launch` submitted."""
        top, requested = (self._by_row(part) for part in (self.top, self.requested))
        return ForwardOutput(self.host_ids.tolist(), self.host_logprobs.tolist(), top, requested)

    def _by_row(self, part: tuple[list[int], Candidates] | None) -> list[TokenLogprobs | None]:
        """One element for each of the n rows; None for rows that requested nothing."""
        result: list[TokenLogprobs | None] = [None] * len(self.host_ids)
        if part is not None:
            for row, candidates in zip(part[0], part[1].read(), strict=True):
                result[row] = candidates
        return result


@dataclass
class _Batch:
    """The sampling parameters of a batch, which are the same in every step until rows join or leave the batch."""

    specs: list[SampleSpec]
    scales: Tensor
    """fp32 [n]: 1 / temperature."""
    greedy: Tensor
    """bool [n]: take the most likely token instead of a draw."""
    mixed_seeds: Ints
    """int64 [n]: `draw.mix` of the seeds."""
    special: _Special | None


@dataclass
class _Special:
    """The rows that need more than a temperature and a draw. A copy of their logits is edited in fp32."""

    rows: list[int]
    """Indices in the batch."""
    index: Tensor
    """`rows` on the device."""
    scales: Tensor
    """fp32 [len(rows)]: 1 / temperature."""
    greedy: Tensor
    """bool [len(rows)]"""
    ones: Tensor
    """fp32 [len(rows)]: the scales for a draw from logits that are divided by the temperature already."""
    filters: Filters | None
    top: tuple[Tensor, list[int]] | None
    """(indices in `rows`, number of tokens for each) of the rows that request the most likely tokens."""
    top_rows: list[int]
    """The same rows as indices in the batch."""
    requested: RequestedTokens | None
    """Token ids whose log-probabilities are requested, by index in `rows`."""
    requested_rows: list[int]
    """Indices in the batch of the rows that request token ids."""


class Sampler:
    """Samples a batch. Keeps the parameter tensors of the last batch, and uses them again if the rows are the same."""

    def __init__(self, vocab_size: int, device: torch.device, choose: draw.Choose = draw.choose) -> None:
        """`choose`: `draw.choose`, or a kernel that computes the same."""
        self._vocab_size, self._device, self._choose = vocab_size, device, choose
        self._penalties = Penalties(vocab_size, device)
        self._batch: _Batch | None = None

    def forget(self) -> None:
        """Hold nothing of the last batch: a launch that failed may have left it half updated."""
        self._batch = None
        self._penalties.forget()

    def launch(
        self, logits: Tensor, specs: list[SampleSpec], positions: Ints, masks: TokenMasks | None = None
    ) -> Sampled:
        """Submit the sampling of one token for each row of `logits` [n, vocab_size] fp32, bf16 or fp16.

        `specs[i]` are the parameters of row i. `positions` int64 [n] are the positions of the tokens to sample in their
        sequences, prompt included. `masks` forbids tokens. The logits may be overwritten.
        """
        if masks is not None:
            rows = self._tensor(np.array(masks.rows, dtype=np.int64))
            token_mask.apply(logits, rows, masks.words.to(self._device, non_blocking=True))
        batch = self._batch
        if batch is None or specs != batch.specs:  # specs are compared by identity
            batch = self._batch = self._prepare(list(specs))
        special = batch.special
        keys = to_device(draw.row_keys(batch.mixed_seeds, positions), self._device)
        if special is None:
            ids, logprobs = self._choose(logits, batch.scales, batch.greedy, keys)
            return Sampled(ids, to_host(ids), to_host(logprobs))
        if len(special.rows) == len(specs):
            part, norms = self._edit(logits, special, positions)
            ids, logprobs = self._choose_special(part, norms, special, keys)
        else:
            # The special rows are drawn with all others first, then again from their edited logits.
            ids, logprobs = self._choose(logits, batch.scales, batch.greedy, keys)
            part, norms = self._edit(logits.index_select(0, special.index), special, positions[special.rows])
            own = self._choose_special(part, norms, special, keys.index_select(0, special.index))
            ids.index_copy_(0, special.index, own[0])
            logprobs.index_copy_(0, special.index, own[1])
        sampled = Sampled(ids, to_host(ids), to_host(logprobs))
        if special.top is not None:
            index, nums = special.top
            top = TopCandidates(part.index_select(0, index), norms.index_select(0, index), nums)
            sampled.top = special.top_rows, top
        if special.requested is not None:
            sampled.requested = special.requested_rows, RequestedCandidates(part, norms, special.requested)
        return sampled

    def _edit(self, logits: Tensor, special: _Special, positions: Ints) -> tuple[Tensor, Tensor]:
        """(fp32 logits of the special rows after penalties, bias and temperature, their logsumexp [n, 1])."""
        logits = logits.float().contiguous()
        self._penalties.apply(logits, positions)
        logits.mul_(special.scales.unsqueeze(1))
        return logits, logits.logsumexp(-1, keepdim=True)

    def _choose_special(self, logits: Tensor, norms: Tensor, special: _Special, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Draw from the filtered logits. Returns (ids, log-probabilities from the unfiltered logits), each [n]."""
        if special.filters is None:
            return self._choose(logits, special.ones, special.greedy, keys)
        ids, _ = self._choose(special.filters(logits, norms), special.ones, special.greedy, keys)
        logprobs = logits.gather(1, ids.unsqueeze(1)).sub_(norms).clamp_(min=draw.LOWEST)
        return ids, logprobs.masked_fill_(~norms.isfinite(), torch.nan).squeeze(1)

    # -- preparation when the rows of the batch change -----------------------------------------------------------

    def _prepare(self, specs: list[SampleSpec]) -> _Batch:
        params = [s.params for s in specs]
        # A row that is greedy by top_k=1 has log-probabilities with its temperature; temperature 0 counts as 1.
        scales = 1.0 / np.array([p.temperature or 1.0 for p in params], dtype=np.float32)
        greedy = np.array([p.is_greedy for p in params], dtype=bool)
        rows = [i for i, s in enumerate(specs) if s.special]
        self._penalties.set_batch([specs[i] for i in rows])
        return _Batch(
            specs,
            self._tensor(scales),
            self._tensor(greedy),
            draw.mix(np.array([s.seed for s in specs], dtype=np.int64)),
            self._prepare_special(specs, rows, scales, greedy) if rows else None,
        )

    def _prepare_special(
        self, specs: list[SampleSpec], rows: list[int], scales: npt.NDArray[np.float32], greedy: npt.NDArray[np.bool_]
    ) -> _Special:
        own = [specs[i] for i in rows]
        top = {place: s.top_logprobs_num for place, s in enumerate(own) if s.top_logprobs_num}
        requested = {place: s.token_ids_logprob for place, s in enumerate(own) if s.token_ids_logprob is not None}
        return _Special(
            rows=rows,
            index=self._tensor(np.array(rows, dtype=np.int64)),
            scales=self._tensor(scales[rows]),
            greedy=self._tensor(greedy[rows]),
            ones=torch.ones(len(rows), device=self._device),
            filters=Filters(own, self._vocab_size, self._device) if any(s.filtered for s in own) else None,
            top=(self._tensor(np.array(list(top), dtype=np.int64)), list(top.values())) if top else None,
            top_rows=[rows[place] for place in top],
            requested=RequestedTokens(list(requested.items()), self._device) if requested else None,
            requested_rows=[rows[place] for place in requested],
        )

    def _tensor(self, values: npt.NDArray[np.generic]) -> Tensor:
        return to_device(values, self._device)

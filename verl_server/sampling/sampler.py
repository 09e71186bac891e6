"""`Sampler`: from logits to next tokens and log-probabilities, for a mixed batch, without waiting for the device.

The sampler runs on rank 0. The order of operations is SGLang's. First, a token that a grammar forbids gets the logit
-inf, which no later operation changes. Then repetition penalty (prompt and output tokens), frequency and presence
penalty (output tokens), `logit_bias`, `min_new_tokens`, the masks (`Masks`) and the temperature. Then top-k, top-p
(cumulated over the unfiltered distribution) and min-p (relative to the largest probability) each filter the same
distribution.

Log-probabilities of output tokens are the fp32 log-softmax of logits that `SamplingParams.logprobs_mode` names:
"default" those after the temperature, before the filters; "raw" the model's; "sampling" those after the filters, and
for a greedy row the sampled token alone. The default is over the allowed vocabulary, because grammars, masks and
`min_new_tokens` count. Temperature 0 counts as 1. Log-probabilities of prompt tokens (`logprobs.PromptCandidates`) are
always raw.

A draw (`kernels.draw`) is a function of the request's seed, the position of the token and the distribution. It does not
depend on the other rows of the batch or on earlier steps.

A row whose logits contain NaN or +inf gets a valid token id and log-probability NaN. A row in which no token is allowed
gets NaN or `spec.NOTHING_ALLOWED`. The scheduler ends such requests. Minus infinity is reported as the lowest finite
fp32 number.
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
from verl_server.sampling.logprobs import (
    Candidates,
    LogSoftmax,
    RequestedCandidates,
    RequestedTokens,
    SamplingMasks,
    TopCandidates,
    to_host,
)
from verl_server.sampling.masks import Masks
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
    masks: tuple[list[int], Candidates] | None = None
    """(row indices, tokens that could be drawn) of the rows that requested them."""

    def read(self) -> ForwardOutput:
        """The result as Python lists. Call it after the device has done the work that `launch` submitted."""
        top, requested = (self._by_row(part) for part in (self.top, self.requested))
        output = ForwardOutput(self.host_ids.tolist(), self.host_logprobs.tolist(), top, requested)
        if self.masks is not None:
            output.sampling_masks = dict(zip(self.masks[0], self.masks[1].read(), strict=True))
        return output

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
    modes: _Modes | None
    raw_rows: Tensor | None
    """int64 indices in the batch of the rows of mode "raw", or None."""
    top: tuple[Tensor, list[int]] | None
    """(indices in `rows`, number of tokens for each) of the rows that request the most likely tokens."""
    top_rows: list[int]
    """The same rows as indices in the batch."""
    requested: RequestedTokens | None
    """Token ids whose log-probabilities are requested, by index in `rows`."""
    requested_rows: list[int]
    """Indices in the batch of the rows that request token ids."""
    masks: tuple[Tensor, list[int]] | None
    """(indices in `rows`, most tokens for each) of the rows that request the tokens that could be drawn."""
    mask_rows: list[int]
    """The same rows as indices in the batch."""


@dataclass
class _Modes:
    """Rows whose log-probabilities are not the default ones, as int64 indices in `_Special.rows`, or None."""

    raw: Tensor | None
    filtered: Tensor | None
    """Rows of mode "sampling" that are drawn."""
    greedy: Tensor | None
    """Rows of mode "sampling" that are greedy."""

    def reported(self, logits: Tensor, raw: Tensor | None, drawn: Tensor, ids: Tensor) -> Tensor:
        """Return the logits whose log-softmax is reported, [n, vocab].

        The arguments are the logits after the temperature [n, vocab], the model's logits of the rows `self.raw`, the
        filtered logits [n, vocab] and the sampled ids [n].
        """
        reported = logits.clone()
        if self.raw is not None and raw is not None:
            reported.index_copy_(0, self.raw, raw)
        if self.filtered is not None:
            reported.index_copy_(0, self.filtered, drawn.index_select(0, self.filtered))
        if self.greedy is not None:
            point = torch.full((len(self.greedy), logits.shape[1]), -torch.inf, device=logits.device)
            reported.index_copy_(0, self.greedy, point.scatter_(1, ids.index_select(0, self.greedy).unsqueeze(1), 0.0))
        return reported


class Sampler:
    """Samples a batch. Keeps the parameter tensors of the last batch, and uses them again if the rows are the same."""

    def __init__(self, vocab_size: int, device: torch.device, choose: draw.Choose = draw.choose) -> None:
        """`choose`: `draw.choose`, or a kernel that computes the same."""
        self._vocab_size, self._device, self._choose = vocab_size, device, choose
        self._penalties = Penalties(vocab_size, device)
        self._masks = Masks(vocab_size, device)
        self._batch: _Batch | None = None

    def forget(self) -> None:
        """Hold nothing of the last batch: a launch that failed may have left it half updated."""
        self._batch = None
        self._penalties.forget()
        self._masks.forget()

    def launch(
        self, logits: Tensor, specs: list[SampleSpec], positions: Ints, masks: TokenMasks | None = None
    ) -> Sampled:
        """Submit the sampling of one token for each row of `logits` [n, vocab_size] fp32, bf16 or fp16.

        `specs[i]` are the parameters of row i. `positions` int64 [n] are the positions of the tokens to sample in their
        sequences, prompt included. `masks` forbids tokens. The logits may be overwritten.
        """
        batch = self._batch
        if batch is None or specs != batch.specs:  # specs are compared by identity
            batch = self._batch = self._prepare(list(specs))
        special = batch.special
        raw = None if special is None or special.raw_rows is None else logits.index_select(0, special.raw_rows).float()
        if masks is not None:
            rows = self._tensor(np.array(masks.rows, dtype=np.int64))
            token_mask.apply(logits, rows, masks.words.to(self._device, non_blocking=True))
        keys = to_device(draw.row_keys(batch.mixed_seeds, positions), self._device)
        if special is None:
            ids, logprobs = self._choose(logits, batch.scales, batch.greedy, keys)
            return Sampled(ids, to_host(ids), to_host(logprobs))
        if len(special.rows) == len(specs):
            ids, logprobs, reported, drawn_from = self._sample_special(logits, raw, special, positions, keys)
        else:
            # The special rows are drawn with all others first, then again from their edited logits.
            ids, logprobs = self._choose(logits, batch.scales, batch.greedy, keys)
            part, part_keys = logits.index_select(0, special.index), keys.index_select(0, special.index)
            own_ids, own_logprobs, reported, drawn_from = self._sample_special(
                part, raw, special, positions[special.rows], part_keys
            )
            ids.index_copy_(0, special.index, own_ids)
            logprobs.index_copy_(0, special.index, own_logprobs)
        sampled = Sampled(ids, to_host(ids), to_host(logprobs))
        if special.top is not None:
            sampled.top = special.top_rows, TopCandidates(reported, *special.top)
        if special.requested is not None:
            sampled.requested = special.requested_rows, RequestedCandidates(reported, special.requested)
        if drawn_from is not None:
            sampled.masks = special.mask_rows, drawn_from
        return sampled

    def _sample_special(
        self, logits: Tensor, raw: Tensor | None, special: _Special, positions: Ints, keys: Tensor
    ) -> tuple[Tensor, Tensor, LogSoftmax, SamplingMasks | None]:
        """Sample the special rows, whose `logits` may be overwritten. `raw` are the model's logits of the raw rows.

        Returns (ids [n], their log-probabilities [n], the log-probabilities of all tokens, the requested masks).
        """
        modes = special.modes
        logits = self._edit(logits, special, positions)
        reported = softmax = LogSoftmax(logits)
        drawn = logits if special.filters is None else special.filters(logits, softmax.norms)
        ids, _ = self._choose(drawn, special.ones, special.greedy, keys)
        if modes is not None:
            reported = LogSoftmax(modes.reported(logits, raw, drawn, ids))
        logprobs = softmax.or_flags(reported.of(ids.unsqueeze(1)).squeeze(1))
        return ids, logprobs, reported, None if special.masks is None else _sampling_masks(special, drawn, ids)

    def _edit(self, logits: Tensor, special: _Special, positions: Ints) -> Tensor:
        """Return the fp32 logits of the special rows after penalties, bias, masks and temperature."""
        logits = logits.float().contiguous()
        self._penalties.apply(logits, positions)
        self._masks.apply(logits)
        return logits.mul_(special.scales.unsqueeze(1))

    # -- preparation when the rows of the batch change -----------------------------------------------------------

    def _prepare(self, specs: list[SampleSpec]) -> _Batch:
        params = [s.params for s in specs]
        # A row that is greedy by top_k=1 has log-probabilities with its temperature; temperature 0 counts as 1.
        scales = 1.0 / np.array([p.temperature or 1.0 for p in params], dtype=np.float32)
        greedy = np.array([p.is_greedy for p in params], dtype=bool)
        rows = [i for i, s in enumerate(specs) if s.special]
        self._penalties.set_batch([specs[i] for i in rows])
        self._masks.set_batch([specs[i] for i in rows])
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
        places = {
            "raw": [place for place, s in enumerate(own) if s.logprobs_mode == "raw"],
            "filtered": [place for place, s in enumerate(own) if s.logprobs_mode == "sampling" and s.filtered],
            "greedy": [place for place, s in enumerate(own) if s.logprobs_mode == "sampling" and not s.filtered],
        }
        masked = {place: s.sampling_mask_num for place, s in enumerate(own) if s.sampling_mask_num}
        modes = {name: self._tensor(np.array(of, dtype=np.int64)) if of else None for name, of in places.items()}
        return _Special(
            rows=rows,
            index=self._tensor(np.array(rows, dtype=np.int64)),
            scales=self._tensor(scales[rows]),
            greedy=self._tensor(greedy[rows]),
            ones=torch.ones(len(rows), device=self._device),
            filters=Filters(own, self._vocab_size, self._device) if any(s.filtered for s in own) else None,
            modes=_Modes(**modes) if any(places.values()) else None,
            raw_rows=self._tensor(np.array([rows[p] for p in raw], dtype=np.int64)) if (raw := places["raw"]) else None,
            top=(self._tensor(np.array(list(top), dtype=np.int64)), list(top.values())) if top else None,
            top_rows=[rows[place] for place in top],
            requested=RequestedTokens(list(requested.items()), self._device) if requested else None,
            requested_rows=[rows[place] for place in requested],
            masks=(self._tensor(np.array(list(masked), dtype=np.int64)), list(masked.values())) if masked else None,
            mask_rows=[rows[place] for place in masked],
        )

    def _tensor(self, values: npt.NDArray[np.generic]) -> Tensor:
        return to_device(values, self._device)


def _sampling_masks(special: _Special, drawn: Tensor, ids: Tensor) -> SamplingMasks:
    """Return the tokens that the rows `special.masks` could draw. A greedy row can draw the token that it took."""
    assert special.masks is not None
    rows, nums = special.masks
    logits, taken = drawn.index_select(0, rows), ids.index_select(0, rows).unsqueeze(1)
    others = torch.ones_like(logits, dtype=torch.bool).scatter_(1, taken, False)
    others &= special.greedy.index_select(0, rows).unsqueeze(1)
    return SamplingMasks(LogSoftmax(logits.masked_fill_(others, -torch.inf)), nums)

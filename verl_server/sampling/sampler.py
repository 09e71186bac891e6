"""`Sampler`: from logits to next tokens and log-probabilities, for a mixed batch, without waiting for the device.

The sampler runs on rank 0. The order of operations is SGLang's. First, a token that a grammar, `min_new_tokens` or a
mask (`Masks`) forbids gets the logit -inf. No later operation changes this logit. Then follow repetition penalty
(prompt and output tokens), frequency and presence penalty (output tokens), `logit_bias` and the temperature. Then
top-k, top-p (cumulated over the unfiltered distribution) and min-p (relative to the largest probability) each filter
the same distribution.

Log-probabilities of output tokens are the fp32 log-softmax of the logits that `SamplingParams.logprobs_mode` chooses:
"default", the logits after the temperature and before the filters; "raw", the model's logits; "sampling", the logits
after the filters, and for a greedy row the sampled token alone. The default is over the allowed vocabulary, because
grammars, masks and `min_new_tokens` count. Temperature 0 counts as 1. Log-probabilities of prompt tokens
(`logprobs.PromptCandidates`) are always raw.


If the reported log-probability is not the policy's (`SampleSpec.adds_policy`), the policy's log-probability is reported
in addition: the fp32 log-softmax of the model's logits / temperature, which a trainer computes, too. If a mask may
leave a single token, the result reports whether it did: such a token says nothing about the policy. Both are computed
on the device from a copy of the model's logits of these rows. Other rows need no extra work.

A draw (`kernels.draw`) is a function of the request's seed, the position of the token and the distribution. It does not
depend on the other rows of the batch or on earlier steps.

A row whose logits contain NaN or +inf gets a valid token id and log-probability NaN. A row in which no token is allowed
gets NaN or `spec.NOTHING_ALLOWED`. The scheduler ends such requests. Minus infinity is reported as the lowest finite
fp32 number.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from verl_server.kernels import draw, token_mask
from verl_server.kernels.device_arrays import Ints, to_device
from verl_server.messages.packed import TokenLogprobs
from verl_server.sampling.distribution import Distribution, PointMass, SamplingOps
from verl_server.sampling.filters import Filters
from verl_server.sampling.logprobs import (
    Candidates,
    RequestedCandidates,
    RequestedTokens,
    SamplingMasks,
    TopCandidates,
    to_host,
)
from verl_server.sampling.masks import Masks
from verl_server.sampling.penalties import Penalties
from verl_server.sampling.spec import ForwardOutput, SampleSpec, TokenMasks

Kind = Literal["default", "raw", "filtered", "sampled"]
"""The distribution whose log-probabilities are reported. "filtered" and "sampled" are mode "sampling", of rows that are
drawn and of greedy rows."""


@dataclass
class Sampled:
    """The result of `Sampler.launch`, which may still be computed by the device."""

    ids: Tensor
    """int64 [n] token ids on the device, from which the next step can read its inputs."""
    host_ids: Tensor
    """Copy of `ids` on the host, valid once the step is done."""
    host_logprobs: Tensor
    """fp32 [n] log-probabilities of `ids` on the host, valid once the step is done."""
    more: _More | None = None
    edited: _EditedValues | None = None

    def read(self) -> ForwardOutput:
        """Return the result as Python lists. Call it after the device has done the work that `launch` submitted."""
        ids, logprobs, more = self.host_ids.tolist(), self.host_logprobs.tolist(), self.more or _More()
        n = len(ids)
        output = ForwardOutput(ids, logprobs, _by_row(more.top, n), _by_row(more.requested, n))
        for rows, candidates in more.masks:
            output.sampling_masks.update(zip(rows, candidates.read(), strict=True))
        if self.edited is not None:
            self.edited.read(output)
        return output


_Rows = tuple[list[int], Candidates]
"""(indices of rows in the batch, one result for each of them)."""


@dataclass
class _More:
    """The results that rows requested besides the log-probability of their token."""

    top: list[_Rows] = field(default_factory=list)
    """The most likely tokens."""
    requested: list[_Rows] = field(default_factory=list)
    """The log-probabilities of requested token ids."""
    masks: list[_Rows] = field(default_factory=list)
    """The tokens that could be drawn."""


@dataclass
class _EditedValues:
    """Reported values of rows whose logits were edited. Tensors are on the host, valid once the step is done."""

    rows: list[int]
    policy_logprobs: Tensor
    """fp32 [len(rows)]"""
    counted_rows: list[int]
    has_choice: Tensor
    """bool [len(counted_rows)]"""

    def read(self, output: ForwardOutput) -> None:
        """Fill in `output`. Call it after the step is done."""
        output.policy_logprobs.update(zip(self.rows, self.policy_logprobs.tolist(), strict=True))
        output.has_choice.update(zip(self.counted_rows, self.has_choice.tolist(), strict=True))


def _by_row(parts: list[_Rows], n: int) -> list[TokenLogprobs | None]:
    """Return one element for each of `n` rows; None for rows that requested nothing."""
    result: list[TokenLogprobs | None] = [None] * n
    for rows, candidates in parts:
        for row, found in zip(rows, candidates.read(), strict=True):
            result[row] = found
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
    edited: _Edited | None


@dataclass
class _Edited:
    """The rows of the batch with `SampleSpec.adds_policy`, and those with `SampleSpec.counts_choice`."""

    rows: list[int]
    index: Tensor
    """`rows` on the device."""
    scales: Tensor
    """fp32 [len(rows)]: 1 / temperature."""
    counted_rows: list[int]
    counted: Tensor
    """`counted_rows` on the device."""


@dataclass
class _Special:
    """The m rows that need more than a temperature and a draw."""

    rows: list[int]
    """Indices in the batch."""
    index: Tensor | None
    """`rows` on the device, None for all rows of the batch."""
    scales: Tensor
    """fp32 [m]: 1 / temperature."""
    greedy: Tensor
    """bool [m]"""
    penalized: bool
    """True if `Penalties` changes logits."""
    filters: Filters | None
    raw_rows: Tensor | None
    """The rows of the batch whose log-probabilities are those of the model's logits."""
    reports: list[_Report]
    masks: list[_Masked]


@dataclass
class _Report:
    """The special rows whose log-probabilities are of the same kind, and what they request besides the token's."""

    kind: Kind
    places: Tensor | None
    """int64 indices of the rows among the special ones, None for all of them."""
    top_rows: list[int]
    """The rows of the batch that request their most likely tokens."""
    top_places: Tensor | None
    """Indices of these rows in the report, None for all of its rows."""
    top_nums: list[int]
    requested_rows: list[int]
    """The rows of the batch that request token ids."""
    requested: RequestedTokens | None


@dataclass
class _Masked:
    """Special rows that request all tokens that could be drawn. A group has only drawn rows, or only greedy rows."""

    kind: Kind
    places: Tensor
    rows: list[int]
    nums: list[int]
    """The most tokens of each row."""


class Sampler:
    """Samples a batch. Keeps the parameter tensors of the last batch, and uses them again if the rows are the same."""

    def __init__(self, vocab_size: int, device: torch.device, ops: SamplingOps | None = None) -> None:
        """`ops` has PyTorch's functions by default, or kernels with the same results."""
        self._vocab_size, self._device, self.ops = vocab_size, device, ops or SamplingOps()
        self._penalties = Penalties(vocab_size, device, self.ops.penalize)
        self._masks = Masks(vocab_size, device)
        self._batch: _Batch | None = None

    def forget(self) -> None:
        """Drop the state of the last batch, because a failed launch may have updated only a part of it."""
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
        special, edited = batch.special, batch.edited
        unedited = None if edited is None else logits.index_select(0, edited.index)
        raw = None if special is None or special.raw_rows is None else logits.index_select(0, special.raw_rows)
        if masks is not None:
            rows = self._tensor(np.array(masks.rows, dtype=np.int64))
            token_mask.apply(logits, rows, masks.words.to(self._device, non_blocking=True))
        keys = to_device(draw.row_keys(batch.mixed_seeds, positions), self._device)
        more, has_choice = None, None
        if special is not None:
            self._masks.apply(logits, positions)
        if edited is not None:  # now, because penalties and filters may overwrite the logits
            allowed = logits.index_select(0, edited.counted) > -torch.inf
            has_choice = allowed.sum(-1) > 1
        if special is None:
            ids, logprobs = self.ops.choose(logits, batch.scales, batch.greedy, keys)
        elif special.index is None:
            ids, logprobs, more = self._sample_special(logits, raw, special, positions, keys)
        else:
            # The special rows are drawn with all others first, then again with their parameters.
            ids, logprobs = self.ops.choose(logits, batch.scales, batch.greedy, keys)
            own_keys = keys.index_select(0, special.index)
            own_ids, own_logprobs, more = self._sample_special(logits, raw, special, positions[special.rows], own_keys)
            ids.index_copy_(0, special.index, own_ids)
            logprobs.index_copy_(0, special.index, own_logprobs)
        values = None
        if edited is not None and unedited is not None and has_choice is not None:
            policy = self.ops.distribution(unedited, None, edited.scales)
            policy_logprobs = policy.of(ids.index_select(0, edited.index).unsqueeze(1)).squeeze(1)
            values = _EditedValues(edited.rows, to_host(policy_logprobs), edited.counted_rows, to_host(has_choice))
        return Sampled(ids, to_host(ids), to_host(logprobs), more, values)

    def _sample_special(
        self, logits: Tensor, raw: Tensor | None, special: _Special, positions: Ints, keys: Tensor
    ) -> tuple[Tensor, Tensor, _More]:
        """Sample the special rows of `logits` [n, vocab]. `raw` are the model's logits of the raw rows.

        Return (ids [m], their log-probabilities [m], what else the rows requested).
        """
        index = special.index
        if special.penalized:
            logits, index = self._penalties.apply(logits, index, positions), None
        default = self.ops.distribution(logits, index, special.scales)
        drawn = default if special.filters is None else default.filtered(special.filters)
        ids, logprobs = drawn.draw(special.greedy, keys)
        more = _More()
        rows_of: dict[Kind, Distribution] = {"default": default, "filtered": drawn, "sampled": PointMass(ids)}
        for report in special.reports:
            if report.kind == "raw":
                assert raw is not None
                rows: Distribution = self.ops.distribution(raw, None, torch.ones(len(raw), device=raw.device))
            else:
                rows = rows_of[report.kind] if report.places is None else rows_of[report.kind].select(report.places)
            if report.kind != "default":
                own = ids if report.places is None else ids.index_select(0, report.places)
                values = rows.of(own.unsqueeze(1)).squeeze(1)
                values = values if report.places is None else logprobs.index_copy(0, report.places, values)
                logprobs = default.or_flags(values)
            if report.top_nums:
                top = rows if report.top_places is None else rows.select(report.top_places)
                more.top.append((report.top_rows, TopCandidates(top, report.top_nums, self._vocab_size)))
            if report.requested is not None:
                more.requested.append((report.requested_rows, RequestedCandidates(rows, report.requested)))
        for masked in special.masks:
            possible = SamplingMasks(rows_of[masked.kind].select(masked.places), masked.nums, self._vocab_size)
            more.masks.append((masked.rows, possible))
        self._penalties.sampled(ids)
        return ids, logprobs, more

    # -- preparation when the rows of the batch change -----------------------------------------------------------

    def _prepare(self, specs: list[SampleSpec]) -> _Batch:
        params = [s.params for s in specs]
        # A row that is greedy by top_k=1 has log-probabilities with its temperature; temperature 0 counts as 1.
        scales = 1.0 / np.array([p.temperature or 1.0 for p in params], dtype=np.float32)
        greedy = np.array([p.is_greedy for p in params], dtype=bool)
        rows = [i for i, s in enumerate(specs) if s.special]
        self._masks.set_batch(specs)
        penalized = self._penalties.set_batch([specs[i] for i in rows])
        return _Batch(
            specs,
            self._tensor(scales),
            self._tensor(greedy),
            draw.mix(np.array([s.seed for s in specs], dtype=np.int64)),
            self._prepare_special(specs, rows, scales, greedy, penalized) if rows else None,
            self._prepare_edited(specs, scales),
        )

    def _prepare_edited(self, specs: list[SampleSpec], scales: npt.NDArray[np.float32]) -> _Edited | None:
        rows = [i for i, s in enumerate(specs) if s.adds_policy]
        if not rows:
            return None
        counted = [i for i, s in enumerate(specs) if s.counts_choice]
        return _Edited(rows, self._indices(rows), self._tensor(scales[rows]), counted, self._indices(counted))

    def _prepare_special(
        self,
        specs: list[SampleSpec],
        rows: list[int],
        scales: npt.NDArray[np.float32],
        greedy: npt.NDArray[np.bool_],
        penalized: bool,
    ) -> _Special:
        own = [specs[i] for i in rows]
        kinds = [_kind(s) for s in own]
        raw = [row for row, kind in zip(rows, kinds, strict=True) if kind == "raw"]
        masked: dict[Kind, list[int]] = {
            "filtered": [i for i, s in enumerate(own) if s.sampling_mask_num and not s.params.is_greedy],
            "sampled": [i for i, s in enumerate(own) if s.sampling_mask_num and s.params.is_greedy],
        }
        return _Special(
            rows=rows,
            index=None if len(rows) == len(specs) else self._indices(rows),
            scales=self._tensor(scales[rows]),
            greedy=self._tensor(greedy[rows]),
            penalized=penalized,
            filters=Filters.of(own, self._vocab_size, self._device) if any(s.filtered for s in own) else None,
            raw_rows=self._indices(raw) if raw else None,
            reports=[self._prepare_report(kind, kinds, own, rows) for kind in sorted(set(kinds))],
            masks=[self._prepare_masked(kind, places, own, rows) for kind, places in masked.items() if places],
        )

    def _prepare_report(self, kind: Kind, kinds: list[Kind], specs: list[SampleSpec], rows: list[int]) -> _Report:
        """`kinds`, `specs` and `rows` are those of the special rows."""
        places = [i for i, k in enumerate(kinds) if k == kind]
        own = [specs[i] for i in places]
        top = [i for i, s in enumerate(own) if s.top_logprobs_num]
        requested = [(i, s.token_ids_logprob) for i, s in enumerate(own) if s.token_ids_logprob is not None]
        return _Report(
            kind,
            None if len(places) == len(specs) else self._indices(places),
            top_rows=[rows[places[i]] for i in top],
            top_places=None if len(top) == len(own) else self._indices(top),
            top_nums=[own[i].top_logprobs_num for i in top],
            requested_rows=[rows[places[i]] for i, _ in requested],
            requested=RequestedTokens(requested, self._device) if requested else None,
        )

    def _prepare_masked(self, kind: Kind, places: list[int], specs: list[SampleSpec], rows: list[int]) -> _Masked:
        """`places` are indices of the special rows, whose `specs` and `rows` these are."""
        nums = [specs[i].sampling_mask_num for i in places]
        return _Masked(kind, self._indices(places), [rows[i] for i in places], nums)

    def _indices(self, values: list[int]) -> Tensor:
        return self._tensor(np.array(values, dtype=np.int64))

    def _tensor(self, values: npt.NDArray[np.generic]) -> Tensor:
        return to_device(values, self._device)


def _kind(spec: SampleSpec) -> Kind:
    if spec.logprobs_mode != "sampling":
        return spec.logprobs_mode
    return "filtered" if spec.filtered else "sampled"

"""`Sampler`: logits to next tokens and log-probabilities, for a mixed batch, on rank 0.

Log-probabilities of output tokens are `logits - logsumexp(logits)` in fp32, where `logits` are
(model logits + penalties + bias) / temperature over the full vocabulary, before top-k, top-p and min-p;
temperature 0 counts as 1. Stop tokens masked by `min_new_tokens` count as penalties. Those of prompt tokens
(`prompt_logprobs`) are of the model's raw logits.

Order of operations, as in SGLang: repetition penalty (prompt and output tokens), frequency and presence
penalty (output tokens), `logit_bias`, `min_new_tokens`, temperature; then top-k, top-p (cumulated over the
unfiltered distribution) and min-p (relative to the largest probability) each cut on their own.

A draw inverts the cumulative distribution (fp64) at one uniform number per request: from the generator, or,
for a seeded request, from a hash of (seed, position), so that it does not depend on the batch around it.

Rows whose logits hold NaN or +inf, or nothing finite, get some valid token id and log-probability NaN: the
scheduler finishes such a request. Minus infinity is reported as the lowest finite fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from verl_server.io_struct import PromptLogprobs, TokenLogprobs
from verl_server.models.attention import to_device
from verl_server.runtime.forward_batch import ForwardOutput, SampleSpec
from verl_server.runtime.penalties import Penalties

_LOWEST = torch.finfo(torch.float32).min


@dataclass
class _BatchParams:
    """Parameter tensors of one batch composition; None where nobody asked, so that the work is skipped."""

    temperatures: Tensor | None
    """[n, 1]; 1 for greedy rows."""
    greedy: Tensor | None
    """[n] bool; None if no row is greedy."""
    all_greedy: bool
    min_p: Tensor | None
    filtered: _Filter | None
    seeded: list[int]
    seeds: np.ndarray[tuple[int], np.dtype[np.uint64]]


@dataclass
class _Filter:
    """The rows with top-k or top-p; these are drawn in order of probability."""

    rows: Tensor
    top_k: Tensor
    top_p: Tensor
    width: int
    """Largest top_k: how many candidates have to be sorted."""


@dataclass
class Sampled:
    """What a launch gave."""

    ids: Tensor
    """int64 [n] on the device."""
    output: ForwardOutput

    def read(self) -> ForwardOutput:
        return self.output


class Sampler:
    """Holds the parameter tensors of the last batch while its composition does not change."""

    def __init__(self, vocab_size: int, device: torch.device, random_seed: int) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._generator = torch.Generator().manual_seed(random_seed)
        self._specs: list[SampleSpec] = []
        self._params: _BatchParams | None = None
        self._penalties = Penalties(vocab_size, device)

    def launch(
        self, logits: Tensor, specs: list[SampleSpec], positions: np.ndarray[tuple[int], np.dtype[np.int64]]
    ) -> Sampled:
        output = self(logits.float(), specs)
        return Sampled(torch.tensor(output.next_ids, device=self._device), output)

    def __call__(self, logits: Tensor, specs: list[SampleSpec]) -> ForwardOutput:
        """`logits` [n, vocab_size] fp32, one row for each of `specs`; they are overwritten."""
        params = self._batch_params(specs)
        self._penalties.apply(logits)
        if params.temperatures is not None:
            logits.div_(params.temperatures)
        norm = logits.logsumexp(-1, keepdim=True)
        logprobs = logits.sub_(norm)
        next_ids = self._choose(logprobs, params, specs)
        chosen = logprobs.gather(1, next_ids.unsqueeze(1)).clamp_(min=_LOWEST)
        chosen = torch.where(norm.isfinite(), chosen, torch.nan).squeeze(1)
        # One transfer: fp64 holds ids exactly.
        ids, values = torch.stack([next_ids.double(), chosen.double()]).tolist()
        top = top_logprobs(logprobs, [s.top_logprobs_num for s in specs])
        requested = _requested_logprobs(logprobs, specs)
        return ForwardOutput([int(i) for i in ids], values, top, requested)

    def _choose(self, logprobs: Tensor, params: _BatchParams, specs: list[SampleSpec]) -> Tensor:
        greedy_ids = logprobs.argmax(-1) if params.greedy is not None else None
        if params.all_greedy:
            assert greedy_ids is not None
            return greedy_ids
        uniforms = to_device(self._uniforms(params, specs), self._device).unsqueeze(1)
        weights = logprobs.exp()
        if params.min_p is not None:
            weights.masked_fill_(weights < params.min_p * weights.amax(-1, keepdim=True), 0.0)
        ids = _invert_cdf(weights, uniforms)
        if params.filtered is not None:
            rows = params.filtered.rows
            ids[rows] = _draw_filtered(weights[rows], logprobs[rows], uniforms[rows], params.filtered)
        if params.greedy is None or greedy_ids is None:
            return ids
        return torch.where(params.greedy, greedy_ids, ids)

    def _uniforms(self, params: _BatchParams, specs: list[SampleSpec]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        """One number in [0, 1) per row."""
        uniforms = torch.rand(len(specs), generator=self._generator, dtype=torch.float64).numpy()
        if params.seeded:
            positions = [len(specs[i].prompt_ids) + len(specs[i].output_ids) for i in params.seeded]
            uniforms[params.seeded] = seeded_uniforms(params.seeds, np.array(positions, dtype=np.uint64))
        return uniforms

    def _batch_params(self, specs: list[SampleSpec]) -> _BatchParams:
        same = len(specs) == len(self._specs) and all(a is b for a, b in zip(specs, self._specs, strict=True))
        if self._params is None or not same:
            self._specs = list(specs)
            self._penalties.set_batch(specs)
            self._params = self._build_params(specs)
        return self._params

    def _build_params(self, specs: list[SampleSpec]) -> _BatchParams:
        params = [s.params for s in specs]
        greedy = np.array([p.is_greedy for p in params])
        # Greedy by top_k=1 keeps its temperature for the log-probabilities; temperature 0 counts as 1.
        temperatures = np.array([p.temperature or 1.0 for p in params], dtype=np.float32)
        min_p = np.array([p.min_p for p in params], dtype=np.float32)
        seeded = [i for i, s in enumerate(specs) if s.seed is not None and not greedy[i]]
        seeds = np.array([(s.seed or 0) & (2**64 - 1) for s in specs], dtype=np.uint64)[seeded]
        return _BatchParams(
            temperatures=self._column(temperatures) if (temperatures != 1.0).any() else None,
            greedy=to_device(greedy, self._device) if greedy.any() else None,
            all_greedy=bool(greedy.all()),
            min_p=self._column(min_p) if min_p[~greedy].any() else None,
            filtered=self._build_filter(specs),
            seeded=seeded,
            seeds=seeds,
        )

    def _build_filter(self, specs: list[SampleSpec]) -> _Filter | None:
        rows = [
            i
            for i, s in enumerate(specs)
            if not s.params.is_greedy and (s.params.top_p < 1.0 or s.params.top_k < self._vocab_size)
        ]
        if not rows:
            return None
        top_k = np.array([min(specs[i].params.top_k, self._vocab_size) for i in rows], dtype=np.int64)
        top_p = np.array([specs[i].params.top_p for i in rows], dtype=np.float64)
        return _Filter(
            to_device(np.array(rows), self._device), self._column(top_k), self._column(top_p), int(top_k.max())
        )

    def _column(self, values: np.ndarray[tuple[int], np.dtype[np.generic]]) -> Tensor:
        return to_device(values, self._device).unsqueeze(1)


def _invert_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The first index whose cumulated weight exceeds uniform * total; never one of weight 0."""
    cdf = weights.cumsum(-1, dtype=torch.float64)
    # A uniform that rounds up to the total would fall behind the last weight: step back below it.
    target = torch.minimum(uniforms * cdf[:, -1:], torch.nextafter(cdf[:, -1:], torch.zeros_like(cdf[:, -1:])))
    return torch.searchsorted(cdf, target, right=True).squeeze(1).clamp_(max=weights.shape[1] - 1)


def _draw_filtered(weights: Tensor, logprobs: Tensor, uniforms: Tensor, filtered: _Filter) -> Tensor:
    """Draw among each row's top-k / top-p candidates. `weights` has min-p applied already."""
    if filtered.width < logprobs.shape[1]:
        values, order = logprobs.topk(filtered.width, dim=-1)
    else:
        values, order = logprobs.sort(dim=-1, descending=True, stable=True)
    before = values.double().exp().cumsum(-1)
    before = torch.cat([torch.zeros_like(before[:, :1]), before[:, :-1]], dim=-1)
    ranks = torch.arange(values.shape[1], device=values.device)
    cut = (ranks >= filtered.top_k) | (before >= filtered.top_p)
    cut[:, 0] = False  # the most likely token always stays
    kept = weights.gather(1, order).masked_fill_(cut, 0.0)
    return order.gather(1, _invert_cdf(kept, uniforms).unsqueeze(1)).squeeze(1)


def seeded_uniforms(
    seeds: np.ndarray[tuple[int], np.dtype[np.uint64]], positions: np.ndarray[tuple[int], np.dtype[np.uint64]]
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Uniforms in [0, 1) as a function of (seed, position): two rounds of the splitmix64 mixer."""
    with np.errstate(over="ignore"):
        state = _mix(seeds) + positions * np.uint64(0x9E3779B97F4A7C15)
        return (_mix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray[tuple[int], np.dtype[np.uint64]] = x ^ (x >> np.uint64(31))
    return mixed


def top_logprobs(logprobs: Tensor, nums: list[int]) -> list[TokenLogprobs | None]:
    """The `nums[i]` most likely candidates of row i, most likely first; None where 0."""
    result: list[TokenLogprobs | None] = [None] * len(nums)
    rows = [i for i, num in enumerate(nums) if num]
    if rows:
        width = min(max(nums), logprobs.shape[1])
        part = logprobs if len(rows) == len(nums) else logprobs[rows]
        values, ids = part.topk(width, dim=-1)
        for i, row_values, row_ids in zip(rows, values.clamp_(min=_LOWEST).tolist(), ids.tolist(), strict=True):
            result[i] = TokenLogprobs(row_values[: nums[i]], row_ids[: nums[i]])
    return result


def _requested_logprobs(logprobs: Tensor, specs: list[SampleSpec]) -> list[TokenLogprobs | None]:
    """Log-probabilities of the token ids each request named, in its order; one gather for all rows."""
    result: list[TokenLogprobs | None] = [None] * len(specs)
    asked = [(i, s.token_ids_logprob) for i, s in enumerate(specs) if s.token_ids_logprob is not None]
    if asked:
        rows = [i for i, ids in asked for _ in ids]
        columns = [column for _, ids in asked for column in ids]
        values = logprobs[rows, columns].clamp_(min=_LOWEST).tolist()
        for i, ids in asked:
            result[i] = TokenLogprobs(values[: len(ids)], list(ids))
            values = values[len(ids) :]
    return result


def prompt_logprobs(
    part: PromptLogprobs, logits: Tensor, targets: list[int], top_num: int, requested: list[int] | None
) -> None:
    """Append to `part` the log-probabilities of `targets` under raw `logits` [len(targets), vocab_size]."""
    logits = logits.float()
    logprobs = logits.sub_(logits.logsumexp(-1, keepdim=True))
    ids = to_device(np.array(targets, dtype=np.int64), logits.device).unsqueeze(1)
    part.logprobs += logprobs.gather(1, ids).squeeze(1).tolist()
    if part.top is not None:
        part.top += top_logprobs(logprobs, [top_num] * len(targets))
    if part.requested is not None and requested is not None:
        values = logprobs[:, requested].clamp_(min=_LOWEST).tolist()
        part.requested += [TokenLogprobs(row, list(requested)) for row in values]

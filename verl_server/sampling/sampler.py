"""`Sampler`: logits to next tokens and log-probabilities, for a mixed batch, on rank 0, without waiting for the device.

Log-probabilities of output tokens are `logits - logsumexp(logits)` in fp32, where `logits` are
(model logits + penalties + bias) / temperature over the full vocabulary, before top-k, top-p and min-p;
temperature 0 counts as 1. Stop tokens masked by `min_new_tokens` count as penalties. Those of prompt tokens
(`candidates.PromptCandidates`) are of the model's raw logits.

Order of operations, as in SGLang: repetition penalty (prompt and output tokens), frequency and presence
penalty (output tokens), `logit_bias`, `min_new_tokens`, temperature; then top-k, top-p (cumulated over the
unfiltered distribution) and min-p (relative to the largest probability) each cut on their own.

A draw (`draw`) is a function of the request's seed, the position of the token and the distribution: the batch
around it, and what ran before, do not matter.

Rows whose logits hold NaN or +inf, or nothing finite, get some valid token id and log-probability NaN: the
scheduler finishes such a request. Minus infinity is reported as the lowest finite fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from verl_server.io_struct import TokenLogprobs
from verl_server.kernels import draw
from verl_server.kernels.device_arrays import Ints, to_device
from verl_server.sampling.filters import Filters
from verl_server.sampling.logprobs import Candidates, NamedCandidates, NamedTokens, TopCandidates, to_host
from verl_server.sampling.penalties import Penalties
from verl_server.sampling.spec import ForwardOutput, SampleSpec


@dataclass
class Sampled:
    """What a launch gives."""

    ids: Tensor
    """int64 [n] on the device: the next step may take its inputs from here."""
    host_ids: Tensor
    host_logprobs: Tensor
    top: tuple[list[int], Candidates] | None = None
    """The rows that asked, and theirs."""
    named: tuple[list[int], Candidates] | None = None

    def read(self) -> ForwardOutput:
        """Python lists, once the device has done what was submitted before `launch` returned."""
        top, named = (self._spread(asked) for asked in (self.top, self.named))
        return ForwardOutput(self.host_ids.tolist(), self.host_logprobs.tolist(), top, named)

    def _spread(self, asked: tuple[list[int], Candidates] | None) -> list[TokenLogprobs | None]:
        result: list[TokenLogprobs | None] = [None] * len(self.host_ids)
        if asked is not None:
            for row, candidates in zip(asked[0], asked[1].read(), strict=True):
                result[row] = candidates
        return result


@dataclass
class _Batch:
    """Parameters of one batch composition."""

    specs: list[SampleSpec]
    scales: Tensor
    """fp32 [n], 1 / temperature."""
    greedy: Tensor
    """bool [n]."""
    mixed_seeds: Ints
    special: _Special | None


@dataclass
class _Special:
    """The rows that take more than a temperature and a draw. Their logits are edited apart, in fp32."""

    rows: list[int]
    index: Tensor
    """`rows` on the device."""
    scales: Tensor
    greedy: Tensor
    ones: Tensor
    """The scales of logits that are scaled already."""
    filters: Filters | None
    top: tuple[Tensor, list[int]] | None
    """Places in `rows` of those that ask for the most likely tokens, and how many each."""
    top_rows: list[int]
    named: NamedTokens | None
    """By places in `rows`."""
    named_rows: list[int]


class Sampler:
    """Holds the parameter tensors of the last batch while its composition does not change."""

    def __init__(self, vocab_size: int, device: torch.device, choose: draw.Choose = draw.choose) -> None:
        """`choose`: `draw.choose`, or a kernel that does the same."""
        self._vocab_size, self._device, self._choose = vocab_size, device, choose
        self._penalties = Penalties(vocab_size, device)
        self._batch: _Batch | None = None

    def forget(self) -> None:
        """Hold nothing of the last batch: a launch that failed may have left it half updated."""
        self._batch = None
        self._penalties.forget()

    def launch(self, logits: Tensor, specs: list[SampleSpec], positions: Ints) -> Sampled:
        """`logits` [n, vocab_size] fp32, bf16 or fp16, a row for each of `specs`; they may be overwritten.

        `positions` int64 [n]: the place of each token to be sampled in its sequence, prompt included.
        """
        batch = self._batch
        if batch is None or specs != batch.specs:  # compared by identity
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
            # The special rows are drawn with all others, and then once more as they ask for.
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
        if special.named is not None:
            sampled.named = special.named_rows, NamedCandidates(part, norms, special.named)
        return sampled

    def _edit(self, logits: Tensor, special: _Special, positions: Ints) -> tuple[Tensor, Tensor]:
        """fp32 logits of the special rows with penalties, bias and temperature, and their logsumexp [n, 1]."""
        logits = logits.float().contiguous()
        self._penalties.apply(logits, positions)
        logits.mul_(special.scales.unsqueeze(1))
        return logits, logits.logsumexp(-1, keepdim=True)

    def _choose_special(self, logits: Tensor, norms: Tensor, special: _Special, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Drawn after the filters; log-probabilities from before them."""
        if special.filters is None:
            return self._choose(logits, special.ones, special.greedy, keys)
        ids, _ = self._choose(special.filters(logits, norms), special.ones, special.greedy, keys)
        logprobs = logits.gather(1, ids.unsqueeze(1)).sub_(norms).clamp_(min=draw.LOWEST)
        return ids, logprobs.masked_fill_(~norms.isfinite(), torch.nan).squeeze(1)

    # -- what depends on the composition of the batch only -------------------------------------------------------

    def _prepare(self, specs: list[SampleSpec]) -> _Batch:
        params = [s.params for s in specs]
        # Greedy by top_k=1 keeps its temperature for the log-probabilities; temperature 0 counts as 1.
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
        named = {place: s.token_ids_logprob for place, s in enumerate(own) if s.token_ids_logprob is not None}
        return _Special(
            rows=rows,
            index=self._tensor(np.array(rows, dtype=np.int64)),
            scales=self._tensor(scales[rows]),
            greedy=self._tensor(greedy[rows]),
            ones=torch.ones(len(rows), device=self._device),
            filters=Filters(own, self._vocab_size, self._device) if any(s.filtered for s in own) else None,
            top=(self._tensor(np.array(list(top), dtype=np.int64)), list(top.values())) if top else None,
            top_rows=[rows[place] for place in top],
            named=NamedTokens(list(named.items()), self._device) if named else None,
            named_rows=[rows[place] for place in named],
        )

    def _tensor(self, values: npt.NDArray[np.generic]) -> Tensor:
        return to_device(values, self._device)

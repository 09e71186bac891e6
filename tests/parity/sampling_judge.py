"""Says which tokens and log-probabilities a `MixedRequest` may have, given the logits of a reference model.

The draw is a function of the seed, the position and the distribution. The judge computes the distribution from its
definition, in fp64, one position at a time: from the request's own prompt and output, without a batch or a state that a
retraction could lose. The reference's logits differ from the engine's by rounding. So a token passes if rounding of
`TOLERANCE` can decide for it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tests.parity.mixed_requests import MixedRequest, allowed_by_grammar
from verl_server.kernels import draw
from verl_server.messages.packed import TokenLogprobs

TOLERANCE = 2e-4
"""Tolerance of log-probabilities. Low temperatures and penalties multiply the error of logits, which is below 1e-4."""

Row = npt.NDArray[np.float64]
Candidates = list[tuple[float, int]]
"""(log-probability, token id), in the order of the reply."""


@dataclass
class Found:
    """The contents of a reply."""

    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top: list[Candidates] = field(default_factory=list)
    requested: list[Candidates] = field(default_factory=list)
    masks: list[list[int]] = field(default_factory=list)
    """For each output token the tokens that it was drawn from."""
    finish: dict[str, Any] | None = None
    """`finish_reason`"""
    prompt: list[tuple[float | None, int]] = field(default_factory=list)
    prompt_top: list[Candidates] = field(default_factory=list)
    prompt_requested: list[Candidates] = field(default_factory=list)
    """The lists of the prompt begin with an empty entry for the first token."""

    @classmethod
    def in_reply(cls, reply: dict[str, Any]) -> Found:
        """`reply` is a result of `Engine.generate`."""
        meta = reply["meta_info"]
        assert [entry[1] for entry in meta["output_token_logprobs"]] == reply["output_ids"]

        def candidates(name: str) -> list[Candidates]:
            return [[(entry[0], entry[1]) for entry in position or ()] for position in meta.get(name, ())]

        return cls(
            reply["output_ids"],
            [entry[0] for entry in meta["output_token_logprobs"]],
            candidates("output_top_logprobs"),
            candidates("output_token_ids_logprobs"),
            meta.get("output_token_sampling_mask", []),
            meta["finish_reason"],
            [(entry[0], entry[1]) for entry in meta["input_token_logprobs"]],
            candidates("input_top_logprobs"),
            candidates("input_token_ids_logprobs"),
        )


def unpacked(position: TokenLogprobs | None) -> Candidates:
    return [] if position is None else list(zip(position.logprobs, position.token_ids, strict=True))


class SamplingJudge:
    """Judges one reply, position by position."""

    def __init__(self, request: MixedRequest, found: Found, tolerance: float = TOLERANCE) -> None:
        self._request, self._found, self._tolerance = request, found, tolerance
        self._params = request.sampling
        self._allowed = list(allowed_by_grammar(request, found.output_ids))
        self._words, self._stops = request.bad_words_ids, request.stop_ids
        seed = request.seed if request.seed is not None else self._params.sampling_seed
        first = len(request.prompt)
        n = len(found.output_ids)
        positions = np.arange(first, first + n, dtype=np.int64)
        seeds = np.full(n, seed or 0, dtype=np.int64)
        assert seed is not None or self._params.is_greedy, "the judge must know the seed"
        self._keys = draw.row_keys(draw.mix(seeds), positions)

    # -- the whole reply -----------------------------------------------------------------------------------------

    def check_shape(self) -> None:
        """Assert why the output ended, and that the reply has an entry for each position of what was requested."""
        request, found, n = self._request, self._found, len(self._found.output_ids)
        assert len(found.logprobs) == n
        assert len(found.top) == (n if request.top else 0)
        assert len(found.requested) == (n if request.ids is not None else 0)
        assert len(found.masks) == (n if request.mask else 0)
        if found.prompt or request.start >= 0:
            length = len(request.prompt) - min(request.start, len(request.prompt) - 1)
            told = bool(n) or (found.finish or {}).get("type") != "abort"
            assert len(found.prompt) == (length if told else 0)
            assert len(found.prompt_top) == (len(found.prompt) if request.top else 0)
            assert len(found.prompt_requested) == (len(found.prompt) if request.ids is not None else 0)
        assert not set(found.output_ids[:-1]) & set(self._stops), "the output continues after a stop token"
        finish = found.finish
        assert finish is not None
        if finish["type"] == "abort":
            return
        last = found.output_ids[-1] if n else None
        if last in self._stops or (n and request.grammar and not self._allowed[-1]):
            assert finish["type"] == "stop" and finish["matched"] == last
        else:
            assert finish["type"] == "length" and n == self._params.max_new_tokens, (finish, n)

    def check_prompt(self, logits: torch.Tensor) -> None:
        """Assert the prompt's log-probabilities. `logits` [len(prompt), vocab] follow each token of the prompt."""
        found, request = self._found, self._request
        if not found.prompt:
            return
        start = min(request.start, len(request.prompt) - 1)
        assert [token for _, token in found.prompt] == request.prompt[start:]
        assert found.prompt[0][0] is None
        for i, (logprob, token) in enumerate(found.prompt[1:], start=1):
            row = _log_softmax(logits[start + i - 1].double().numpy())
            assert self._close(logprob, row[token]), f"prompt, {start + i}"
            if request.top:
                assert self._are_top(found.prompt_top[i], row, request.top), f"candidates of the prompt, {start + i}"
            if request.ids is not None:
                assert self._are_requested(found.prompt_requested[i], row), f"ids of the prompt, {start + i}"

    def check_outputs(self, logits: torch.Tensor) -> None:
        """Assert every position. `logits` [len(output_ids), vocab] precede each token of the output."""
        for index, row in enumerate(logits):
            assert self.agrees(index, row), self.explain(index, row)

    # -- one position --------------------------------------------------------------------------------------------

    def agrees(self, index: int, logits: torch.Tensor) -> bool:
        """Return True if everything in the reply about output token `index` agrees with `logits` [vocab]."""
        raw = logits.double().numpy()
        scaled = self._scaled(index, raw)
        if self._params.is_greedy:
            return self._is_greedy(index, scaled) and self._reports_agree(index, raw, scaled, scaled)
        return any(
            self._is_drawn(index, kept) and self._reports_agree(index, raw, scaled, kept)
            for kept in self._filtered(scaled)
        )

    def explain(self, index: int, logits: torch.Tensor) -> str:
        raw = logits.double().numpy()
        scaled = self._scaled(index, raw)
        token, found = self._found.output_ids[index], self._found
        default = _log_softmax(scaled)
        variants = [
            f"{np.isfinite(kept).sum()} kept, drawn: {self._is_drawn(index, kept)}, "
            f"reports: {self._reports_agree(index, raw, scaled, kept)}"
            for kept in self._filtered(scaled)
        ]
        return (
            f"output token {index} of {len(found.output_ids)}: {token} with {found.logprobs[index]}; "
            f"the judge's log-probability is {default[token]}, the most likely token {int(default.argmax())} with "
            f"{default.max()}. {variants}. {self._params}"
        )

    def _scaled(self, index: int, raw: Row) -> Row:
        """Return the logits after masks, penalties, bias and temperature."""
        p, output = self._params, self._found.output_ids[:index]
        logits = raw.copy()
        forbidden = np.zeros(len(raw), dtype=bool)
        if (allowed := self._allowed[index]) is not None:
            forbidden[list(set(range(len(raw))) - allowed)] = True
        if p.allowed_token_ids is not None:
            forbidden[list(set(range(len(raw))) - set(p.allowed_token_ids))] = True
        for word in self._words:
            if output[len(output) - len(word) + 1 :] == word[:-1]:
                forbidden[word[-1]] = True
        if index < p.min_new_tokens:
            forbidden[self._stops] = True
        for token in {*self._request.prompt, *output}:
            logits[token] = (
                logits[token] / p.repetition_penalty if raw[token] > 0 else raw[token] * p.repetition_penalty
            )
        for token in set(output):
            logits[token] -= p.frequency_penalty * output.count(token) + p.presence_penalty
        for key, bias in (p.logit_bias or {}).items():
            logits[int(key)] += bias
        logits[forbidden] = -np.inf
        return logits / (p.temperature or 1.0)

    def _filtered(self, scaled: Row) -> list[Row]:
        """Return the logits that top-k, top-p and min-p keep: once, or more often where rounding decides."""
        p, tolerance = self._params, self._tolerance
        values = np.sort(scaled[np.isfinite(scaled)])[::-1]
        probs = np.exp(values - values[0])
        before = np.concatenate([[0.0], (probs / probs.sum()).cumsum()[:-1]])

        def by(top_p: float, min_p: float) -> int:
            largest = len(values) if p.top_p >= 1 else int((before < top_p).sum())
            likely = len(values) if not p.min_p else int((values >= values[0] + np.log(min_p)).sum())
            return max(1, min(largest, likely, p.top_k))

        counts = {by(p.top_p + d, p.min_p * (1 + e)) for d in (-1e-4, 0.0, 1e-4) for e in (-tolerance, 0.0, tolerance)}
        kept = []
        for count in sorted(counts):
            edge = values[count - 1]
            if count == p.top_k and count < len(values) and edge - values[count] < tolerance:
                kept += self._ties(scaled, edge, count)
            else:
                kept.append(np.where(scaled >= edge, scaled, -np.inf))
        return kept

    def _ties(self, scaled: Row, edge: float, count: int) -> list[Row]:
        """Return the logits that top-k may keep if rounding decides which tokens are its last ones.

        Any of the tokens near `edge` may be left out, or all of them stay, since equal tokens stay together.
        """
        sure = scaled >= edge + self._tolerance
        near = np.flatnonzero(~sure & (scaled > edge - self._tolerance))
        kept = []
        for last in [*itertools.combinations(near, count - int(sure.sum())), tuple(near)]:
            stays = sure.copy()
            stays[list(last)] = True
            kept.append(np.where(stays, scaled, -np.inf))
        return kept

    def _is_greedy(self, index: int, scaled: Row) -> bool:
        return bool(scaled[self._found.output_ids[index]] >= scaled.max() - self._tolerance)

    def _is_drawn(self, index: int, kept: Row) -> bool:
        """Return True if the token has the largest score in both stages of the draw (`kernels.draw`)."""
        token = self._found.output_ids[index]
        if not np.isfinite(kept[token]):
            return False
        key = torch.from_numpy(self._keys[index : index + 1, None])
        blocks = -(-len(kept) // draw.BLOCK)
        noise = draw.gumbel(key, torch.arange(-1, -1 - blocks, -1)).numpy()[0]
        padded = np.concatenate([kept, np.full(blocks * draw.BLOCK - len(kept), -np.inf)]).reshape(blocks, draw.BLOCK)
        with np.errstate(divide="ignore"):
            scores = noise + np.log(np.exp(padded - kept.max()).sum(1))
        block = token // draw.BLOCK
        if scores[block] < scores.max() - 2 * self._tolerance:
            return False
        tokens = np.arange(block * draw.BLOCK, (block + 1) * draw.BLOCK)
        own = draw.gumbel(key, torch.from_numpy(tokens + 1)).numpy()[0] + padded[block]
        return bool(own[token % draw.BLOCK] >= own.max() - 2 * self._tolerance)

    def _reports_agree(self, index: int, raw: Row, scaled: Row, kept: Row) -> bool:
        """Return True if log-probability, candidates and sampling mask are those of the requested distribution."""
        found, token, p = self._found, self._found.output_ids[index], self._params
        point = np.full(len(raw), -np.inf)
        point[token] = 0.0
        if p.logprobs_mode == "sampling":
            row = point if p.is_greedy else _log_softmax(kept)
        else:
            row = _log_softmax(raw if p.logprobs_mode == "raw" else scaled)
        agree = self._close(found.logprobs[index], row[token])
        if self._request.top:
            agree = agree and self._are_top(found.top[index], row, self._request.top)
        if self._request.ids is not None:
            agree = agree and self._are_requested(found.requested[index], row)
        if self._request.mask:
            possible = {token} if p.is_greedy else set(np.flatnonzero(np.isfinite(kept)).tolist())
            agree = agree and set(found.masks[index]) == possible
        return bool(agree)

    def _are_top(self, candidates: Candidates, row: Row, num: int) -> bool:
        best = np.sort(row)[::-1][:num]
        return len(candidates) == min(num, len(row)) and all(
            self._close(logprob, wanted) and self._close(logprob, row[token])
            for (logprob, token), wanted in zip(candidates, best, strict=True)
        )

    def _are_requested(self, candidates: Candidates, row: Row) -> bool:
        return [token for _, token in candidates] == self._request.ids and all(
            self._close(logprob, row[token]) for logprob, token in candidates
        )

    def _close(self, found: float | None, wanted: float) -> bool:
        """Return True for two log-probabilities that are equal up to rounding. Minus infinity is reported as LOWEST."""
        if found is None or not np.isfinite(wanted):
            return found == draw.LOWEST
        # A very negative one is the sum of large numbers.
        return bool(abs(found - wanted) < self._tolerance * max(1.0, abs(wanted) / 20))


def _log_softmax(logits: Row) -> Row:
    top = logits.max()
    return logits - top - np.log(np.exp(logits - top).sum())

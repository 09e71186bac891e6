"""Checks outputs against transformers when their tokens were computed under several versions of the weights.

A reply names the version under which each token was sampled, but not the versions of the KV cache. The judge derives
these from the updates between two tokens. KV was kept (by an update `in_place`, or while generation was paused or held
by a transaction), or computed again (`retract`), or no request survives the update (`wait`, `abort`). Requests are also
retracted for other reasons, such as a pause, or an unfinished prefill that starts again. `num_retractions` counts these
retractions without naming their tokens, so that the judge allows for them at every token.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from transformers import AutoModelForCausalLM, DynamicCache

Weights = dict[str, torch.Tensor]
Fate = Literal["kept", "recomputed", "ended"]
"""The effect of a new version on the KV cache of the requests that run."""
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Version:
    weights: Weights
    fate: Fate


@dataclass
class _Story:
    """A possible content of the KV cache after some tokens."""

    cache: DynamicCache
    retractions: int
    """The number of retractions that lead to this content."""


class TokenJudge(Protocol):
    """Judges the positions of one reply. See `sampling_judge.SamplingJudge`."""

    def agrees(self, index: int, logits: torch.Tensor) -> bool:
        """Return True if output token `index` agrees with `logits` [vocab]."""
        ...

    def explain(self, index: int, logits: torch.Tensor) -> str:
        """Return why output token `index` agrees with `logits` [vocab] or does not."""
        ...

    def check_prompt(self, logits: torch.Tensor) -> None:
        """Assert the prompt's log-probabilities. `logits` [len(prompt), vocab] follow each token of the prompt."""
        ...


class _GreedyJudge:
    """The token is the most likely one, and only log-probabilities of tokens are requested."""

    def __init__(self, prompt: list[int], reply: dict[str, Any], tolerance: float) -> None:
        self._prompt, self._tolerance = prompt, tolerance
        self._found, self._found_prompt = (
            reply["meta_info"].get(name, []) for name in ("output_token_logprobs", "input_token_logprobs")
        )

    def agrees(self, index: int, logits: torch.Tensor) -> bool:
        logprob, token, _ = self._found[index]
        row = logits.log_softmax(-1)
        best = row.topk(2)
        is_best = token == int(best.indices[0]) or float(best.values[0] - best.values[1]) < self._tolerance
        return is_best and abs(logprob - float(row[token])) < self._tolerance

    def explain(self, index: int, logits: torch.Tensor) -> str:
        logprob, token, _ = self._found[index]
        row = logits.log_softmax(-1)
        best = int(row.argmax())
        return (
            f"token {token} with {logprob}, the judge has {float(row[token])}, and {float(row[best])} for token {best}"
        )

    def check_prompt(self, logits: torch.Tensor) -> None:
        logprobs = logits.log_softmax(-1)
        for position, (logprob, token, _) in enumerate(self._found_prompt):
            assert token == self._prompt[position]
            if position:
                assert abs(logprob - float(logprobs[position - 1, token])) < self._tolerance, f"prompt, {position}"


class SpanJudge:
    def __init__(self, folder: Path, tolerance: float = TOLERANCE) -> None:
        self._tolerance = tolerance
        torch.set_num_threads(1)  # with more threads, the tiny products take longer beside other tests
        auto: Any = AutoModelForCausalLM
        self._model = auto.from_pretrained(folder, dtype=torch.float32).eval()
        self._loaded = ""
        self.versions: dict[str, Version] = {}
        """Version by label, in the order in which the versions were served. A label occurs once."""
        self.judged = self.mixed = 0
        """The number of checked tokens, and of replies whose tokens have several versions."""

    @torch.inference_mode()
    def check(self, prompt: list[int], reply: dict[str, Any], judge: TokenJudge | None = None) -> None:
        """Assert what the reply says about each output token, and about the prompt if that was requested.

        `judge` knows what was requested. By default that is greedy sampling, with log-probabilities.
        """
        meta, output = reply["meta_info"], reply["output_ids"]
        judge = judge or _GreedyJudge(prompt, reply, self._tolerance)
        labels = [span["version"] for span in meta["weight_versions"] for _ in range(span["start"], span["end"])]
        assert len(labels) == len(output) == len(meta["output_token_logprobs"])
        assert [logprob[1] for logprob in meta["output_token_logprobs"]] == output
        for before, after in itertools.pairwise(labels):
            assert "ended" not in self._fates(before, after), f"a request lived from {before} to {after}"
        if output and meta.get("input_token_logprobs"):
            judge.check_prompt(self._run(labels[0], prompt, None))
        if len(meta["weight_versions"]) > 1:
            self.mixed += 1
        self._check_spans(meta["weight_versions"], prompt, reply, judge)
        self.judged += len(output)

    def _check_spans(
        self, spans: list[dict[str, Any]], prompt: list[int], reply: dict[str, Any], judge: TokenJudge
    ) -> None:
        tokens = prompt + reply["output_ids"]
        retractions = reply["meta_info"]["num_retractions"]
        stories: list[_Story] = []
        label = ""
        for span in spans:
            before, label = label, span["version"]
            start, end = len(prompt) + span["start"], len(prompt) + span["end"]
            wanted = range(span["start"], span["end"])
            anew = not stories or "recomputed" in self._fates(before, label)
            told, most_kept, spare = [], 0, []
            for story in [] if anew else stories:
                cache = copy.deepcopy(story.cache)
                kept = _leading(self._run(label, tokens[start - 1 : end - 1], cache), wanted, judge)
                if kept == len(wanted):
                    told.append(_Story(cache, story.retractions))
                if story.retractions < retractions:
                    most_kept = max(most_kept, kept)
                    spare.append(story.retractions + 1)
            # Computed again from the first token of the span on, or from a later one that the reply does not name.
            if anew or spare:
                cache = DynamicCache()
                rows = self._run(label, tokens[: end - 1], cache)[start - 1 :]
                trailing = _leading(rows.flip(0), wanted[::-1], judge)
                if trailing == len(wanted) or (not anew and 0 < trailing >= len(wanted) - most_kept):
                    told.append(_Story(cache, min(spare, default=min((s.retractions for s in stories), default=0))))
            assert told, f"wrong tokens in {span} of {spans}, {retractions} retractions; computed " + "; ".join(
                self._explained(label, tokens[: end - 1], wanted, stories, judge)
            )
            stories = told

    def _explained(
        self, label: str, tokens: list[int], wanted: range, stories: list[_Story], judge: TokenJudge
    ) -> Iterator[str]:
        """Yield for each possible content of the KV cache which of the last tokens disagree with it."""
        cases = [(f"with KV kept ({story.retractions} retractions)", copy.deepcopy(story.cache)) for story in stories]
        for name, cache in [*cases, ("anew", DynamicCache())]:
            rows = self._run(label, tokens[cache.get_seq_length() :], cache)[-len(wanted) :]
            wrong = [index for index, row in zip(wanted, rows, strict=True) if not judge.agrees(index, row)]
            first = f", {judge.explain(wrong[0], rows[wrong[0] - wanted[0]])}" if wrong else ""
            yield f"{name}: tokens {wrong} disagree{first}"

    def _fates(self, before: str, after: str) -> set[Fate]:
        """Return the fates of the versions after `before`, up to and including `after`."""
        order = list(self.versions)
        first, last = order.index(before), order.index(after)
        assert first <= last, f"version {after} was served before {before}"
        return {self.versions[label].fate for label in order[first + 1 : last + 1]}

    # -- the model -------------------------------------------------------------------------------------------------

    def _run(self, label: str, tokens: list[int], cache: DynamicCache | None) -> torch.Tensor:
        """Return logits [len(tokens), vocab], and append the tokens to the cache."""
        if self._loaded != label:
            self._model.load_state_dict(self.versions[label].weights)
            self._loaded = label
        logits: torch.Tensor = self._model(
            torch.tensor([tokens]), past_key_values=cache, use_cache=cache is not None
        ).logits[0]
        return logits


def _leading(rows: torch.Tensor, wanted: range, judge: TokenJudge) -> int:
    """Return the number of leading tokens that agree with the model. Row i of the logits is for token `wanted[i]`."""
    for count, (row, index) in enumerate(zip(rows, wanted, strict=True)):
        if not judge.agrees(index, row):
            return count
    return len(wanted)

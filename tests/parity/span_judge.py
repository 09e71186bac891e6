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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

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


class SpanJudge:
    def __init__(self, folder: Path, tolerance: float = TOLERANCE) -> None:
        self._tolerance = tolerance
        auto: Any = AutoModelForCausalLM
        self._model = auto.from_pretrained(folder, dtype=torch.float32).eval()
        self._loaded = ""
        self.versions: dict[str, Version] = {}
        """Version by label, in the order in which the versions were served. A label occurs once."""
        self.judged = self.mixed = 0
        """The number of checked tokens, and of replies whose tokens have several versions."""

    @torch.inference_mode()
    def check(self, prompt: list[int], reply: dict[str, Any]) -> None:
        """Assert greedy ids and log-probabilities of all output tokens, and of the prompt if they were requested."""
        meta, output = reply["meta_info"], reply["output_ids"]
        labels = [span["version"] for span in meta["weight_versions"] for _ in range(span["start"], span["end"])]
        assert len(labels) == len(output) == len(meta["output_token_logprobs"])
        assert [logprob[1] for logprob in meta["output_token_logprobs"]] == output
        for before, after in itertools.pairwise(labels):
            assert "ended" not in self._fates(before, after), f"a request lived from {before} to {after}"
        if output and meta.get("input_token_logprobs"):
            self._check_prompt(labels[0], prompt, meta["input_token_logprobs"])
        if len(meta["weight_versions"]) > 1:
            self.mixed += 1
        self._check_spans(meta["weight_versions"], prompt, reply)
        self.judged += len(output)

    def _check_prompt(self, label: str, prompt: list[int], found: list[Any]) -> None:
        logprobs = self._logprobs(label, prompt)
        for position, (logprob, token, _) in enumerate(found):
            assert token == prompt[position]
            if position:
                assert abs(logprob - float(logprobs[position - 1, token])) < self._tolerance, f"prompt, {position}"

    def _check_spans(self, spans: list[dict[str, Any]], prompt: list[int], reply: dict[str, Any]) -> None:
        tokens = prompt + reply["output_ids"]
        found = [logprob[0] for logprob in reply["meta_info"]["output_token_logprobs"]]
        retractions = reply["meta_info"]["num_retractions"]
        stories: list[_Story] = []
        label = ""
        for span in spans:
            before, label = label, span["version"]
            start, end = len(prompt) + span["start"], len(prompt) + span["end"]
            wanted = list(zip(tokens[start:end], found[span["start"] : span["end"]], strict=True))
            anew = not stories or "recomputed" in self._fates(before, label)
            told, most_kept, spare = [], 0, []
            for story in [] if anew else stories:
                cache = copy.deepcopy(story.cache)
                kept = _leading(self._run(label, tokens[start - 1 : end - 1], cache), wanted, self._tolerance)
                if kept == len(wanted):
                    told.append(_Story(cache, story.retractions))
                if story.retractions < retractions:
                    most_kept = max(most_kept, kept)
                    spare.append(story.retractions + 1)
            # Computed again from the first token of the span on, or from a later one that the reply does not name.
            if anew or spare:
                cache = DynamicCache()
                rows = self._run(label, tokens[: end - 1], cache)[start - 1 :]
                trailing = _leading(rows.flip(0), wanted[::-1], self._tolerance)
                if trailing == len(wanted) or (not anew and 0 < trailing >= len(wanted) - most_kept):
                    told.append(_Story(cache, min(spare, default=min((s.retractions for s in stories), default=0))))
            assert told, f"wrong tokens in {span} of {spans}, {retractions} retractions"
            stories = told

    def _fates(self, before: str, after: str) -> set[Fate]:
        """Return the fates of the versions after `before`, up to and including `after`."""
        order = list(self.versions)
        first, last = order.index(before), order.index(after)
        assert first <= last, f"version {after} was served before {before}"
        return {self.versions[label].fate for label in order[first + 1 : last + 1]}

    # -- the model -------------------------------------------------------------------------------------------------

    def _logprobs(self, label: str, tokens: list[int]) -> torch.Tensor:
        return self._run(label, tokens, None)

    def _run(self, label: str, tokens: list[int], cache: DynamicCache | None) -> torch.Tensor:
        """Return log-probabilities [len(tokens), vocab], and append the tokens to the cache."""
        if self._loaded != label:
            self._model.load_state_dict(self.versions[label].weights)
            self._loaded = label
        logits = self._model(torch.tensor([tokens]), past_key_values=cache, use_cache=cache is not None).logits[0]
        return logits - logits.logsumexp(-1, keepdim=True)


def _leading(rows: torch.Tensor, wanted: list[tuple[int, float]], tolerance: float) -> int:
    """Return the number of leading tokens that agree with the model."""
    agree = [_agrees(row, token, logprob, tolerance) for row, (token, logprob) in zip(rows, wanted, strict=True)]
    return agree.index(False) if False in agree else len(agree)


def _agrees(row: torch.Tensor, token: int, logprob: float, tolerance: float) -> bool:
    best = row.topk(2)
    is_best = token == int(best.indices[0]) or float(best.values[0] - best.values[1]) < tolerance
    return is_best and abs(logprob - float(row[token])) < tolerance

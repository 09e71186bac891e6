"""transformers as the judge of outputs whose tokens were computed under several versions of the weights.

A reply says which version each token was sampled under. Of the KV cache it says nothing, so the judge knows what must
have become of it: between two versions it was kept (an update `in_place`, or while generation was paused or held by a
transaction), or computed anew (`retract`), or nobody could live through the update (`wait`, `abort`). A request that
was retracted for another reason (an unfinished prefill that starts again, a pause) says so by `num_retractions`, but
not when: then the judge allows for it at every token.
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
"""Of requests that ran when a version came."""
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Version:
    weights: Weights
    fate: Fate


@dataclass
class _Story:
    """What the KV cache may hold after some tokens."""

    cache: DynamicCache
    retractions: int
    """That it takes."""


class SpanJudge:
    def __init__(self, folder: Path) -> None:
        auto: Any = AutoModelForCausalLM
        self._model = auto.from_pretrained(folder, dtype=torch.float32).eval()
        self._loaded = ""
        self.versions: dict[str, Version] = {}
        """By label, in the order in which they were served. A label comes once."""
        self.judged = self.mixed = 0
        """Tokens, and replies whose tokens have several versions."""

    @torch.inference_mode()
    def check(self, prompt: list[int], reply: dict[str, Any]) -> None:
        """Greedy ids and log-probabilities of every token, and the prompt's if they were asked for."""
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
                assert abs(logprob - float(logprobs[position - 1, token])) < TOLERANCE, f"prompt, {position}"

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
                kept = _leading(self._run(label, tokens[start - 1 : end - 1], cache), wanted)
                if kept == len(wanted):
                    told.append(_Story(cache, story.retractions))
                if story.retractions < retractions:
                    most_kept = max(most_kept, kept)
                    spare.append(story.retractions + 1)
            if anew or spare:  # from the first token of the span on, or from a later one that nobody tells
                cache = DynamicCache()
                rows = self._run(label, tokens[: end - 1], cache)[start - 1 :]
                trailing = _leading(rows.flip(0), wanted[::-1])
                if trailing == len(wanted) or (not anew and 0 < trailing >= len(wanted) - most_kept):
                    told.append(_Story(cache, min(spare, default=min((s.retractions for s in stories), default=0))))
            assert told, f"wrong tokens in {span} of {spans}, {retractions} retractions"
            stories = told

    def _fates(self, before: str, after: str) -> set[Fate]:
        """Of all versions that came between two tokens."""
        order = list(self.versions)
        first, last = order.index(before), order.index(after)
        assert first <= last, f"version {after} was served before {before}"
        return {self.versions[label].fate for label in order[first + 1 : last + 1]}

    # -- the model -------------------------------------------------------------------------------------------------

    def _logprobs(self, label: str, tokens: list[int]) -> torch.Tensor:
        return self._run(label, tokens, None)

    def _run(self, label: str, tokens: list[int], cache: DynamicCache | None) -> torch.Tensor:
        """[len(tokens), vocab]; appends to the cache."""
        if self._loaded != label:
            self._model.load_state_dict(self.versions[label].weights)
            self._loaded = label
        logits = self._model(torch.tensor([tokens]), past_key_values=cache, use_cache=cache is not None).logits[0]
        return logits - logits.logsumexp(-1, keepdim=True)


def _leading(rows: torch.Tensor, wanted: list[tuple[int, float]]) -> int:
    """How many tokens from the beginning on are what the model would have said."""
    agree = [_agrees(row, token, logprob) for row, (token, logprob) in zip(rows, wanted, strict=True)]
    return agree.index(False) if False in agree else len(agree)


def _agrees(row: torch.Tensor, token: int, logprob: float) -> bool:
    best = row.topk(2)
    is_best = token == int(best.indices[0]) or float(best.values[0] - best.values[1]) < TOLERANCE
    return is_best and abs(logprob - float(row[token])) < TOLERANCE

"""Random messages, late masks, failing matchers and failing launches among requests with and without grammars.

There are two independent checks besides the shadow of the KV. Every output under one version equals the output of the
request alone in a scheduler that collects each step in its turn. And the steps are those of a scheduler that never
plans ahead.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.depth import at_depth
from tests.grammar.conftest import EOS
from tests.scheduler.constrained import SCHEMA, GrammarHarness, hold
from tests.scheduler.monkey import Monkey
from verl_server.grammar.source import Grammar, translate
from verl_server.messages.io_struct import FinishReason, FinishReq, TokenizedGenerateReq
from verl_server.sampling_params import SamplingParams

_GRAMMARS = [
    translate(grammar, {})
    for grammar in (
        Grammar("regex", "([a-f][0-9]){2,12}x"),
        Grammar("json_schema", SCHEMA),
        Grammar("ebnf", 'root ::= "(" root ")" | [0-9]{2}'),
        Grammar("regex", "[a-z]{1,30}"),
    )
]


class MixedHarness(GrammarHarness):
    """Gives a grammar to five of seven requests, and forbidden words of two tokens to one of sixteen."""

    def add(
        self, rid: str, prompt: Sequence[int], new: int | None = 8, frequency_penalty: float = 0.0, **fields: Any
    ) -> None:
        number = int(rid[1:])
        if number % 7 > 1:
            fields["grammar"] = _GRAMMARS[number % len(_GRAMMARS)]
            fields["stop_ids"] = [*fields.get("stop_ids", []), EOS]
        if number % 16 == 3:
            fields["bad_words_ids"] = [[1, 2]]
        super().add(rid, prompt, new, frequency_penalty, **fields)
        self.compile()


class ConstrainedMonkey(Monkey):
    """Besides, masks are late or fail, and launches fail after the masks were made."""

    def __init__(self, seed: int, modes: list[str], pause_modes: list[str], **settings: Any) -> None:
        super().__init__(seed, modes, pause_modes, memory=True, harness=MixedHarness, **settings)
        late = random.Random(seed)
        self.executor = hold(self.h, lambda _: late.random() < 0.3)  # type: ignore[arg-type]
        self.executor.most_held = 0.5
        self.shadow.most_repeated = 1
        self.arrival_rate, self.lengths = 0.2, [0, 1, 2, 5, 16, 30, 40]
        self.executor.fails = lambda _: late.random() < 0.002
        self.confirmed: list[bool] = []
        confirm = self.h.scheduler.planner.confirm

        def watch(*args: Any) -> bool:
            self.confirmed.append(confirm(*args))
            return self.confirmed[-1]

        self.h.scheduler.planner.confirm = watch  # type: ignore[method-assign]

    def disturb(self) -> None:
        dice = self.rng.random()
        if dice < 0.004:
            self.h.runner.fail_sampling_with = torch.OutOfMemoryError("at the sampling")
        elif dice < 0.006:
            self.h.runner.fail_sampling_with = RuntimeError("an operator failed")
        elif dice < 0.02 and (alive := list(self.h.scheduler.requests)):
            rid = self.rng.choice(alive)
            self.silent.append(rid)
            self.h.scheduler.handle(FinishReq(rid=rid))
        elif dice > 0.75:
            super().disturb()


class Alone:
    """The outputs of requests that run alone, without overlap."""

    def __init__(self) -> None:
        self._harnesses: dict[int, GrammarHarness] = {}
        self._count = 0

    def output(self, ids: list[int], new: int, grammar: str, stop_ids: list[int], salt: int) -> list[int]:
        if salt not in self._harnesses:
            self._harnesses[salt] = GrammarHarness(False, num_pages=400, chunked_prefill_size=256)
            self._harnesses[salt].runner.salt = salt
        h, rid = self._harnesses[salt], f"r{self._count}"
        self._count += 1
        sampling = SamplingParams(max_new_tokens=new, temperature=0.0)
        h.scheduler.handle(
            TokenizedGenerateReq(rid=rid, input_ids=ids, sampling=sampling, stop_ids=stop_ids, grammar=grammar)
        )
        h.finish()
        return h.tokens.get(rid, [])


TINY = {"num_pages": 24, "page_size": 4, "max_rows": 8, "chunked_prefill_size": 10, "context_length": 128}
ODD = {"num_pages": 90, "page_size": 1, "max_rows": 8, "chunked_prefill_size": 7, "context_length": 128}
VAST = {"num_pages": 4000, "page_size": 4, "max_rows": 8, "chunked_prefill_size": 64}
MODES = ["wait", "in_place", "retract", "abort"]
PAUSES = ["abort", "retract", "in_place", "wait"]


@pytest.mark.parametrize("overlaps", [True, False], ids=["overlapped", "in-turn"])
@pytest.mark.parametrize("settings", [TINY, ODD, VAST], ids=["tiny", "page1", "vast"])
@pytest.mark.parametrize("seed", at_depth(range(4)))
def test_outputs_are_those_of_each_request_alone(seed: int, settings: dict[str, Any], overlaps: bool) -> None:
    monkey = ConstrainedMonkey(seed, MODES, PAUSES, overlaps=overlaps, **settings)
    asked: dict[str, TokenizedGenerateReq] = {}
    handle = monkey.h.scheduler.handle

    def record(message: Any) -> None:
        if isinstance(message, TokenizedGenerateReq):
            asked[message.rid] = message
        handle(message)

    monkey.h.scheduler.handle = record  # type: ignore[method-assign]
    monkey.play(200)
    monkey.check_ends()
    alone, compared = Alone(), 0
    for rid, tokens in monkey.h.tokens.items():
        request, versions = asked[rid], set(monkey.h.versions[rid])
        if len(versions) != 1 or monkey.h.last[rid][0].num_retractions[monkey.h.last[rid][1]]:
            continue
        whole = alone.output(
            request.input_ids, monkey.news[rid], request.grammar, request.stop_ids, int(versions.pop())
        )
        reason = monkey.h.finished.get(rid)
        complete = reason is not None and reason.type != "abort" and reason.matched != "NaN happened"
        assert tokens == (whole if complete else whole[: len(tokens)]), rid
        compared += bool(request.grammar)
    assert compared > 30 and monkey.executor.num_held > 10
    assert overlaps == any(monkey.confirmed), "no step was planned ahead"
    assert not overlaps or settings is not VAST or not all(monkey.confirmed), "no planned step was planned again"


def steps_of(seed: int, *, ahead: bool) -> tuple[list[Any], dict[str, list[int]], dict[str, FinishReason], list[bool]]:
    """Return the steps, the outputs and the ends of a run, and how often a step was planned ahead."""
    monkey = ConstrainedMonkey(seed, MODES, PAUSES, overlaps=True, **VAST)
    if not ahead:
        monkey.h.scheduler.planner.plan_ahead = lambda only_started: None  # type: ignore[method-assign]
    monkey.play(150)
    monkey.check_ends()
    steps = [(batch.rows, batch.cached_lens, batch.input_ids, batch.sample) for batch in monkey.h.runner.batches]
    return steps, monkey.h.tokens, monkey.h.finished, monkey.confirmed


@pytest.mark.parametrize("seed", at_depth(range(8), quick=2))
def test_the_steps_are_those_of_a_scheduler_that_never_plans_ahead(seed: int) -> None:
    *planned, confirmed = steps_of(seed, ahead=True)
    *usual, never = steps_of(seed, ahead=False)
    assert planned == usual
    assert sum(confirmed) > 30 and not never

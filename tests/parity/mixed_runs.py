"""Plays `MixedRequest`s through a `ModelHarness`, compares runs with each other, and judges them."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path

import torch

from tests.parity.harness import Reference, random_prompt
from tests.parity.in_process import ModelHarness
from tests.parity.mixed_requests import MixedRequest, mixed_request, prompts_in_families
from tests.parity.sampling_judge import Found, SamplingJudge

COUNT = 36


class Requests:
    """The requests of one seed, in the order of their arrival, and the turns that continue some of them."""

    def __init__(self, seed: int, count: int = COUNT, longest: int = 60, most_new: int = 56) -> None:
        """`longest`: most tokens of a prompt. `most_new`: largest `max_new_tokens`."""
        rng = random.Random(seed)
        drawn = random.Random(0)  # as the scheduler draws seeds with `random_seed=0`
        self.first: dict[str, MixedRequest] = {}
        for i, prompt in enumerate(prompts_in_families(rng, count, longest)):
            request = mixed_request(rng, prompt, most_new, seeded=i % 3 > 0)
            self.first[f"r{i}"] = request if i % 3 else request.seeded(drawn.getrandbits(63))
        self._continued = [mixed_request(rng, [], most_new // 3) for _ in range(count // 3)]

    def next_turn(self, rid: str, output_ids: list[int]) -> MixedRequest | None:
        """Return the request that continues `rid` after its end."""
        number = int(rid[1:])
        if not rid.startswith("r") or number >= len(self._continued):
            return None
        prompt = self.first[rid].prompt + output_ids + random_prompt(5, number)
        return dataclasses.replace(self._continued[number], prompt=prompt)


Disturb = Callable[["Run"], None]
"""Called before each step."""


class Run:
    """Plays requests to their ends. `asked` has all of them, with the turns that continue others."""

    def __init__(self, harness: ModelHarness, requests: Requests) -> None:
        self.h, self._requests = harness, requests
        self.asked: dict[str, MixedRequest] = {}
        self.aborted: set[str] = set()

    def play(self, monkey: Disturb | None = None) -> Run:
        for number, (rid, request) in enumerate(self._requests.first.items()):
            self._ask(rid, request)
            for _ in range(3 * (number % 2)):
                self._step(monkey)
        for _ in range(5000):
            if not self.h.scheduler.requests and not self.h.scheduler.has_work():
                return self
            self._step(monkey)
        raise AssertionError(f"never answered: {list(self.h.scheduler.requests)}")

    def _ask(self, rid: str, request: MixedRequest) -> None:
        self.asked[rid] = request
        number = int(rid[1:])
        self.h.ask(rid, request, priority=int(number % 7 == 0), session_id=f"s{number}" if number % 2 else "")
        self.h.compile()

    def _step(self, monkey: Disturb | None) -> None:
        if monkey is not None:
            monkey(self)
        self.h.steps()
        for rid in [rid for rid in self.h.finished if f"t{rid[1:]}" not in self.asked]:
            if (turn := self._requests.next_turn(rid, self.h.tokens[rid])) is not None:
                self._ask(f"t{rid[1:]}", turn)

    def retracted_features(self) -> set[str]:
        """Return the features of the requests that were retracted."""
        retracted = [request.features for rid, request in self.asked.items() if self.h.num_retractions(rid)]
        return set().union(*retracted)

    @property
    def found(self) -> dict[str, Found]:
        return self.h.found


class Judged:
    """Judges runs, with the reference's logits of each sequence computed once."""

    def __init__(self, folder: Path) -> None:
        self._reference = Reference(folder)
        self._logits: dict[tuple[int, ...], torch.Tensor] = {}

    def check(self, run: Run) -> None:
        assert set(run.found) == set(run.asked) == set(run.h.finished)
        for rid, request in run.asked.items():
            found = run.found[rid]
            judge = SamplingJudge(request, found)
            judge.check_shape()
            logits, length = self._of(request.prompt + found.output_ids), len(request.prompt)
            judge.check_prompt(logits[:length])
            judge.check_outputs(logits[length - 1 : -1])

    @torch.inference_mode()
    def _of(self, tokens: list[int]) -> torch.Tensor:
        key = tuple(tokens)
        if key not in self._logits:
            self._logits[key] = self._reference.model(torch.tensor([tokens])).logits[0]
        return self._logits[key]


def expect_same_ids(run: Run, other: Run) -> None:
    """Assert equal ids, or the beginning of them after an abort.

    The judge has accepted the ids of both runs. So they differ only where rounding decides, which is rare.
    """
    parted = []
    for rid, request in run.asked.items():
        ids, wanted = run.found[rid].output_ids, other.found[rid].output_ids
        if request.prompt != other.asked[rid].prompt:  # an aborted reply was continued
            assert rid.startswith("t")
        elif ids != (wanted[: len(ids)] if rid in run.aborted else wanted):
            parted.append(rid)
    assert len(parted) <= 1, parted

"""What a request samples depends on its seed, its position and its distribution only, under every policy and switch.

Requests with mixed settings share prefixes, arrive one after the other, and are continued as conversations. They run
under each order of the queue, with and without fused kernels, prefix cache and overlapping steps, and with a KV pool so
small that requests are retracted. Every token, log-probability, candidate and end is compared with a judge's, which
computes each position alone from logits of transformers. The same requests must also get the same ids everywhere.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.depth import at_depth
from tests.parity.harness import Reference, random_prompt
from tests.parity.in_process import ModelHarness
from tests.parity.mixed_requests import FEATURES, MixedRequest, mixed_request, prompts_in_families
from tests.parity.sampling_judge import Found, SamplingJudge
from verl_server.io_struct import AbortReq, ContinueGenerationReq, FlushCacheReq, PauseGenerationReq

COUNT = 36
KERNELS: dict[str, dict[str, Any]] = {
    "fused": {},
    "plain": {"fused_kernels": False},
    "torch": {"fused_kernels": False, "attention_backend": "torch"},
}


@dataclass(frozen=True)
class Switches:
    policy: str
    kernels: str
    cache: bool
    pool: str
    overlaps: bool

    def harness(self, folder: Path) -> ModelHarness:
        return ModelHarness(
            folder,
            num_pages=33 if self.pool == "small" else 600,
            schedule_policy=self.policy,
            disable_radix_cache=not self.cache,
            overlaps=self.overlaps,
            **KERNELS[self.kernels],
        )

    def __str__(self) -> str:
        cache, steps = "cache" if self.cache else "no-cache", "overlapped" if self.overlaps else "in-turn"
        return f"{self.policy}-{self.kernels}-{cache}-{self.pool}-{steps}"


QUICK = [
    Switches("lpm", "fused", cache=True, pool="small", overlaps=True),
    Switches("fcfs", "plain", cache=True, pool="small", overlaps=False),
    Switches("lpm", "plain", cache=False, pool="small", overlaps=True),
    Switches("fcfs", "fused", cache=True, pool="large", overlaps=True),
]
EVERY = itertools.starmap(
    Switches, itertools.product(["lpm", "fcfs"], KERNELS, [True, False], ["small", "large"], [True, False])
)
CASES = [(switches, 1) for switches in QUICK] + [(switches, 2) for switches in EVERY]
BASELINE = Switches("fcfs", "fused", cache=False, pool="large", overlaps=False)


class Requests:
    """The requests of one seed, in the order of their arrival, and the turns that continue some of them."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        drawn = random.Random(0)  # as the scheduler draws seeds with `random_seed=0`
        self.first: dict[str, MixedRequest] = {}
        for i, prompt in enumerate(prompts_in_families(rng, COUNT)):
            request = mixed_request(rng, prompt, 56, seeded=i % 3 > 0)
            self.first[f"r{i}"] = request if i % 3 else request.seeded(drawn.getrandbits(63))
        self._continued = [mixed_request(rng, [], 16) for _ in range(COUNT // 3)]

    def next_turn(self, rid: str, output_ids: list[int]) -> MixedRequest | None:
        """Return the request that continues `rid` after its end."""
        number = int(rid[1:])
        if not rid.startswith("r") or number >= len(self._continued):
            return None
        prompt = self.first[rid].prompt + output_ids + random_prompt(5, number)
        return dataclasses.replace(self._continued[number], prompt=prompt)


class Run:
    """Plays requests to their ends. `asked` has all of them, with the turns that continue others."""

    def __init__(self, harness: ModelHarness, seed: int) -> None:
        self.h, self._requests = harness, Requests(seed)
        self.asked: dict[str, MixedRequest] = {}
        self.aborted: set[str] = set()

    def play(self, monkey: Monkey | None = None) -> Run:
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

    def _step(self, monkey: Monkey | None) -> None:
        if monkey is not None:
            monkey.disturb(self)
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


class Monkey:
    """Pauses in every mode, aborts and flushes at random."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._paused_for = self._serial = 0
        self.pauses: list[str] = []

    def disturb(self, run: Run) -> None:
        rng, h = self._rng, run.h
        if self._paused_for:
            self._paused_for -= 1
            if not self._paused_for:
                self._send(h, ContinueGenerationReq())
        dice = rng.random()
        if dice < 0.03:
            self.pauses.append(rng.choice(["retract", "retract", "in_place", "wait"]))
            self._send(h, PauseGenerationReq(mode=self.pauses[-1]))  # type: ignore[arg-type]
            self._paused_for = rng.randint(1, 6)
        elif dice < 0.04:
            self._send(h, FlushCacheReq(timeout=0.0))
        elif dice < 0.05 and h.scheduler.requests:
            rid = rng.choice(list(h.scheduler.requests))
            run.aborted.add(rid)
            h.scheduler.handle(AbortReq(rid=rid))
        elif dice < 0.0515:
            self.pauses.append("abort")
            run.aborted |= set(h.scheduler.requests)
            self._send(h, PauseGenerationReq(mode="abort"))
            self._paused_for = 2

    def _send(self, h: ModelHarness, message: Any) -> None:
        self._serial += 1
        message.id = self._serial
        h.scheduler.handle(message)


class Judged:
    """Judges runs, with the reference's logits of each sequence computed once."""

    def __init__(self, folder: Path) -> None:
        self._reference = Reference(folder)
        self._logits: dict[tuple[int, ...], torch.Tensor] = {}
        self.baselines: dict[int, Run] = {}

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


@pytest.fixture(scope="module")
def judged(tiny_llama: Path) -> Judged:
    return Judged(tiny_llama)


def baseline(judged: Judged, folder: Path, seed: int) -> Run:
    if seed not in judged.baselines:
        run = judged.baselines[seed] = Run(BASELINE.harness(folder), seed).play()
        judged.check(run)
        asked = [request.features for request in run.asked.values()]
        assert all(sum(name in features for features in asked) > 2 for name in FEATURES)
        assert {found.finish["type"] for found in run.found.values() if found.finish} == {"length", "stop"}
    return judged.baselines[seed]


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


@pytest.mark.parametrize(("switches", "seed"), at_depth(CASES, quick=len(QUICK)), ids=str)
def test_no_switch_changes_what_a_request_samples(
    switches: Switches, seed: int, tiny_llama: Path, judged: Judged
) -> None:
    wanted = baseline(judged, tiny_llama, seed)
    run = Run(switches.harness(tiny_llama), seed).play()
    judged.check(run)
    expect_same_ids(run, wanted)
    planner = run.h.scheduler.planner
    assert (planner.num_cached_tokens > 0) == switches.cache
    assert (planner.num_retractions > 0) == (switches.pool == "small")
    assert (run.h.late_masks.num_late > 0) == switches.overlaps
    if switches.pool == "small":
        assert run.retracted_features() >= {"penalties", "filters", "candidates"}


def test_the_policies_start_the_same_requests_in_different_orders(tiny_llama: Path) -> None:
    """Otherwise the test above would compare a policy with itself."""
    switches = [Switches(policy, "fused", cache=True, pool="large", overlaps=False) for policy in ("lpm", "fcfs")]
    lpm, fcfs = (Run(each.harness(tiny_llama), 1).play() for each in switches)
    assert lpm.h.starts != fcfs.h.starts and sorted(lpm.h.starts) == sorted(fcfs.h.starts)


@pytest.mark.parametrize("seed", at_depth(range(4)))
@pytest.mark.parametrize("kernels", at_depth(["fused", "plain"]))
@pytest.mark.parametrize(
    ("policy", "overlaps"), at_depth([("lpm", True), ("fcfs", False), ("lpm", False), ("fcfs", True)], quick=2)
)
def test_pauses_and_aborts_change_no_token_of_the_others(
    policy: str, overlaps: bool, kernels: str, seed: int, tiny_llama: Path, judged: Judged
) -> None:
    monkey = Monkey(seed)
    switches = Switches(policy, kernels, cache=True, pool="small", overlaps=overlaps)
    run = Run(switches.harness(tiny_llama), 1).play(monkey)
    judged.check(run)
    expect_same_ids(run, baseline(judged, tiny_llama, 1))
    assert "retract" in monkey.pauses and run.aborted
    assert run.retracted_features() >= {"penalties", "filters", "candidates"}

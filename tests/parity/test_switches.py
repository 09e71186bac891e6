"""The ids that a request samples depend on its seed, positions and distributions only, under every policy and switch.

Requests with mixed settings share prefixes, arrive one after the other, and are continued as conversations. They run
under each order of the queue, with and without fused kernels, prefix cache and overlapping steps, and with a KV pool so
small that requests are retracted. Every token, log-probability, candidate and end is compared with a judge's, which
computes each position alone from logits of transformers. The same requests must also get the same ids everywhere.
"""

from __future__ import annotations

import functools
import itertools
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.depth import at_depth
from tests.parity.in_process import ModelHarness
from tests.parity.mixed_requests import FEATURES
from tests.parity.mixed_runs import Judged, Requests, Run, expect_same_ids
from verl_server.messages.io_struct import AbortReq, ContinueGenerationReq, FlushCacheReq, PauseGenerationReq

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
    Switches("fcfs", "fused", cache=True, pool="large", overlaps=True),
]
EVERY = itertools.starmap(
    Switches, itertools.product(["lpm", "fcfs"], KERNELS, [True, False], ["small", "large"], [True, False])
)
CASES = [(switches, 1) for switches in QUICK] + [(switches, 2) for switches in EVERY]
BASELINE = Switches("fcfs", "fused", cache=False, pool="large", overlaps=False)


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


@pytest.fixture(scope="module")
def judged(tiny_llama: Path) -> Judged:
    return Judged(tiny_llama)


@functools.cache
def baseline(folder: Path, judged: Judged, seed: int) -> Run:
    run = Run(BASELINE.harness(folder), Requests(seed)).play()
    judged.check(run)
    asked = [request.features for request in run.asked.values()]
    assert all(sum(name in features for features in asked) > 2 for name in FEATURES)
    assert {found.finish["type"] for found in run.found.values() if found.finish} == {"length", "stop"}
    return run


@pytest.mark.parametrize(("switches", "seed"), at_depth(CASES, quick=len(QUICK)), ids=str)
def test_no_switch_changes_what_a_request_samples(
    switches: Switches, seed: int, tiny_llama: Path, judged: Judged
) -> None:
    wanted = baseline(tiny_llama, judged, seed)
    run = Run(switches.harness(tiny_llama), Requests(seed)).play()
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
    lpm, fcfs = (Run(each.harness(tiny_llama), Requests(1)).play() for each in switches)
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
    run = Run(switches.harness(tiny_llama), Requests(1)).play(monkey.disturb)
    judged.check(run)
    expect_same_ids(run, baseline(tiny_llama, judged, 1))
    assert "retract" in monkey.pauses and run.aborted
    assert run.retracted_features() >= {"penalties", "filters", "candidates"}

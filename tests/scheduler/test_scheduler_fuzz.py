"""Hundreds of requests with random aborts, pauses, updates and tiny pools, checked after every step.

There are two independent checks: a shadow of what each context must contain when it is read through the page table
(written by which request, under which weights), and the streams as a client sees them.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.depth import at_depth
from tests.scheduler.fakes import generate
from tests.scheduler.monkey import Monkey

TINY = {"num_pages": 20, "page_size": 4, "max_rows": 6, "chunked_prefill_size": 10}
LARGE = {"num_pages": 200, "page_size": 4, "max_rows": 8, "chunked_prefill_size": 64}
ODD = {"num_pages": 70, "page_size": 1, "max_rows": 5, "chunked_prefill_size": 7}


@pytest.mark.parametrize("policy", ["lpm", "fcfs"])
@pytest.mark.parametrize("overlaps", [False, True], ids=["in-turn", "overlapped"])
@pytest.mark.parametrize("settings", [TINY, LARGE, ODD], ids=["tiny", "large", "page1"])
@pytest.mark.parametrize("seed", at_depth(range(3)))
def test_everything_at_once(seed: int, settings: dict[str, Any], overlaps: bool, policy: str) -> None:
    monkey = Monkey(
        seed,
        modes=["wait", "in_place", "retract", "abort"],
        pause_modes=["abort", "retract", "in_place"],
        memory=True,
        overlaps=overlaps,
        schedule_policy=policy,
        schedule_max_age=40.0,
        **settings,
    )
    monkey.play(300)
    monkey.check_ends()
    reasons = monkey.h.finished.values()
    assert {reason.type for reason in reasons} == {"length", "stop", "abort"}
    assert any(reason.matched == "NaN happened" for reason in reasons)
    assert any(reason.status_code == 500 for reason in reasons), "no step failed"
    assert any(reason.at_border for reason in reasons), "no request ended at a change of the version"
    planner = monkey.h.scheduler.planner
    assert planner.num_cached_tokens > 0 and (settings is LARGE or planner.num_retractions > 0)


@pytest.mark.parametrize("policy", ["lpm", "fcfs"])
@pytest.mark.parametrize("overlaps", [False, True], ids=["in-turn", "overlapped"])
@pytest.mark.parametrize("settings", [TINY, ODD], ids=["tiny", "page1"])
@pytest.mark.parametrize("seed", at_depth(range(2)))
def test_wait_mode_computes_every_request_under_one_version(
    seed: int, settings: dict[str, Any], overlaps: bool, policy: str
) -> None:
    """Every stream equals the reference of the one version that it names.

    Updates only wait and pauses only abort, so that no request continues under other weights.
    """
    settings = settings | {"overlaps": overlaps, "schedule_policy": policy}
    monkey = Monkey(100 + seed, ["wait"], ["abort"], memory=False, **settings)
    monkey.play(300)
    monkey.check_ends()
    seen = set()
    for rid, tokens in monkey.h.tokens.items():
        versions = set(monkey.h.versions[rid])
        assert len(versions) <= 1, f"{rid} was computed under {versions}"
        if tokens:
            (version,) = versions
            seen.add(version)
            assert tokens == generate(monkey.prompts[rid], len(tokens), int(version))
    assert len(seen) > 5


@pytest.mark.parametrize("overlaps", [False, True], ids=["in-turn", "overlapped"])
def test_disabled_cache_under_disturbance(overlaps: bool) -> None:
    settings = TINY | {"disable_radix_cache": True, "overlaps": overlaps}
    monkey = Monkey(7, ["wait", "in_place", "retract"], ["retract", "in_place"], memory=False, **settings)
    monkey.play(200)
    monkey.check_ends()
    assert monkey.h.scheduler.planner.num_cached_tokens == 0

"""Waiting requests start within memory and pages, after equal prefills, and behind running episodes."""

from __future__ import annotations

import pytest

from tests.scheduler.planned import Planned
from verl_server.scheduler import admission
from verl_server.scheduler.schedule_batch import Req


def ids(seed: int, length: int) -> list[int]:
    return [seed * 100 + i for i in range(length)]


def started(*reqs: Req) -> list[bool]:
    return [req.started for req in reqs]


def test_requests_start_while_the_memory_of_steps_suffices_and_the_first_one_always() -> None:
    p = Planned(step_budget=10)
    large, small, other = (p.add(str(i), ids(i, 3), step_bytes=size) for i, size in enumerate((12, 1, 1)))
    p.step()
    assert started(large, small, other) == [True, False, False], "it starts alone, although it exceeds the budget"
    p.planner.remove(large)
    p.step()
    assert started(small, other) == [True, True] and p.planner.admission.step_bytes == 2
    p.run()
    assert p.planner.admission.step_bytes == 0


def test_a_request_starts_when_its_prompt_and_half_of_its_reply_fit() -> None:
    p = Planned(num_pages=8, schedule_policy="fcfs")
    p.add("first", ids(1, 7), 16)  # two pages, and two for half of the reply
    p.step()
    fits, too_large = p.add("fits", ids(2, 8), 16), p.add("too large", ids(3, 4), 1)
    p.step()
    assert started(fits, too_large) == [True, False]


@pytest.mark.parametrize(("length", "expected"), [(18, True), (24, False)])
def test_the_pages_of_its_own_prefix_are_not_taken_from_a_request(length: int, expected: bool) -> None:
    p = Planned(num_pages=6, schedule_policy="fcfs")
    p.add("cached", ids(1, 17), 1)
    p.run()
    p.add("running", ids(2, 3), 2)
    p.step()
    assert (p.planner.pages.available, p.planner.cache.evictable) == (1, 4)
    req = p.add("again", ids(1, length), 1)
    p.step()
    assert req.started == expected, "one page is free besides the four of its prefix"


def test_a_prompt_that_a_running_prefill_computes_waits_for_it() -> None:
    p = Planned(chunk=8)
    first, twin, other = p.add("first", ids(1, 14)), p.add("twin", ids(1, 14)), p.add("other", ids(2, 4))
    assert p.step() == {"first": 8}
    assert p.step() == {"first": 6, "other": 2}, "the twin waits, and the request behind it does not"
    assert started(first, twin, other) == [True, False, True]
    p.step()
    assert twin.started and twin.cached_tokens == 12
    alone = Planned(chunk=8, disable_radix_cache=True)
    alone.add("first", ids(1, 6))
    twin = alone.add("twin", ids(1, 6))
    alone.step()
    assert twin.started, "without a cache there is nothing to wait for"


def test_a_drain_admits_only_what_was_started() -> None:
    p = Planned()
    running = p.add("running", ids(1, 5))
    p.step()
    p.planner.retract(running)
    new = p.add("new", ids(2, 5), priority=1)
    assert list(p.step(only_started=True)) == ["running"] and not new.started
    p.planner.remove(running)
    assert p.step(only_started=True) == {}


@pytest.mark.parametrize(("only_started", "expected"), [(False, False), (True, True)])
def test_a_step_passes_over_a_bounded_number_of_requests(
    monkeypatch: pytest.MonkeyPatch, only_started: bool, expected: bool
) -> None:
    monkeypatch.setattr(admission, "_MAX_SKIPPED", 3)
    p = Planned(chunk=20, schedule_policy="fcfs")
    if only_started:
        last = p.add("last", ids(9, 5))
        p.step()
        p.planner.retract(last)
        for i in range(4):
            p.add(f"new{i}", ids(i, 4), priority=1)
    else:
        p.add("group", ids(1, 28))
        p.step()
        for i in range(4):
            p.add(f"twin{i}", ids(1, 28))
        last = p.add("last", ids(9, 5))
    p.step(only_started=only_started)
    assert (last.row >= 0) == expected


def episode(p: Planned, seed: int, length: int) -> list[int]:
    """Play two turns of an agent, one second apart, so that a third one is expected. Return the history."""
    history = ids(seed, length)
    for turn in range(2):
        p.now += 1.0
        req = p.add(f"{seed}/{turn}", list(history), 4)
        p.run()
        history = req.token_ids + [seed + 50] * 4
    return history


@pytest.mark.parametrize(("continues", "waits", "expected"), [(False, 0, False), (False, 0.6, True), (True, 0, True)])
def test_a_new_episode_leaves_pages_that_will_be_used_again(continues: bool, waits: float, expected: bool) -> None:
    p = Planned(num_pages=100, chunk=256, max_age=0.5)
    history = episode(p, 1, 80)
    p.add("running", ids(3, 120), 40)
    p.step()
    assert (p.planner.cache.available_pages(), p.planner.cache.kept.count) == (70, 22)
    p.planner.admission.headroom.lost(25)
    req = p.add("next", history + ids(4, 80) if continues else ids(4, 88), 4)
    p.now += waits
    p.step()
    assert req.started == expected, "it starts if it is overdue, or continues a cached history"


def test_a_new_episode_does_not_yield_while_half_of_the_pool_is_idle() -> None:
    p = Planned(num_pages=40)
    episode(p, 1, 100)
    p.add("running", ids(2, 20), 8)
    p.step()
    assert p.planner.cache.kept.count >= 26
    small, large = p.add("small", ids(3, 36), 4), p.add("large", ids(4, 44), 4)
    p.step()
    assert started(small, large) == [True, False]


def test_only_lpm_prefers_running_episodes() -> None:
    p = Planned(num_pages=40, schedule_policy="fcfs")
    p.planner.admission.headroom.lost(20)
    p.add("running", ids(1, 20), 8)
    p.step()
    large = p.add("large", ids(3, 88), 8)
    p.step()
    assert large.started

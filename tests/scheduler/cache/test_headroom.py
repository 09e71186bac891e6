"""The headroom rises by what running episodes lose, falls with their turns, and keeps new episodes out."""

from __future__ import annotations

import pytest

from tests.scheduler.fakes import Harness, prompt
from verl_server.messages.io_struct import FinishReq
from verl_server.scheduler.cache.headroom import Headroom


def test_it_rises_by_lost_pages_to_half_of_the_pool_and_falls_with_each_turn() -> None:
    headroom = Headroom(1000)
    headroom.lost(100)
    assert headroom.pages == 100
    for _ in range(693):
        headroom.turn_ended()
    assert headroom.pages == pytest.approx(50, abs=1)
    headroom.lost(900)
    assert headroom.pages == 500


def test_a_new_episode_leaves_headroom_once_others_lost_their_pages() -> None:
    h = Harness(num_pages=100, max_rows=8, chunked_prefill_size=256)
    planner = h.scheduler.planner
    h.add("running", prompt(1, 200), 100)
    h.steps(2)
    assert planner.cache.available_pages() == 49
    h.add("fits", prompt(2, 80), 4)
    h.steps()
    assert h.scheduler.requests["fits"].started, "nothing was lost yet"
    h.run()
    h.add("running again", prompt(1, 200), 100)
    h.steps(2)
    planner.admission.headroom.lost(40)
    h.add("yields", prompt(3, 80), 4)
    h.steps(2)
    assert not h.scheduler.requests["yields"].started
    h.run()
    assert h.finished["yields"].type == "length", "it starts when the other one has ended"


def agent(h: Harness, seed: int) -> None:
    """Play two turns of an agent, so that its pages are kept for a return."""
    history = prompt(seed, 40)
    for turn in range(2):
        h.clock.now += 1.0
        h.add(f"{seed}/{turn}", history, 4)
        h.run()
        history += h.tokens[f"{seed}/{turn}"] + prompt(50, 4)


def test_pages_that_episodes_take_from_each_other_raise_it_and_unused_ones_do_not() -> None:
    h = Harness(num_pages=40, max_rows=4, chunked_prefill_size=256)
    planner = h.scheduler.planner
    agent(h, 1)
    h.clock.now += 100.0  # the agent will not return
    h.add("grows", prompt(2, 120), 4)
    h.run()
    assert planner.admission.headroom.pages == 0
    agent(h, 3)
    h.add("grows again", prompt(4, 130), 4)
    h.run()
    assert planner.admission.headroom.pages >= 5, "the history of agent 3 was kept"
    h.clock.now += 1000.0
    lost = planner.admission.headroom.pages
    for i in range(300):
        h.add(f"short{i}", prompt(5, 8), 1)
        h.run()
    assert planner.admission.headroom.pages < lost, "turns ended, and none lost its pages"


def test_retractions_do_not_raise_it() -> None:
    """A retracted request waits for its own pages, which others take. That is no episode that lost its history."""
    h = Harness(num_pages=30, max_rows=8, chunked_prefill_size=256)
    for i in range(8):
        h.add(f"r{i}", prompt(i, 12), 40)
    h.run()
    assert h.scheduler.planner.num_retractions and h.scheduler.planner.admission.headroom.pages == 0


def test_turns_that_end_by_a_stop_string_lower_it() -> None:
    h = Harness()
    headroom = h.scheduler.planner.admission.headroom
    headroom.lost(10)
    h.add("a", prompt(1, 9), 20)
    h.steps(2)
    h.scheduler.handle(FinishReq(rid="a"))
    h.steps()
    assert headroom._pages == pytest.approx(9.99)


def test_what_is_kept_until_a_time_leaves_nothing_behind() -> None:
    """Also while memory is never short, which is when nobody reads the count."""
    h = Harness(num_pages=200, chunked_prefill_size=64)
    history, planner = prompt(1, 21), h.scheduler.planner
    for i in range(50):
        h.clock.now += 1.0
        h.add(f"r{i}", history, 2)
        h.run()
        history += h.tokens[f"r{i}"] + [5]
    assert planner.returns.keep_seconds(3) > 0.0
    assert len(planner.cache.kept._expiries) <= 2

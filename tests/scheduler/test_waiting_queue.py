"""The order of the waiting queue by policy, its bound on age, and that a long prompt is matched once."""

from __future__ import annotations

import weakref
from typing import Any, SupportsIndex

import pytest

from tests.scheduler.fakes import Harness, generate, prompt
from verl_server.messages.io_struct import FinishSessionReq, PauseGenerationReq
from verl_server.scheduler import session_histories


def busy(**settings: Any) -> Harness:
    """Return a harness with one row, which a long request takes, and with the prefixes of prompts 1 and 2 cached."""
    h = Harness(**({"max_rows": 1, "chunked_prefill_size": 64} | settings))
    for seed, length in ((1, 9), (2, 21)):
        h.add(f"warm{seed}", prompt(seed, length), 1)
        h.run()
    h.add("running", prompt(0, 4), 40)
    h.steps()
    return h


def order(h: Harness) -> list[str]:
    return [req.rid for req in h.scheduler.planner.waiting]


def cached(h: Harness, rid: str) -> int:
    message, index = h.last[rid]
    return message.cached_tokens[index]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [("lpm", ["long", "short", "new", "also new"]), ("fcfs", ["new", "short", "also new", "long"])],
)
def test_the_longest_cached_prefix_comes_first_or_the_first_comer(policy: str, expected: list[str]) -> None:
    h = busy(schedule_policy=policy)
    for rid, seed, length in (("new", 3, 30), ("short", 1, 12), ("also new", 4, 6), ("long", 2, 25)):
        h.add(rid, prompt(seed, length), 2)
    assert order(h) == expected
    h.run()
    ends = [rid for message in h.sent for rid, end in zip(message.rids, message.finish_reasons, strict=True) if end]
    assert ends[-4:] == expected
    assert h.tokens["long"] == generate(prompt(2, 25), 2, 0)


def test_priority_precedes_prefixes_and_a_started_request_precedes_both_in_its_priority() -> None:
    h = busy()
    h.add("long", prompt(2, 25), 2)
    h.add("urgent", prompt(3, 9), 2, priority=1)
    h.scheduler.handle(PauseGenerationReq(id=1, mode="retract"))
    h.steps()
    assert order(h) == ["urgent", "running", "long"]


def test_under_endless_cached_requests_an_uncached_one_starts_within_its_bound() -> None:
    """Two rows, and always four short requests in the queue whose whole prompts are cached."""
    h = Harness(max_rows=2, chunked_prefill_size=64, schedule_max_age=30.0)
    h.add("warm", prompt(1, 21), 1)
    h.run()
    count = 0

    def fill() -> None:
        nonlocal count
        while len(h.scheduler.planner.waiting) < 5:
            h.add(f"r{count}", prompt(1, 21), 3)
            count += 1

    for turn in range(120):
        fill()
        if turn == 10:
            h.add("uncached", prompt(5, 40), 3)
        h.clock.now += 1.0
        h.steps()
        if turn >= 10 and h.scheduler.requests["uncached"].started:
            break
    waited = h.clock.now - 10.0
    assert 30.0 <= waited <= 35.0, "it waits for its bound, and then for one of the two rows"
    assert count > 10


def test_an_overdue_request_gets_room_although_others_would_fit() -> None:
    """The pool holds the running request and small ones; the large one starts only if small ones stop to start."""
    h = Harness(num_pages=24, max_rows=8, chunked_prefill_size=64, schedule_max_age=5.0)
    for i in range(200):
        if i == 3:
            h.add("large", prompt(9, 70), 4)
        if len(h.scheduler.planner.waiting) < 3:
            h.add(f"r{i}", prompt(1, 21), 6)
        h.clock.now += 1.0
        h.steps()
        if "large" in h.finished:
            break
    assert h.tokens["large"] == generate(prompt(9, 70), 4, 0)
    assert h.clock.now < 40.0


class CountedTokens(list[int]):
    """Counts the tokens that are read in slices."""

    read = 0

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        found = super().__getitem__(index)
        if isinstance(index, slice):
            self.read += len(found)
        return found


@pytest.mark.parametrize("policy", ["lpm", "fcfs"])
def test_a_waiting_prompt_is_matched_once(policy: str) -> None:
    h = Harness(num_pages=200, max_rows=8, chunked_prefill_size=64, schedule_policy=policy)
    h.add("warm", prompt(1, 400), 1)
    h.run()
    h.add("running", prompt(2, 40), 60)
    h.steps()
    planner = h.scheduler.planner
    h.runner.step_budget = 0  # the next request cannot start
    h.add("waits", prompt(1, 401), 2)
    req = h.scheduler.requests["waits"]
    req.step_bytes = 1
    h.steps()
    req.token_ids = tokens = CountedTokens(req.token_ids)
    uses = planner.cache._tick
    h.steps(20)
    assert not req.started and tokens.read <= 20 * 8, "at most the next page, and its key, in each step"
    assert planner.cache._tick == uses, "its pages are not locked and unlocked in each step"
    h.runner.step_budget = None
    h.run()
    assert cached(h, "waits") == 400
    assert h.tokens["waits"] == generate(prompt(1, 401), 2, 0)


def test_a_waiting_request_keeps_its_place_by_what_is_left_of_its_prefix() -> None:
    h = busy(num_pages=32)
    h.add("long", prompt(2, 25), 2)
    h.add("short", prompt(1, 12), 2)
    assert order(h) == ["long", "short"]
    planner = h.scheduler.planner
    long = h.scheduler.requests["long"]
    planner.cache.evict(1)
    planner.cache.want(long.match)  # another request with the same prefix, so that `short` is evicted before
    planner.cache.unwant(long.match)
    planner.cache.evict(6)
    h.run()
    assert h.tokens["long"] == generate(prompt(2, 25), 2, 0)
    assert h.tokens["short"] == generate(prompt(1, 12), 2, 0)


def test_an_update_hides_the_prefixes_of_waiting_requests() -> None:
    h = busy()
    h.add("short", prompt(1, 12), 2)
    h.add("long", prompt(2, 25), 2)
    assert order(h) == ["long", "short"]
    h.scheduler.planner.start_version()
    assert order(h) == ["short", "long"]
    h.run()
    assert cached(h, "long") == 0


# -- running episodes first ----------------------------------------------------------------------------------


def with_agent(wait: float, h: Harness | None = None, **settings: Any) -> tuple[Harness, list[int]]:
    """Return a harness with a running request, and the history of an agent that returned twice after `wait` seconds.

    The agent's pages will be kept for `wait` seconds after its third turn, which ended just now.
    """
    h = h or Harness(**({"num_pages": 24, "max_rows": 4, "chunked_prefill_size": 64} | settings))
    history = prompt(1, 30)
    for turn in range(3):
        h.clock.now += wait if turn else 0.0
        h.add(f"a{turn}", history, 6)
        h.run()
        history += h.tokens[f"a{turn}"] + prompt(2, 2)
    h.add("other", prompt(3, 20), 30)
    h.steps(2)
    return h, history


def test_a_new_request_does_not_take_the_pages_of_an_agent_that_will_return() -> None:
    h, history = with_agent(wait=1.0)
    h.add("new", prompt(4, 40), 8)
    h.steps(2)
    assert not h.scheduler.requests["new"].started
    h.add("a3", history, 6)
    h.run()
    assert cached(h, "a3") >= 48, "its history was kept"
    assert h.finished["new"].type == "length"


def test_a_new_request_takes_the_pages_of_an_agent_whose_time_is_over() -> None:
    h, _ = with_agent(wait=1.0)
    h.clock.now += 100.0
    h.add("new", prompt(4, 40), 8)
    h.steps(2)
    assert h.scheduler.requests["new"].started


def test_an_overdue_request_takes_the_pages_of_an_agent_that_will_return() -> None:
    h, _ = with_agent(wait=500.0, schedule_max_age=10.0)
    h.add("new", prompt(4, 40), 8)
    h.clock.now += 9.0
    h.steps(2)
    assert not h.scheduler.requests["new"].started
    h.clock.now += 1.0
    h.steps()
    assert h.scheduler.requests["new"].started


def test_a_new_request_that_yields_delays_no_request_behind_it() -> None:
    h, history = with_agent(wait=1.0)
    h.add("new", history[:12] + prompt(4, 40), 8)
    h.add("small", prompt(5, 6), 2)
    assert order(h) == ["new", "small"]
    h.steps()
    assert [h.scheduler.requests[rid].started for rid in ("new", "small")] == [False, True]
    h.run()
    assert h.tokens["new"] == generate(history[:12] + prompt(4, 40), 8, 0)


def test_a_new_request_that_yields_evicts_nothing() -> None:
    """Pages that would not be enough for it may be used before others are free."""
    h = Harness(num_pages=32, max_rows=4, chunked_prefill_size=64)
    h.add("idle", prompt(6, 20), 2)  # nothing keeps its pages
    h.run()
    h, _ = with_agent(wait=1.0, h=h)
    cache = h.scheduler.planner.cache
    assert cache.match(prompt(6, 20), 20).depth == 5
    h.add("new", prompt(4, 60), 8)
    h.steps(2)
    assert not h.scheduler.requests["new"].started and cache.match(prompt(6, 20), 20).depth == 5


def test_many_new_requests_with_a_common_beginning_do_not_hide_the_turn_of_an_agent() -> None:
    """They have more cached tokens than the turn, but the turn is cached almost whole."""
    h, _ = with_agent(wait=1.0, num_pages=60, max_rows=8)
    system, history = prompt(7, 40), prompt(8, 20)
    h.add("warm", system, 1)
    h.add("short", history, 4)
    h.run()
    for i in range(300):
        h.add(f"new{i}", system + prompt(100 + i, 120), 4)
    h.add("turn", history + h.tokens["short"] + [9], 4)
    assert order(h)[0] == "turn"
    h.steps()
    assert h.scheduler.requests["turn"].started


def test_overdue_requests_start_one_after_the_other() -> None:
    h = busy(schedule_max_age=64.0)
    for i in range(3):
        h.add(f"new{i}", prompt(5 + i, 9), 2)
    h.add("cached", prompt(1, 12), 2)
    queue = h.scheduler.planner.waiting
    h.clock.now += 64.0
    for overdue in (1, 1, 2, 2, 3):
        queue.age()
        assert [req.rid for req in queue if req.overdue] == [f"new{i}" for i in range(overdue)]
        h.clock.now += 0.5
    assert order(h) == ["new0", "new1", "new2", "cached"]


def test_the_backlog_of_one_priority_delays_no_overdue_request_of_another() -> None:
    h = busy(schedule_max_age=64.0)
    for i in range(5):
        h.add(f"low{i}", prompt(5 + i, 9), 2)
    h.add("high", prompt(20, 9), 2, priority=1)
    h.clock.now += 64.0
    queue = h.scheduler.planner.waiting
    queue.age()
    assert [req.rid for req in queue if req.overdue] == ["high", "low0"]
    h.run()
    assert not queue._young


def test_a_long_backlog_becomes_overdue_faster() -> None:
    h = busy(schedule_max_age=64.0)
    for i in range(600):
        h.add(f"new{i}", prompt(5 + i, 9), 2)
    h.clock.now += 64.0
    queue = h.scheduler.planner.waiting
    queue.age()
    assert [req.rid for req in queue if req.overdue] == ["new0", "new1", "new2"]


def test_a_prompt_that_others_continue_too_is_no_history() -> None:
    """Otherwise each new episode with a long system prompt would take the pages of running ones."""
    h, _ = with_agent(wait=1.0, num_pages=50)
    system = prompt(7, 40)
    for i in range(2):
        h.add(f"episode{i}", system + prompt(20 + i, 8), 2)
    h.run()
    h.add("other", prompt(3, 20), 30)
    h.add("new", system + prompt(30, 8), 2)
    h.add("again", system + prompt(20, 8) + h.tokens["episode0"] + [9], 2)
    queue = h.scheduler.planner.waiting
    requests = h.scheduler.requests
    assert [queue.is_cached(requests[rid]) for rid in ("new", "again")] == [False, True]


def with_dropped_output(seed: int, turns: int, h: Harness) -> None:
    """Play an agent that drops the first half of each output, such as its reasoning, from its history."""
    history = prompt(seed, 21)
    for turn in range(turns):
        h.clock.now += 1.0
        h.add(f"{seed}/{turn}", history, 16)
        h.run()
        history = history + h.tokens[f"{seed}/{turn}"][8:] + prompt(20 + turn, 6)


def test_a_turn_is_recognized_although_the_next_one_drops_tokens_of_its_output() -> None:
    h = Harness(num_pages=80, chunked_prefill_size=64)
    with_dropped_output(1, 4, h)
    returns = h.scheduler.planner.returns
    assert returns.keep_seconds(2) == 1.0, "each turn was continued after a second"
    h.scheduler.planner.check_invariants()


def test_dropped_tokens_are_evicted_first() -> None:
    h = Harness(num_pages=80, chunked_prefill_size=64)
    with_dropped_output(1, 2, h)
    cache = h.scheduler.planner.cache
    first, second = h.tokens["1/0"], h.tokens["1/1"]
    old, new = prompt(1, 21) + first, prompt(1, 21) + first[8:] + prompt(20, 6) + second
    assert (cache.match(old, len(old)).depth, cache.match(new, len(new)).depth) == (9, 12)
    cache.evict(4)
    assert (cache.match(old, len(old)).depth, cache.match(new, len(new)).depth) == (5, 12)


def test_a_session_continues_no_turn_of_another_one() -> None:
    """Although its prompt begins with the whole prompt of the other one's turn."""
    h = Harness(num_pages=80, chunked_prefill_size=64)
    h.add("x", prompt(1, 24), 8, session_id="x")
    h.run()
    ended = h.scheduler.planner.cache.match(prompt(1, 24) + h.tokens["x"], 31)
    assert ended.ended is not None
    h.add("y", prompt(1, 24) + prompt(2, 20), 8, session_id="y")
    assert h.scheduler.requests["y"].turn == 0 and ended.ended is not None
    h.run()
    h.add("no id", prompt(1, 24) + h.tokens["x"] + [5], 2)
    assert h.scheduler.requests["no id"].turn == 0 and ended.ended is not None


def test_the_last_tokens_of_a_prompt_count_although_they_fill_no_page() -> None:
    h = Harness(num_pages=80, chunked_prefill_size=64)
    h.add("x", [*prompt(1, 20), 6, 7], 10)
    h.run()
    h.add("other", [*prompt(1, 20), 6, 8, *prompt(2, 9)], 2)
    h.add("next", [*prompt(1, 20), 6, 7, *h.tokens["x"][6:], *prompt(2, 9)], 2)
    assert [h.scheduler.requests[rid].turn for rid in ("other", "next")] == [0, 1]


def test_the_same_prompt_again_continues_nothing() -> None:
    """Neither do other samples of a group, nor another agent with the same beginning."""
    h = Harness(num_pages=80, chunked_prefill_size=64)
    for i, ids in enumerate([prompt(1, 21), prompt(1, 21), prompt(1, 12) + prompt(2, 30)]):
        h.clock.now += 1.0
        h.add(f"r{i}", ids, 16)
        h.run()
    assert h.scheduler.planner.returns.keep_seconds(1) == 0.0


def test_pages_are_not_kept_where_no_request_continues_another() -> None:
    """Protection costs nothing for requests of one turn: all rows are busy."""
    h = Harness(num_pages=64, max_rows=4, chunked_prefill_size=256)
    for i in range(40):
        h.add(f"r{i}", prompt(i, 30), 10)
    while len(h.scheduler.planner.waiting) > 4:
        h.clock.now += 0.01
        h.steps()
        assert len(h.runner.batches[-1].rows) == 4
    h.run()


def test_the_pages_of_a_finished_session_are_evicted_first() -> None:
    h = Harness(num_pages=64, chunked_prefill_size=64)
    h.add("old", prompt(1, 21), 4, session_id="old")
    h.run()
    h.add("finished", prompt(2, 21), 4, session_id="finished")
    h.run()
    h.scheduler.handle(FinishSessionReq(session_id="finished"))
    h.scheduler.handle(FinishSessionReq(session_id="unknown"))
    cache = h.scheduler.planner.cache
    cache.evict(6)
    assert cache.match(prompt(2, 21), 21).depth == 0 and cache.match(prompt(1, 21), 21).depth == 5


@pytest.mark.parametrize("runs", [True, False])
def test_a_session_may_finish_before_its_last_request_has_ended(runs: bool) -> None:
    h = Harness(num_pages=64, chunked_prefill_size=64)
    h.add("old", prompt(1, 21), 4, session_id="old")
    h.run()
    h.add("last", prompt(2, 21), 40, session_id="finished")
    h.steps(3 * runs)
    h.scheduler.handle(FinishSessionReq(session_id="finished"))
    h.abort("last")
    h.run()
    h.add("aborted later", prompt(3, 21), 4, session_id="finished too")
    h.steps(1)
    h.scheduler.handle(FinishSessionReq(session_id="finished too"))
    h.run()
    planner = h.scheduler.planner
    assert len(planner._histories) == 1, "nothing is remembered of the sessions that ended"
    planner.cache.evict(5)
    assert planner.cache.match(prompt(1, 21), 21).depth == 5 > planner.cache.match(prompt(3, 21), 21).depth


def test_the_turn_of_a_session_is_known_although_its_pages_were_evicted() -> None:
    h = busy()
    planner = h.scheduler.planner
    h.add("first", prompt(5, 9), 2, session_id="s")
    h.run()
    planner.cache.evict(planner.pages.num_pages)
    h.add("also running", prompt(0, 4), 10)
    h.steps()
    h.add("new", prompt(6, 9), 2)
    h.add("second", prompt(5, 9) + h.tokens["first"] + [9], 2, session_id="s")
    assert h.scheduler.requests["second"].turn == 1
    assert order(h) == ["second", "new"], "a running episode precedes a new one"


def test_many_sessions_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_histories, "_MOST_SESSIONS", 5)
    h = Harness(chunked_prefill_size=64)
    planner = h.scheduler.planner
    for i in range(20):
        h.add(f"r{i}", prompt(i, 9), 2, session_id=f"s{i}")
        h.run()
    assert len(planner._histories) == 5
    pages = weakref.ref(planner.cache.match(prompt(19, 9), 9))
    planner.cache.evict(planner.pages.num_pages)
    assert pages() is None, "the history of a session keeps no evicted page in memory"
    h.scheduler.handle(FinishSessionReq(session_id="s19"))
    assert len(planner._histories) == 4


def test_a_prompt_without_a_full_page_is_no_turn_that_others_continue() -> None:
    h = Harness(chunked_prefill_size=64)
    h.add("long", prompt(1, 9), 2)  # its pages keep the tree, and with it the root
    h.run()
    for i in range(3):
        h.add(f"r{i}", [9 + i], 2)
        h.run()
    assert h.scheduler.planner.returns.keep_seconds(1) == 0.0
    h.add("next", [20], 2)
    assert h.scheduler.requests["next"].turn == 0


def test_retracted_pages_have_no_advantage_with_fcfs() -> None:
    h = Harness(chunked_prefill_size=64, schedule_policy="fcfs")
    h.clock.now = 5.0
    h.add("old", prompt(1, 9), 20)
    h.steps(2)
    h.scheduler.handle(PauseGenerationReq(id=1, mode="retract"))
    h.steps()
    cache = h.scheduler.planner.cache
    assert {node.keep_until for node in cache.nodes()} == {0.0}

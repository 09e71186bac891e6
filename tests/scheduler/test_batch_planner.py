"""A step contains decodes, then chunks of prefills. When pages run out, the youngest requests make room."""

from __future__ import annotations

from tests.scheduler.planned import Planned


def ids(seed: int, length: int) -> list[int]:
    return [seed * 100 + i for i in range(length)]


def test_decodes_run_in_every_step_and_the_oldest_prefill_fills_it() -> None:
    p = Planned(chunk=10)
    p.add("old", ids(1, 4), 20)
    assert p.step() == {"old": 4}
    p.add("long", ids(2, 25), 4)
    p.add("short", ids(3, 6), 4)
    assert p.step() == {"old": 1, "long": 10}
    assert p.step() == {"old": 1, "long": 10}
    assert p.step() == {"old": 1, "long": 5, "short": 5}
    assert p.step() == {"old": 1, "long": 1, "short": 1}


def test_a_step_has_no_more_rows_than_the_page_table() -> None:
    p = Planned(max_rows=2)
    reqs = [p.add(str(i), ids(i, 3), 2) for i in range(3)]
    assert list(p.step()) == ["0", "1"]
    p.run()
    assert all(len(req.output_ids) == 2 for req in reqs)


def test_the_newest_request_makes_room_for_older_ones_but_not_under_a_step_in_flight() -> None:
    p = Planned(num_pages=6, schedule_policy="fcfs")
    old, new = p.add("old", ids(1, 7), 9), p.add("new", ids(2, 7), 9)
    for _ in range(6):
        assert list(p.step()) == ["old", "new"]
    assert p.planner.cache.available_pages() == 0 and old.cached_len == 12, "both need a fourth page"
    assert p.planner.plan(settled=False) is None and new.row >= 0
    assert list(p.step()) == ["old"]
    assert (old.num_retractions, new.num_retractions, new.row) == (0, 1, -1) and new.output_ids
    assert p.planner.has_started() and p.planner.num_retracted == 1
    p.run()
    assert (len(old.output_ids), len(new.output_ids), p.planner.num_retracted) == (9, 9, 0)


def test_a_request_with_a_pending_last_token_is_not_planned() -> None:
    p = Planned()
    p.add("a", ids(1, 3), 2)
    p.step()
    batch = p.planner.plan()
    assert batch is not None
    assert p.planner.plan(settled=False) is None, "the step in flight samples the last token"
    p.compute(batch)
    assert not p.planner.running


def test_a_step_ahead_is_the_next_step_and_is_undone_with_its_pages() -> None:
    p = Planned()
    a = p.add("a", ids(1, 4), 20)
    p.step()
    before = a.cached_len, a.num_pending
    ahead = p.planner.plan_ahead(only_started=False)
    assert ahead is not None and len(a.pages) == 2 and not a.page_updates
    assert p.planner.confirm(ahead, only_started=False)
    ahead.undo()
    assert (a.cached_len, a.num_pending) == before and len(a.page_updates) == 1
    usual = p.planner.plan()
    assert usual is not None and usual.forward == ahead.forward
    p.compute(usual)


def test_no_step_is_planned_ahead_without_pages_or_while_a_request_may_start() -> None:
    p = Planned(num_pages=6, max_rows=3, schedule_policy="fcfs")
    for rid, number in (("old", 1), ("new", 2)):
        p.add(rid, ids(number, 7), 9)
    for _ in range(5):
        p.step()
    ahead = p.planner.plan_ahead(only_started=False)
    assert ahead is not None
    p.add("third", ids(3, 7), 9)
    assert not p.planner.confirm(ahead, only_started=False) and p.planner.confirm(ahead, only_started=True)
    ahead.undo()
    assert p.planner.plan_ahead(only_started=False) is None, "`third` waits for pages, and there is a row for it"
    p.step()
    assert p.planner.cache.available_pages() == 0
    assert p.planner.plan_ahead(only_started=True) is None, "both need a fourth page"


def test_a_new_version_restarts_prefills_and_shares_nothing_of_older_pages() -> None:
    p = Planned(chunk=8)
    decoding = p.add("decoding", ids(1, 5), 12)
    p.step()
    prefilling = p.add("prefilling", ids(2, 20), 2)
    p.step()
    p.planner.start_version()
    assert (prefilling.row, prefilling.restarted, decoding.private) == (-1, True, True)
    p.step()
    assert p.planner.is_restarting(), "the prefill is computed again"
    p.run()
    assert not p.planner.is_restarting()
    match = p.planner.cache.match
    assert match(decoding.token_ids, 16).depth == 0, "pages of two versions are not shared"
    assert match(prefilling.token_ids, 20).depth == 5


def test_a_step_that_ran_out_of_memory_is_planned_again_in_halves() -> None:
    p = Planned()
    for i in range(4):
        p.add(str(i), ids(i, 30), 4)
    batch = p.planner.plan()
    assert batch is not None and len(batch.reqs) == 3 and p.planner.out_of_memory(batch) is None
    assert len(p.step()) == 1, "half of the requests"
    p.run()
    assert not p.planner.limits.has_suspects


def test_a_session_that_ends_ends_for_its_live_requests() -> None:
    p = Planned(max_rows=1)
    running, waiting = (p.add(rid, ids(1, 5), session_id="s") for rid in ("running", "waiting"))
    other = p.add("other", ids(2, 5), session_id="t")
    p.step()
    p.planner.finish_session("s")
    assert (running.session_over, waiting.session_over, other.session_over) == (True, True, False)

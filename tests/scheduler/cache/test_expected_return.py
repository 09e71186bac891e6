"""What is learned about turns that are continued, and how long their pages are kept therefore."""

from __future__ import annotations

from verl_server.scheduler.cache.expected_return import EndedTurn, ExpectedReturn


def observe(returns: ExpectedReturn, turn: int, waits: list[float], lost: int) -> None:
    for wait in waits:
        returns.continued(EndedTurn(turn, 100.0), 100.0 + wait)
    for _ in range(lost):
        returns.lost(EndedTurn(turn, 100.0))


def test_nothing_is_kept_where_no_turn_was_ever_continued() -> None:
    returns = ExpectedReturn()
    assert returns.keep_seconds(1) == 0.0
    observe(returns, 1, [], lost=50)
    assert returns.keep_seconds(1) == 0.0


def test_pages_are_kept_for_the_longest_wait_if_every_turn_is_continued() -> None:
    returns = ExpectedReturn()
    observe(returns, 1, [float(wait) for wait in range(1, 101)], lost=0)
    assert returns.keep_seconds(1) == 100.0 and returns.keep_seconds(7) == 100.0, "no turn 7 was seen: as all turns"


def test_the_less_probable_a_continuation_the_shorter_the_time() -> None:
    times = []
    for lost in (0, 20, 60, 95):
        returns = ExpectedReturn()
        for i in range(100):  # in turns, because the latest observations count most
            observe(returns, 1, [float(i)] if i >= lost else [], lost=i < lost)
            observe(returns, 2, [float(i)], lost=0)
        times.append(returns.keep_seconds(1))
    assert times == sorted(times, reverse=True) and len(set(times)) == len(times)


def test_the_last_turn_of_episodes_is_learned_by_its_number() -> None:
    returns = ExpectedReturn()
    for _ in range(40):
        for turn in range(1, 8):
            observe(returns, turn, [0.5], lost=0)
        observe(returns, 8, [], lost=1)
    assert returns.keep_seconds(8) == 0.0 < returns.keep_seconds(7)


def test_new_waits_replace_old_ones() -> None:
    returns = ExpectedReturn()
    observe(returns, 1, [100.0] * 600, lost=0)
    observe(returns, 1, [1.0] * 600, lost=0)
    assert returns.keep_seconds(1) == 1.0

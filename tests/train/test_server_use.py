"""Idle shares and cache hits between two readings, of servers that tell, that are new and that tell nothing."""

from __future__ import annotations

import pytest

from verl_server.train.server_use import ServerCounters, ServerUse


def test_the_figures_are_about_the_time_between_two_readings() -> None:
    readings = iter(
        [
            {"a": ServerCounters(10.0, 1000, 900), "b": ServerCounters(0.0, 0, 0), "c": ServerCounters()},
            {"a": ServerCounters(13.0, 1300, 1000), "b": ServerCounters(1.0, 100, 60), "c": ServerCounters()},
            {"a2": ServerCounters(1.0, 10, 5), "c": ServerCounters()},
            {"a2": ServerCounters(9.0, 10, 5), "c": ServerCounters()},
        ]
    )
    use = ServerUse(lambda: next(readings))
    use.read()
    assert use.idle(1.0) == {} and use.cache_hit_rate() is None
    use.read()
    assert use.idle(4.0) == {"servers": pytest.approx(1 - (3 + 1) / 2 / 4)}
    assert use.cache_hit_rate() == pytest.approx((100 + 60) / (300 + 100))
    use.read()  # the server was started again
    assert use.idle(4.0) == {} and use.cache_hit_rate() is None
    use.read()
    assert use.idle(4.0) == {"servers": 0.0}, "a busy time that exceeds the wall time by a clock's error"
    assert use.cache_hit_rate() is None, "no prompt has begun"

"""Seconds in which a server has requests, counted over gaps and while one runs."""

from __future__ import annotations

from verl_server.server.busy_time import BusyTime


def test_time_counts_while_there_are_requests() -> None:
    now = 10.0
    busy = BusyTime(lambda: now)
    assert busy.seconds == 0.0
    for at, requests in ((11.0, 1), (12.0, 3), (14.0, 1), (15.0, 0), (20.0, 0), (30.0, 2)):
        now = at
        busy.note(requests)
    assert busy.seconds == 4.0
    now = 33.0
    assert busy.seconds == 7.0, "the time of requests that run counts, too"

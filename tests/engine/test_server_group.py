"""The same call to several servers: at one time, until all have answered, and with one outcome."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from verl_server.engine.server_group import Outcomes, ServerGroup
from verl_server.errors import (
    BadRequestError,
    ServerDiedError,
    ServerUnavailableError,
    UnansweredError,
    VerlServerError,
    WeightUpdateError,
)

URLS = ["http://a:1", "http://b:1", "http://c:1"]
WAIT = 30.0


class Member:
    def __init__(self, url: str) -> None:
        self.url = url
        self.closed = threading.Event()

    def shutdown(self) -> None:
        self.closed.set()


@pytest.fixture
def group() -> Iterator[ServerGroup[Member]]:
    group = ServerGroup(Member)
    yield group
    group.close()


def test_the_calls_run_at_one_time_and_over_kept_connections(group: ServerGroup[Member]) -> None:
    together = threading.Barrier(3)

    def act(member: Member) -> Member:
        together.wait(WAIT)
        return member

    first, second = (group.each(URLS, "call", act).done for _ in range(2))
    assert list(first) == URLS and first == second == group.members()


def test_no_call_returns_before_all_servers_have_answered(group: ServerGroup[Member]) -> None:
    """Another server may read the caller's memory while one has refused already."""
    refused, answered = threading.Event(), threading.Event()

    def act(member: Member) -> None:
        if member.url == URLS[0]:
            refused.set()
            raise WeightUpdateError("no")
        assert refused.wait(WAIT)
        answered.set()

    outcomes = group.each(URLS[:2], "call", act)
    assert answered.is_set() and list(outcomes.failed) == [URLS[0]] and list(outcomes.done) == [URLS[1]]


def test_an_interruption_closes_the_connections_of_calls_that_wait(group: ServerGroup[Member]) -> None:
    """So each server withdraws its request, unless it has begun. The next call connects again."""
    waiting, ended = threading.Barrier(2), threading.Event()

    def act(member: Member) -> None:
        waiting.wait(WAIT)
        if member.url == URLS[0]:
            raise KeyboardInterrupt
        assert member.closed.wait(WAIT)
        ended.set()
        raise ServerUnavailableError("The adapter was shut down during the call.")

    with pytest.raises(KeyboardInterrupt):
        group.each(URLS[:2], "call", act)
    assert ended.is_set(), "the caller may write to its memory again"
    assert URLS[1] not in group.members()


def test_a_server_that_cannot_be_connected_to_is_left_out() -> None:
    def connect(url: str) -> Member:
        if url == URLS[0]:
            raise ServerDiedError("refused")
        return Member(url)

    outcomes = ServerGroup(connect).each(URLS, "call", lambda member: member.url)
    assert list(outcomes.left_out) == [URLS[0]] and list(outcomes.done) == URLS[1:]


@pytest.mark.parametrize(
    ("outcomes", "kind", "text"),
    [
        (Outcomes(done={"a": 1}), None, ""),
        (Outcomes(done={"a": 1}, left_out={"b": ServerDiedError("x")}), None, ""),
        (Outcomes(), ServerUnavailableError, "push: the router has no server."),
        (Outcomes(left_out={"a": ServerDiedError("x")}), ServerDiedError, "x"),
        (
            Outcomes(left_out={"a": ServerDiedError("x"), "b": ServerUnavailableError("y.")}),
            ServerDiedError,
            "push: none of the 2 servers takes part. a: x. b: y.",
        ),
        (Outcomes(failed={"a": BadRequestError("same"), "b": BadRequestError("same")}), BadRequestError, "same"),
        (
            Outcomes(done={"a": 1}, failed={"b": WeightUpdateError("no")}, left_out={"c": ServerDiedError("x")}),
            WeightUpdateError,
            "push failed on 1 of 3 servers. b is b failed: no. a is a has carried it out. c was left out: x.",
        ),
        (
            Outcomes(failed={"a": WeightUpdateError("no"), "b": UnansweredError("silence")}),
            UnansweredError,
            "push failed on 2 of 2 servers. a is a failed: no. b is b failed: silence.",
        ),
    ],
)
def test_the_error_of_a_call(outcomes: Outcomes[int], kind: type[VerlServerError] | None, text: str) -> None:
    error = outcomes.error("push", lambda url: f" is {url}")
    assert (type(error), str(error)) == (kind, text) if kind is not None else error is None

"""A non-blocking message socket delivers messages whole and in order, for any message size and any reading speed."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from verl_server.ipc.message_socket import MessageSocket
from verl_server.ipc.readiness import wait_readable, wait_writable

WAIT = 30.0


@pytest.fixture
def ends() -> Iterator[tuple[MessageSocket, MessageSocket]]:
    ours, theirs = MessageSocket.pair()
    pair = ours, MessageSocket(theirs)
    yield pair
    for end in pair:
        end.close()


def serve(end: MessageSocket, enough: Callable[[], bool], got: list[bytes]) -> None:
    """Send and receive on `end`, as an event loop would, until `enough` returns True."""
    deadline = time.monotonic() + WAIT
    while not enough():
        assert time.monotonic() < deadline, "the messages did not come"
        wait_writable(end, 0.5) if end.unsent else wait_readable(end, 0.5)
        end.flush()
        got += end.receive()


def received(end: MessageSocket, count: int) -> list[bytes]:
    got: list[bytes] = []
    serve(end, lambda: len(got) >= count, got)
    return got


def test_messages_arrive_whole_and_in_order(ends: tuple[MessageSocket, MessageSocket]) -> None:
    ours, theirs = ends
    messages = [b"", b"one", b"\0" * 9, bytes(range(256)) * 300]
    for message in messages:
        ours.send(message)
    assert received(theirs, len(messages)) == messages
    assert theirs.receive() == []
    assert not ours.is_closed and not theirs.is_closed


def test_a_message_larger_than_any_buffer(ends: tuple[MessageSocket, MessageSocket]) -> None:
    ours, theirs = ends
    large = random.Random(0).randbytes(20 << 20)
    ours.send(large)
    ours.send(b"after it")
    assert ours.unsent, "the message must exceed the socket's buffer"
    got: list[bytes] = []
    with ThreadPoolExecutor() as threads:
        reader = threads.submit(serve, theirs, lambda: len(got) == 2, got)
        serve(ours, lambda: not ours.unsent, [])
        reader.result(WAIT)
    assert got == [large, b"after it"]


def test_two_ends_that_send_before_they_read_do_not_wait_for_each_other(
    ends: tuple[MessageSocket, MessageSocket],
) -> None:
    sent = [bytes([k % 256]) * 50_000 for k in range(200)]  # 10 MB in each direction, while neither end reads
    for end in ends:
        for message in sent:
            end.send(message)
        assert end.unsent
    got: tuple[list[bytes], list[bytes]] = ([], [])

    def done() -> bool:
        return all(len(each) == len(sent) for each in got) and not any(end.unsent for end in ends)

    with ThreadPoolExecutor() as threads:
        for future in [threads.submit(serve, end, done, mine) for end, mine in zip(ends, got, strict=True)]:
            future.result(WAIT)
    assert got == (sent, sent)


def test_one_call_does_not_read_for_ever(ends: tuple[MessageSocket, MessageSocket]) -> None:
    ours, theirs = ends
    small = b"x" * 1000
    with ThreadPoolExecutor() as threads:
        for _ in range(10_000):
            ours.send(small)
        writer = threads.submit(serve, ours, lambda: not ours.unsent, [])
        sizes = []
        while sum(sizes) < 10_000:
            wait_readable(theirs, WAIT)
            sizes.append(len(theirs.receive()))
        writer.result(WAIT)
    assert max(sizes) < 10_000


def test_what_a_peer_said_before_it_went_is_heard(ends: tuple[MessageSocket, MessageSocket]) -> None:
    ours, theirs = ends
    theirs.send(b"last words")
    theirs.close()
    ours.send(b"to nobody")  # this call detects that the peer has closed its end
    ours.send(b"to nobody")
    assert not ours.unsent
    assert ours.receive() == [b"last words"]
    assert ours.receive() == [] and ours.is_closed
    theirs.close()


def test_a_message_that_was_cut_off_is_none(ends: tuple[MessageSocket, MessageSocket]) -> None:
    ours, theirs = ends
    ours.send(b"y" * (10 << 20))
    ours.close()
    got: list[bytes] = []
    serve(theirs, lambda: theirs.is_closed, got)
    assert got == [] and theirs.receive() == []

"""Connections that break at every place: what is sampled again, and what a client gets."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import tracemalloc
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import orjson
import pytest

from tests.steps import Steps
from verl_server.server.http.operation import POST, Operation
from verl_server.server.replay import middleware as middleware_module
from verl_server.server.replay.middleware import ReplayMiddleware
from verl_server.web.resolver import Found

SESSION = SimpleNamespace(session_id="ses_1", child=None, scope_key=b"s" * 16)
BOUND = 10.0


class App:
    """An application whose answer comes piece by piece, as the test permits."""

    def __init__(self) -> None:
        self.runs = 0
        self.disconnected = 0
        self.media_type = b"application/json"
        self.status = 200
        self.pieces = [b"one ", b"two ", b"three"]
        self.gates = [asyncio.Event() for _ in range(5)]
        """Before the start, before each piece, before the end."""
        self.open()

    def open(self, count: int | None = None) -> None:
        for gate in self.gates[:count]:
            gate.set()

    def hold(self, at: int) -> None:
        """Stop before gate `at`."""
        for gate in self.gates[at:]:
            gate.clear()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.runs += 1
        self.replay = scope["state"].get("replay")
        message = await receive()
        assert message["body"] == b"{}"
        gone = asyncio.ensure_future(receive())
        try:
            await self._answer(gone, send)
        finally:
            gone.cancel()

    async def _answer(self, gone: asyncio.Future[Any], send: Any) -> None:
        headers = [(b"content-type", self.media_type)]
        for gate, piece in zip(self.gates, [None, *self.pieces, b""], strict=True):
            opened = asyncio.ensure_future(gate.wait())
            await asyncio.wait((opened, gone), return_when=asyncio.FIRST_COMPLETED)
            if not gate.is_set():
                self.disconnected += 1
                opened.cancel()
                return
            if piece is None:
                await send({"type": "http.response.start", "status": self.status, "headers": headers})
            else:
                await send({"type": "http.response.body", "body": piece, "more_body": bool(piece)})


class Client:
    """One connection. `cut` breaks it."""

    def __init__(self) -> None:
        self.status, self.body, self.ended = 0, b"", False
        self.headers: dict[bytes, bytes] = {}
        self._gone = asyncio.Event()
        self._sent = False
        self.grew = asyncio.Event()

    def cut(self) -> None:
        self._gone.set()

    async def receive(self) -> dict[str, Any]:
        if not self._sent:
            self._sent = True
            return {"type": "http.request", "body": b"{}", "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: dict[str, Any]) -> None:
        if self._gone.is_set():
            raise OSError("broken pipe")
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], dict(message["headers"])
        else:
            self.body += message["body"]
            self.ended = not message.get("more_body", False)
        self.grew.set()
        self.grew.clear()


class House:
    """The middleware over an `App`."""

    def __init__(self, **options: Any) -> None:
        self.app = App()
        settings: dict[str, Any] = {"grace": 60.0, "ttl": 60.0, "most_bytes": 1 << 20, "most_body": 1 << 20}
        self.middleware = ReplayMiddleware(self.app, cumulative_events=True, **settings | options)
        self.tasks: list[asyncio.Task[None]] = []

    def connect(self, session: Any = SESSION, path: str = "/v1/messages", **headers: str) -> Client:
        client = Client()
        operation = Operation(path, MagicMock(), POST, replayed=True)
        state = {"route": Found(operation, {})} | ({"session": session} if session else {})
        scope = {
            **{"type": "http", "method": "POST", "path": path, "state": state},
            "headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()],
        }
        self.tasks.append(asyncio.ensure_future(self.middleware(scope, client.receive, client.send)))
        return client

    async def ended(self) -> None:
        """Wait until all connections have ended."""
        await asyncio.wait_for(asyncio.gather(*self.tasks), BOUND)


@contextlib.asynccontextmanager
async def bounded() -> AsyncIterator[None]:
    async with asyncio.timeout(BOUND):
        yield


def scenario(test: Callable[[House], Awaitable[None]], **options: Any) -> None:
    async def run() -> None:
        async with bounded():
            await test(House(**options))

    asyncio.run(run())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


RETRY = {"x_stainless_retry_count": "1"}
WHOLE = b"one two three"


@pytest.mark.parametrize("at", range(5))
@pytest.mark.parametrize("headers", [{"idempotency_key": "k"}, RETRY])
def test_a_retry_of_a_connection_that_broke_anywhere_gets_the_one_answer(at: int, headers: dict[str, str]) -> None:
    async def test(house: House) -> None:
        house.app.hold(at)
        first = house.connect(**{**headers, **({"x_stainless_retry_count": "0"} if headers is RETRY else {})})
        await until(lambda: first.body == WHOLE[: [0, 0, 4, 8, 13][at]] and house.app.runs == 1)
        first.cut()
        await until(house.tasks[0].done)
        second = house.connect(**headers)
        await until(lambda: len(house.middleware.entries) == 1)
        house.app.open()
        await house.ended()
        assert (second.status, second.body, second.ended, house.app.runs) == (200, WHOLE, True, 1)

    scenario(test)


def test_two_connections_of_one_key_read_one_answer() -> None:
    async def test(house: House) -> None:
        house.app.hold(2)
        first, second = house.connect(idempotency_key="k"), house.connect(idempotency_key="k")
        await until(lambda: first.body == second.body == b"one ")
        house.app.open()
        await house.ended()
        third = house.connect(idempotency_key="k")
        await house.ended()
        assert first.body == second.body == third.body == WHOLE and house.app.runs == 1

    scenario(test)


def test_another_body_or_path_of_a_key_is_refused() -> None:
    async def test(house: House) -> None:
        house.connect(idempotency_key="k")
        await house.ended()
        other = house.connect(idempotency_key="k", path="/generate")
        await house.ended()
        assert other.status == 409 and other.headers[b"x-should-retry"] == b"false" and house.app.runs == 1
        elsewhere = house.connect(
            SimpleNamespace(session_id="ses_2", child=None, scope_key=b"t" * 16), idempotency_key="k"
        )
        await house.ended()
        assert elsewhere.status == 200 and house.app.runs == 2

    scenario(test)


def test_a_request_that_still_has_a_client_is_never_joined_without_a_key() -> None:
    async def test(house: House) -> None:
        house.app.hold(2)
        first, second = house.connect(), house.connect(**RETRY)
        await until(lambda: house.app.runs == 2)
        house.app.open()
        await house.ended()
        assert first.body == second.body == WHOLE

    scenario(test)


def test_several_lost_requests_are_sampled_anew() -> None:
    async def test(house: House) -> None:
        house.app.hold(2)
        lost = [house.connect(), house.connect()]
        await until(lambda: all(each.body for each in lost))
        for each in lost:
            each.cut()
        await until(lambda: all(task.done() for task in house.tasks))
        house.connect(**RETRY)
        await until(lambda: house.app.runs == 3)
        house.app.open()
        await house.ended()

    scenario(test)


def test_a_first_request_joins_nothing_and_outside_a_session_nothing_is_kept() -> None:
    async def test(house: House) -> None:
        house.app.hold(2)
        first = house.connect()
        await until(lambda: bool(first.body))
        first.cut()
        await until(lambda: house.tasks[0].done())
        house.connect()
        await until(lambda: house.app.runs == 2)
        house.connect(None, **RETRY)
        await until(lambda: house.app.runs == 3)
        assert len(house.middleware.entries) == 2 and house.app.replay is None
        house.app.open()
        await house.ended()

    scenario(test)


def test_a_generation_without_a_client_ends_after_the_grace() -> None:
    async def test(house: House) -> None:
        house.app.hold(2)
        first = house.connect(idempotency_key="k")
        await until(lambda: bool(first.body))
        first.cut()
        await until(lambda: house.app.disconnected == 1 and len(house.middleware.entries) == 0)
        house.app.open()
        house.connect(idempotency_key="k")
        await house.ended()
        assert house.app.runs == 2

    scenario(test, grace=0.01)


def test_refusals_and_expired_answers_are_not_kept() -> None:
    async def test(house: House) -> None:
        house.app.status = 503
        assert house.connect(idempotency_key="k").status == 0
        await house.ended()
        await until(lambda: len(house.middleware.entries) == 0)
        house.app.status = 200
        house.connect(idempotency_key="k")
        await house.ended()
        await until(lambda: len(house.middleware.entries) == 0)
        assert house.app.runs == 2

    scenario(test, ttl=0.01)


def test_a_stream_continues_behind_an_event() -> None:
    async def test(house: House) -> None:
        house.app.media_type, house.app.pieces = (
            b"text/event-stream",
            [b"data: a\n\n", b"data: b\n\ndata: c\n\n", b"data: [DONE]\n\n"],
        )
        house.app.hold(3)
        first = house.connect(idempotency_key="k")
        await until(lambda: b"data: b" in first.body)
        first.cut()
        await until(lambda: house.tasks[0].done())
        second = house.connect(idempotency_key="k", last_event_id="2")
        house.app.open()
        await house.ended()
        assert first.body == b"id: 1\ndata: a\n\nid: 2\ndata: b\n\nid: 3\ndata: c\n\n"
        assert second.body == b"id: 3\ndata: c\n\nid: 4\ndata: [DONE]\n\n"

    scenario(test)


@pytest.mark.parametrize("last", ["x", "-1", "²", "1_0", "9" * 5000])
def test_a_last_event_id_that_is_no_number_is_the_callers_fault(last: str) -> None:
    async def test(house: House) -> None:
        house.app.open()
        house.connect(idempotency_key="k")
        await house.ended()
        bad = house.connect(idempotency_key="k", last_event_id=last)
        await house.ended()
        assert bad.status == 400 and b"Last-Event-ID" in bad.body and house.app.runs == 1

    scenario(test)


def test_of_cumulative_events_the_last_one_is_kept() -> None:
    async def test(house: House) -> None:
        house.app.media_type, house.app.pieces = (
            b"text/event-stream",
            [b"data: 1\n\n", b"data: 12\n\n", b"data: [DONE]\n\n"],
        )
        house.connect(idempotency_key="k", path="/generate")
        await house.ended()
        second = house.connect(idempotency_key="k", path="/generate")
        await house.ended()
        assert second.body == b"id: 2\ndata: 12\n\nid: 3\ndata: [DONE]\n\n"

    scenario(test)


def test_old_answers_make_room() -> None:
    async def test(house: House) -> None:
        for key in "abc":
            house.connect(idempotency_key=key)
            await house.ended()
        await until(lambda: len(house.middleware.entries) == 2)
        house.connect(idempotency_key="c")
        await house.ended()
        assert house.app.runs == 3
        house.connect(idempotency_key="a")
        await house.ended()
        assert house.app.runs == 4

    scenario(test, most_bytes=2 * kept_bytes() + len(WHOLE))


def kept_bytes() -> int:
    """Return the bytes that the server counts for one kept answer of `App`."""
    sizes: list[int] = []

    async def test(house: House) -> None:
        house.connect(idempotency_key="a")
        await house.ended()
        sizes.append(house.middleware.entries.size)

    scenario(test)
    return sizes[0]


async def ask(house: House, keys: range) -> None:
    """Send one request after the other, each with its key."""
    for key in keys:
        house.connect(idempotency_key=f"key-{key}")
        await house.tasks.pop()


def test_the_work_of_a_request_does_not_grow_with_the_kept_answers() -> None:
    async def test(house: House) -> None:
        counts: list[int] = []
        for kept in (100, 400):
            await ask(house, range(len(house.middleware.entries), kept))
            with Steps() as steps:
                await ask(house, range(kept, kept + 1))
            counts.append(steps.count)
        assert len(house.middleware.entries) == 401
        assert abs(counts[1] - counts[0]) < 100, counts

    scenario(test)


def test_a_full_table_drops_an_answer_without_looking_at_all() -> None:
    counts: list[int] = []
    for kept in (50, 200):

        async def test(house: House, kept: int = kept) -> None:
            await ask(house, range(100, 110 + kept))
            with Steps() as steps:
                await ask(house, range(110 + kept, 111 + kept))
            assert len(house.middleware.entries) == kept
            counts.append(steps.count)

        scenario(test, most_bytes=kept * kept_bytes() + len(WHOLE))
    assert abs(counts[1] - counts[0]) < 100, counts


def test_the_counted_bytes_of_a_kept_answer_are_about_its_memory() -> None:
    async def test(house: House) -> None:
        events = [b'data: {"choices": [{"delta": {"content": "%d"}}]}\n\n' % k for k in range(20)]
        house.app.media_type, house.app.pieces = b"text/event-stream", events
        house.app.gates = [asyncio.Event() for _ in range(22)]
        house.app.open()
        text, count = sum(map(len, events)) + 20 * len(b"id: 10\n"), 200
        await ask(house, range(50))
        gc.collect()
        tracemalloc.start()
        before, size = tracemalloc.get_traced_memory()[0], house.middleware.entries.size
        await ask(house, range(50, 50 + count))
        gc.collect()
        used = (tracemalloc.get_traced_memory()[0] - before) / count
        tracemalloc.stop()
        counted = (house.middleware.entries.size - size) / count
        assert used < text + 1500, used
        assert 0.75 < counted / used < 1.4, (counted, used)

    scenario(test)


def test_a_kept_answer_does_not_keep_the_buffer_of_its_encoder() -> None:
    """orjson returns bytes that keep the memory of a buffer of some KiB."""

    async def test(house: House) -> None:
        count = 200
        house.app.gates, house.app.pieces = house.app.gates[:3], [b"warm"]
        await ask(house, range(20))
        gc.collect()
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        for key in range(20, 20 + count):
            house.app.pieces = [orjson.dumps({"text": "x" * 400, "key": key})]
            await ask(house, range(key, key + 1))
        house.app.pieces = []
        gc.collect()
        used = (tracemalloc.get_traced_memory()[0] - before) / count
        tracemalloc.stop()
        assert used < 420 + 1500, used

    scenario(test)


def test_an_answer_that_was_sent_again_expires_too() -> None:
    async def test(house: House) -> None:
        for _ in range(2):
            house.connect(idempotency_key="k")
            await house.ended()
        await until(lambda: len(house.middleware.entries) == 0)
        assert house.middleware.entries.size == 0

    scenario(test, ttl=0.05)


def test_the_bytes_of_an_answer_that_is_too_large_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware_module, "_MOST_ENTRY_BYTES", 1000)

    async def test(house: House) -> None:
        house.app.pieces = [b"x" * 5000, b"y", b"z"]
        first = house.connect(None, idempotency_key="k")
        await house.ended()
        assert first.body == b"x" * 5000 + b"yz" and house.middleware.entries.size < 2000
        again = house.connect(None, idempotency_key="k")
        await house.ended()
        assert again.status == 409 and house.app.runs == 1

    scenario(test)


def test_what_waits_for_a_delivery_is_called_once_and_let_go() -> None:
    async def test(house: House) -> None:
        delivered: list[int] = []
        house.app.hold(2)
        first = house.connect(idempotency_key="k")
        await until(lambda: bool(first.body))
        house.app.replay.on_delivered = lambda: delivered.append(1)
        house.app.open()
        await house.ended()
        house.connect(idempotency_key="k")
        await house.ended()
        assert delivered == [1]

    scenario(test)


def test_a_packed_answer_is_read_from_any_event_on() -> None:
    async def test(house: House) -> None:
        house.app.media_type = b"text/event-stream"
        house.app.pieces = [b"data: a\n\n", b"data: b\n\ndata: c\n\n", b"data: [DONE]\n\n"]
        first = house.connect(idempotency_key="k")
        await house.ended()
        for last in range(6):
            again = house.connect(idempotency_key="k", last_event_id=str(last))
            await house.ended()
            events = first.body.split(b"\n\n")[last:]
            assert again.body == b"\n\n".join(events) and again.ended
        assert house.app.runs == 1

    scenario(test)


def test_a_body_beyond_the_bound_reaches_the_route() -> None:
    async def test(house: House) -> None:
        client = house.connect(idempotency_key="k")
        await house.ended()
        assert client.status == 200 and house.app.replay is None and len(house.middleware.entries) == 0

    scenario(test, most_body=1)


def test_delivery_is_reported_for_whole_answers_only() -> None:
    async def test(house: House) -> None:
        delivered: list[int] = []
        house.app.hold(2)
        first = house.connect(idempotency_key="k")
        await until(lambda: bool(first.body))
        house.app.replay.on_delivered = lambda: delivered.append(1)
        first.cut()
        await until(lambda: house.tasks[0].done())
        house.app.open()
        assert not delivered
        house.connect(idempotency_key="k")
        await house.ended()
        assert delivered == [1]

    scenario(test)

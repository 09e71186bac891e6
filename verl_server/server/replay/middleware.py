"""`ReplayMiddleware`: a repeated request to generate is not sampled again.

It is between `AuthMiddleware` and the routes, and applies to requests to generate that have the header
`Idempotency-Key` or belong to a session. The application writes its answer to an `AnswerLog`, and the client's
connection reads the log. If the connection breaks, the application continues for `replay_grace` seconds, so that a
retry misses no part of the answer. The rules, by what arrives:

- a key that came before, with the same body: the connection joins the running answer, or gets the kept one;
- the same key with another body: 409;
- a key of a session whose answer is no longer kept, also after a restart: the routes answer from the turn that the
  session's ledger has, and never sample it a second time;
- a retry of an SDK without a key (`x-stainless-retry-count` above 0) in a session: it joins the one request of the same
  body whose connection was lost before its reply was complete. With none or several of them it is sampled anew.

The header `Last-Event-ID` of a request with a key continues a stream behind that event.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import deque
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from verl_server.errors import BadRequestError, IdempotencyConflictError, VerlServerError
from verl_server.server.http.routing import error_answer, route_of
from verl_server.server.http.version_headers import demand_of
from verl_server.server.replay.answer_log import AnswerLog
from verl_server.server.replay.entries import Entries, Entry
from verl_server.web.bodies import Body
from verl_server.web.numbers import whole_number
from verl_server.web.resolver import NotServed

logger = logging.getLogger(__name__)

KEY_HEADER = "idempotency-key"
_MOST_KEY = 255
_MOST_ENTRY_BYTES = 16 * 2**20
_NOTICE_SECONDS = 0.05
"""The most seconds to wait until the server detects that the connection of the earlier request was lost."""


class ReplayMiddleware:
    def __init__(
        self,
        app: ASGIApp,
        *,
        grace: float,
        ttl: float,
        most_bytes: int,
        most_body: int,
        cumulative_events: bool,
    ) -> None:
        """`cumulative_events` is True if an event of `/generate` contains the whole output so far."""
        self._app, self._most_body = app, most_body
        self._cumulative = cumulative_events
        self.entries = Entries(grace, ttl, most_bytes, _MOST_ENTRY_BYTES)
        self._running: set[asyncio.Task[None]] = set()  # the loop itself keeps no reference to a task

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = route_of(scope)
        if isinstance(route, NotServed) or not route.operation.replayed:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        session = scope.get("state", {}).get("session")
        key = headers.get(KEY_HEADER)
        if key is None and session is None:
            await self._app(scope, receive, send)
            return
        read = await self._read(receive)
        if read.rest is not None:  # the body is too large or has not arrived: the route says so
            await self._app(scope, read.rest, send)
            return
        try:
            entry = await self._entry(scope, headers, session, key, read)
            start = _first_piece(headers, entry, key is not None)
        except VerlServerError as error:
            await error_answer(scope, error)(scope, receive, send)
            return
        await self._follow(entry, start, receive, send)

    # -- which answer ------------------------------------------------------------------------------------------

    async def _entry(self, scope: Scope, headers: Headers, session: Any, key: str | None, read: _Read) -> Entry:
        """Return the entry that answers a request: a new entry, or an entry that the request joins."""
        if key is not None and not 0 < len(key) <= _MOST_KEY:
            raise BadRequestError(f"Idempotency-Key must have 1 to {_MOST_KEY} characters.")
        caller = _scope(headers, session)
        digest = _digest(read, scope, headers)
        hashed = None if key is None else hashlib.blake2b(key.encode(), digest_size=16).digest()
        if hashed is not None:
            entry = self.entries.find(caller, hashed)
            if entry is not None and not (session is not None and self._is_only_in_ledger(entry)):
                return self._known(entry, digest)
        elif _is_retry(headers):
            lost = await self.entries.lost(caller, digest, _NOTICE_SECONDS)
            if lost is not None:
                return lost
        return self._begin(scope, caller, hashed, digest, read.body)

    def _is_only_in_ledger(self, entry: Entry) -> bool:
        """Return True for an answer that is complete and too large to be kept."""
        return entry.log.is_complete and self.entries.is_too_large(entry)

    def _known(self, entry: Entry, digest: bytes) -> Entry:
        if entry.digest != digest:
            raise IdempotencyConflictError(
                "The idempotency key came before with another request. Use a new key for each request."
            )
        if self.entries.is_too_large(entry):
            raise IdempotencyConflictError("The answer of this idempotency key is too large to be sent again.")
        return entry

    # -- the application ---------------------------------------------------------------------------------------

    def _begin(self, scope: Scope, caller: bytes, key: bytes | None, digest: bytes, body: bytes) -> Entry:
        """Start the application for a request that is not known."""
        supersedes = self._cumulative and scope["path"] == "/generate"
        log, abandoned = AnswerLog(numbers_events=key is not None, supersedes=supersedes), asyncio.Event()
        entry = Entry(caller, key, digest, log, abandoned)
        self.entries.add(entry)
        inner: MutableMapping[str, Any] = {**scope, "state": {**scope.get("state", {}), "replay": entry}}
        task = asyncio.ensure_future(self._run(entry, abandoned, inner, body))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return entry

    async def _run(self, entry: Entry, abandoned: asyncio.Event, scope: Scope, body: bytes) -> None:
        log = entry.log
        was_read = False

        async def receive() -> Message:
            nonlocal was_read
            if not was_read:
                was_read = True
                return {"type": "http.request", "body": body, "more_body": False}
            await abandoned.wait()
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            if abandoned.is_set():
                raise OSError("nobody waits for this answer")
            log.send(dict(message))

        try:
            await self._app(scope, receive, send)
        except OSError:
            pass  # abandoned
        except Exception:
            logger.exception("%s failed.", scope["path"])
        finally:
            log.end()
            self.entries.ended(entry)

    # -- the connection ----------------------------------------------------------------------------------------

    async def _follow(self, entry: Entry, place: int, receive: Receive, send: Send) -> None:
        """Send the log of an entry from piece `place` on, until its end or until the client disconnects."""
        log = entry.log
        self.entries.joined(entry)
        gone = asyncio.ensure_future(_disconnected(receive))
        complete = False
        try:
            complete = await self._send_all(log, place, gone, send)
        except OSError:
            pass  # the connection broke
        finally:
            gone.cancel()
            self.entries.left(entry, complete=complete)
        if complete and not log.is_broken:
            entry.delivered()

    async def _send_all(self, log: AnswerLog, place: int, gone: asyncio.Future[None], send: Send) -> bool:
        """Return True when everything was sent, or False if the client disconnected earlier."""
        started = False
        while True:
            if gone.done():
                return False
            if not started and (start := log.start) is not None:
                started = True
                await send(_continued(start) if place else start)
            while started and place < log.count:
                body, place = log.read(place)
                if body:
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                if place < log.count:
                    await asyncio.sleep(0)  # a connection that takes everything at once must not hold the loop
                if gone.done():
                    return False
            if log.is_complete:
                if started:
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
                return started
            change = asyncio.ensure_future(log.next_change().wait())
            await asyncio.wait((change, gone), return_when=asyncio.FIRST_COMPLETED)
            change.cancel()

    # -- the body ----------------------------------------------------------------------------------------------

    async def _read(self, receive: Receive) -> _Read:
        """Read and hash the whole body. Beyond the bound, return a `receive` that repeats what was read."""
        hashed = hashlib.blake2b(digest_size=16)
        body = Body()
        while True:
            message = await receive()
            if message["type"] != "http.request" or body.size + len(message.get("body", b"")) > self._most_body:
                before: list[Message] = [{"type": "http.request", "body": body.whole(), "more_body": True}]
                return _Read(b"", hashed, _repeated([*before[: body.size], message], receive))
            body.add(message.get("body", b""))
            hashed.update(message.get("body", b""))  # piece by piece: the hash of a large body takes long
            if not message.get("more_body", False):
                return _Read(body.whole(), hashed, None)


@dataclass(frozen=True)
class _Read:
    body: bytes
    hashed: hashlib.blake2b
    """The hash of the body."""
    rest: Receive | None


def _repeated(messages: list[Message], receive: Receive) -> Receive:
    left = deque(messages)

    async def repeat() -> Message:
        return left.popleft() if left else await receive()

    return repeat


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _scope(headers: Headers, session: Any) -> bytes:
    """Return the hash of the caller's key, the session and the child session."""
    hashed = hashlib.blake2b(digest_size=16)
    if session is None:
        hashed.update(b"key\0" + (headers.get("authorization") or headers.get("x-api-key") or "").encode())
    else:
        parts = (b"session", session.scope_key, session.session_id.encode(), (session.child or "").encode())
        hashed.update(b"\0".join(parts))
    return hashed.digest()


def _digest(read: _Read, scope: Scope, headers: Headers) -> bytes:
    """Return the hash of what determines an answer."""
    hashed = read.hashed.copy()
    for part in (scope["path"], headers.get("accept", "")):
        hashed.update(b"\0" + part.encode())
    if demand := demand_of(scope):
        hashed.update(b"\0" + demand.encode())
    return hashed.digest()


def _is_retry(headers: Headers) -> bool:
    return bool(whole_number(headers.get("x-stainless-retry-count", "")))


def _first_piece(headers: Headers, entry: Entry, has_key: bool) -> int:
    """Return the number of pieces that the client already has."""
    last = headers.get("last-event-id")
    if last is None or not has_key:
        return 0
    number = whole_number(last)
    if number is None:
        raise BadRequestError(f"Last-Event-ID must be the `id` of an event of this answer, not {last[:40]!r}.")
    return min(number, entry.log.count)


def _continued(start: Message) -> Message:
    """Return the start of an answer that is sent from the middle on, which has another length."""
    headers = [(name, value) for name, value in start.get("headers", []) if name.lower() != b"content-length"]
    return {**start, "headers": headers}

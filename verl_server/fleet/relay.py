"""`Relay`: one request, sent to one server, and the answer, handed on to the client in the pieces in which it arrives.

`router` decides where a request goes, and where it goes next. The relay says what became of it: delivered, or refused
or lost before any byte of an answer was handed on. Only the latter may be repeated. A stream that breaks after its
first byte ends with an error event of its dialect, and any other answer by closing the connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Literal

from starlette.types import Receive, Send

from verl_server.errors import ServerDiedError, ServerStoppingError
from verl_server.fleet.answers import error_event
from verl_server.fleet.members import Member
from verl_server.fleet.metrics import RouterMetrics
from verl_server.fleet.requests import RoutedRequest
from verl_server.fleet.upstream import Exchange, Headers, UnreachableError
from verl_server.web.error_bodies import ERROR_HEADER

logger = logging.getLogger(__name__)

EXPECTED_INSTANCE = b"x-verl-expected-instance"
INSTANCE = b"x-verl-instance"
FLEET_HEADER = b"x-verl-fleet"
SERVER_HEADER = b"x-verl-server"
_NOT_SENT = frozenset(
    [
        b"host",
        b"content-length",
        b"transfer-encoding",
        b"connection",
        b"keep-alive",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"upgrade",
        b"expect",
        b"origin",
        b"referer",
        b"sec-fetch-site",
        b"sec-fetch-mode",
        b"sec-fetch-dest",
        EXPECTED_INSTANCE,
    ]
)
"""Headers that concern the connection of the client, or that the router has checked itself."""
_KEY_HEADERS = (b"authorization", b"x-api-key")
_NOT_RETURNED = frozenset([b"connection", b"keep-alive", b"transfer-encoding", INSTANCE])
_MOST_REFUSAL = 1024 * 1024
_LAST_SECONDS = 1.0
"""Seconds for the last event of a stream when the router ends."""
_UNWATCHED_SECONDS = 0.02
"""Seconds after which the router looks whether the client has left."""


@dataclass
class Refusal:
    """An answer that the server gave instead of doing the work."""

    status: int
    headers: Headers
    body: bytes
    error: str
    """Name of the error's class (X-Verl-Error), or "" if the server names none."""


@dataclass
class Outcome:
    """What became of an attempt."""

    delivered: bool = False
    """True if the client has got an answer or the beginning of one, or has left."""
    refusal: Refusal | None = None
    """The server's refusal, of which nothing was handed on."""
    lost: ServerDiedError | None = None
    """Why no answer came."""
    was_sent: bool = True
    """False if no byte of the request reached the server."""


class ClientLeftError(Exception):
    """The client closed its connection."""


class Client:
    """The client's side of one request."""

    def __init__(self, receive: Receive, send: Send) -> None:
        """Watch the connection from a moment on: most requests that are shorter are answered before."""
        self.send = send
        self._receive = receive
        self._watch: asyncio.Task[None] | None = None
        self._later = asyncio.get_running_loop().call_later(_UNWATCHED_SECONDS, self._begin)
        self._on_left: Callable[[], None] | None = None
        self.on_begun: Callable[[], None] = lambda: None
        """Called when the client gets the first byte of an answer: the request is not repeated any more."""
        self.since = 0.0
        """When the whole request had arrived, by the router's clock."""
        self.held = 0.0
        """Seconds for which the request has waited for a server or a version."""
        self.failed: Literal["refused", "lost"] | None = None
        """Why the newest attempt delivered nothing. None before it."""

    @property
    def has_left(self) -> bool:
        return self._watch is not None and self._watch.done()

    def when_left(self, act: Callable[[], None] | None) -> None:
        """Call `act` when the client leaves. It replaces the one before."""
        self._on_left = act

    async def first_of(self, work: Awaitable[object]) -> None:
        """Wait for `work`, or until the client leaves."""
        task = asyncio.ensure_future(work)
        await asyncio.wait((task, self._begin()), return_when=asyncio.FIRST_COMPLETED)
        task.cancel()

    def close(self) -> None:
        self._later.cancel()
        if self._watch is not None:
            self._watch.cancel()

    def _begin(self) -> asyncio.Task[None]:
        self._later.cancel()
        if self._watch is None:
            self._watch = asyncio.ensure_future(self._wait())
        return self._watch

    async def _wait(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if self._on_left is not None:
            self._on_left()


@dataclass
class Relay:
    name: str
    """Name of the fleet, which clients see as the instance of the server."""
    on_answer: Callable[[RoutedRequest, Member, bytes], None] = field(default=lambda request, member, body: None)
    """Takes the whole body of each answer to a request that creates a session."""
    metrics: RouterMetrics | None = None
    refused: frozenset[int] = frozenset((409, 412, 503))
    """Statuses of refusals that another server, or the same one later, may not repeat."""

    async def attempt(self, request: RoutedRequest, member: Member, client: Client) -> Outcome:
        """Send the request to a member, and hand its answer on."""
        tokens = request.tokens
        member.began(tokens)  # before a connection is opened: many requests at once are placed meanwhile
        try:
            return await self._attempt(request, member, client)
        finally:
            member.ended(tokens)

    async def _attempt(self, request: RoutedRequest, member: Member, client: Client) -> Outcome:
        try:
            exchange = await member.upstream.send(
                request.method, request.target, self._to(request, member), request.body
            )
        except UnreachableError as error:
            return Outcome(lost=error, was_sent=False)
        client.when_left(lambda: exchange.abandon(ClientLeftError()))
        try:
            if client.has_left:
                raise ClientLeftError
            return await self._answered(request, member, exchange, client)
        except ClientLeftError:
            return Outcome(delivered=True)
        finally:
            client.when_left(None)
            exchange.close()

    async def _answered(self, request: RoutedRequest, member: Member, exchange: Exchange, client: Client) -> Outcome:
        try:
            await exchange.started()
            if exchange.status in self.refused or (exchange.status == 404 and request.may_be_elsewhere):
                body = await exchange.whole(_MOST_REFUSAL)
                error = exchange.header(ERROR_HEADER.lower().encode()) or b""
                headers = self.returned(exchange.headers, member)
                return Outcome(refusal=Refusal(exchange.status, headers, body, error.decode("latin-1")))
            data = await exchange.read()
            if changes := self._may_change_sessions(request, exchange):
                data += await exchange.whole(_MOST_REFUSAL)
        except ServerDiedError as error:
            return Outcome(lost=error)
        except asyncio.CancelledError:  # the time that a router has for its end is over
            raise ServerStoppingError("The router is stopping. Repeat the request.") from None
        if changes:
            self.on_answer(request, member, data)
        client.on_begun()
        if self.metrics is not None:
            self.metrics.answered(exchange.status, "server")
        await client.send(
            {
                "type": "http.response.start",
                "status": exchange.status,
                "headers": self.returned(exchange.headers, member),
            }
        )
        await self._hand_on(request, member, exchange, client, data)
        return Outcome(delivered=True)

    async def _hand_on(
        self, request: RoutedRequest, member: Member, exchange: Exchange, client: Client, data: bytes
    ) -> None:
        """Hand on the content, whose first bytes are `data`."""
        send = client.send
        is_stream = (exchange.header(b"content-type") or b"").startswith(b"text/event-stream")
        rest = b""  # the beginning of an event, which is not handed on before its end
        try:
            while data:
                if is_stream:
                    whole, mark, rest = (rest + data).rpartition(b"\n\n") if rest else data.rpartition(b"\n\n")
                    data = whole + mark
                if exchange.is_complete:
                    break
                if data:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                data = await exchange.read()
        except (ServerDiedError, asyncio.CancelledError) as error:
            is_stopping = isinstance(error, asyncio.CancelledError)  # the time that a router has for its end is over
            who = "The router" if is_stopping else "The server that generated"
            logger.warning(
                "%s %s: the answer of %s broke. %s", request.method, request.operation.name, member.url, error
            )
            if self.metrics is not None:
                self.metrics.broke()
            if not is_stream:
                return  # uvicorn closes the connection, because the answer has no end
            failed = ServerDiedError(f"{who} ended in the middle of the stream. Repeat the request. ({error})")
            last = {"type": "http.response.body", "body": error_event(request.operation, failed), "more_body": False}
            with contextlib.suppress(TimeoutError):  # a client that reads nothing must not delay the router's end
                async with asyncio.timeout(_LAST_SECONDS if is_stopping else None):
                    await send(last)
            return
        await send({"type": "http.response.body", "body": data + rest, "more_body": False})

    @staticmethod
    def _may_change_sessions(request: RoutedRequest, exchange: Exchange) -> bool:
        is_owners = request.operation.access in ("owner", "local_owner")
        return is_owners and request.method != "GET" and exchange.status < 300

    def sent(self, request: RoutedRequest) -> Headers:
        """Return the headers of a request as a server gets them."""
        replaced = _KEY_HEADERS if request.attached is not None else ()
        headers = [(name, value) for name, value in request.headers if name not in _NOT_SENT and name not in replaced]
        if request.attached:
            headers.append((b"authorization", b"Bearer " + request.attached))
        if request.is_foreign:
            headers.append((b"sec-fetch-site", b"cross-site"))  # a server then sees what the router has seen
        return headers

    def _to(self, request: RoutedRequest, member: Member) -> Headers:
        """Return the headers for a member, which does nothing if it is another run than the one that was looked at."""
        expected = [] if member.instance is None else [(EXPECTED_INSTANCE, member.instance.encode("latin-1"))]
        return [*self.sent(request), *expected]

    def returned(self, headers: Headers, member: Member) -> Headers:
        """Return the headers of a server's answer as the client gets them."""
        kept = [(name, value) for name, value in headers if name.lower() not in _NOT_RETURNED]
        return [*kept, *self.own_headers(), (SERVER_HEADER, member.url.encode())]

    def own_headers(self) -> Headers:
        """Return the headers of every answer."""
        return [(INSTANCE, self.name.encode()), (FLEET_HEADER, self.name.encode())]

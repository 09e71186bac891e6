"""`Router`: the ASGI application of `verl-server router`.

It finds the operation of a request, checks the key, and decides which server gets the request, and which one next if
that server did not do it:

- a turn of a session goes to the server of the session, and is never repeated on another one;
- other generation goes to a server that serves the demanded version (`placement`). While no server does, the request
  waits, for a bounded time. If a server refuses it or is lost before any byte of its answer was handed on, the same
  bytes go to another server;
- control requests reach all servers, or are refused (`control`);
- the router answers `/health`, `/ready`, `/metrics` and `/fleet` itself (`status`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from starlette.types import Receive, Scope, Send

from verl_server.errors import (
    ServerDiedError,
    ServerRestartedError,
    ServerStoppingError,
    ServerUnavailableError,
    SessionBusyError,
    SessionNotFoundError,
    SessionUnavailableError,
    UnauthorizedError,
    VerlServerError,
    VersionBehindError,
)
from verl_server.fleet.answers import error_answer, unavailable
from verl_server.fleet.control import TO_ALL, Control, aborts_all
from verl_server.fleet.keys import RouterKeys
from verl_server.fleet.members import Fleet, Member, State
from verl_server.fleet.metrics import RouterMetrics
from verl_server.fleet.operations import RoutedOperation, UnservedPaths
from verl_server.fleet.placement import Placement
from verl_server.fleet.relay import EXPECTED_INSTANCE, Client, Outcome, Refusal, Relay
from verl_server.fleet.requests import RoutedRequest, read_body
from verl_server.fleet.session_list import listed_sessions
from verl_server.fleet.sessions import SessionPlaces
from verl_server.fleet.status import FleetStatus
from verl_server.fleet.upstream import Headers
from verl_server.web.keys import sent_keys
from verl_server.web.resolver import NotServed, Resolver
from verl_server.web.session_keys import take_session_key
from verl_server.weight_version import WeightVersion, satisfies

_RESTARTED = ServerRestartedError.__name__
_BEHIND = VersionBehindError.__name__
_STOPPING = ServerStoppingError.__name__
_NOT_NOW = frozenset((SessionUnavailableError.__name__, SessionBusyError.__name__, _STOPPING))
"""Refusals of a session's turn, of which nothing was done, and which the same server may accept later."""
_MOST_LOSSES = 3
"""Servers that may be lost with a request in them. A request that ends servers must not end all of them."""
_LOST_PAUSE = 0.1
"""Seconds before the servers are tried again when none of them could be reached."""


class Router:
    def __init__(
        self,
        fleet: Fleet,
        keys: RouterKeys,
        operations: list[RoutedOperation],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet, self._keys, self._clock = fleet, keys, clock
        self._args = fleet.args
        self._resolver, self._unserved = Resolver(operations), UnservedPaths(operations)
        self.placement = Placement(fleet.args.spill_margin, clock)
        fleet.on_renewed = lambda member: self.placement.prefixes.forget(member.url)
        self.sessions = SessionPlaces(fleet, clock)
        self._control = Control(fleet)
        self._held = 0
        self.metrics = RouterMetrics(fleet, self.placement, self.sessions, lambda: self._held)
        self._relay = Relay(fleet.args.name, self._on_changed, self.metrics)
        self._status = FleetStatus(fleet, self.placement, self.sessions, self.metrics, self._relay.own_headers())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            return
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        path_key = take_session_key(scope)
        found = self._resolver.find(scope["method"], scope["path"])
        if isinstance(found, NotServed):
            operation, parameters, path_key = self._unserved.operation(scope["path"]), {}, None
        else:
            operation, parameters = found.operation, found.parameters
        try:
            if self._status.serves(scope):
                await self._status.answer(scope, receive, send, self._keys)
            else:
                await self._serve(scope, receive, send, operation, parameters, target, path_key)
        except VerlServerError as error:
            dialect = operation.errors_of(scope["headers"])
            await self._answer(send, *error_answer(dialect, error, says_success=operation.says_success))

    async def _serve(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        operation: RoutedOperation,
        parameters: dict[str, str],
        target: bytes,
        path_key: bytes | None,
    ) -> None:
        caller = self._keys.caller(scope, operation, path_key)
        expected = dict(scope["headers"]).get(EXPECTED_INSTANCE)
        if expected is not None and expected.decode("latin-1") != self._args.name:
            raise ServerRestartedError(
                f"The request expects run {expected.decode('latin-1')} of a server, but this is the router of fleet "
                f"{self._args.name}. Nothing was done."
            )
        if self._held > self._args.max_held_bytes:
            raise ServerUnavailableError("The router holds as many bytes of requests as --max-held-bytes permits.")
        body = await read_body(receive, scope, self._args.max_request_bytes)
        if body is None:
            return
        if aborts_all(scope["path"], body):
            caller = self._keys.caller(scope, operation, path_key, is_control=True)
        request = RoutedRequest(
            operation,
            scope["method"],
            target,
            list(scope["headers"]),
            body,
            parameters,
            path_key,
            sent_keys(scope),
            caller.attached,
            caller.is_foreign,
        )
        client = Client(receive, send)
        client.since = self._clock()
        self._held += len(body)
        del body

        def release() -> None:
            self._held -= len(request.body)
            request.body = b""

        client.on_begun = release
        try:
            await self._dispatch(request, client)
        finally:
            release()
            client.close()

    async def _dispatch(self, request: RoutedRequest, client: Client) -> None:
        operation = request.operation
        if operation.access == "control" or operation.name in TO_ALL:
            self._control.check(request)
            await self._to_all(request, client)
        elif operation.name == "/sessions" and request.method == "GET":
            answer = await listed_sessions(self._fleet, self.sessions, request, self._relay.sent(request))
            await self._answer(client.send, *answer)
        elif (home := await self._home(request)) is not None:
            await self._to_home(request, client, home)
        elif operation.name == "/close_session":  # it ends a hint, which any server may have seen
            await self._to_all(request, client)
        else:
            await self._to_any(request, client)

    async def _to_all(self, request: RoutedRequest, client: Client) -> None:
        reached = await self._control.send_to_all(request, self._relay.sent(request))
        await self._answer(
            client.send, reached.status, self._relay.returned(reached.headers, reached.member), reached.body
        )

    # -- sessions ------------------------------------------------------------------------------------------------

    async def _home(self, request: RoutedRequest) -> str | None:
        """Return the server of the session to which the request belongs, or None if it belongs to none.

        Raise SessionUnavailableError if a server that may have the session does not answer.
        """
        operation = request.operation
        if not (
            operation.in_session or operation.access in ("owner", "local_owner") or operation.name == "/close_session"
        ):
            return None
        if (key := request.session_key) is not None:
            url = await self.sessions.of_key(key)
            if url is None:
                raise UnauthorizedError(
                    "Unauthorized: the session key of this request is of no session that the servers have. A session "
                    "that was deleted or has expired has no key."
                )
            return url
        if operation.name in ("/sessions", "/open_session"):
            name = request.new_session
            return name and await self.sessions.of_name(name, self._relay.sent(request), may_be_hint=True)
        name = request.session_name
        if name is None or not (request.keys or request.must_be_session or operation.name == "/close_session"):
            return None
        return await self.sessions.of_name(name, self._relay.sent(request), may_be_hint=not request.must_be_session)

    def _on_changed(self, request: RoutedRequest, member: Member, body: bytes) -> None:
        """Note what a server answered to a request that may have created or deleted a session."""
        if request.operation.name in ("/sessions", "/open_session"):
            self.sessions.created(member.url, body)
        elif request.method == "DELETE" and request.session_name is not None:
            self.sessions.ended(request.session_name)

    async def _to_home(self, request: RoutedRequest, client: Client, url: str) -> None:
        """Send a request of a session to its server. Wait for the server, but never repeat what it may have begun."""
        member = self._fleet.member(url)
        if member is None:
            raise SessionUnavailableError(f"The session lives on {url}, which the router does not serve any more.")
        deadline = self._clock() + self._args.hold_seconds
        last: Refusal | None = None
        lost: ServerDiedError | None = None
        while not client.has_left:
            since = self._fleet.changes
            if member.takes_turns:
                outcome = await self._attempt(request, member, client)
                if outcome.delivered:
                    return
                self._note(member, outcome)
                last, lost = outcome.refusal or last, outcome.lost
                if outcome.lost is not None and outcome.was_sent:
                    raise SessionUnavailableError(
                        f"The server of the session broke the connection. It keeps the turn if it was complete: repeat "
                        f"the request. ({outcome.lost})"
                    )
                if outcome.refusal is not None and outcome.refusal.error not in (*_NOT_NOW, _RESTARTED, _BEHIND):
                    break
            is_behind = last is not None and last.error == _BEHIND
            may_change_unseen = member.takes_turns and member.is_confirmed and not is_behind
            if not await self._wait(client, deadline, since, polls=may_change_unseen):
                break
            if lost is not None:
                await client.first_of(asyncio.sleep(_LOST_PAUSE))
        await self._refuse(
            client,
            last,
            unavailable(True, f"The server of the session is {member.state}. {member.reason} Retry later."),
        )

    # -- any server ----------------------------------------------------------------------------------------------

    async def _to_any(self, request: RoutedRequest, client: Client) -> None:
        """Send a request to a server that may get it. If the server did not do it, try the next one."""
        is_placed = request.operation.generates or request.operation.access in ("owner", "local_owner")
        deadline = self._clock() + (self._args.hold_seconds if is_placed else 0.0)
        await self._look_for(request.demand)
        tried: set[str] = set()
        last: Refusal | None = None
        lost: ServerDiedError | None = None
        losses = 0
        while not client.has_left:
            since = self._fleet.changes
            candidates = [each for each in self._candidates(request) if each.url not in tried]
            is_behind = lost is None and last is not None and last.error == _BEHIND
            if candidates:
                member = self.placement.choose(request, candidates)
                outcome = await self._attempt(request, member, client)
                if outcome.delivered:
                    return
                self._note(member, outcome)
                last, lost = outcome.refusal or last, outcome.lost
                losses += lost is not None and outcome.was_sent
                tried.add(member.url)
                if self._is_final(request, outcome) or losses >= _MOST_LOSSES:
                    self._note_maybe_created(request, member, outcome)
                    break
                continue
            if tried and lost is None and last is not None and last.error not in (_RESTARTED, _BEHIND):
                break  # all of them refuse it, for example because their queues are full
            if not await self._wait(client, deadline, since, polls=bool(tried) and not is_behind):
                break
            if lost is not None:  # a server that answers looks may still refuse connections
                await client.first_of(asyncio.sleep(_LOST_PAUSE))
            tried.clear()
        message = (
            self._why_none(request) if lost is None else f"No server could be reached that may get the request. {lost}"
        )
        others = [each.url for each in self._fleet.members if each.url not in tried and not each.is_retired]
        if last is not None and last.error == SessionNotFoundError.__name__ and others:
            last, message = None, f"The session may be on {', '.join(others)}, without an answer. Retry later."
        await self._refuse(client, last, unavailable(request.must_be_session, message))

    async def _look_for(self, demand: str) -> None:
        """Look at the servers if none is known to have a demanded version: a trainer may have pushed it just now."""
        healthy = self._fleet.healthy
        if demand and healthy and not any(satisfies(member.version, demand) for member in healthy):
            await self._fleet.look_now()

    def _candidates(self, request: RoutedRequest) -> list[Member]:
        """Return the servers that may get a request, by their states and the version that it demands."""
        healthy = self._fleet.healthy
        if (key := self.placement.keyed_owner(request, self._args.server)) is not None:
            owner = [member for member in healthy if member.url == key]
            return owner if owner or request.continues_stream else healthy
        operation = request.operation
        if not operation.generates and operation.access in ("open", "key"):  # it does not depend on the weights
            able = healthy or self._fleet.answering
            # Information comes from the same server each time, so that it does not jump.
            return able[:1] if request.method in ("GET", "HEAD") else able
        if request.method in ("GET", "HEAD"):
            return healthy[:1]
        demand = request.demand
        if not demand or not healthy:
            return healthy
        fitting = [member for member in healthy if satisfies(member.version, demand)]
        if fitting:
            return fitting if self._is_admitted(demand) else []
        return healthy[:1]  # it says whether the version is to come, or is gone for good

    def _is_admitted(self, demand: str) -> bool:
        """Return True if all servers that count satisfy a demand, or if it names a free label, which has no order."""
        committed = self._fleet.versions.committed
        if committed is None or satisfies(committed, demand):
            return True
        label = demand.removeprefix(">=")
        least = WeightVersion.parse(label)
        return least is None or satisfies(committed, f">={label}")

    @staticmethod
    def _is_final(request: RoutedRequest, outcome: Outcome) -> bool:
        """Return True if the outcome must reach the client: another server would not do better, or must not try."""
        refusal = outcome.refusal
        if refusal is not None:
            return refusal.status == 409 and refusal.error != _BEHIND
        is_safe = request.operation.generates or request.method in ("GET", "HEAD")
        return outcome.was_sent and not is_safe

    def _why_none(self, request: RoutedRequest) -> str:
        states = "; ".join(
            f"{member.url} is {member.state}: {member.reason}"
            for member in self._fleet.members
            if member.state != State.HEALTHY
        )
        demand = request.demand
        if demand and self._fleet.healthy:
            committed = self._fleet.versions.committed
            return f"The fleet serves version {committed!r}, and the request demands {demand!r}. {states}"
        return f"No server is healthy. {states}"

    # -- both ----------------------------------------------------------------------------------------------------

    async def _attempt(self, request: RoutedRequest, member: Member, client: Client) -> Outcome:
        if client.failed is None:
            self.metrics.chosen(self._clock() - client.since - client.held)
        else:
            self.metrics.repeated(client.failed)
        outcome = await self._relay.attempt(request, member, client)
        client.failed = "lost" if outcome.lost is not None else "refused"
        return outcome

    def _note(self, member: Member, outcome: Outcome) -> None:
        if outcome.lost is not None:
            self._fleet.suspect(member, str(outcome.lost))
        elif outcome.refusal is not None and outcome.refusal.error in (_RESTARTED, _BEHIND, _STOPPING):
            member.wake.set()

    def _note_maybe_created(self, request: RoutedRequest, member: Member, outcome: Outcome) -> None:
        """Let a repeated creation of a session go to the server that may have carried out the first one."""
        name = request.new_session if request.operation.name in ("/sessions", "/open_session") else None
        if name is not None and outcome.lost is not None:
            self.sessions.may_have(member.url, name)

    async def _wait(self, client: Client, deadline: float, since: int, *, polls: bool) -> bool:
        """Wait until the fleet changes after `since`. Return False at the deadline, or if the client has left.

        With `polls`, return after an interval without a change, too: a server refused the request for a reason that no
        look finds out.
        """
        left = deadline - self._clock()
        if left <= 0:
            return False
        begun = self._clock()
        self.metrics.hold(is_first=client.held == 0.0)
        try:
            await client.first_of(self._fleet.changed(min(left, self._args.probe_interval if polls else left), since))
        except asyncio.CancelledError:
            raise ServerStoppingError("The router is stopping. Nothing was done: repeat the request.") from None
        finally:
            seconds = self._clock() - begun
            client.held += seconds
            self.metrics.release(seconds)
        return not client.has_left

    async def _refuse(self, client: Client, refusal: Refusal | None, error: VerlServerError) -> None:
        """Answer with the refusal of a server, or with the router's own error if no server has answered."""
        if client.has_left:
            return
        if refusal is None or refusal.error == _RESTARTED:
            raise error
        await self._answer(client.send, refusal.status, refusal.headers, refusal.body)

    async def _answer(self, send: Send, status: int, headers: Headers, body: bytes) -> None:
        self.metrics.answered(status, "router")
        names = {name.lower() for name, _ in headers}
        own = [header for header in self._relay.own_headers() if header[0] not in names]
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await send({"type": "http.response.start", "status": status, "headers": [*headers, *own]})
            await send({"type": "http.response.body", "body": body, "more_body": False})

"""`Fleet` and `Member`: the servers behind the router, their states, and the probes that find them out.

`router` asks the fleet which servers may get a request. Each member is looked at once a second (`GET /weight_version`,
which a server answers on its event loop, also during a long update), and at once when a request broke or demands a
version that no member is known to have. Nothing is stored: a router that starts again learns everything from the
probes.

| state | meaning | gets |
|---|---|---|
| starting | it has not answered since the router began, or it says that it is not ready | nothing |
| healthy | it answers, and its weights are those of the fleet | everything |
| stale | it answers, and its weights are not those of the fleet | requests of its sessions |
| suspect | a connection broke, or a look failed | requests of its sessions |
| dead | `dead_after` looks in a row failed | nothing |
| retired | it is stopping, or `POST /fleet/retire` named it | requests of its sessions, until it stops |
"""

from __future__ import annotations

import asyncio
import logging
import math
import ssl
import time
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import Any

import msgspec

from verl_server.errors import ServerDiedError
from verl_server.fleet.options import RouterArgs
from verl_server.fleet.upstream import Upstream
from verl_server.fleet.versions import FleetVersions

logger = logging.getLogger(__name__)

_CONNECT_SECONDS = 5.0
_AWAITED = 0.1
"""Seconds between two looks at a server that answers, while a request waits for a change."""
_MOST_ANSWER = 4 * 2**20
_DEFAULT_CAPACITY, _DEFAULT_RUNNING = 100_000, 256
"""Tokens that a cache is taken to hold, and requests that may run, until the server has said how many."""


class State(StrEnum):
    STARTING = "starting"
    HEALTHY = "healthy"
    STALE = "stale"
    SUSPECT = "suspect"
    DEAD = "dead"
    RETIRED = "retired"


class Report(msgspec.Struct):
    """Answer of `GET /weight_version`."""

    weight_version: str
    instance_id: str | None = None
    weights_confirmed: bool = True
    accepts: bool = True
    """False while the weights cannot serve: torn, released or not loaded."""


class Member:
    """One server. `Fleet` looks at it and decides its state."""

    def __init__(self, url: str, upstream: Upstream) -> None:
        self.url = url
        self.upstream = upstream
        self.state = State.STARTING
        self.reason = "It has not answered since the router began."
        """Why the state is not healthy."""
        self.report: Report | None = None
        """What the newest look found. None before the first answer, and while the server is dead."""
        self.info: dict[str, Any] = {}
        """`/server_info` of the present run: model, context, capacity."""
        self.failures = self.successes = 0
        self.has_answered = False
        self.was_dead = False
        self.is_retired = False
        """True if an operator took the server out."""
        self.is_stopping = False
        self.requests = 0
        """Requests that run on the server now."""
        self.tokens = 0
        """Estimated tokens of these requests."""
        self.reported_tokens = 0
        """Tokens of running and waiting requests, as the server said at the newest look; then changed by what began and
        ended since."""
        self.capacity = _DEFAULT_CAPACITY
        self.most_running = _DEFAULT_RUNNING
        self.is_paused = False
        self.wake = asyncio.Event()
        """Set to look at the server at once."""
        self.looks = self.looks_begun = 0
        """Number of looks that have ended, and that have begun."""

    @property
    def instance(self) -> str | None:
        return None if self.report is None else self.report.instance_id

    @property
    def version(self) -> str | None:
        return None if self.report is None else self.report.weight_version

    @property
    def is_confirmed(self) -> bool:
        return self.report is not None and self.report.weights_confirmed

    @property
    def load(self) -> float:
        """Tokens in flight as a share of the tokens that the server's cache holds, or requests as a share of those that
        may run at one time, whichever is larger."""
        return max(max(self.tokens, self.reported_tokens) / self.capacity, self.requests / self.most_running)

    @property
    def takes_turns(self) -> bool:
        """True if requests of sessions that live on this server may be sent to it.

        They are sent to a stale server, too: it answers turns that it has stored, lets its records be read, and refuses
        to sample while its weights are not confirmed (503).
        """
        return self.report is not None and self.state not in (State.DEAD, State.STARTING) and not self.is_stopping

    def began(self, tokens: int) -> None:
        self.requests += 1
        self.tokens += tokens
        self.reported_tokens += tokens

    def ended(self, tokens: int) -> None:
        self.requests -= 1
        self.tokens -= tokens
        self.reported_tokens = max(0, self.reported_tokens - tokens)


class Fleet:
    """The members. Use it on one event loop, between `start` and `stop`."""

    def __init__(
        self,
        args: RouterArgs,
        server_key: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`server_key` is the key with which the router looks at servers."""
        self.args = args
        self._clock = clock
        self.on_renewed: Callable[[Member], None] = lambda member: None
        """Called when a member runs anew or has other weights, so that what its cache held is gone."""
        self._headers = [(b"accept", b"application/json")]
        if server_key is not None:
            self._headers.append((b"authorization", b"Bearer " + server_key.encode()))
        tls = ssl.create_default_context() if any(url.startswith("https:") for url in args.server) else None
        self.members = [Member(url, Upstream(url, _CONNECT_SECONDS, tls)) for url in args.server]
        self.versions = FleetVersions(args.stale_after)
        self._saw_confirmed = False
        self.changes = 0
        """Number of changes so far, for `changed`."""
        self._view: object = None
        """What `settle` found last."""
        self._changed, self._looked = asyncio.Event(), asyncio.Event()
        self._waiting = 0
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [asyncio.ensure_future(self._watch(member)) for member in self.members]
        self._tasks += [asyncio.ensure_future(self._watch_load(member)) for member in self.members]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for member in self.members:
            member.upstream.close("The router is stopping.")

    def member(self, url: str) -> Member | None:
        return next((member for member in self.members if member.url == url), None)

    @property
    def healthy(self) -> list[Member]:
        return [member for member in self.members if member.state == State.HEALTHY]

    @property
    def answering(self) -> list[Member]:
        """Members that answer, with whatever weights. They may say what does not depend on the weights."""
        states = (State.HEALTHY, State.STALE, State.SUSPECT)
        return [member for member in self.members if member.state in states and member.report is not None]

    # -- waiting -------------------------------------------------------------------------------------------------

    async def changed(self, seconds: float, since: int | None = None) -> bool:
        """Wait until a state, a version or the model of a member changes. Return False after so many seconds.

        Return at once if `changes` is not `since` any more. The members are looked at more often meanwhile.
        """
        if since is not None and since != self.changes:
            return True
        if not self._waiting:
            for member in self.members:
                if not member.failures:
                    member.wake.set()
        self._waiting += 1
        try:
            return await _is_set(self._changed, seconds)
        finally:
            self._waiting -= 1

    async def look_now(self, members: Iterable[Member] | None = None) -> None:
        """Look at members, by default at those that are not dead, and return when each look has ended.

        Looks of several callers are joined. A look that has begun before does not count.
        """
        if members is None:
            members = [member for member in self.members if member.state != State.DEAD]
        asked = [(member, member.looks_begun + 1) for member in members]
        for member, _ in asked:
            member.wake.set()
        deadline = self._clock() + self.args.probe_timeout
        while any(member.looks < number for member, number in asked) and (left := deadline - self._clock()) > 0:
            await _is_set(self._looked, left)

    def suspect(self, member: Member, reason: str) -> None:
        """Note that a connection to a member broke, and look at it at once."""
        if member.state in (State.HEALTHY, State.STALE):
            self._set(member, State.SUSPECT, reason)
        member.wake.set()

    def commit(self, label: str) -> bool:
        """Declare that the push of a version is over. Return False if no server has it."""
        is_known = self.versions.commit(label, self._clock())
        self.settle()
        self._notify()
        return is_known

    def retire(self, member: Member, *, is_retired: bool) -> None:
        """Take a member out of service, or back. Requests that run end as usual."""
        member.is_retired = is_retired
        self.settle()
        self._notify()

    # -- states --------------------------------------------------------------------------------------------------

    async def _watch(self, member: Member) -> None:
        while True:
            member.wake.clear()
            await self._look(member)
            is_awaited = self._waiting and not member.failures
            await _is_set(member.wake, min(self.args.probe_interval, _AWAITED if is_awaited else math.inf))

    async def _look(self, member: Member) -> None:
        """Look at a member once, and settle the states of all."""
        member.looks_begun += 1
        try:
            status, body, header = await self._get(member, b"/weight_version")
            self._answered(member, status, body, header)
        except ServerDiedError as error:
            self._failed(member, str(error))
        except Exception as error:  # whatever a server answers, it is looked at again
            logger.exception("The look at %s failed.", member.url)
            self._failed(member, f"A look at it failed: {error!r}")
        member.looks += 1
        self.settle()
        self._looked.set()
        self._looked = asyncio.Event()

    def _answered(self, member: Member, status: int, body: bytes, instance: str | None) -> None:
        text = body[:300].decode("utf-8", "replace")
        if status in (401, 403):
            raise ServerDiedError(
                f"It refuses the router's look ({status}): start the router with --server-api-key-file."
            )
        if status not in (200, 503):
            raise ServerDiedError(f"It answers a look with {status}: {text}")
        report = None
        if status == 200:
            try:
                report = msgspec.json.decode(body, type=Report)
            except msgspec.DecodeError as error:
                raise ServerDiedError(f"It answers a look, but not as a verl-server does: {error}") from None
            report.instance_id = report.instance_id or instance
        member.failures, member.successes, member.has_answered = 0, member.successes + 1, True
        member.is_stopping = status == 503 and "shutting down" in text
        if report is None:
            member.report, member.reason = None, f"It answers 503: {text}"
            return
        before = member.report
        if before is None or (before.instance_id, before.weight_version) != (report.instance_id, report.weight_version):
            if before is None or before.instance_id != report.instance_id:
                member.info = {}
            self.on_renewed(member)
        member.report = report

    def _failed(self, member: Member, reason: str) -> None:
        member.failures, member.successes = member.failures + 1, 0
        member.reason = reason
        if member.failures >= self.args.dead_after:
            member.report = None
            member.was_dead = True

    def settle(self) -> None:
        """Decide the states of all members from what the looks found. Begin when each of them was looked at once."""
        now = self._clock()
        if any(not member.looks for member in self.members):
            return
        reports = {member.url: member.report for member in self.members if member.report is not None}
        confirmed = {url: r.weight_version for url, r in reports.items() if r.weights_confirmed and r.accepts}
        counted = {url: label for url, label in confirmed.items() if not self._is_out(url)}
        self._saw_confirmed |= bool(counted)
        silent = {each.url for each in self.members if each.report is None and not self._is_out(each.url)}
        is_complete = len(counted) == sum(not each.is_retired for each in self.members)
        self.versions.note(counted, now, silent, is_complete=is_complete)
        for member in self.members:
            state, reason = self._judged(member, now)
            if state != member.state or (reason != member.reason and state != State.HEALTHY):
                self._set(member, state, reason)
        view = self.versions.committed, [(member.state, member.report, member.info) for member in self.members]
        if view != self._view:
            self._view = view
            self._notify()

    def _is_out(self, url: str) -> bool:
        member = self.member(url)
        return member is not None and (member.is_retired or member.is_stopping)

    def _judged(self, member: Member, now: float) -> tuple[State, str]:
        report = member.report
        if member.is_retired:
            return State.RETIRED, "An operator retired it."
        if member.is_stopping:
            return State.RETIRED, "It is stopping."
        if member.failures >= self.args.dead_after:
            return (State.DEAD if member.has_answered else State.STARTING), member.reason
        if member.failures:
            return (State.SUSPECT if member.has_answered else State.STARTING), member.reason
        if report is None:
            return State.STARTING, member.reason
        if member.was_dead and member.successes < self.args.healthy_after:
            return State.SUSPECT, f"It answers again, {member.successes} time(s) of {self.args.healthy_after}."
        member.was_dead = False
        fault = self._fault(member, report, now)
        return (State.HEALTHY, "") if fault is None else (State.STALE, fault)

    def _fault(self, member: Member, report: Report, now: float) -> str | None:
        """Return why the weights or the model of a member that answers are not those of the fleet."""
        if not report.accepts:
            return "Its weights cannot serve: they are torn, released or not loaded. Push all parameters to it."
        if not report.weights_confirmed:
            if self._saw_confirmed:
                return (
                    f"It serves version {report.weight_version!r}, which it loaded and nobody has confirmed. Push to "
                    "it, or call /accept_restart on it."
                )
            silent = [each.url for each in self.members if not (each.has_answered or each.is_retired)]
            if silent and not self.args.serve_loaded_weights:
                return (
                    f"It serves weights that it loaded, and {', '.join(silent)}, which may have newer ones, has not "
                    "answered yet. Start it, leave it out, or use --serve-loaded-weights."
                )
        fault = self.versions.fault(member.url, now)
        return f"Left out: {fault}." if fault is not None else self._misfit(member)

    def _misfit(self, member: Member) -> str | None:
        """Return what differs between the model of a member and the model of the first healthy one."""
        other = next(
            (each for each in self.members if each is not member and each.state == State.HEALTHY and each.info), None
        )
        if other is None or not member.info:
            return None
        for name in ("served_model_name", "context_length", "vocab_size"):
            own, theirs = member.info.get(name), other.info.get(name)
            if own is not None and theirs is not None and own != theirs:
                return f"Its {name} is {own!r}, and {other.url} has {theirs!r}."
        return None

    def _set(self, member: Member, state: State, reason: str) -> None:
        before, member.state, member.reason = member.state, state, reason
        if state != before:
            level = logging.INFO if state in (State.HEALTHY, State.STARTING) else logging.WARNING
            logger.log(level, "%s is %s. %s", member.url, state.value, reason)
            if state == State.DEAD:
                member.upstream.close(f"{member.url} is dead: {reason}")
            self._notify()

    def _notify(self) -> None:
        self.changes += 1
        self._changed.set()
        self._changed = asyncio.Event()

    # -- load ----------------------------------------------------------------------------------------------------

    async def _watch_load(self, member: Member) -> None:
        """Read the tokens in flight once in an interval. The scheduler answers, which a long step delays: the figures
        then stay what they were, and nothing else follows from it."""
        while True:
            if member.report is None:
                await _is_set(self._looked, self.args.probe_interval)
            else:
                try:
                    status, body, _ = await self._get(member, b"/server_info")
                    if status == 200:
                        self._take_info(member, msgspec.json.decode(body))
                except (ServerDiedError, msgspec.DecodeError):
                    pass
                except Exception:  # the figures are of an unknown form
                    logger.exception("/server_info of %s cannot be read.", member.url)
                await asyncio.sleep(self.args.probe_interval)

    def _take_info(self, member: Member, info: dict[str, Any]) -> None:
        scheduler = info.get("scheduler_info") or {}
        member.info = {
            "served_model_name": info.get("served_model_name"),
            "model_path": info.get("model_path"),
            "context_length": scheduler.get("context_length"),
            "vocab_size": scheduler.get("vocab_size"),
            "engine": info.get("engine"),
        }
        member.capacity = scheduler.get("max_total_num_tokens") or member.capacity
        member.most_running = scheduler.get("max_running_requests") or member.most_running
        member.is_paused = info.get("paused_since") is not None
        state = next(iter(info.get("internal_states") or ()), None) or {}
        if "num_total_tokens" in state:
            member.reported_tokens = int(state["num_total_tokens"])

    async def _get(self, member: Member, target: bytes) -> tuple[int, bytes, str | None]:
        """Return status, body and instance of an answer. Raise ServerDiedError if there is none in time."""
        exchange = None
        try:
            async with asyncio.timeout(self.args.probe_timeout):
                exchange = await member.upstream.send("GET", target, self._headers, b"")
                await exchange.started()
                body = await exchange.whole(_MOST_ANSWER)
        except TimeoutError:
            raise ServerDiedError(f"It did not answer a look within {self.args.probe_timeout:g} s.") from None
        finally:
            if exchange is not None:
                exchange.close()
        instance = exchange.header(b"x-verl-instance")
        return exchange.status, body, None if instance is None else instance.decode("latin-1")


async def _is_set(event: asyncio.Event, seconds: float) -> bool:
    """Wait for an event, at most so many seconds. Return False after them."""
    try:
        async with asyncio.timeout(max(0.0, seconds)):
            await event.wait()
    except TimeoutError:
        return False
    return True

"""`ServerGroup`: the same call to several servers at one time, and one outcome of all of them.

`RoutedCalls` has one for the servers behind its router. A server that cannot take part (it has ended, is starting, or
was started again) is left out; one that refuses, or does not answer in time, fails the call. No call returns before
every server has answered, because a server may read the caller's memory until then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from verl_server.errors import (
    ControlTimeoutError,
    ServerDiedError,
    ServerRestartedError,
    ServerUnavailableError,
    VerlServerError,
)

logger = logging.getLogger(__name__)

AWAY = (ServerDiedError, ServerRestartedError, ServerUnavailableError)
"""Errors of a server that is left out: none of its processes has the caller's memory open."""
_END_SECONDS = 10.0
"""Seconds that interrupted calls have to end after their connections were closed."""


class Member(Protocol):
    """The part of an engine that the group itself needs. `shutdown` makes its waiting calls raise an error."""

    def shutdown(self) -> None: ...


M = TypeVar("M", bound=Member)
T = TypeVar("T")


@dataclass
class Outcomes(Generic[T]):
    """What the servers of a call answered, by URL."""

    done: dict[str, T] = field(default_factory=dict)
    left_out: dict[str, VerlServerError] = field(default_factory=dict)
    failed: dict[str, VerlServerError] = field(default_factory=dict)

    def error(self, what: str, state: Callable[[str], str] = lambda url: "") -> VerlServerError | None:
        """Return the error of the call `what`, or None if a server has carried it out and no other one failed.

        `state(url)` is added to the message about a server, if some servers carried the call out and others did not.
        """
        if not self.failed:
            return None if self.done else self._nobody(what)
        # An error that leaves the outcome open has priority: the server may still read the caller's memory.
        first = next((e for e in self.failed.values() if isinstance(e, ControlTimeoutError)), None)
        error = first or next(iter(self.failed.values()))
        if not self.done and len({str(each) for each in self.failed.values()}) == 1:
            return error
        answers = [f"{url}{state(url)} failed: {_sentence(e)}" for url, e in self.failed.items()]
        answers += [f"{url}{state(url)} has carried it out." for url in self.done]
        answers += [f"{url} was left out: {_sentence(e)}" for url, e in self.left_out.items()]
        return _same_kind(error, f"{what} failed on {len(self.failed)} of {len(answers)} servers. {' '.join(answers)}")

    def _nobody(self, what: str) -> VerlServerError:
        if not self.left_out:
            return ServerUnavailableError(f"{what}: the router has no server.")
        error = next(iter(self.left_out.values()))
        if len(self.left_out) == 1:
            return error
        answers = " ".join(f"{url}: {_sentence(each)}" for url, each in self.left_out.items())
        return _same_kind(error, f"{what}: none of the {len(self.left_out)} servers takes part. {answers}")


class ServerGroup(Generic[M]):
    """Connections to servers, which are opened when a call first needs them. Any thread may call."""

    def __init__(self, connect: Callable[[str], M]) -> None:
        """`connect(url)` returns an engine for one server."""
        self._connect = connect
        self._members: dict[str, M] = {}
        self._away: set[str] = set()
        """Servers that the last call left out, about which a warning was logged."""
        self._pool: ThreadPoolExecutor | None = None

    def each(self, urls: Sequence[str], what: str, act: Callable[[M], T]) -> Outcomes[T]:
        """Call `act` with the engine of each server at one time, and return when all have answered.

        A server that is left out is logged once, and again after it has taken part.
        """
        outcomes = Outcomes[T]()
        for url, result in zip(urls, self._all(urls, act), strict=True):
            if not isinstance(result, VerlServerError):
                outcomes.done[url] = result
                self._away.discard(url)
            elif not isinstance(result, AWAY):
                outcomes.failed[url] = result
            else:
                outcomes.left_out[url] = result
                level = logging.DEBUG if url in self._away else logging.WARNING
                self._away.add(url)
                logger.log(level, "%s leaves out the server at %s. The next push tries it again. %s", what, url, result)
        return outcomes

    def members(self) -> dict[str, M]:
        """Return the connections that are open, by URL."""
        return dict(self._members)

    def close(self) -> None:
        """Close all connections. The servers continue to run."""
        members, self._members = self._members, {}
        for member in members.values():
            member.shutdown()
        if self._pool is not None:
            self._pool.shutdown(wait=False)

    def _all(self, urls: Sequence[str], act: Callable[[M], T]) -> list[T | VerlServerError]:
        def call(url: str) -> T | VerlServerError:
            try:
                return act(self._member(url))
            except VerlServerError as error:
                return error

        if len(urls) == 1:
            return [call(urls[0])]
        self._pool = self._pool or ThreadPoolExecutor(64, thread_name_prefix="server-group")
        calls = {url: self._pool.submit(call, url) for url in urls}
        try:
            return [calls[url].result() for url in urls]
        except BaseException:  # Ctrl-C, or a fault of this program: nobody may read on after the call
            self._interrupt(calls)
            raise

    def _member(self, url: str) -> M:
        member = self._members.get(url)
        if member is None:
            opened = self._connect(url)
            member = self._members.setdefault(url, opened)
            if member is not opened:  # another thread was faster
                opened.shutdown()
        return member

    def _interrupt(self, calls: dict[str, Future[T | VerlServerError]]) -> None:
        """Close the connections of calls that have not ended, so that their servers withdraw the requests."""
        for url, running in calls.items():
            if not (running.cancel() or running.done()) and (member := self._members.pop(url, None)) is not None:
                member.shutdown()
        wait(calls.values(), _END_SECONDS)


def _sentence(error: VerlServerError) -> str:
    return f"{str(error).rstrip('.')}."


def _same_kind(error: VerlServerError, text: str) -> VerlServerError:
    """Return an error like `error` with another text, and with its notes."""
    other = type(error)(text)
    other.status_code, other.code = error.status_code, error.code
    for note in getattr(error, "__notes__", ()):
        other.add_note(note)
    return other

"""`RankGroup`: collective calls in which the first rank acts and every rank gets the outcome.

`VerlEngine` and `JointRanks` call it. A call has three steps:

1. Every rank prepares. All ranks gather the results, or the error of a rank that failed. This is also a barrier.
2. The first rank acts. Every few seconds it sends a heartbeat to the other ranks.
3. The first rank broadcasts its result or error (`rank_sockets`).

The work of a call has no time limit. The limits apply to silence, so no rank waits forever for a rank that has ended.

If a rank leaves a call early (Ctrl-C), it cannot mistake the outcome of this call for the outcome of a later call: the
first rank starts no later call before all ranks have confirmed the outcome, and raises an error if a rank does not
confirm.
"""

from __future__ import annotations

import builtins
import contextlib
import datetime
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec
import torch.distributed as dist

from verl_server import errors
from verl_server.errors import BadRequestError, UnansweredError
from verl_server.ipc.rank_sockets import GlooChannel, RankSockets

T = TypeVar("T")

RANK_TIMEOUT = 7200.0
"""Default of `rank_timeout`: the most seconds between the first and the last rank's start of a call.

One rank may still run an episode while the others wait, so the value exceeds the longest episode
(`Limits.trajectory_timeout`, an hour).
"""
_HEARTBEAT_SECONDS = 2.0
"""Seconds between two heartbeats of the acting rank."""
_BUILTIN_ERRORS = ("ValueError", "TypeError", "KeyError", "RuntimeError", "AssertionError", "NotImplementedError")


class _Entry(msgspec.Struct, array_like=True):
    """A rank's contribution to a call."""

    call: str
    payload: bytes = b""
    error: tuple[str, str] | None = None
    """(type, message) of the error if the rank could not prepare."""


class _Outcome(msgspec.Struct, array_like=True):
    """The result of a call, or its error as (type, message)."""

    result: Any = None
    error: tuple[str, str] | None = None


class RankGroup:
    """Some ranks of the default process group. The first rank acts for all.

    Every rank of the group constructs a `RankGroup`, and calls the same methods in the same order. The group has
    connections of its own. `rank_timeout` limits the seconds between the first and the last rank's start of a call.
    `silence_timeout` limits the seconds without a message of the acting rank. `beat` is the number of seconds between
    two heartbeats.
    """

    def __init__(
        self, ranks: list[int], rank_timeout: float, silence_timeout: float, beat: float = _HEARTBEAT_SECONDS
    ) -> None:
        self.rank, self.size = ranks.index(dist.get_rank()), len(ranks)
        self._rank_timeout = rank_timeout
        if self.size == 1:
            return  # one rank needs no connections
        meeting = _new_group(ranks, rank_timeout)
        channel = RankSockets.connect(meeting, rank_timeout, silence_timeout)
        self._channel: RankSockets | GlooChannel = channel or GlooChannel(
            meeting, _new_group(ranks, silence_timeout), ranks[0], gather_timeout=rank_timeout
        )
        self._heartbeat = _Heartbeat(self._channel, beat)

    def gather(self, what: str, prepare: Callable[[], bytes]) -> list[bytes]:
        """Return the results of all ranks' `prepare()`, in the order of the ranks, on every rank.

        If `prepare` fails on a rank, every rank raises the error. `what` names the call. If ranks make different calls,
        every rank raises an error.
        """
        if self.size == 1:
            return [prepare()]
        entry, failure = _Entry(what), None
        try:
            entry.payload = prepare()
        except Exception as error:
            failure, entry.error = error, describe_error(error)
        with self._peer_errors(what):
            encoded = self._channel.gather(msgspec.msgpack.encode(entry))
        entries = [msgspec.msgpack.decode(data, type=_Entry) for data in encoded]
        if failure is not None:
            raise failure
        for rank, other in enumerate(entries):
            if other.error is not None:
                raise rebuild_error(other.error, rank)
        if any(entry.call != what for entry in entries):
            raise BadRequestError(
                f"The ranks called different methods: {[entry.call for entry in entries]}. All ranks must call the "
                "same methods in the same order."
            )
        return [entry.payload for entry in entries]

    def of_engine(self, parts: list[T]) -> list[T]:
        """Return `parts` as they are, because all ranks of the group belong to one engine (see `JointRanks`)."""
        return parts

    def act(self, what: str, act: Callable[[], Any]) -> Any:
        """Run `act()` on the first rank. Every rank returns the same JSON-like result or raises the same error.

        The ranks must have called `gather` before.
        """
        if self.rank == 0:
            return self._act(what, act)
        data = b""
        with self._peer_errors(what):
            while not data:  # empty: a heartbeat
                data = self._channel.receive_broadcast()
        outcome = msgspec.msgpack.decode(data, type=_Outcome)
        if outcome.error is not None:
            raise rebuild_error(outcome.error, 0)
        return outcome.result

    def call(self, what: str, act: Callable[[list[bytes]], Any], prepare: Callable[[], bytes] = bytes) -> Any:
        """Gather the results of `prepare` and run `act` with them on the first rank; see `gather` and `act`."""
        payloads = self.gather(what, prepare)
        return self.act(what, lambda: act(payloads))

    @property
    def is_on_one_host(self) -> bool:
        """True if all ranks of the group are on one host."""
        return self.size == 1 or isinstance(self._channel, RankSockets)

    @property
    def is_lost(self) -> bool:
        """True if a rank ended or missed the time limit in an earlier call. Every later call then fails."""
        return self.size > 1 and self._channel.is_closed

    def close(self) -> None:
        """Close the connections. The current or next call of every other rank fails."""
        if self.size > 1:
            self._channel.close()

    def _act(self, what: str, act: Callable[[], Any]) -> Any:
        if self.size == 1:
            return act()
        try:
            with self._heartbeat.sending():
                data = msgspec.msgpack.encode(_Outcome(act()))
        except BaseException as error:  # also Ctrl-C: the other ranks wait for an outcome
            self._broadcast_outcome(what, msgspec.msgpack.encode(_Outcome(error=describe_error(error))))
            raise
        self._broadcast_outcome(what, data)
        return msgspec.msgpack.decode(data, type=_Outcome).result  # the same types as on the other ranks

    def _broadcast_outcome(self, what: str, data: bytes) -> None:
        with self._peer_errors(what):
            self._channel.broadcast(data, confirmed=True)

    @contextlib.contextmanager
    def _peer_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise UnansweredError(
                f"{what}: another rank of this VerlEngine ended, or did not make the call within "
                f"rank_timeout={self._rank_timeout:g} s ({str(error).splitlines()[0]}). Look for that rank's own "
                "error. If the rank only needs more time, set a larger VerlEngine(rank_timeout=...)."
            ) from error


class _Heartbeat:
    """Broadcasts empty messages from a thread while the first rank acts.

    The thread starts with the first call and runs as long as the group exists. It sleeps between heartbeats, so that a
    short call costs one lock only.
    """

    def __init__(self, channel: RankSockets | GlooChannel, seconds: float) -> None:
        self._channel, self._seconds = channel, seconds
        self._acting = False
        self._lock = threading.Lock()  # a heartbeat that has begun must end before the outcome is sent
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def sending(self) -> Iterator[None]:
        """Send heartbeats during the block."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=_run_heartbeat, args=(weakref.ref(self), self._seconds, self._stopped)
            )
            self._thread.name, self._thread.daemon = "verl-engine-heartbeat", True
            weakref.finalize(self, self._stopped.set)
            self._thread.start()
        self._acting = True
        try:
            yield
        finally:
            with self._lock:
                self._acting = False

    def send_if_acting(self) -> None:
        with self._lock:
            if self._acting:
                with contextlib.suppress(RuntimeError):  # a rank is gone: the broadcast of the outcome will raise
                    self._channel.broadcast(b"")


def _run_heartbeat(reference: weakref.ref[_Heartbeat], seconds: float, stopped: threading.Event) -> None:
    while not stopped.wait(seconds):
        if (heartbeat := reference()) is not None:
            heartbeat.send_if_acting()
        del heartbeat  # so that the thread does not keep it alive


def _new_group(ranks: list[int], timeout: float) -> dist.ProcessGroup:
    bound = datetime.timedelta(seconds=timeout)
    # Local synchronization: ranks of other engines do not take part.
    group: dist.ProcessGroup = dist.new_group(ranks, timeout=bound, backend="gloo", use_local_synchronization=True)
    return group


def describe_error(error: BaseException) -> tuple[str, str]:
    """Return (type, message) of an error, for `rebuild_error`."""
    return type(error).__name__, str(error)


def rebuild_error(error: tuple[str, str], rank: int) -> Exception:
    """Return an exception for the error of another rank.

    It has the same type if the type is one of `errors` or a common built-in one, and is an UnansweredError otherwise.
    """
    name, message = error
    kind = getattr(errors, name, None) or (getattr(builtins, name) if name in _BUILTIN_ERRORS else None)
    # An error of another type, such as KeyboardInterrupt, ended the call without an answer.
    rebuilt: Exception = kind(message) if kind is not None else UnansweredError(f"{name}: {message}")
    rebuilt.add_note(f"Raised on rank {rank} of this VerlEngine.")
    return rebuilt

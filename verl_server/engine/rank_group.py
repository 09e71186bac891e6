"""One rank acts, all ranks know the outcome: the collective calls under `VerlEngine`.

A call has three steps. Every rank prepares; what they prepared, or the error that kept one from it, is
gathered, which is also the barrier before the first rank acts. The first rank acts while it tells the others
every few seconds that it still does. Its result or error is told to all (`rank_sockets`). So a call may take as
long as it takes, and yet no rank waits for a rank that is gone: the bounds are on silence, not on work.

A rank that leaves a call early (Ctrl-C) cannot take its outcome for that of a later call: the first rank comes to no
later meeting before all have received it, and fails when one does not.
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
"""Default of `rank_timeout`: seconds that trainer ranks may be apart when they come to a call. One rank may still play
an episode while the others wait, so it is longer than an episode (`Limits.trajectory_timeout`, an hour)."""
_BEAT_SECONDS = 2.0
_BUILTIN_ERRORS = ("ValueError", "TypeError", "KeyError", "RuntimeError", "AssertionError", "NotImplementedError")


class _Entry(msgspec.Struct, array_like=True):
    """What a rank brings to a call."""

    call: str
    payload: bytes = b""
    error: tuple[str, str] | None = None
    """(type, message) if it could not prepare."""


class _Outcome(msgspec.Struct, array_like=True):
    result: Any = None
    error: tuple[str, str] | None = None


class RankGroup:
    """Some ranks of the default process group, in order; the first one acts for all.

    Every member constructs it, and calls the same methods in the same order. Its connections are its own:
    `rank_timeout` bounds how far ranks may be apart when they come to a call, `silence_timeout` how long the
    acting rank may be silent (seconds).
    """

    def __init__(
        self, ranks: list[int], rank_timeout: float, silence_timeout: float, beat: float = _BEAT_SECONDS
    ) -> None:
        self.rank, self.size = ranks.index(dist.get_rank()), len(ranks)
        self._rank_timeout = rank_timeout
        if self.size == 1:
            return  # there is nobody to talk to
        meeting = _new_group(ranks, rank_timeout)
        channel = RankSockets.connect(meeting, rank_timeout, silence_timeout)
        self._channel: RankSockets | GlooChannel = channel or GlooChannel(
            meeting, _new_group(ranks, silence_timeout), ranks[0], gather_timeout=rank_timeout
        )
        self._heart = _Heart(self._channel, beat)

    def gather(self, what: str, prepare: Callable[[], bytes]) -> list[bytes]:
        """Every rank's bytes, in order, on every rank; if one could not prepare, its error on every rank."""
        if self.size == 1:
            return [prepare()]
        mine, failure = _Entry(what), None
        try:
            mine.payload = prepare()
        except Exception as error:
            failure, mine.error = error, describe_error(error)
        with self._peer_errors(what):
            encoded = self._channel.gather(msgspec.msgpack.encode(mine))
        entries = [msgspec.msgpack.decode(data, type=_Entry) for data in encoded]
        if failure is not None:
            raise failure
        for rank, entry in enumerate(entries):
            if entry.error is not None:
                raise rebuild_error(entry.error, rank)
        if any(entry.call != what for entry in entries):
            raise BadRequestError(f"The ranks called different methods: {[entry.call for entry in entries]}.")
        return [entry.payload for entry in entries]

    def own(self, parts: list[T]) -> list[T]:
        """What all ranks of a group brought is what its engine's ranks brought."""
        return parts

    def act(self, what: str, act: Callable[[], Any]) -> Any:
        """The first rank's `act()`: the same JSON-like result, or its error, on all. Ranks must have met (`gather`)."""
        if self.rank == 0:
            return self._act(what, act)
        data = b""
        with self._peer_errors(what):
            while not data:  # empty: still at it
                data = self._channel.receive_broadcast()
        outcome = msgspec.msgpack.decode(data, type=_Outcome)
        if outcome.error is not None:
            raise rebuild_error(outcome.error, 0)
        return outcome.result

    def call(self, what: str, act: Callable[[list[bytes]], Any], prepare: Callable[[], bytes] = bytes) -> Any:
        """`gather`, then the first rank acts on what all prepared."""
        payloads = self.gather(what, prepare)
        return self.act(what, lambda: act(payloads))

    @property
    def is_on_one_host(self) -> bool:
        return self.size == 1 or isinstance(self._channel, RankSockets)

    @property
    def is_lost(self) -> bool:
        """Whether a rank was gone, or too late, in an earlier call: no call succeeds any more."""
        return self.size > 1 and self._channel.is_closed

    def close(self) -> None:
        """Every other rank's call fails, now or later. Idempotent."""
        if self.size > 1:
            self._channel.close()

    def _act(self, what: str, act: Callable[[], Any]) -> Any:
        if self.size == 1:
            return act()
        try:
            with self._heart.beating():
                data = msgspec.msgpack.encode(_Outcome(act()))
        except BaseException as error:  # also Ctrl-C: the others must not stay behind
            self._tell(what, msgspec.msgpack.encode(_Outcome(error=describe_error(error))))
            raise
        self._tell(what, data)
        return msgspec.msgpack.decode(data, type=_Outcome).result  # what the other ranks get

    def _tell(self, what: str, data: bytes) -> None:
        with self._peer_errors(what):
            self._channel.broadcast(data, confirmed=True)

    @contextlib.contextmanager
    def _peer_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise UnansweredError(
                f"{what}: another rank of this VerlEngine died, or did not come to the call within "
                f"rank_timeout={self._rank_timeout:g} s ({str(error).splitlines()[0]}). Look for that rank's own "
                "error; if it only needs longer, raise VerlEngine(rank_timeout=...)."
            ) from error


class _Heart:
    """Tells the other ranks every few seconds that the first one still acts, from a thread of its own.

    The thread lives with its group and sleeps between beats, so a call that is quick pays for a lock only.
    """

    def __init__(self, channel: RankSockets | GlooChannel, seconds: float) -> None:
        self._channel, self._seconds = channel, seconds
        self._acting = False
        self._lock = threading.Lock()  # a beat that has begun ends before the outcome is sent
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def beating(self) -> Iterator[None]:
        if self._thread is None:
            self._thread = threading.Thread(target=_beat, args=(weakref.ref(self), self._seconds, self._stopped))
            self._thread.name, self._thread.daemon = "verl-engine-heart", True
            weakref.finalize(self, self._stopped.set)
            self._thread.start()
        self._acting = True
        try:
            yield
        finally:
            with self._lock:
                self._acting = False

    def beat_if_acting(self) -> None:
        with self._lock:
            if self._acting:
                with contextlib.suppress(RuntimeError):  # a rank is gone: telling the outcome will say so
                    self._channel.broadcast(b"")


def _beat(heart: weakref.ref[_Heart], seconds: float, stopped: threading.Event) -> None:
    while not stopped.wait(seconds):
        if (alive := heart()) is not None:
            alive.beat_if_acting()
        del alive


def _new_group(ranks: list[int], timeout: float) -> dist.ProcessGroup:
    bound = datetime.timedelta(seconds=timeout)
    # Local synchronization: the ranks of another replica need not take part.
    group: dist.ProcessGroup = dist.new_group(ranks, timeout=bound, backend="gloo", use_local_synchronization=True)
    return group


def describe_error(error: BaseException) -> tuple[str, str]:
    """(type, message), for `rebuild_error`."""
    return type(error).__name__, str(error)


def rebuild_error(error: tuple[str, str], rank: int) -> Exception:
    """An exception that came from another rank: of the same type if it is ours or a common built-in one."""
    name, message = error
    kind = getattr(errors, name, None) or (getattr(builtins, name) if name in _BUILTIN_ERRORS else None)
    # Any other, Ctrl-C above all, ended the call without an answer.
    rebuilt: Exception = kind(message) if kind is not None else UnansweredError(f"{name}: {message}")
    rebuilt.add_note(f"Raised on rank {rank} of this VerlEngine.")
    return rebuilt

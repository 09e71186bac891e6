"""`TrainerRanks`: collective calls of all trainer ranks, in which an error of one rank is raised on every rank.

`ServerAdapter` and `WeightPush` use it. The ranks of one replica are consecutive ranks of the default process group;
the first rank of each replica talks to the replica's server. All calls of one update run in a thread of their own
(`run`), because some of them may never return: a rank that iterates verl's weights takes part in collectives of the
trainer, and waits there if another rank has failed before it. Such a failure is reported through the store of the
default process group, and `run` raises it although the thread still waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from verl_server.engine.joint_ranks import JointRanks
from verl_server.engine.rank_group import RankGroup
from verl_server.errors import UnansweredError

T = TypeVar("T")

RANK_TIMEOUT = 600.0
"""Most seconds between the first and the last rank's start of a call: verl's own default for its collectives."""
_SILENCE_TIMEOUT = 60.0
"""Most seconds without a heartbeat of a replica's first rank."""


class TrainerRanks:
    """All ranks of the default process group, which make the same calls in the same order."""

    def __init__(self, replica_size: int, *, poll: float = 1.0, grace: float = 10.0) -> None:
        """Connect the ranks. All ranks call it together.

        `replica_size` is the number of ranks of each replica. `poll` is the number of seconds between two checks for a
        failure of another rank. `grace` is the number of seconds that a rank may take to reach the other ranks after
        one of them has failed.
        """
        rank, size = dist.get_rank(), dist.get_world_size()
        first = rank - rank % replica_size
        everyone = RankGroup(list(range(size)), RANK_TIMEOUT, RANK_TIMEOUT)
        replica = RankGroup(list(range(first, first + replica_size)), RANK_TIMEOUT, _SILENCE_TIMEOUT)
        self._replica, self._joint = replica, JointRanks(replica, everyone, list(range(first, first + replica_size)))
        self.replica_size = replica_size
        self.is_first = rank == first
        """True on the rank that talks to the replica's server."""
        self.is_on_one_host = everyone.is_on_one_host
        self._rank, self._poll, self._grace = rank, poll, grace
        (name, *_) = everyone.gather("connect", lambda: uuid.uuid4().bytes)
        self.incarnation = name.hex()[:8]
        """Incarnation of this object's weight versions (`weight_version`), equal on all ranks."""
        # This has its own connection, because a collective that waits holds the lock of the default store's connection.
        store: Any = dist.distributed_c10d._get_default_store()
        self._store = torch.distributed.distributed_c10d.PrefixStore(f"verl-server-{name.hex()}", store.clone())
        self._num_runs = 0
        self._has_failed = False
        """True if this rank has failed in the current run. It then waits until the other ranks have noticed."""

    def act(self, what: str, act: Callable[[], Any]) -> Any:
        """Run `act` on the first rank of each replica. Return the JSON-like result of this rank's replica.

        Every rank raises an error if `act` failed for one replica; see `JointRanks.act`.
        """
        self._joint.gather(what, bytes)
        return self._joint.act(what, act)

    def agree(self, what: str, call: Callable[[], T]) -> T:
        """Run `call` on every rank and return its result. Every rank raises an error if `call` failed on one rank."""
        failure: Exception | None = None
        try:
            result = call()
        except Exception as error:
            failure = error
            self._report(error)

        def outcome() -> bytes:
            if failure is not None:
                raise failure
            return b""

        try:
            self._joint.gather(what, outcome)
        except UnansweredError:
            if failure is not None:
                raise failure from None  # the other ranks have given up their wait
            raise
        return result

    def gather(self, what: str, data: bytes) -> list[bytes]:
        """Return the data of all ranks, in the order of the ranks, on every rank."""
        return self._joint.gather(what, lambda: data)

    async def run(self, call: Callable[[], T]) -> T:
        """Run `call` in a thread of its own and return its result. All ranks call it together.

        If another rank fails and this rank's `call` does not end within the grace period, the call raises
        UnansweredError, all later calls of all ranks fail, and the thread is abandoned.
        """
        self._num_runs, self._has_failed = self._num_runs + 1, False
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()
        threading.Thread(
            target=self._run, args=(call, done, loop, _device_of_caller()), name="verl-server-update", daemon=True
        ).start()
        deadline = None
        while not (await asyncio.wait([done], timeout=self._poll))[0]:
            failure = None if self._has_failed else self._reported_failure()
            if failure is not None and deadline is None:
                deadline = loop.time() + self._grace
            if failure is not None and deadline is not None and loop.time() > deadline:
                self.close()
                raise UnansweredError(
                    f"{failure} This rank still waits for that rank in a collective of the trainer, and gives up."
                )
        return done.result()

    def close(self) -> None:
        """Make the current or next call of every rank fail."""
        self._replica.close()
        self._joint.close()

    # -- inside ------------------------------------------------------------------------------------------------

    def _run(
        self,
        call: Callable[[], T],
        done: asyncio.Future[T],
        loop: asyncio.AbstractEventLoop,
        device: contextlib.AbstractContextManager[Any],
    ) -> None:
        def settle() -> None:
            if done.done():  # the caller was cancelled
                return
            if failure is None:
                done.set_result(result)
            else:
                done.set_exception(failure)

        failure: BaseException | None = None
        try:
            with device:
                result = call()
        except BaseException as error:
            failure = error
            self._report(error)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle)

    def _report(self, error: BaseException) -> None:
        self._has_failed = True
        text = f"Rank {self._rank} failed: {type(error).__name__}: {error}"
        with contextlib.suppress(RuntimeError):  # the process that hosts the store is gone
            self._store.set(self._key, text)

    def _reported_failure(self) -> str | None:
        try:
            return self._store.get(self._key).decode() if self._store.check([self._key]) else None
        except RuntimeError as error:
            return f"The store of the trainer's process group is gone ({error})."

    @property
    def _key(self) -> str:
        return f"failure-of-run-{self._num_runs}"


@contextlib.contextmanager
def _on_stream(stream: torch.cuda.Stream) -> Iterator[None]:
    torch.cuda.set_device(stream.device)
    with torch.cuda.stream(stream):
        yield


def _device_of_caller() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which another thread works on the caller's CUDA device and stream."""
    if not torch.cuda.is_available():
        return contextlib.nullcontext()
    return _on_stream(torch.cuda.current_stream())

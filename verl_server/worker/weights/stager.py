"""`Stager`: the threads of one rank that prepare updates until they can be written.

The `TpWorker` submits requests in the order of rank 0's commands, so all ranks stage the same requests in the same
order. The ranks vote on each request, over a process group that only the stagers use, while the loop generates. A
request that all ranks staged is kept until its turn (`take`) or until it is dropped (`drop`). After each vote the
stager wakes rank 0's loop, which reads the outcomes with `finished`.

There are two threads, each with its own queue and process group. One thread only joins trainers' process groups,
because the wait for a trainer must not delay other requests. A thread may hang in foreign code, for example if the
owner of a tensor does not answer. Then only staging waits. The threads are daemons, so they do not keep the process
alive.
"""

from __future__ import annotations

import logging
import threading
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from verl_server.errors import VerlServerError, WeightUpdateError
from verl_server.ipc.tp_group import TpGroup
from verl_server.messages.weight_requests import InitWeightsUpdateGroupReq, StagedReq
from verl_server.worker.agreement import agree
from verl_server.worker.weights.prepared import Prepared

logger = logging.getLogger(__name__)

UNLIKE_NAMES = (
    "The tensor-parallel ranks were sent tensors of different names, so the ranks would serve different versions. Each "
    "entry of serialized_named_tensors must have the same names."
)
Outcome = tuple[int, VerlServerError | None]
"""(id of a request, error that refused it or None)."""


class Sources(Protocol):
    """The methods of `WeightSources` that the stager's threads call."""

    def adopt_thread(self) -> None: ...

    def prepare(self, req: StagedReq) -> Prepared: ...

    def refused(self, req: StagedReq, error: VerlServerError) -> None: ...

    def abandoned(self, req: StagedReq) -> None: ...


@dataclass(slots=True, eq=False)
class Staged:
    """One request in the stager."""

    req: StagedReq
    prepared: Prepared | None = None
    """Set when all ranks have staged the request."""
    dropped: bool = False
    """True after `Stager.drop`."""


class Stager:
    def __init__(self, sources: Sources, tp: TpGroup, take_timeout: float) -> None:
        """`take_timeout` is in seconds: `take` waits so long for this rank's thread to record a vote."""
        self._rank, self._take_timeout = tp.rank, take_timeout
        self.on_finished: Callable[[], None] = lambda: None
        """Called on a stager's thread after each vote, and when a vote failed."""
        self._items: dict[int, Staged] = {}
        self._finished: deque[Outcome] = deque()
        self._lost: Exception | None = None
        self._changed = threading.Condition()
        """Guards `_items` and their fields."""
        callbacks = self._vote_ended, self._vote_failed
        self._updates = _Lane("weight-stager", sources, tp.for_staging(), *callbacks)
        self._joins = _Lane("weight-group-joiner", sources, tp.for_joining(), *callbacks)

    def submit(self, req: StagedReq) -> None:
        """Queue `req` to be staged. `finished` returns its outcome later."""
        item = Staged(req)
        with self._changed:
            self._items[req.id] = item
        (self._joins if isinstance(req, InitWeightsUpdateGroupReq) else self._updates).put(item)

    @property
    def is_lost(self) -> bool:
        """True if a vote failed, so that this rank cannot stage any more. `finished` raises then."""
        return self._lost is not None

    def finished(self) -> list[Outcome]:
        """Return the outcomes of the votes since the last call.

        Raise ConnectionError if the ranks could not vote, because a rank ended or did not answer in time. A process
        group that failed once cannot be used again, so this process must end then.
        """
        if self._lost is not None:
            raise ConnectionError(
                f"the tensor-parallel ranks lost each other while they staged an update: {self._lost}"
            ) from self._lost
        outcomes = []
        while self._finished:
            outcomes.append(self._finished.popleft())
        return outcomes

    def take(self, request_id: int) -> Staged:
        """Remove and return a request that all ranks staged. The caller commits and discards its `prepared`."""
        with self._changed:
            item = self._items[request_id]
            # Rank 0 has already read the vote, but this rank's thread may not have stored the result yet.
            if not self._changed.wait_for(lambda: item.prepared is not None, self._take_timeout):
                raise RuntimeError(f"rank {self._rank} did not finish staging request {request_id}")
            return self._items.pop(request_id)

    def drop(self, request_id: int) -> None:
        """Discard a request now, or as soon as its thread has staged it."""
        with self._changed:
            item = self._items.get(request_id)
            if item is None:
                return  # the vote refused it
            item.dropped = True
            if item.prepared is None:
                return  # its thread will discard it
            del self._items[request_id]
        discard(item.prepared)

    def close(self, timeout: float) -> None:
        """End the threads. Wait up to `timeout` seconds for each, then leave a busy one running."""
        for lane in (self._updates, self._joins):
            lane.close(timeout)

    def _vote_failed(self, error: Exception) -> None:
        logger.error("Staging ended on rank %d, because the ranks could not vote.", self._rank, exc_info=error)
        self._lost = error
        self.on_finished()

    def _vote_ended(self, item: Staged, prepared: Prepared | None, error: VerlServerError | None) -> None:
        """Keep the request if all ranks staged it and it was not dropped. Called on a lane's thread."""
        with self._changed:
            if error is None and not item.dropped:
                item.prepared, prepared = prepared, None
                self._changed.notify_all()
            else:
                self._items.pop(item.req.id, None)
        if prepared is not None:
            discard(prepared)
        self._finished.append((item.req.id, error))
        self.on_finished()


class _Lane:
    """One thread that stages requests one after another."""

    def __init__(
        self,
        name: str,
        sources: Sources,
        tp: TpGroup,
        vote_ended: Callable[[Staged, Prepared | None, VerlServerError | None], None],
        vote_failed: Callable[[Exception], None],
    ) -> None:
        self._sources, self._tp, self._vote_ended, self._vote_failed = sources, tp, vote_ended, vote_failed
        self._queue: deque[Staged] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, item: Staged) -> None:
        with self._changed:
            self._queue.append(item)
            self._changed.notify_all()

    def close(self, timeout: float) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout)
        if self._thread.is_alive():
            logger.warning("The thread %s was still busy when the process ended.", self._thread.name)

    def _run(self) -> None:
        try:
            self._sources.adopt_thread()
            while self._wait():
                self._stage(self._queue.popleft())  # no local variable: it would keep memory open during the wait
        except Exception as error:
            self._vote_failed(error)

    def _wait(self) -> bool:
        """Wait for a request. Return False if the thread must end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            return not self._closing

    def _stage(self, item: Staged) -> None:
        prepared: Prepared | None = None

        def prepare() -> Prepared:
            nonlocal prepared
            if item.dropped:  # this rank must still vote, because all ranks vote on the same requests
                self._sources.abandoned(item.req)
                raise WeightUpdateError("The request was withdrawn before it was staged.")
            prepared = self._sources.prepare(item.req)
            return prepared

        refusal: VerlServerError | None = None
        try:
            agree(self._tp, prepare, alike=digest_of_names, unlike=UNLIKE_NAMES)
        except VerlServerError as error:
            refusal = _without_frames(error)
            self._sources.refused(item.req, error)
        self._vote_ended(item, prepared, refusal)


def digest_of_names(prepared: Prepared) -> int:
    """Return a number that depends on the set of written parameters, but not on their order. Ranks compare it."""
    return zlib.crc32("\n".join(sorted(prepared.names)).encode())


def _without_frames(error: VerlServerError) -> VerlServerError:
    """Remove the traceback of an error and return the error. The frames of a traceback keep opened memory alive."""
    error.__context__ = error.__cause__ = None
    return error.with_traceback(None)


def discard(prepared: Prepared) -> None:
    """Close everything that staging opened. Log an error instead of raising it."""
    try:
        prepared.discard()
    except Exception:
        logger.exception("The memory that an update had opened could not be closed.")

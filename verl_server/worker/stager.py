"""`Stager`: the threads of one rank that do what an update needs before it can be written.

Fed by the `TpWorker` in the order of rank 0's commands, so all ranks stage the same requests in the same order, and
vote on each over a process group of their own while the loop generates. What all ranks staged waits for `take` (its
turn) or `drop`, exactly one of them. Rank 0's loop is woken after each vote and reads the outcomes with `finished`.

Two threads, each with its own order and group: joining a trainer's process group waits for that trainer, which must
hold up nobody else. A thread may hang in foreign code (an owner that does not answer): nothing but staging waits for
it. They are daemons, so they do not keep the process alive either.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from verl_server.errors import VerlServerError, WeightUpdateError
from verl_server.io_struct import InitWeightsUpdateGroupReq, StagedReq
from verl_server.ipc.tp_group import TpGroup
from verl_server.worker.agreement import agree
from verl_server.worker.prepared import Prepared

logger = logging.getLogger(__name__)

Outcome = tuple[int, VerlServerError | None]
"""(id of a request, None or the error that refused it)."""


class Sources(Protocol):
    """The methods of `WeightSources` that staging calls, on the stager's threads."""

    def adopt_thread(self) -> None: ...

    def prepare(self, req: StagedReq) -> Prepared: ...

    def refused(self, req: StagedReq, error: VerlServerError) -> None: ...

    def abandoned(self, req: StagedReq) -> None: ...


@dataclass(slots=True, eq=False)
class Staged:
    """One request on its way through the stager."""

    req: StagedReq
    prepared: Prepared | None = None
    """Set when all ranks agreed."""
    dropped: bool = False
    """The request was dropped."""


class Stager:
    def __init__(self, sources: Sources, tp: TpGroup, take_timeout: float) -> None:
        """`take_timeout`: seconds that `take` waits for this rank's thread to note the result of the vote."""
        self._rank, self._take_timeout = tp.rank, take_timeout
        self.on_finished: Callable[[], None] = lambda: None
        """Called on a stager's thread after each vote, and when no vote is possible any more."""
        self._items: dict[int, Staged] = {}
        self._finished: deque[Outcome] = deque()
        self._lost: Exception | None = None
        self._changed = threading.Condition()
        """Guards `_items` and what is in them."""
        ends = self._vote_over, self._vote_failed
        self._updates = _Lane("weight-stager", sources, tp.for_staging(), *ends)
        self._joins = _Lane("weight-group-joiner", sources, tp.for_joining(), *ends)

    def submit(self, req: StagedReq) -> None:
        """Stage `req` after those before it. Its outcome comes out of `finished`."""
        item = Staged(req)
        with self._changed:
            self._items[req.id] = item
        (self._joins if isinstance(req, InitWeightsUpdateGroupReq) else self._updates).put(item)

    @property
    def is_lost(self) -> bool:
        """True if this rank cannot stage any more; see `finished`."""
        return self._lost is not None

    def finished(self) -> list[Outcome]:
        """The requests voted on since the last call.

        Raises ConnectionError when the ranks could not vote: one is gone, or was silent beyond the group's bound. A
        group that failed once is lost, so this process must end.
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
        """A request that all ranks staged; its `prepared` is the caller's to commit and discard."""
        with self._changed:
            item = self._items[request_id]
            # Rank 0 knows the vote already; this rank's thread may still be on its way back from it.
            if not self._changed.wait_for(lambda: item.prepared is not None, self._take_timeout):
                raise RuntimeError(f"rank {self._rank} did not finish staging request {request_id}")
            return self._items.pop(request_id)

    def drop(self, request_id: int) -> None:
        """Discard a request: now, or as soon as its thread has finished with it."""
        with self._changed:
            item = self._items.get(request_id)
            if item is None:
                return  # refused by the vote
            item.dropped = True
            if item.prepared is None:
                return  # its thread will discard it
            del self._items[request_id]
        discard(item.prepared)

    def close(self, timeout: float) -> None:
        """End the threads if they are idle; leave behind one that hangs."""
        for lane in (self._updates, self._joins):
            lane.close(timeout)

    def _vote_failed(self, error: Exception) -> None:
        logger.error("Staging ended on rank %d", self._rank, exc_info=error)
        self._lost = error
        self.on_finished()

    def _vote_over(self, item: Staged, prepared: Prepared | None, error: VerlServerError | None) -> None:
        """On a lane's thread: keep what all ranks prepared, unless nobody wants it any more."""
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
    """One thread that stages one request after the other."""

    def __init__(
        self,
        name: str,
        sources: Sources,
        tp: TpGroup,
        vote_over: Callable[[Staged, Prepared | None, VerlServerError | None], None],
        vote_failed: Callable[[Exception], None],
    ) -> None:
        self._sources, self._tp, self._vote_over, self._vote_failed = sources, tp, vote_over, vote_failed
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
            logger.warning("%s was still busy when the process ended.", self._thread.name)

    def _run(self) -> None:
        try:
            self._sources.adopt_thread()
            while self._wait():
                self._stage(self._queue.popleft())  # no local of ours keeps a request's memory open while we wait
        except Exception as error:
            self._vote_failed(error)

    def _wait(self) -> bool:
        """Wait for a request; returns False when the thread must end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            return not self._closing

    def _stage(self, item: Staged) -> None:
        prepared: Prepared | None = None

        def prepare() -> None:
            nonlocal prepared
            if item.dropped:  # it still takes part in the vote: all ranks vote on the same requests
                self._sources.abandoned(item.req)
                raise WeightUpdateError("The request was withdrawn before it was staged.")
            prepared = self._sources.prepare(item.req)

        refusal: VerlServerError | None = None
        try:
            agree(self._tp, prepare)
        except VerlServerError as error:
            refusal = _without_frames(error)
            self._sources.refused(item.req, error)
        self._vote_over(item, prepared, refusal)


def _without_frames(error: VerlServerError) -> VerlServerError:
    """The error alone: frames of a traceback hold what was opened in them."""
    error.__context__ = error.__cause__ = None
    return error.with_traceback(None)


def discard(prepared: Prepared) -> None:
    """Close what an update opened. An error in this is only logged."""
    try:
        prepared.discard()
    except Exception:
        logger.exception("Could not close what an update had opened")

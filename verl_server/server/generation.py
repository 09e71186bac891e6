"""`Generation`: the handle of one `/generate` call, with which a route awaits its results or its stream frames."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from verl_server.errors import error_for_status
from verl_server.server.request_state import ReqState
from verl_server.server.slices import Slices


class Turns(Protocol):
    """Stores the samples of a generation in its session."""

    async def commit(self, state: ReqState) -> None:
        """Store a sample that is done. Return when its reply may be sent."""
        ...

    def close(self) -> None:
        """Record that the caller no longer waits. Called after the samples were aborted."""
        ...


class Generation:
    """The samples of one `/generate` call, in order. Call `close` when no caller waits for the result any more.

    Each sample calls `_on_news`. A task that awaits the generation is woken once at the end. With `stream`, the task
    is woken once for all the progress since it last ran, at most once in `frame_gap()` seconds, and at once when a
    sample ends. So many fast streams share the event loop with fewer and longer frames.
    """

    def __init__(
        self,
        states: list[ReqState],
        is_single: bool,
        abandon: Callable[[ReqState], None],
        frame_gap: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._abandon = abandon
        self._frame_gap = frame_gap
        self._woken = -math.inf  # time when the task of a stream last ran
        self._timer: asyncio.TimerHandle | None = None
        self.states = states
        self._is_single = is_single and len(states) == 1
        self._index = {state.req.rid: i for i, state in enumerate(states)}
        self._running = len(states)
        self._updated: dict[int, ReqState] = {}  # streamed samples with new tokens, in the order of arrival
        self._results: dict[int, Any] = {}
        self._collects = False
        self._unbuilt: deque[int] = deque()  # samples that are done, whose results `_builder` builds
        self._builder: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self.turns: Turns | None = None
        """In a session: stores each sample before its reply ends."""
        for state in states:
            state.on_news = self._on_news

    def _on_news(self, state: ReqState) -> None:
        i = self._index[state.req.rid]
        if state.done:
            self._running -= 1
            if self._collects and state.error is None:
                # Build the result while the other samples still run, instead of all results at the end of the batch.
                if not state.has_candidates:
                    self._results[i] = state.written_result()
                elif self._running:
                    self._unbuilt.append(i)
                    if self._builder is None or self._builder.done():
                        self._builder = asyncio.create_task(self._build())
        if state.stream:
            self._updated[i] = state
        if state.done and (state.stream or not self._running or self._failure(state) is not None):
            self._wake.set()
        elif state.stream and self._timer is None and not self._wake.is_set():
            self._wake_later()

    def _wake_later(self) -> None:
        """Wake the task of a stream when its next frame is due."""
        loop = asyncio.get_running_loop()
        due = self._woken + self._frame_gap()
        if due <= loop.time():
            self._wake.set()
        else:
            self._timer = loop.call_at(due, self._wake.set)

    async def wait(self) -> None:
        """Wait until all samples are done. Raise the error of a failed sample without waiting for the others."""
        await self._wake.wait()
        for state in self.states:
            if (error := self._failure(state)) is not None:
                raise error
        if self.turns is not None:
            for state in self.states:
                await self.turns.commit(state)

    async def result(self) -> Any:
        """Return the result object, or a list of result objects for a batch or `n` above 1. Not for streams.

        If the states have a `Write`, each object is encoded. Raise the error of a failed sample, as `wait` does.
        """
        self._collects = True
        await self.wait()
        if self._builder is not None:
            await self._builder
        slices = Slices()
        results: list[Any] = []
        for i, state in enumerate(self.states):
            if results:
                await slices.end()
            await state.write_candidates()
            results.append(self._results.get(i) or state.written_result())
        return results[0] if self._is_single else results

    async def _build(self) -> None:
        """Build results with candidates in slices, because such a result takes long."""
        slices = Slices()
        while self._unbuilt:
            await slices.end()
            i = self._unbuilt.popleft()
            await self.states[i].write_candidates()
            self._results[i] = self.states[i].written_result()

    async def updates(self) -> AsyncIterator[tuple[int, ReqState]]:
        """Yield (index, state) whenever a sample has new tokens. At the last yield of a sample, `state.done` is True.

        Needs `stream`.

        Raise the error of a failed sample.
        """
        pending = set(range(len(self.states)))
        while pending:
            await self._wake.wait()
            self._wake.clear()
            self._end_timer()
            self._woken = asyncio.get_running_loop().time()
            updated, self._updated = self._updated, {}
            for i, state in updated.items():
                if i not in pending:  # the sample was already yielded as done
                    continue
                await state.write_candidates()
                if state.done:  # the sample may have ended during the await
                    pending.discard(i)
                    if (error := self._failure(state)) is not None:
                        raise error
                    if self.turns is not None:
                        await self.turns.commit(state)
                yield i, state

    async def frames(self, incremental: bool) -> AsyncIterator[dict[str, Any]]:
        """Yield a result object whenever a sample has new tokens: the whole result so far, or only what is new.

        All tokens that arrive while the caller handles a frame are in the sample's next frame. With several samples,
        frames have an `index`. Raise the error of a failed sample.
        """
        async for i, state in self.updates():
            frame = state.increment() if incremental else state.result()
            if len(self.states) > 1:
                frame["index"] = i
            yield frame

    def _failure(self, state: ReqState) -> Exception | None:
        """Return the error of a sample, for which the whole call fails, or None.

        A push may end samples that have no token yet. They are empty if another sample of the call has tokens.
        """
        error = failure(state)
        if error is not None and _ended_at_border(state) and any(other.output_ids for other in self.states):
            return None
        return error

    def _end_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def close(self) -> None:
        """Abort the samples that still run. Idempotent."""
        self._end_timer()
        self._collects = False
        if self._builder is not None:
            self._builder.cancel()
        for state in self.states:
            self._abandon(state)
        if self.turns is not None:
            self.turns.close()


def failure(state: ReqState) -> Exception | None:
    """Return the error of a sample that has no result, or None.

    There is no result if the scheduler died, or if it refused the sample (an abort with an HTTP status). A sample that
    a push ended has one if it has tokens.
    """
    if state.error is not None:
        return state.error
    reason = state.finish_reason
    if _ended_at_border(state) and state.output_ids:
        return None
    if reason is not None and reason.type == "abort" and reason.status_code is not None:
        return error_for_status(reason.status_code, reason.message or "Aborted", code=reason.code)
    return None


def _ended_at_border(state: ReqState) -> bool:
    """Return True if a push ended the sample, because its demand excludes the new version."""
    return state.finish_reason is not None and state.finish_reason.at_border

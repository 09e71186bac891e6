"""`Generation`: the handle of one `/generate` call, from which its samples' results or frames are awaited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from verl_server.errors import error_for_status
from verl_server.server.request_state import ReqState
from verl_server.server.slices import Slices


class Generation:
    """The samples of one `/generate` call, in order. Close it when the caller goes away.

    Its samples call `_on_news`; whoever awaits it is woken once at the end, or with `stream` once for all the news
    that came meanwhile.
    """

    def __init__(self, states: list[ReqState], is_single: bool, abandon: Callable[[ReqState], None]) -> None:
        self._abandon = abandon
        self.states = states
        self._is_single = is_single and len(states) == 1
        self._index = {state.req.rid: i for i, state in enumerate(states)}
        self._running = len(states)
        self._news: dict[int, ReqState] = {}  # of a stream; in the order in which it came
        self._results: dict[int, Any] = {}
        self._collects = False
        self._wake = asyncio.Event()
        for state in states:
            state.on_news = self._on_news

    def _on_news(self, state: ReqState) -> None:
        i = self._index[state.req.rid]
        if state.done:
            self._running -= 1
            if self._collects and state.error is None and not state.has_candidates:
                # Now, while the others are still computed, rather than for all of a batch at its end.
                self._results[i] = state.written_result()
        if state.stream:
            self._news[i] = state
        if state.stream or not self._running or failure(state) is not None:
            self._wake.set()

    async def wait(self) -> None:
        """Until all samples are done. One that failed raises at once, and ends the others."""
        await self._wake.wait()
        for state in self.states:
            if (error := failure(state)) is not None:
                raise error

    async def result(self) -> Any:
        """The finished object, or a list for a batch or n > 1. Raises as `wait`. Not for streams.

        With a `Write`, each object is encoded already.
        """
        self._collects = True
        await self.wait()
        slices = Slices()
        results: list[Any] = []
        for i, state in enumerate(self.states):
            if results:
                await slices.end()
            await state.write_candidates()
            results.append(self._results.get(i) or state.written_result())
        return results[0] if self._is_single else results

    async def updates(self) -> AsyncIterator[tuple[int, ReqState]]:
        """(index, state) whenever a sample has news; its last time with `state.done`. Needs stream=True."""
        pending = set(range(len(self.states)))
        while pending:
            await self._wake.wait()
            self._wake.clear()
            news, self._news = self._news, {}
            for i, state in news.items():
                if i not in pending:  # it ended between its news and its turn, and was yielded as done
                    continue
                await state.write_candidates()
                if state.done:  # it may have ended only now
                    pending.discard(i)
                    if (error := failure(state)) is not None:
                        raise error
                yield i, state

    def close(self) -> None:
        """Abort what still runs. Idempotent."""
        for state in self.states:
            self._abandon(state)


def failure(state: ReqState) -> Exception | None:
    """Why the sample got no answer: the scheduler died, or it was refused (abort with an HTTP status)."""
    if state.error is not None:
        return state.error
    reason = state.finish_reason
    if reason is not None and reason.type == "abort" and reason.status_code is not None:
        return error_for_status(reason.status_code, reason.message or "Aborted")
    return None

"""`Generation`: the handle of one `/generate` call, from which its samples' results or frames are awaited."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from verl_server.errors import error_for_status
from verl_server.server.request_state import ReqState


class Generation:
    """The samples of one `/generate` call, in order. Close it when the caller goes away."""

    def __init__(self, states: list[ReqState], is_single: bool, abandon: Callable[[ReqState], None]) -> None:
        self._abandon = abandon
        self.states = states
        self._is_single = is_single and len(states) == 1

    async def result(self) -> dict[str, Any] | list[dict[str, Any]]:
        """The finished object, or a list for a batch or n > 1. A failed sample raises and ends the others."""
        for state in self.states:
            await state.progress.wait()
            raise_failure(state)
        results = [state.result() for state in self.states]
        return results[0] if self._is_single else results

    async def updates(self) -> AsyncIterator[tuple[int, ReqState]]:
        """(index, state) whenever a sample has news; its last time with `state.done`. Needs stream=True."""
        pending = dict(enumerate(self.states))
        waits = {i: asyncio.ensure_future(state.progress.wait()) for i, state in pending.items()}
        try:
            while pending:
                await asyncio.wait(waits.values(), return_when=asyncio.FIRST_COMPLETED)
                for i in [i for i, wait in waits.items() if wait.done()]:
                    state = pending[i]
                    state.progress.clear()
                    if state.done:
                        del pending[i], waits[i]
                        raise_failure(state)
                    else:
                        waits[i] = asyncio.ensure_future(state.progress.wait())
                    yield i, state
        finally:
            for wait in waits.values():
                wait.cancel()

    def close(self) -> None:
        """Abort what still runs. Idempotent."""
        for state in self.states:
            self._abandon(state)


def raise_failure(state: ReqState) -> None:
    """Raise if the sample got no answer: the scheduler died, or it was refused (abort with an HTTP status)."""
    if state.error is not None:
        raise state.error
    reason = state.finish_reason
    if reason is not None and reason.type == "abort" and reason.status_code is not None:
        raise error_for_status(reason.status_code, reason.message or "Aborted")

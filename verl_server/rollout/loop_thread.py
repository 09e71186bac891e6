"""`LoopThread`: an event loop in a thread of its own.

A trainer's rollout runs on it, so that the thread of the trainer can meet the other ranks, and push weights to a server
that was started again, while the rollout's environments and episodes go on.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import sys
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Generic, TypeVar

import uvloop

from verl_server.errors import VerlServerError

T = TypeVar("T")

_CANCEL_SECONDS = 1.5
"""Seconds for which `cancel` waits. The ranks of a run that ends wait for each other for little more (`run_end`)."""
_END_SECONDS = 15.0
"""Seconds for which `close` waits until what was cancelled has closed its environments."""


class RolloutCancelledError(VerlServerError):
    """The coroutine was cancelled, so that it has no result."""


class Running(Generic[T]):
    """A coroutine that runs on a `LoopThread`. Its methods are for other threads."""

    def __init__(self, work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._task: asyncio.Task[T] | None = None
        self._outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
        loop.call_soon_threadsafe(self._begin, work)

    def _begin(self, work: Coroutine[Any, Any, T]) -> None:
        self._task = self._loop.create_task(work)
        self._task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self._outcome.set_exception(RolloutCancelledError("The rollout was cancelled."))
        elif (error := task.exception()) is not None:
            self._outcome.set_exception(error)
        else:
            self._outcome.set_result(task.result())

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds` for the end of the coroutine, and return whether it has ended."""
        return bool(concurrent.futures.wait([self._outcome], seconds).done)

    def result(self) -> T:
        """Return the result of a coroutine that has ended, or raise its error."""
        return self._outcome.result(timeout=0)

    async def joined(self) -> T:
        """Wait on another event loop for the end, and return the result. If cancelled, cancel the coroutine first."""
        outcome = asyncio.wrap_future(self._outcome)
        try:
            return await asyncio.shield(outcome)
        except asyncio.CancelledError:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._cancel)
            await asyncio.wait([outcome])
            outcome.exception()  # it was read: asyncio logs nothing
            raise

    def cancel(self) -> None:
        """Cancel the coroutine if it has not ended, and wait for a moment only. `LoopThread.close` waits longer."""
        if not self._outcome.done():
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._cancel)
            self.wait(_CANCEL_SECONDS)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()


class LoopThread:
    """The thread and its event loop. Both start with the first coroutine."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()

    def start(self, work: Coroutine[Any, Any, T]) -> Running[T]:
        """Run a coroutine on the loop, and return at once."""
        if self._loop is None:
            self._loop = self._started()
        return Running(work, self._loop)

    def _started(self) -> asyncio.AbstractEventLoop:
        loops: concurrent.futures.Future[asyncio.AbstractEventLoop] = concurrent.futures.Future()
        use_gpu, closing = _current_gpu(), self._closing

        def run() -> None:
            use_gpu()
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # it cancels what is left at its end
                loop = runner.get_loop()
                loops.set_result(loop)
                # An event loop raises the KeyboardInterrupt or SystemExit of a coroutine. `Running.result` raises it,
                # and the other coroutines go on.
                while not closing.is_set():
                    with contextlib.suppress(KeyboardInterrupt, SystemExit):
                        loop.run_forever()

        self._thread = threading.Thread(target=run, name=self._name, daemon=True)
        self._thread.start()
        return loops.result(_END_SECONDS)

    def close(self) -> None:
        """Cancel what runs, and end the thread. A thread that does not end within `_END_SECONDS` is left behind."""
        loop, self._loop = self._loop, None
        closing, self._closing = self._closing, threading.Event()
        if loop is not None and self._thread is not None:
            closing.set()
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join(_END_SECONDS)

    def __enter__(self) -> LoopThread:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _current_gpu() -> Callable[[], object]:
    """Return a function that makes this thread's GPU the current one of another thread, for the code of users there."""
    torch = sys.modules.get("torch")  # who has not imported it uses no GPU
    if torch is None or not torch.cuda.is_initialized():
        return lambda: None
    gpu = torch.cuda.current_device()
    return lambda: torch.cuda.set_device(gpu)

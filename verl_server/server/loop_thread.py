"""`LoopThread`: an event loop that runs in its own thread, and the calls with which other threads use the loop.

The TokenizerManager owns one. Sockets, events and locks that are created on the loop belong to its thread alone.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, TypeVar

from verl_server.errors import ServerUnavailableError, UnansweredError

T = TypeVar("T")


class LoopThread:
    def __init__(self, name: str) -> None:
        self.loop = _new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and not self.loop.is_closed()

    def run_sync(self, coro: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run `coro` on the loop, and block until it returns. Call it in any thread except the loop's.

        Raise UnansweredError after `timeout` seconds, ServerUnavailableError after `stop`, and RuntimeError in the
        loop's own thread, which would wait for itself.
        """
        if threading.current_thread() is self._thread:
            coro.close()
            raise RuntimeError(
                "A synchronous engine call was made from the engine's own event loop, where it would wait for itself. "
                "Await the async method (async_generate), or call from another thread."
            )
        self._check_alive(coro)
        future = asyncio.run_coroutine_threadsafe(coro, self.loop)
        try:
            return future.result(timeout)
        except FutureTimeoutError:
            if future.done():  # the coroutine itself raised TimeoutError
                raise
            future.cancel()
            raise UnansweredError(f"No answer from the engine's event loop within {timeout} s.") from None
        except BaseException:
            future.cancel()
            raise

    async def run_async(self, coro: Coroutine[Any, Any, T]) -> T:
        """Run `coro` on the loop, and await it on any loop. If the caller is cancelled, `coro` is cancelled too."""
        if threading.current_thread() is self._thread:
            return await coro
        self._check_alive(coro)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coro, self.loop))

    def stop(self, timeout: float = 5.0) -> None:
        """End the loop, and wait at most `timeout` seconds for its thread to end."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout)
        if not self._thread.is_alive():
            self.loop.close()

    def _check_alive(self, coro: Coroutine[Any, Any, Any]) -> None:
        if not self.is_alive:
            coro.close()
            raise ServerUnavailableError("The engine has been shut down.")


def _new_event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # uvloop has no wheel for this platform
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop

"""`in_thread`: runs a user's blocking function (a reward, a tool) in a thread that cannot keep the process alive."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any


async def in_thread(work: Callable[[], Any], name: str) -> Any:
    """Run a function in a daemon thread and return its result. After a cancelled call the thread continues to run."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if result.done():
            return
        if error is None:
            result.set_result(value)
        else:
            result.set_exception(error)

    def run() -> None:
        value, failed = None, None
        try:
            value = work()
        except Exception as error:
            failed = error
        try:
            loop.call_soon_threadsafe(settle, value, failed)
        except RuntimeError:  # the loop was closed while the function ran
            return

    threading.Thread(target=run, name=name, daemon=True).start()
    return await result

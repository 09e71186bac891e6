"""Servers that are away for a moment: when and how often a connection to one is tried again.

`RemoteEnvironment` and `McpTools` use `Tries` while they connect. Nothing has been sent then, so nothing can have
happened on the other side, and another try is safe. The players ask `is_refused` why an attempt at a task failed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

_PAUSE = 0.05
"""Seconds before the second try; each further pause is twice as long."""
_LONGEST_PAUSE = 1.0


class Tries:
    """The failed tries to reach a server, and the growing pauses between them, until a bound is over."""

    def __init__(self, seconds: float) -> None:
        """`seconds` bounds all tries together, from now on."""
        self._deadline = time.monotonic() + seconds
        self._pause = _PAUSE
        self.failed = 0
        self.error: Exception | None = None
        """Error of the last try, None if none has failed."""

    async def again(self, error: Exception) -> bool:
        """Count a try that `error` ended. Pause and return True; return False at once if no time is left."""
        self.failed += 1
        self.error = error
        if time.monotonic() + self._pause >= self._deadline:
            return False
        await asyncio.sleep(self._pause)
        self._pause = min(_LONGEST_PAUSE, self._pause * 2)
        return True


def is_refused(error: BaseException) -> bool:
    """Return True if a refused connection is `error`, or one of its causes, members or contexts."""
    return any(isinstance(each, ConnectionRefusedError) for each in _causes(error))


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield `error` and all errors that led to it, each once."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        each = left.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        left += [each.__cause__, each.__context__]
        if isinstance(each, BaseExceptionGroup):
            left += each.exceptions

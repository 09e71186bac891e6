"""`Slices` divides long work on the event loop into slices, between which the loop does other work.

`text_pieces` does so for the parsing of a text.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

_PIECE = 4096
"""Characters that are parsed at once, which takes at most a few milliseconds."""
_SLICE_SECONDS = 0.002
"""Duration of a slice."""


class Slices:
    """Call `end` between small pieces of the work. When a slice has lasted long enough, `end` lets other tasks run."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    async def end(self) -> None:
        if time.monotonic() - self._began > _SLICE_SECONDS:
            await asyncio.sleep(0)
            self._began = time.monotonic()


async def text_pieces(text: str, start: int = 0) -> AsyncIterator[str]:
    """Yield `text` from index `start` on in pieces, which the caller parses."""
    slices = Slices()
    for at in range(start, len(text), _PIECE):
        yield text[at : at + _PIECE]
        await slices.end()

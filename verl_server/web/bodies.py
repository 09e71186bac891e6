"""`bounded_body`: reads the body of a request, and stops at a bound."""

from __future__ import annotations

from starlette.requests import Request


async def bounded_body(request: Request, most: int) -> bytes | None:
    """Return the body, or None if it has more than `most` bytes. No more than that are in memory."""
    raw = bytearray()
    async for chunk in request.stream():
        raw += chunk
        if len(raw) > most:
            return None
    return bytes(raw)

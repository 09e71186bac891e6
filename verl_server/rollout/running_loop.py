"""`refuse_running_loop`, for calls that run an event loop of their own and so cannot be made in a running one."""

from __future__ import annotations

import asyncio

from verl_server.errors import BadRequestError


def refuse_running_loop(call: str, remedy: str) -> None:
    """Raise BadRequestError with the remedy if an event loop runs in this thread, as in a notebook's cells.

    Call it before the coroutine is made: a coroutine that nobody awaits prints a warning instead.
    """
    if is_loop_running():
        raise BadRequestError(
            f"{call} runs an event loop of its own, but one runs in this thread already, as in a notebook or in an "
            f"async function. {remedy}"
        )


def is_loop_running() -> bool:
    """Return True if an event loop runs in this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True

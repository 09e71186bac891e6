"""Helpers for event loops: `refuse_running_loop` for calls that cannot run in one, and coroutines side by side."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

from verl_server.errors import BadRequestError

T = TypeVar("T")


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


async def run_all(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines side by side and return their results in order.

    If one raises, the others are cancelled and awaited before its error is raised.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in work]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]

"""Coroutines in a thread of their own: results, errors, cancellation at any time, and an end within a bound."""

from __future__ import annotations

import asyncio
import threading

import pytest

from verl_server.rollout.loop_thread import LoopThread, RolloutCancelledError

WAIT = 30.0


async def value() -> int:
    return threading.get_ident()


async def fault() -> None:
    raise ZeroDivisionError("in the thread")


def test_work_runs_in_one_other_thread() -> None:
    with LoopThread("test") as thread:
        first, second = thread.start(value()), thread.start(value())
        assert first.wait(WAIT) and second.wait(WAIT)
        assert first.result() == second.result() != threading.get_ident()


def test_an_error_is_raised_where_the_result_is_read() -> None:
    with LoopThread("test") as thread:
        running = thread.start(fault())
        assert running.wait(WAIT)
        with pytest.raises(ZeroDivisionError, match="in the thread"):
            running.result()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_exit_in_a_coroutine_ends_nothing_else(error: type[BaseException]) -> None:
    """Code of users raises it. Signals do not: they reach the main thread."""

    async def leave() -> None:
        raise error

    with LoopThread("test") as thread:
        other = thread.start(asyncio.sleep(0.05, "done"))
        running = thread.start(leave())
        assert running.wait(WAIT) and other.wait(WAIT)
        with pytest.raises(error):
            running.result()
        assert other.result() == "done"
        after = thread.start(value())
        assert after.wait(WAIT) and isinstance(after.result(), int)


def test_cancelled_work_closes_what_it_opened() -> None:
    started, closed = threading.Event(), threading.Event()

    async def endless() -> None:
        try:
            started.set()
            await asyncio.Event().wait()
        finally:
            closed.set()

    with LoopThread("test") as thread:
        running = thread.start(endless())
        assert started.wait(WAIT) and not running.wait(0)
        running.cancel()
        assert closed.is_set()
        with pytest.raises(RolloutCancelledError):
            running.result()
        running.cancel()  # it has ended: without effect


def test_work_that_has_not_begun_can_be_cancelled() -> None:
    busy, free = threading.Event(), threading.Event()

    async def block() -> None:
        busy.set()
        assert free.wait(WAIT)

    with LoopThread("test") as thread:
        thread.start(block())
        assert busy.wait(WAIT)
        running = thread.start(value())
        cancelling = threading.Thread(target=running.cancel)
        cancelling.start()
        free.set()
        cancelling.join(WAIT)
        assert running.wait(WAIT)


def test_the_end_of_the_thread_cancels_what_runs() -> None:
    thread = LoopThread("test")
    running = thread.start(asyncio.sleep(600))
    assert not running.wait(0.01)
    thread.close()
    assert running.wait(WAIT)
    running.cancel()
    thread.close()  # again: without effect


def test_another_loop_waits_for_the_end_of_what_it_cancels() -> None:
    ended = threading.Event()

    async def hang(started: threading.Event) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.set()

    async def main(thread: LoopThread) -> None:
        assert await thread.start(value()).joined() != threading.get_ident()
        with pytest.raises(ZeroDivisionError, match="in the thread"):
            await thread.start(fault()).joined()
        started = threading.Event()
        waiting = asyncio.ensure_future(thread.start(hang(started)).joined())
        await asyncio.to_thread(started.wait, WAIT)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert ended.is_set()

    with LoopThread("test") as thread:
        asyncio.run(asyncio.wait_for(main(thread), WAIT))

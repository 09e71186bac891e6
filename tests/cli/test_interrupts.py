"""SIGTERM and SIGHUP reach a rollout as Ctrl-C does."""

from __future__ import annotations

import asyncio
import signal
import threading

import pytest

from verl_server.cli.interrupts import Interrupts


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_cancels_a_run_and_settles_the_exit_status(number: signal.Signals, status: int) -> None:
    interrupts, cancelled = Interrupts(), []

    async def run() -> None:
        asyncio.get_running_loop().call_soon(signal.raise_signal, number)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(True)  # what a run has to end ends here
            raise

    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)]
    with pytest.raises(KeyboardInterrupt), interrupts.caught():
        asyncio.run(run())
    assert cancelled == [True] and interrupts.exit_status == status
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)] == before


def test_another_thread_leaves_the_signals_alone() -> None:
    before, seen = signal.getsignal(signal.SIGTERM), []

    def body() -> None:
        with Interrupts().caught():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join(30)
    assert seen == [before]

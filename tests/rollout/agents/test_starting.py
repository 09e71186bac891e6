"""The bound of programs that start at one time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from verl_server.rollout.agents.starting import ProgramStarts
from verl_server.rollout.agents.uplink import Traffic


class Programs:
    """Programs in the order in which they began."""

    def __init__(self, starts: ProgramStarts) -> None:
        self.starts = starts
        self.began: list[Traffic] = []
        self.end = asyncio.Event()

    async def play(self) -> None:
        traffic = Traffic()
        async with self.starts.start(traffic):
            self.began.append(traffic)
            await self.end.wait()

    async def reach(self, count: int) -> None:
        """Wait until `count` programs have begun, and look whether no other one begins."""
        while len(self.began) < count:
            await asyncio.sleep(0)
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(self.began) == count


def _asks(programs: Programs, tasks: list[asyncio.Task[None]]) -> None:
    programs.began[0].on_request()
    programs.began[0].on_request()  # makes room once


def _ends(programs: Programs, tasks: list[asyncio.Task[None]]) -> None:
    tasks[0].cancel()


@pytest.mark.parametrize("change", [_asks, _ends])
def test_a_program_waits_until_another_one_has_started(
    change: Callable[[Programs, list[asyncio.Task[None]]], None],
) -> None:
    starts = ProgramStarts(at_once=2)

    async def main() -> None:
        programs = Programs(starts)
        tasks = [asyncio.ensure_future(programs.play()) for _ in range(5)]
        await programs.reach(2)
        tasks[-1].cancel()  # one that waits
        change(programs, tasks)
        await programs.reach(3)
        programs.end.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert len(programs.began) == 4

    for _ in range(2):  # on another event loop, too, as in the next step of a trainer
        asyncio.run(asyncio.wait_for(main(), 60))


def test_a_silent_program_counts_as_started_after_a_time() -> None:
    async def main() -> None:
        programs = Programs(ProgramStarts(at_once=2, seconds=0.0))
        tasks = [asyncio.ensure_future(programs.play()) for _ in range(5)]
        await programs.reach(5)
        programs.end.set()
        await asyncio.gather(*tasks)

    asyncio.run(asyncio.wait_for(main(), 60))

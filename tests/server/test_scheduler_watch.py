"""When a scheduler hangs, every waiting caller gets the reason, and the scheduler is killed and cannot resume."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import pytest

from tests.server.conftest import MakeStack, Stack
from verl_server.errors import ServerDiedError
from verl_server.messages.io_struct import GetInternalStateReq
from verl_server.messages.weight_requests import UpdateWeightsFromTensorReq
from verl_server.server import scheduler_watch
from verl_server.server.generate_request import GenerateReqInput


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_watch, "_SILENCE", 0.1)
    monkeypatch.setattr(scheduler_watch, "_LATE", 0.1)


def generation(stack: Stack) -> asyncio.Future[object]:
    async def run() -> object:
        return await (await stack.manager.submit(GenerateReqInput(input_ids=[5]))).result()

    return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(run(), stack.manager.loop))


async def both(stack: Stack) -> list[object]:
    update = stack.manager.control(UpdateWeightsFromTensorReq(named_tensors=[]))
    waiting = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(update, stack.manager.loop))
    return await asyncio.gather(generation(stack), waiting, return_exceptions=True)


def test_a_silent_scheduler_is_killed_and_every_caller_told(make_stack: MakeStack) -> None:
    stack = make_stack(control_timeout=0.3)
    stack.scheduler.hold = True
    stack.scheduler.control = lambda message: None
    began = time.monotonic()
    for error in asyncio.run(both(stack)):
        assert isinstance(error, ServerDiedError) and "did not answer for 0.3 s" in str(error)
        assert "Boom: the reason" in str(error)
    assert time.monotonic() - began < 5
    assert stack.child.code == -9 and len(stack.deaths) == 1
    assert stack.get("/health").status_code == 503


def test_a_scheduler_that_answers_is_given_time(make_stack: MakeStack) -> None:
    """Paused requests and long prompts produce no tokens, but the scheduler is not considered dead."""
    stack = make_stack(control_timeout=0.3)
    stack.scheduler.hold = True

    async def run() -> object:
        waiting = generation(stack)
        await asyncio.to_thread(stack.scheduler.wait_for, GetInternalStateReq, 4)
        stack.scheduler.release()
        return await waiting

    assert asyncio.run(run())
    assert stack.child.code is None and not stack.deaths


@dataclass
class Ended:
    """A rank that has ended, or that ends after `looks` calls of `poll`."""

    name: str
    code: int | None
    looks: int = 0

    def poll(self) -> int | None:
        self.looks -= 1
        return None if self.looks >= 0 else self.code

    def log_tail(self) -> str:
        return f" Log of {self.name}."

    def terminate(self, grace: float = 10.0) -> int | None:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("ranks", "said"),
    [
        ([Ended("tp0", 1), Ended("tp1", -9)], "tp1 ended with signal SIGKILL. Log of tp1."),
        ([Ended("tp0", 1), Ended("tp1", -7, looks=1)], "tp1 ended with signal SIGBUS. Log of tp1."),
        ([Ended("tp0", 1), Ended("tp1", None)], "tp0 ended with code 1. Log of tp0."),
        ([Ended("tp0", 1), Ended("tp1", 1)], "tp0 ended with code 1, tp1 ended with code 1. Log of tp0. Log of tp1."),
    ],
)
def test_the_rank_whose_end_took_the_others_along_is_named(ranks: list[Ended], said: str) -> None:
    async def ask(bound: float) -> None: ...

    watch = scheduler_watch.SchedulerWatch(ranks, 10.0, ask, lambda: False, time.monotonic)
    assert str(asyncio.run(watch.until_death())) == said

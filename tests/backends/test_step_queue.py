"""Steps reach the backend's thread once and in order, and the error of an engine ends the queue."""

from __future__ import annotations

import pytest

from verl_server.backends.process.driver import NewTokens, Step
from verl_server.backends.process.step_queue import StepQueue
from verl_server.errors import ServerDiedError


class Bell:
    def __init__(self) -> None:
        self.rings = 0

    def ring(self) -> None:
        self.rings += 1


@pytest.fixture
def bell() -> Bell:
    return Bell()


@pytest.fixture
def queue(bell: Bell) -> StepQueue:
    return StepQueue("SGLang", bell.ring)


def step(*ids: int) -> Step:
    return [NewTokens("a", list(ids), [])]


def test_steps_are_taken_once_and_in_order(queue: StepQueue, bell: Bell) -> None:
    assert queue.take() == [] and bell.rings == 0
    queue.add(step(1))
    queue.add(step(2, 3))
    assert bell.rings == 2
    assert queue.take() == [step(1), step(2, 3)]
    queue.add(step(4))
    assert queue.take() == [step(4)] and queue.take() == []


def test_a_step_is_in_the_queue_when_the_bell_rings() -> None:
    taken: list[list[Step]] = []
    queue = StepQueue("SGLang", lambda: taken.append(queue.take()))
    queue.add(step(1))
    assert taken == [[step(1)]]


def test_an_error_is_in_the_queue_when_the_bell_rings() -> None:
    seen: list[str] = []

    def ring() -> None:
        with pytest.raises(ServerDiedError) as raised:
            queue.check()
        seen.append(str(raised.value))

    queue = StepQueue("SGLang", ring)
    queue.fail(ValueError("no memory"))
    assert seen == ["SGLang failed: ValueError: no memory"]


def test_the_first_error_is_raised_from_then_on(queue: StepQueue, bell: Bell) -> None:
    queue.check()
    first = ValueError("no memory")
    queue.add(step(1))
    queue.fail(first)
    queue.fail(OSError("closed"))
    queue.add(step(2))
    for read in (queue.check, queue.take, queue.take):
        with pytest.raises(ServerDiedError, match="SGLang failed: ValueError: no memory") as raised:
            read()
        assert raised.value.__cause__ is first
    assert bell.rings == 4

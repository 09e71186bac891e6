"""`EngineWorkers` asks the workers often at first, and rarely while an update takes long."""

from __future__ import annotations

from typing import Any, cast

import msgspec
import pytest

from verl_server.backends.process.commands import COMMANDS, PollCommand, WeightsState, WorkerReply
from verl_server.backends.process.driver import EngineDriver
from verl_server.backends.process.engine_workers import EngineWorkers
from verl_server.messages.weight_requests import InitWeightsUpdateGroupReq
from verl_server.worker.tp_worker import StageCommand

JOIN = InitWeightsUpdateGroupReq(id=1, master_address="h", master_port=1, rank_offset=1, world_size=2)
STATE = WeightsState("0", "serving", 0, [], None, 1, [])


class StagingEngine:
    """Stages the request 1 until `ends_at`, and notes when the workers are asked."""

    def __init__(self, ends_at: float) -> None:
        self.now, self._ends_at, self._is_staging = 0.0, ends_at, False
        self.polls: list[float] = []
        self.workers = EngineWorkers(cast(EngineDriver, self), 5.0, lambda: self.now)

    def call(self, method: str, argument: bytes, timeout: float) -> list[bytes]:
        reply = WorkerReply(STATE)
        match COMMANDS.decode(argument):
            case PollCommand():
                if self._is_staging:
                    self.polls.append(self.now)
                    reply.finished = [(1, None)] if self.now >= self._ends_at else []
            case StageCommand():
                self._is_staging = True
            case other:
                raise AssertionError(other)
        return [msgspec.msgpack.encode(reply)]

    def run(self) -> list[tuple[int, Any]]:
        """Stage the request, and sleep as the loop does until it has ended."""
        self.workers.stage(JOIN)
        while not (outcomes := self.workers.finished()):
            wait = self.workers.wait_seconds()
            assert wait is not None and wait > 0
            self.now += wait
        return outcomes


@pytest.mark.parametrize("seconds", [0.0, 0.05, 1.0, 7.0, 60.0])
def test_the_outcome_is_noticed_within_an_eighth_of_the_time(seconds: float) -> None:
    engine = StagingEngine(seconds)
    assert engine.run() == [(1, None)]
    assert engine.now <= seconds + max(0.02, min(2.0, seconds / 8)) + 1e-6
    assert engine.workers.wait_seconds() is None


def test_a_long_update_leaves_the_workers_idle() -> None:
    """vLLM's workers spin for a second after each call."""
    engine = StagingEngine(60.0)
    engine.run()
    gaps = [later - earlier for earlier, later in zip(engine.polls, engine.polls[1:], strict=False)]
    assert len(engine.polls) < 100
    assert sum(max(0.0, gap - 1.0) for gap in gaps) > 20.0


def test_steps_of_requests_cause_no_more_polls() -> None:
    engine = StagingEngine(60.0)
    engine.workers.stage(JOIN)
    for _ in range(5000):  # a step of 10 ms each, after which the loop asks
        engine.workers.finished()
        engine.now += 0.01
    assert len(engine.polls) < 100

"""The queue alone, over a loop that does nothing: order, deadlines, and when an idle loop must look again."""

from __future__ import annotations

from typing import Any

from verl_server.messages.io_struct import ControlReply, FlushCacheReq, PauseGenerationReq
from verl_server.messages.weight_requests import (
    BeginWeightUpdateReq,
    GetWeightsByNameReq,
    RegisterWeightsReq,
    StagedReq,
    UpdateWeightsFromDiskReq,
    UpdateWeightsFromTensorReq,
    WeightReq,
)
from verl_server.scheduler.control.control_queue import ControlQueue
from verl_server.weight_sync.handles import WeightsDescription

TIMEOUT, LEASE = 10.0, 30.0


class Loop:
    """An `EngineLoop` with a number of running requests. Its worker and stager note what they are asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self.running: list[int] = []
        self.waiting: list[int] = []
        self.ran: list[int] = []
        self.dropped: list[int] = []
        self.outcomes: list[tuple[int, Any]] = []
        self.sent: list[ControlReply] = []
        self.flushed = 0
        self.requests: dict[str, Any] = {}
        self.clock, self.send = (lambda: self.now), self.sent.append
        self.planner = self.worker = self.weights = self.stager = self
        self.version, self.state, self.epoch = "0", "serving", 0
        self.queue = ControlQueue(self, TIMEOUT, LEASE)  # type: ignore[arg-type]

    def check(self, req: WeightReq) -> None: ...
    def settle(self) -> None: ...
    def emit(self) -> None: ...
    def stage(self, req: StagedReq) -> None: ...
    def start_version(self) -> None: ...

    def refusal(self) -> str | None:
        return None

    def has_runnable(self) -> bool:
        return True

    def has_started(self) -> bool:
        return bool(self.running)

    def is_restarting(self) -> bool:
        return False

    def flush_cache(self) -> None:
        self.flushed += 1

    def control(self, req: Any) -> ControlReply:
        self.ran.append(req.id)
        return ControlReply(id=req.id, success=True)

    run_staged = control

    def drop_staged(self, req: Any) -> None:
        self.dropped.append(req.id)

    def finished(self) -> list[tuple[int, Any]]:
        outcomes, self.outcomes = self.outcomes, []
        return outcomes

    def turn(self, *, step: bool = True) -> list[int]:
        """Run what is ready, then take a step. Return the ids of the requests that ran."""
        before = len(self.ran)
        self.queue.run_ready()
        if step:
            self.queue.step_taken()
        return self.ran[before:]


def push(id: int, **fields: Any) -> UpdateWeightsFromTensorReq:
    """Return a push by id, which is not staged."""
    return UpdateWeightsFromTensorReq(id=id, registration="r", **fields)


def read(id: int) -> GetWeightsByNameReq:
    return GetWeightsByNameReq(id=id, name="w")


def test_one_update_runs_between_two_steps_and_others_follow_in_order() -> None:
    loop = Loop()
    for req in (read(1), push(2), read(3), push(4)):
        loop.queue.receive(req)
    assert loop.turn(step=False) == [1, 2]
    assert loop.turn(step=False) == [3], "generation must progress before the next update"
    loop.queue.step_taken()
    assert loop.turn() == [4] and not loop.queue.is_ready()


def test_an_update_waits_for_running_requests_and_holds_up_what_is_behind_it() -> None:
    loop = Loop()
    loop.running = [1]
    loop.queue.receive(push(1, mode="wait"))
    loop.queue.receive(read(2))
    assert loop.turn() == [] and loop.queue.draining and loop.queue.is_ready()
    loop.running = []
    assert loop.turn() == [1] and loop.turn() == [2] and not loop.queue.draining


def test_what_is_being_staged_does_not_drain_and_wakes_nobody() -> None:
    loop = Loop()
    loop.queue.receive(UpdateWeightsFromDiskReq(id=1, model_path="m"))
    loop.queue.receive(read(2))
    assert loop.turn() == [] and not loop.queue.draining and not loop.queue.is_ready()
    loop.outcomes = [(1, None)]
    assert loop.turn() == [1] and loop.turn() == [2]


def test_a_registration_runs_as_soon_as_it_is_staged_whatever_waits_before_it() -> None:
    loop = Loop()
    loop.running = [1]
    loop.queue.receive(push(1, mode="wait"))
    loop.queue.receive(RegisterWeightsReq(id=2, description=WeightsDescription(id="d", allocations=[], tensors=[])))
    loop.outcomes = [(2, None)]
    assert loop.turn() == [2] and loop.queue.draining


def test_the_end_of_its_time_refuses_a_request_and_what_it_staged_is_dropped() -> None:
    loop = Loop()
    loop.queue.receive(UpdateWeightsFromDiskReq(id=1, model_path="m"))
    assert loop.queue.wait_seconds() == TIMEOUT
    loop.now = 4.0
    loop.queue.receive(read(2))
    assert loop.queue.wait_seconds() == TIMEOUT - 4.0
    loop.now = TIMEOUT
    assert loop.turn() == [2], "the request behind it has time left"
    (late, _) = loop.sent
    assert (late.id, late.status_code, loop.dropped) == (1, 504, [1])
    assert loop.queue.wait_seconds() is None
    loop.queue.receive(UpdateWeightsFromDiskReq(id=3, model_path="m"))
    assert loop.sent[-1].status_code == 503, "the stager's thread is still busy with the first one"
    loop.outcomes = [(1, None)]
    loop.turn()
    loop.queue.receive(UpdateWeightsFromDiskReq(id=4, model_path="m"))
    assert loop.sent[-1].id == 3


def test_a_flush_waits_for_an_idle_engine_and_no_longer_than_its_timeout() -> None:
    loop = Loop()
    loop.running = [1]
    loop.queue.receive(FlushCacheReq(id=1, timeout=1.0))
    loop.queue.receive(FlushCacheReq(id=2, timeout=1000.0))
    assert not loop.queue.is_ready() and loop.queue.wait_seconds() == 1.0
    loop.now = 1.0
    loop.turn()
    assert [(reply.id, reply.status_code) for reply in loop.sent] == [(1, 400)]
    assert loop.queue.wait_seconds() == TIMEOUT - 1.0, "a longer timeout counts as control_timeout"
    loop.running, loop.waiting = [], [2]
    assert not loop.queue.is_ready()
    loop.queue.receive(PauseGenerationReq(id=3, mode="in_place"))
    assert loop.queue.is_ready(), "requests that wait do not count while generation is held"
    loop.turn()
    assert loop.flushed == 1 and loop.sent[-1].success


def test_an_open_transaction_holds_generation_until_its_lease_is_over() -> None:
    loop = Loop()
    loop.queue.receive(BeginWeightUpdateReq(id=1, transaction_id="t"))
    loop.turn()
    assert loop.queue.holds_generation and loop.queue.wait_seconds() == LEASE
    loop.now = LEASE - 1.0
    loop.turn()
    assert loop.queue.holds_generation
    loop.now = LEASE
    loop.turn()
    assert not loop.queue.holds_generation and loop.queue.wait_seconds() is None


def test_a_request_is_withdrawn_until_it_begins() -> None:
    loop = Loop()
    loop.running = [1]
    loop.queue.receive(push(1, mode="wait"))
    loop.queue.withdraw(1)
    assert loop.sent[-1].status_code == 499 and loop.turn() == [] and not loop.queue.draining
    loop.queue.withdraw(1)
    assert len(loop.sent) == 1

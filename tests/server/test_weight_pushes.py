"""Pushes and their failures, as `/metrics` counts them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from tests.server.conftest import Stack
from verl_server.messages import io_struct as io
from verl_server.messages.weight_requests import (
    BeginWeightUpdateReq,
    EndWeightUpdateReq,
    UpdateWeightsFromDiskReq,
    UpdateWeightVersionReq,
)
from verl_server.server.weight_pushes import WeightPushes


class Counted:
    def __init__(self) -> None:
        self.pushes: list[tuple[str, float]] = []
        self.failures: list[str] = []
        self.prepared: list[float] = []
        self.held: list[float] = []

    def weights_prepared(self, seconds: float) -> None:
        self.prepared.append(seconds)

    def generation_held(self, seconds: float) -> None:
        self.held.append(seconds)

    def weights_pushed(self, source: str, seconds: float) -> None:
        self.pushes.append((source, seconds))

    def push_failed(self, route: str) -> None:
        self.failures.append(route)


DONE, FAILED = io.ControlReply(id=1, success=True), io.ControlReply(id=1, success=False)
DISK = UpdateWeightsFromDiskReq(model_path="m")


def told(now: float, notes: Callable[[WeightPushes], None]) -> Counted:
    counted = Counted()
    notes(WeightPushes(counted, clock=lambda: now))
    return counted


def test_an_update_is_a_push() -> None:
    counted = told(7.0, lambda pushes: pushes.note(DISK, DONE, 4.0, False))
    assert counted.pushes == [("disk", 3.0)] and not counted.failures


def test_a_transaction_is_one_push_from_its_begin_to_its_end() -> None:
    def notes(pushes: WeightPushes) -> None:
        pushes.note(BeginWeightUpdateReq(), DONE, 1.0, False)
        pushes.note(DISK, DONE, 2.0, True)
        pushes.note(EndWeightUpdateReq(), FAILED, 3.0, True)
        pushes.note(EndWeightUpdateReq(), DONE, 4.0, True)

    counted = told(7.0, notes)
    assert counted.pushes == [("transaction", 6.0)] and counted.failures == ["/end_weight_update"]


def test_what_is_discarded_or_changes_no_weights_is_no_push() -> None:
    def notes(pushes: WeightPushes) -> None:
        pushes.note(BeginWeightUpdateReq(), DONE, 1.0, False)
        pushes.note(EndWeightUpdateReq(discard=True), DONE, 4.0, True)
        pushes.note(UpdateWeightVersionReq(new_version="2"), DONE, 5.0, False)
        pushes.note(io.FlushCacheReq(), FAILED, 5.0, False)

    counted = told(7.0, notes)
    assert not counted.pushes and not counted.failures


def test_the_times_of_a_reply_are_counted() -> None:
    def reply(**payload: float) -> io.ControlReply:
        return io.ControlReply(id=1, success=True, payload=payload)

    def notes(pushes: WeightPushes) -> None:
        pushes.note(DISK, reply(prepare_seconds=2.0, pause_seconds=0.5), 1.0, False)
        pushes.note(BeginWeightUpdateReq(), DONE, 1.0, False)
        pushes.note(DISK, reply(prepare_seconds=3.0), 1.0, True)
        pushes.note(EndWeightUpdateReq(), reply(pause_seconds=4.0), 1.0, True)
        pushes.note(DISK, FAILED, 1.0, False)

    counted = told(7.0, notes)
    assert (counted.prepared, counted.held) == ([2.0, 3.0], [0.5, 4.0])


def test_the_times_are_in_the_metrics_and_in_the_answer(stack: Stack) -> None:
    times = {"prepare_seconds": 2.0, "pause_seconds": 0.25}
    stack.scheduler.control = lambda req: io.ControlReply(id=req.id, success=True, payload=times)
    text = stack.get("/metrics").text
    for name in ("prepare", "pause"):
        assert re.search(rf"weight_{name}_seconds_count{{.*}} 0.0", text)
    answer = stack.post("/update_weights_from_tensor", {"registration": "r"}).json()
    assert answer["prepare_seconds"] == 2.0 and answer["pause_seconds"] == 0.25
    text = stack.get("/metrics").text
    for name, seconds in (("prepare", 2.0), ("pause", 0.25)):
        assert re.search(rf"weight_{name}_seconds_sum{{.*}} {seconds}", text)


def pushes(stack: Stack) -> dict[str, float]:
    """Return source -> pushes, and route -> failures."""
    text = stack.get("/metrics").text
    found = re.findall(r'weight_push_(?:seconds_count|failures_total)\{.*?(?:source|endpoint)="(.*?)".*\} (\S+)', text)
    return {name: float(count) for name, count in found if float(count)}


def test_replies_of_the_scheduler_are_counted(stack: Stack) -> None:
    answers: list[dict[str, Any]] = [{"success": False, "status_code": 400}, {"success": True}]

    def control(message: Any) -> io.ControlReply:
        if isinstance(message, UpdateWeightsFromDiskReq):
            return io.ControlReply(id=message.id, **answers.pop(0))
        payload = {"lease_seconds": 60.0} if isinstance(message, BeginWeightUpdateReq) else {}
        return io.ControlReply(id=message.id, success=True, payload=payload)

    stack.scheduler.control = control
    disk = {"model_path": str(stack.args.model_path)}
    assert not pushes(stack)
    assert stack.post("/update_weights_from_disk", disk).status_code == 400
    assert pushes(stack) == {"/update_weights_from_disk": 1}
    assert stack.post("/update_weights_from_disk", disk).status_code == 200
    assert pushes(stack) == {"/update_weights_from_disk": 1, "disk": 1}
    assert "last_weight_push_time_seconds" in stack.get("/metrics").text
    answers.append({"success": True})
    for path, body in (("/begin_weight_update", {}), ("/update_weights_from_disk", disk), ("/end_weight_update", {})):
        assert stack.post(path, body).status_code == 200
    assert pushes(stack) == {"/update_weights_from_disk": 1, "disk": 1, "transaction": 1}

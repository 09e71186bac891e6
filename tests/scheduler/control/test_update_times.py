"""The seconds that an update was prepared, and for which generation stood still because of it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.scheduler.fakes import Harness, serving, update
from verl_server.messages.io_struct import ContinueGenerationReq, ControlReply, PauseGenerationReq
from verl_server.messages.weight_requests import BeginWeightUpdateReq, EndWeightUpdateReq, UpdateWeightsFromTensorReq

COPY = 0.25
"""Seconds that each request takes on the ranks."""


def slow(h: Harness) -> Harness:
    """Let each weight request take `COPY` seconds, and each step one."""
    handle, launch = h.weights.handle, h.runner.launch

    def handled(*args: Any) -> ControlReply:
        h.clock.now += COPY
        return handle(*args)

    def launched(*args: Any) -> Any:
        h.clock.now += 1.0
        return launch(*args)

    h.weights.handle, h.runner.launch = handled, launched  # type: ignore[method-assign]
    return h


def times(h: Harness, id: int) -> dict[str, float]:
    """Return the times in a reply."""
    payload = h.replies[id].payload or {}
    return {name: value for name, value in payload.items() if name in ("prepare_seconds", "pause_seconds")}


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
def test_an_update_is_prepared_beside_generation(mode: str) -> None:
    h = slow(serving(new=40))
    h.stager.hold = True
    h.control(update(1, mode))
    h.steps(3)
    h.stager.finish()
    h.steps()
    assert times(h, 1) == {"prepare_seconds": 4.0, "pause_seconds": COPY}


def test_requests_that_finish_first_are_no_pause() -> None:
    h = slow(serving(new=10))
    h.control(update(1, "wait"))
    h.run()
    assert times(h, 1) == {"prepare_seconds": 0.0, "pause_seconds": COPY}
    assert h.clock.now > 5.0


def test_a_push_by_id_needs_no_preparation() -> None:
    h = slow(serving())
    h.control(UpdateWeightsFromTensorReq(id=1, registration="r", mode="in_place"))
    assert times(h, 1) == {"prepare_seconds": 0.0, "pause_seconds": COPY}


def test_a_transaction_holds_generation_from_its_begin_to_its_end() -> None:
    h = slow(serving(new=40))
    h.control(BeginWeightUpdateReq(id=1, mode="in_place"))
    h.control(update(2))
    h.clock.now += 7.0
    h.control(update(3))
    h.control(EndWeightUpdateReq(id=4))
    assert times(h, 1) == {} and times(h, 2) == times(h, 3) == {"prepare_seconds": 0.0}
    assert times(h, 4) == {"pause_seconds": 7.0 + 4 * COPY}
    h.steps()
    h.control(update(5, "in_place"))
    assert times(h, 5) == {"prepare_seconds": 0.0, "pause_seconds": COPY}


def test_a_pause_of_the_caller_is_not_the_updates() -> None:
    h = slow(serving(new=40))
    h.control(PauseGenerationReq(id=1, mode="in_place"))
    h.control(update(2))
    assert times(h, 2) == {"prepare_seconds": 0.0, "pause_seconds": 0.0}
    h.control(BeginWeightUpdateReq(id=3, mode="in_place"))
    h.control(update(4))
    h.control(EndWeightUpdateReq(id=5))
    assert times(h, 5) == {"pause_seconds": 0.0}
    h.control(ContinueGenerationReq(id=6))
    h.steps()
    h.control(update(7, "in_place"))
    assert times(h, 7)["pause_seconds"] == COPY


def test_a_refused_update_has_no_times() -> None:
    h = slow(serving())
    h.weights.next_outcome = "refused"
    h.control(update(1, "in_place"))
    assert not h.replies[1].success and times(h, 1) == {}

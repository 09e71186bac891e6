"""docs/scheduler-states.md, "Staging": requests that are with the stager, between arrival and their turn."""

from __future__ import annotations

from typing import Any

import pytest

from tests.scheduler.fakes import ELSEWHERE, NOWHERE, Harness, join, prompt, serving, update
from verl_server.errors import UnknownRegistrationError, WeightUpdateError
from verl_server.messages.io_struct import ControlReply, PauseGenerationReq
from verl_server.messages.weight_requests import (
    RegisterWeightsReq,
    ReleaseMemoryOccupationReq,
    ResumeMemoryOccupationReq,
    UnregisterWeightsReq,
    UpdateWeightsFromDistributedReq,
    UpdateWeightsFromTensorReq,
)


def held_stager(**settings: Any) -> Harness:
    """Return two running requests and a stager that finishes only when `finish` is called."""
    h = serving(new=40, **settings)
    h.stager.hold = True
    return h


@pytest.mark.parametrize("mode", ["wait", "retract", "abort", "in_place"])
def test_what_is_being_staged_stops_nobody_and_starts_in_its_mode_when_it_is_ready(mode: Any) -> None:
    h = held_stager()
    assert h.control(update(1, mode)) is None
    h.add("late", prompt(8, 9), 5)
    h.steps(4)
    assert len(h.tokens["r0"]) == 8 and len(h.tokens["late"]) == 4 and not h.scheduler.control.draining
    h.stager.finish()
    h.steps()
    assert h.scheduler.control.draining == (mode == "wait") != (1 in h.replies)
    h.run()
    assert h.replies[1].success and h.stager.staged == {}
    assert h.versions["late"] == {"wait": ["0"] * 5, "abort": ["0"] * 4}.get(mode, ["0"] * 4 + ["1"])


def test_a_request_that_is_refused_by_the_stager_is_answered_at_once_wherever_it_waits() -> None:
    h = held_stager()
    h.scheduler.handle(update(1))
    h.scheduler.handle(update(2))
    h.steps()
    h.stager.next_refusal = WeightUpdateError("the first")
    h.stager.finish()
    h.steps()
    assert h.replies[1].message == "the first" and 2 not in h.replies and h.scheduler.control.draining
    h.stager.next_refusal = WeightUpdateError("behind")
    h.scheduler.handle(update(3))
    h.stager.finish()
    h.steps()
    assert h.replies[3].message == "behind", "answered before the update that drains"


def test_a_pushed_registration_is_not_staged_and_keeps_its_place_behind_what_is() -> None:
    h = held_stager()
    h.control(PauseGenerationReq(id=1, mode="in_place"))
    assert h.control(UpdateWeightsFromTensorReq(id=2, registration="r")).success
    h.control(update(3))
    assert h.control(UpdateWeightsFromTensorReq(id=4, registration="r")) is None, "in the order of arrival"
    h.stager.finish()
    h.steps(2)
    assert h.replies[3].success and h.replies[4].success
    h.control(UpdateWeightsFromTensorReq(id=5, registration="r", checksums={"w": "0"}))
    assert [req.id for req in h.stager.waiting] == [5], "checksums are compared beside generation"


def test_what_is_plainly_wrong_is_answered_before_anything_is_staged() -> None:
    h = held_stager()
    h.weights.next_check = UnknownRegistrationError("who?")
    reply = h.control(UpdateWeightsFromTensorReq(id=1, registration="gone", forget=["old"]))
    assert reply.status_code == 404 and not h.stager.waiting
    (forgotten,) = h.weights.handled
    assert forgotten.registrations == ["old"], "the owner frees that memory whether or not the push succeeds"


def test_every_rank_learns_of_a_refusal_that_its_sender_counts_on_them_for() -> None:
    """A refused broadcast and a refused pickle still reach the stager of every rank, which drops them.

    All ranks must receive a broadcast that is under way, and each rank must return its reference to pickled memory.
    Other refused requests open nothing.
    """
    h = held_stager()
    bucket = UpdateWeightsFromDistributedReq(id=1, names=["w"], dtypes=["float32"], shapes=[[1]])
    pickled = UpdateWeightsFromTensorReq(id=2, serialized_named_tensors=["gASV"])
    for req in (bucket, pickled, update(3)):
        h.weights.next_check = WeightUpdateError("no")
        assert h.control(req).status_code == 400
    assert [req.id for req in h.stager.waiting] == h.stager.dropped == [1, 2]


def test_staging_that_takes_too_long_is_refused_dropped_and_holds_up_no_push_by_id() -> None:
    h = held_stager(control_timeout=5.0)
    h.scheduler.handle(update(1))
    h.clock.now = 1.0
    h.scheduler.handle(RegisterWeightsReq(id=2, description=NOWHERE))
    h.steps()
    assert h.scheduler.control.wait_seconds() == 4.0
    h.clock.now = 5.0
    h.steps()
    assert h.replies[1].status_code == 504 and "its staging" in h.replies[1].message and h.stager.dropped == [1]
    assert h.control(update(3)).status_code == 503 and "stuck" in h.replies[3].message
    joined = h.control(join(4))
    assert joined is None, "joins run in another thread"
    assert h.control(UpdateWeightsFromTensorReq(id=5, registration="r", mode="in_place")).success
    h.clock.now = 6.0
    h.steps()
    assert h.replies[2].status_code == 504 and h.stager.dropped == [1, 2]
    h.stager.finish()
    h.steps()
    assert h.replies[4].success
    h.control(update(6, "in_place"))
    h.stager.finish()
    h.steps(2)
    assert h.replies[6].success, "the stager returned, so that staging works again"
    assert h.stager.staged == {}


def test_an_idle_loop_sleeps_while_something_is_staged() -> None:
    h = Harness(control_timeout=5.0)
    h.stager.hold = True
    h.control(update(1))
    assert not h.scheduler.has_work() and h.scheduler.control.wait_seconds() == 5.0
    h.stager.finish()
    h.steps()
    assert h.replies[1].success and not h.scheduler.has_work() and h.scheduler.control.wait_seconds() is None


def test_released_weights_withdraw_what_was_staged_for_them() -> None:
    h = Harness()
    h.control(PauseGenerationReq(id=1, mode="retract"))
    h.stager.hold = True
    h.scheduler.handle(update(2))
    h.scheduler.handle(ReleaseMemoryOccupationReq(id=3))
    h.scheduler.handle(ResumeMemoryOccupationReq(id=4))
    h.scheduler.handle(RegisterWeightsReq(id=5, description=NOWHERE))
    h.scheduler.handle(update(6))
    h.scheduler.handle(join(7))
    h.stager.waiting, rest = h.stager.waiting[:1], h.stager.waiting[1:]
    h.stager.finish()
    h.stager.waiting = rest
    h.steps(2)
    assert h.replies[2].success and h.replies[3].success and h.replies[4].success
    for id in (5, 6):
        assert h.replies[id].status_code == 400 and "released meanwhile" in h.replies[id].message
    assert h.stager.dropped == [6, 5] and 7 not in h.replies
    replies = [message.id for message in h.sent if isinstance(message, ControlReply)]
    assert replies.index(6) < replies.index(3), "the release is answered after everything was closed"
    assert h.control(update(8)) is None, "a withdrawn request does not make the stager count as stuck"
    h.stager.finish()
    h.steps()
    assert h.replies[7].success and h.replies[8].success


def test_unregistering_withdraws_what_is_staged_from_that_memory() -> None:
    h = Harness()
    h.stager.hold = True
    h.scheduler.handle(UnregisterWeightsReq(id=1, registrations=["d"]))
    h.scheduler.handle(RegisterWeightsReq(id=2, description=NOWHERE))
    h.scheduler.handle(RegisterWeightsReq(id=3, description=ELSEWHERE))
    h.steps()
    assert h.replies[1].success and h.replies[2].status_code == 400 and 3 not in h.replies

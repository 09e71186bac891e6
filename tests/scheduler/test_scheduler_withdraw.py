"""docs/scheduler-states.md, "Callers who give up": requests that have not begun are dropped, all others complete."""

from __future__ import annotations

from typing import Any

import pytest

from tests.scheduler.fakes import NOWHERE, Harness, join, prompt, serving, update
from verl_server.messages.io_struct import FlushCacheReq, PauseGenerationReq, WithdrawReq
from verl_server.messages.weight_requests import (
    BeginWeightUpdateReq,
    DestroyWeightsUpdateGroupReq,
    EndWeightUpdateReq,
    GetWeightsByNameReq,
    RegisterWeightsReq,
    ReleaseMemoryOccupationReq,
    ResumeMemoryOccupationReq,
    UnregisterWeightsReq,
    UpdateWeightsFromTensorReq,
    UpdateWeightVersionReq,
)


def withdraw(h: Harness, id: int) -> None:
    h.scheduler.handle(WithdrawReq(id=id))


def is_withdrawn(h: Harness, id: int) -> bool:
    """Return True if the request was answered as withdrawn and never reached the weights."""
    return h.replies[id].status_code == 499 and id not in [req.id for req in h.weights.handled]


@pytest.mark.parametrize("source", [{"named_tensors": []}, {"registration": "r"}])
def test_an_update_that_drains_is_withdrawn_and_generation_goes_on(source: dict[str, Any]) -> None:
    h = serving(new=20)
    h.control(UpdateWeightsFromTensorReq(id=1, **source))
    h.add("late", prompt(8, 9), 5)
    h.steps(2)
    assert h.scheduler.control.draining and "late" not in h.tokens
    withdraw(h, 1)
    h.steps()
    assert is_withdrawn(h, 1) and h.tokens["late"], "a request that waited for the drain runs at once"
    h.run()
    assert h.runner.salt == 0 and set(h.versions["late"]) == {"0"}
    assert h.stager.staged == {} and h.stager.dropped == ([1] if "named_tensors" in source else [])


def test_what_is_staged_or_being_staged_is_dropped_and_the_next_has_its_turn() -> None:
    h = serving(new=40)
    h.stager.hold = True
    for req in (update(1), update(2, "in_place"), RegisterWeightsReq(id=3, description=NOWHERE), join(4)):
        h.scheduler.handle(req)
    h.steps()
    for id in (1, 3, 4):
        withdraw(h, id)
    assert all(is_withdrawn(h, id) for id in (1, 3, 4)) and h.stager.dropped == [1, 3, 4]
    h.stager.finish()
    h.steps()
    assert h.replies[2].success and h.runner.salt == 1 and h.stager.staged == {}
    assert h.control(update(5, "in_place")) is None, "the stager does not count as stuck"


def test_of_two_updates_the_second_may_still_be_withdrawn_when_the_first_was_carried_out() -> None:
    """A caller gives up while the first update is copied. The memory of the second update must not be read."""
    h = Harness()
    h.scheduler.handle(update(1))
    h.scheduler.handle(update(2))
    h.steps()
    assert h.replies[1].success and 2 not in h.replies and h.scheduler.has_work(), "the loop does not sleep meanwhile"
    withdraw(h, 2)
    h.run()
    assert is_withdrawn(h, 2) and h.runner.salt == 1


@pytest.mark.parametrize(
    "req",
    [
        BeginWeightUpdateReq(id=2),
        UpdateWeightVersionReq(id=2, new_version="x"),
        GetWeightsByNameReq(id=2, name="w"),
        ReleaseMemoryOccupationReq(id=2),
        ResumeMemoryOccupationReq(id=2),
        FlushCacheReq(id=2, timeout=100.0),
    ],
)
def test_everything_else_that_waits_is_withdrawn(req: Any) -> None:
    h = serving(new=20)
    h.control(update(1))
    h.control(req)
    withdraw(h, 2)
    h.run()
    assert is_withdrawn(h, 2) and h.replies[1].success
    assert not h.scheduler.control.transaction.is_open and h.weights.state == "serving"


@pytest.mark.parametrize(
    "req",
    [
        EndWeightUpdateReq(id=3, transaction_id="s", weight_version="done"),
        UnregisterWeightsReq(id=3, registrations=["r"]),
        DestroyWeightsUpdateGroupReq(id=3),
    ],
)
def test_what_ends_or_closes_something_is_carried_out_all_the_same(req: Any) -> None:
    h = Harness()
    h.control(BeginWeightUpdateReq(id=1, transaction_id="s"))
    h.stager.hold = True
    h.control(update(2, transaction_id="s"))
    h.control(req)
    withdraw(h, 3)
    assert 3 not in h.replies
    h.stager.finish()
    h.steps(2)
    assert h.replies[2].success and h.replies[3].success
    assert (h.weights.version == "done") == isinstance(req, EndWeightUpdateReq)


def test_a_call_of_a_transaction_is_withdrawn_and_the_transaction_stays_open() -> None:
    h = Harness(weight_update_lease=10.0)
    h.control(BeginWeightUpdateReq(id=1, transaction_id="s"))
    h.stager.hold = True
    h.control(update(2, transaction_id="s"))
    h.clock.now = 9.0
    withdraw(h, 2)
    h.steps()
    transaction = h.scheduler.control.transaction
    assert is_withdrawn(h, 2) and transaction.is_open and transaction.lease_end == 19.0
    assert h.control(EndWeightUpdateReq(id=3, transaction_id="s")).success and h.runner.salt == 0


def test_a_transaction_that_never_began_refuses_what_was_queued_for_it() -> None:
    h = serving(new=20)
    h.control(BeginWeightUpdateReq(id=1, transaction_id="s"))
    h.control(update(2, transaction_id="s"))
    withdraw(h, 1)
    h.run()
    assert is_withdrawn(h, 1) and h.replies[2].status_code == 409 and h.runner.salt == 0
    assert h.stager.staged == {} and h.stager.dropped == [2]


def test_nothing_happens_for_what_is_answered_or_was_never_there() -> None:
    h = serving(new=20)
    h.control(update(1, "in_place"))
    h.control(PauseGenerationReq(id=2, mode="in_place"))
    sent = len(h.sent)
    for id in (1, 2, 77):
        withdraw(h, id)
    assert h.replies[1].success and h.replies[2].success and len(h.sent) == sent and h.scheduler.control.paused


def test_what_it_wanted_forgotten_is_forgotten() -> None:
    h = serving(new=20)
    h.control(UpdateWeightsFromTensorReq(id=1, named_tensors=[], forget=["old"]))
    withdraw(h, 1)
    (forgotten,) = h.weights.handled
    assert isinstance(forgotten, UnregisterWeightsReq) and forgotten.registrations == ["old"]

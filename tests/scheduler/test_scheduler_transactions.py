"""docs/scheduler-states.md, "Transactions": calls that are permitted, what a transaction holds, and how it ends."""

from __future__ import annotations

from typing import Any

import pytest

from tests.scheduler.fakes import NOWHERE, Harness, generate, join, prompt, serving, update
from verl_server.messages.io_struct import ContinueGenerationReq, FlushCacheReq, GetInternalStateReq, PauseGenerationReq
from verl_server.messages.weight_requests import (
    BeginWeightUpdateReq,
    DestroyWeightsUpdateGroupReq,
    EndWeightUpdateReq,
    GetWeightsByNameReq,
    RegisterWeightsReq,
    ReleaseMemoryOccupationReq,
    ResumeMemoryOccupationReq,
    UnregisterWeightsReq,
    UpdateWeightsFromDiskReq,
    UpdateWeightsFromTensorReq,
    UpdateWeightVersionReq,
    WeightsCheckerReq,
)


def begin(id: int, name: str | None = None, **fields: Any) -> BeginWeightUpdateReq:
    return BeginWeightUpdateReq(id=id, transaction_id=name, **fields)


def end(id: int, name: str | None = None, **fields: Any) -> EndWeightUpdateReq:
    return EndWeightUpdateReq(id=id, transaction_id=name, **fields)


def in_transaction(name: str | None = "s", **settings: Any) -> Harness:
    h = serving(**settings)
    assert h.control(begin(1, name, mode="in_place")).success
    return h


@pytest.mark.parametrize("mode", ["wait", "retract", "abort", "in_place"])
def test_a_transaction_begins_in_its_mode_holds_generation_and_renews_the_cache_once(mode: Any) -> None:
    h = serving()
    h.run()
    h.add("a", prompt(0, 9), 10)
    h.steps(3)
    h.control(begin(1, "s", mode=mode))
    assert (1 in h.replies) == (mode != "wait")
    while 1 not in h.replies:
        h.steps()
    assert h.replies[1].payload["lease_seconds"] == 60.0
    for id in (2, 3, 4):
        assert h.control(update(id, transaction_id="s")).success
        h.add(f"n{id}", prompt(id, 9), 3)
        h.steps(3)
    assert not any(f"n{id}" in h.tokens for id in (2, 3, 4)) and not h.finished.get("n2")
    assert not h.scheduler.has_work(), "the loop sleeps meanwhile"
    assert h.scheduler.planner.cache.version == 0
    assert h.control(end(5, "s", weight_version="v1")).success
    assert h.scheduler.planner.cache.version == 1
    h.run()
    for id in (2, 3, 4):
        assert h.tokens[f"n{id}"] == generate(prompt(id, 9), 3, 1) and set(h.versions[f"n{id}"]) == {"v1"}
    assert h.versions["a"] == {"wait": ["0"] * 10, "abort": ["0"] * 3}.get(mode, ["0"] * 3 + ["v1"] * 7)


def test_a_transaction_without_writes_leaves_everything_as_it_was() -> None:
    h = in_transaction()
    assert h.control(end(2, "s")).success
    h.run()
    assert h.tokens["r0"] == generate(prompt(0, 9), 10, 0) and h.scheduler.planner.cache.version == 0
    assert not any(req.private for req in h.scheduler.requests.values())


OURS, NOBODYS, OTHERS = "s", None, "t"


@pytest.mark.parametrize("name", [OURS, NOBODYS])
def test_who_may_do_what_while_a_transaction_is_open(name: str | None) -> None:
    """The table of docs/scheduler-states.md, "Transactions", row by row."""
    h = in_transaction(name)
    stranger = NOBODYS if name == OURS else OTHERS
    disk = UpdateWeightsFromDiskReq(id=2, model_path="x", transaction_id=name)
    assert h.control(disk).success
    assert h.control(update(3, "abort", transaction_id=name)).success and not h.finished, "the mode is ignored"
    for req in (
        update(10, transaction_id=stranger),
        UpdateWeightsFromTensorReq(id=11, registration="r", transaction_id=OTHERS),
        UpdateWeightsFromDiskReq(id=12, model_path="x", transaction_id=OTHERS),
        end(13, OTHERS),
        end(14, OTHERS, discard=True),
        begin(15, OTHERS),
        UpdateWeightVersionReq(id=16, new_version="9"),
        WeightsCheckerReq(id=17, action="reset_tensors"),
    ):
        reply = h.control(req)
        assert (
            reply.status_code == 409
            and "is open" in reply.message
            and repr(name or "without an id")[1:-1] in reply.message
        )
    assert h.control(begin(20)).status_code == (400 if name is None else 409)
    assert h.control(ReleaseMemoryOccupationReq(id=21)).status_code == 400
    assert h.control(GetWeightsByNameReq(id=22, name="w")).success
    assert h.control(WeightsCheckerReq(id=23)).success
    assert h.control(RegisterWeightsReq(id=24, description=NOWHERE)).success
    assert h.control(UnregisterWeightsReq(id=25)).success
    assert h.control(ResumeMemoryOccupationReq(id=26)).success
    assert h.control(join(27)).success and h.control(DestroyWeightsUpdateGroupReq(id=28)).success
    assert not h.finished and len(h.runner.batches) == 3
    assert h.control(end(30, name)).success
    assert h.control(end(31, name)).status_code == (400 if name is None else 409)
    assert h.control(update(32, transaction_id=OTHERS)).status_code == 409, "the named transaction is not open"
    h.run()
    assert h.versions["r0"] == ["0"] * 3 + ["1"] * 7


def test_fenced_calls_are_refused_before_they_are_staged_or_disturb_anybody() -> None:
    h = in_transaction()
    h.stager.hold = True
    assert h.control(update(2)).status_code == 409 and not h.stager.waiting
    h.scheduler.handle(end(3, "s"))
    h.scheduler.handle(update(4, "abort", transaction_id="s"))
    h.stager.finish()
    h.steps()
    assert h.replies[4].status_code == 409, "the call arrived after the end"
    assert h.stager.dropped == [4] and not h.finished


@pytest.mark.parametrize("writes", [False, True])
def test_a_silent_transaction_is_given_up_when_its_lease_is_over(writes: bool) -> None:
    h = in_transaction(weight_update_lease=10.0)
    h.clock.now = 4.0
    if writes:
        h.control(update(2, transaction_id="s"))
    else:
        h.steps()
    end_at = 14.0 if writes else 10.0
    h.stager.hold = True
    assert h.scheduler.control.wait_seconds() == end_at - 4.0
    h.clock.now = end_at - 0.1
    h.steps()
    assert h.control(GetInternalStateReq(id=3)).payload["transaction"] == "'s'"
    h.clock.now = end_at
    h.steps()
    assert h.control(GetInternalStateReq(id=4)).payload["transaction"] is None
    late = h.control(update(5, transaction_id="s"))
    assert late.status_code == 409 and "not open" in late.message
    h.run()
    if writes:
        assert h.finished["r0"].status_code == 503 and "torn" in (h.finished["r0"].message or "")
    else:
        assert h.tokens["r0"] == generate(prompt(0, 9), 10, 0)


def test_the_lease_does_not_run_while_a_call_of_the_transaction_does() -> None:
    h = in_transaction(weight_update_lease=10.0, control_timeout=100.0)
    h.stager.hold = True
    h.control(update(2, transaction_id="s"))
    assert h.scheduler.control.wait_seconds() == 100.0
    h.clock.now = 50.0
    h.steps()
    assert 2 not in h.replies and h.scheduler.control.transaction.is_open
    h.stager.finish()
    h.steps()
    assert h.replies[2].success and h.scheduler.control.wait_seconds() == 10.0, "the lease starts again"
    h.clock.now = 55.0
    h.control(update(3, transaction_id="s"))
    h.clock.now = 155.0
    h.steps()
    assert h.replies[3].status_code == 504 and h.scheduler.control.transaction.is_open, (
        "the refused call renewed the lease"
    )


def test_pause_continue_flush_and_aborts_in_a_transaction() -> None:
    h = in_transaction(max_rows=2)
    h.add("queued", prompt(7, 9), 5)
    assert h.control(ContinueGenerationReq(id=2)).success
    h.steps(3)
    assert len(h.runner.batches) == 3, "the transaction still holds generation"
    assert h.control(FlushCacheReq(id=3)).success is False, "frozen requests hold their KV"
    h.abort("queued")
    h.steps()
    assert h.finished["queued"].message == "Abort in waiting queue"
    assert h.control(PauseGenerationReq(id=4, mode="retract")).success
    assert h.control(FlushCacheReq(id=5)).success
    h.control(update(6, transaction_id="s"))
    h.control(end(7, "s"))
    h.steps(3)
    assert len(h.runner.batches) == 3, "still paused"
    h.control(ContinueGenerationReq(id=8))
    h.run()
    assert h.versions["r0"] == ["0"] * 3 + ["1"] * 7 and h.last["r0"][0].num_retractions[0] == 1


def test_requests_that_arrive_in_a_transaction_over_torn_weights_wait_for_its_end() -> None:
    h = Harness()
    h.weights.next_outcome = "torn"
    assert not h.control(update(1)).success
    h.control(begin(2, "s"))
    h.add("a", prompt(0, 9), 4)
    h.steps(2)
    assert "a" not in h.finished
    h.control(update(3, transaction_id="s"))
    h.control(end(4, "s"))
    h.run()
    assert h.tokens["a"] == generate(prompt(0, 9), 4, 2)


def test_an_end_that_is_refused_leaves_the_transaction_open() -> None:
    h = in_transaction()
    h.weights.next_outcome = "refused"
    assert h.control(end(2, "s")).status_code == 400
    h.steps(3)
    assert len(h.runner.batches) == 3 and h.control(update(3, transaction_id="s")).success
    assert h.control(end(4, "s")).success


def test_a_transaction_whose_begin_is_still_draining_takes_calls_in_order() -> None:
    h = serving()
    for message in (begin(1, "s"), update(2, transaction_id="s"), end(3, "s"), update(4)):
        h.scheduler.handle(message)
    h.run()
    assert all(h.replies[id].success for id in (1, 2, 3, 4))
    assert h.tokens["r0"] == generate(prompt(0, 9), 10, 0) and h.weights.version == "2"

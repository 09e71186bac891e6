"""The step that is planned ahead while masks are computed: when it is planned, changed, dropped and launched."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.scheduler.constrained import GrammarHarness, hold, make_late
from tests.scheduler.fakes import generate, prompt, update
from verl_server.ipc.tp_group import TpGroup
from verl_server.messages.io_struct import (
    BatchTokenIDOut,
    ContinueGenerationReq,
    FinishReq,
    PauseGenerationReq,
)
from verl_server.messages.weight_requests import BeginWeightUpdateReq
from verl_server.scheduler.schedule_batch import Req, ScheduleBatch


def planned(h: GrammarHarness) -> ScheduleBatch | None:
    return h.scheduler.steps._planned


def lengths(req: Req) -> tuple[int, int]:
    return req.cached_len, req.num_pending


def decoding(count: int = 5, new: int = 30, **settings: Any) -> GrammarHarness:
    """Return a harness whose `count` constrained requests decode, with a step in flight and one planned ahead."""
    h = GrammarHarness(**({"num_pages": 400} | settings))
    h.runner.is_early = lambda: False
    for i in range(count):
        h.constrain(f"s{i}", "regex", "([a-f][0-9]){20}x", new=new)
    h.compile()
    h.steps(4)
    assert planned(h) is not None and not h.scheduler.steps.is_empty
    return h


def expected(count: int = 5, new: int = 30) -> dict[str, list[int]]:
    """Return the outputs without overlap."""
    h = GrammarHarness(False, num_pages=400)
    for i in range(count):
        h.constrain(f"s{i}", "regex", "([a-f][0-9]){20}x", new=new)
    h.finish()
    return h.tokens


# -- planning and launching ---------------------------------------------------------------------------------


def test_a_turn_launches_the_step_that_was_planned_while_masks_were_computed() -> None:
    h = decoding()
    launched: list[Any] = []
    h.runner.on_launch = launched.append
    for _ in range(5):
        step = planned(h)
        assert step is not None
        h.steps()
        assert launched[-1] is step.forward
    h.run()
    assert h.tokens == expected()


def test_tokens_are_sent_and_the_next_step_is_planned_before_masks_are_waited_for() -> None:
    h = decoding()
    masks = h.scheduler.grammars.masks
    assert masks is not None
    finish, seen = masks.finish, []

    def spy(*args: Any) -> Any:
        assert isinstance(h.sent[-1], BatchTokenIDOut)
        seen.append((len(h.tokens["s0"]), planned(h) is not None))
        return finish(*args)

    masks.finish = spy  # type: ignore[method-assign]
    before = len(h.tokens["s0"])
    h.steps(3)
    assert seen == [(before + 1, True), (before + 2, True), (before + 3, True)]


def test_a_step_that_needs_no_mask_is_not_followed_by_a_planned_one() -> None:
    h = decoding(count=1, new=6)
    h.add("r1", prompt(1, 9), 12)
    h.run()
    assert h.tokens["r1"] == generate(prompt(1, 9), 12, 0) and h.tokens["s0"] == expected(1, 6)["s0"]
    assert [batch.input_ids.count(-1) for batch in h.runner.batches[-3:]] == [1, 1, 1], "free steps overlap as usual"


def test_without_overlap_no_step_is_planned_ahead() -> None:
    h = GrammarHarness(False)
    h.constrain("s1", "regex", "[a-z]{9}")
    h.compile()
    h.steps(3)
    assert planned(h) is None and h.runner.uncollected == 0


def test_steps_are_not_planned_ahead_if_they_need_the_values_of_tokens() -> None:
    h = decoding()
    h.add("worded", prompt(9, 6), 5, bad_words_ids=[[1, 2]])
    # The fake refuses a step in which a token of this request is pending.
    while "worded" not in h.finished:
        h.steps()
        assert planned(h) is None or "worded" in h.finished
    h.run()
    assert h.tokens["worded"] == generate(prompt(9, 6), 5, 0)


def test_a_prefill_that_continues_is_planned_at_its_turn() -> None:
    h = decoding(chunked_prefill_size=16)
    h.add("long", prompt(9, 60), 4)
    seen = []
    for _ in range(4):
        h.steps()
        seen.append(planned(h) is None)
    assert seen == [True, True, True, False]
    h.run()
    assert h.tokens["long"] == generate(prompt(9, 60), 4, 0)


def test_retractions_among_planned_steps_change_no_output() -> None:
    """A retraction needs every token, so it finds no step that is planned ahead."""
    h = GrammarHarness(num_pages=24, disable_radix_cache=True)
    for i in range(4):
        h.constrain(f"s{i}", "regex", "([a-f][0-9]){20}x", new=30)
    h.compile()
    planned_ahead = 0
    while h.scheduler.has_work():
        h.steps()
        planned_ahead += planned(h) is not None
    assert h.scheduler.planner.num_retractions > 0 and planned_ahead > 10
    assert h.tokens == expected(4)


# -- what happens between the planning and the launch ----------------------------------------------------------


def test_a_request_that_arrives_is_in_the_next_step_all_the_same() -> None:
    h = decoding()
    h.add("r1", prompt(1, 9), 4)
    h.steps()
    assert h.scheduler.requests["r1"].started
    h.run()
    assert h.tokens["r1"] == generate(prompt(1, 9), 4, 0)
    assert {rid: h.tokens[rid] for rid in expected()} == expected()


def test_steps_are_planned_ahead_while_requests_wait_that_cannot_start() -> None:
    h = decoding(max_rows=5)
    h.add("r1", prompt(1, 9), 4)
    step = planned(h)
    h.steps()
    assert not h.scheduler.requests["r1"].started and planned(h) not in (None, step)
    h.run()
    assert h.tokens["r1"] == generate(prompt(1, 9), 4, 0)


def test_steps_are_planned_ahead_while_a_drain_admits_nobody() -> None:
    h = decoding()
    h.scheduler.handle(update(1, "wait"))
    h.steps()
    h.add("r1", prompt(1, 9), 4)
    h.steps(3)
    assert h.scheduler.control.draining and planned(h) is not None and not h.scheduler.requests["r1"].started
    h.run()
    assert h.replies[1].success and h.tokens["r1"] == generate(prompt(1, 9), 4, 1)


@pytest.mark.parametrize("message", ["abort", "finish"])
def test_a_request_that_ended_is_not_in_the_launched_step(message: str) -> None:
    h = decoding()
    row = h.scheduler.requests["s2"].row
    if message == "abort":
        h.abort("s2")
    else:
        h.scheduler.handle(FinishReq(rid="s2"))
    h.runner.on_launch = lambda batch: rows.append(batch.rows)
    rows: list[list[int]] = []
    h.steps(3)
    assert len(rows) == 3 and all(len(each) == 4 and row not in each for each in rows)
    h.run()
    assert {rid: ids for rid, ids in h.tokens.items() if rid != "s2"} == {
        rid: ids for rid, ids in expected().items() if rid != "s2"
    }


def test_aborts_of_all_requests_leave_no_step_behind() -> None:
    h = decoding()
    for i in range(5):
        h.abort(f"s{i}")
    h.run()
    assert h.runner.uncollected == 0 and planned(h) is None and not h.scheduler.planner.running


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_a_pause_finds_no_planned_step(mode: Any) -> None:
    h = decoding()
    h.scheduler.handle(PauseGenerationReq(id=1, mode=mode))
    assert planned(h) is None and h.runner.uncollected == 0 and h.replies[1].success
    assert all(req.num_pending == 0 for req in h.scheduler.requests.values())
    h.scheduler.handle(ContinueGenerationReq(id=2))
    h.run()
    assert mode == "abort" or h.tokens == expected()


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_an_update_finds_no_planned_step(mode: Any) -> None:
    h = decoding()
    handle, seen = h.weights.handle, []

    def spy(*args: Any) -> Any:
        seen.append((planned(h), h.scheduler.steps.is_empty))
        return handle(*args)

    h.weights.handle = spy  # type: ignore[method-assign]
    assert h.control(update(1, mode)).success  # type: ignore[union-attr]
    h.steps(8)
    assert mode == "abort" or planned(h) is not None
    h.control(BeginWeightUpdateReq(id=2, transaction_id="t", mode="in_place"))
    assert seen == [(None, True), (None, True)]


def test_each_launched_step_is_counted_once() -> None:
    """A step that is planned ahead is no progress yet: the next update may wait for it."""
    h = decoding()
    steps: list[str] = []
    h.scheduler.profiler.step = lambda: steps.append("profiled")  # type: ignore[method-assign]
    h.scheduler.control.step_taken = lambda: steps.append("taken")  # type: ignore[method-assign]
    h.scheduler.planner.admission.reserve.step_planned = lambda retracted: steps.append("planned")  # type: ignore[method-assign]
    h.runner.on_launch = lambda batch: steps.append("launched")
    h.steps(2)
    h.abort("s2")
    h.steps(2)
    assert steps == ["profiled", "planned", "launched", "taken"] * 4


def test_nothing_is_broadcast_between_the_parts_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks wait for the sampled tokens. So the planned step is broadcast when it is launched."""
    h = decoding()
    events: list[str] = []
    monkeypatch.setattr(TpGroup, "broadcast_command", lambda *_: events.append("broadcast") or b"")
    h.worker.tp = TpGroup(rank=0, size=2)
    launch = h.runner.launch

    def spy(*args: Any) -> Any:
        events.append("forward")
        step = launch(*args)
        events.append("sampling")
        return step

    h.runner.launch = spy  # type: ignore[method-assign]
    h.steps(4)
    assert events == ["broadcast", "forward", "sampling"] * 4


# -- late masks and failures -----------------------------------------------------------------------------------


def test_a_late_row_computes_its_newest_token_again_in_the_planned_step() -> None:
    h = decoding()
    slow = make_late(h, "s1")
    h.steps()
    step, req = planned(h), h.scheduler.requests["s1"]
    assert step is not None
    entry = step.reqs.index(req)
    assert step.forward.cached_lens[entry] == len(req.token_ids) - 1
    assert step.forward.input_ids[entry] == req.token_ids[-1] and step.forward.input_ids.count(-1) == 4
    assert lengths(req) == (len(req.token_ids), 1)
    h.steps()  # the mask is late again
    assert lengths(req) == (len(req.token_ids), 1) and len(req.output_ids) == len(h.tokens["s0"]) - 1
    slow.clear()
    h.run()
    assert h.tokens == expected()


def test_a_late_row_whose_last_token_was_in_flight_is_planned_again() -> None:
    """The planned step does not have the row, because the step with the late mask would have sampled its last token."""
    h = decoding(new=6)
    h.constrain("s9", "regex", "([a-f][0-9]){20}x", new=20)
    h.compile()
    while len(h.scheduler.requests["s1"].output_ids) < 4:
        h.steps()
    slow = make_late(h, "s1")
    h.steps()
    assert len(h.tokens["s1"]) == 5 and planned(h) is None
    h.steps()
    assert "s1" not in h.finished and "s0" in h.finished
    slow.clear()
    h.run()
    assert {rid: h.tokens[rid] for rid in expected(new=6)} == expected(new=6)


def test_a_matcher_that_fails_ends_its_request_and_the_step_is_planned_again() -> None:
    h = decoding()
    masks = h.scheduler.grammars.masks
    assert masks is not None
    executor, failing = hold(h, lambda _: False), [h.scheduler.requests["s3"].grammar.open()]  # type: ignore[union-attr]
    executor.fails = lambda matcher: matcher in failing
    h.steps()
    assert planned(h) is not None
    rows: list[int] = []
    h.runner.on_launch = lambda batch: rows.append(len(batch.rows))
    h.steps()
    assert rows == [4] and h.finished["s3"].status_code == 500
    h.run()
    assert {rid: ids for rid, ids in h.tokens.items() if rid != "s3"} == {
        rid: ids for rid, ids in expected().items() if rid != "s3"
    }


@pytest.mark.parametrize("moment", ["fail_with", "fail_sampling_with"])
def test_a_launch_that_runs_out_of_memory_undoes_the_planned_step_first(moment: str) -> None:
    h = decoding()
    setattr(h.runner, moment, torch.OutOfMemoryError("out of memory"))
    h.steps()
    assert planned(h) is None and h.runner.uncollected == 0
    for req in h.scheduler.requests.values():
        assert req.num_pending == 0 and req.cached_len == req.sound_len == len(req.token_ids) - 1
    h.steps()
    assert planned(h) is None, "steps are limited now"
    h.run()
    assert h.tokens == expected()


def test_a_step_before_that_failed_ends_its_requests_and_plans_nothing() -> None:
    h = decoding()
    h.runner.queue[0]._failure = MemoryError("lost")
    h.steps()
    assert planned(h) is None and all(reason.status_code == 500 for reason in h.finished.values())
    h.run()
    assert len(h.finished) == 5


def test_matchers_are_free_before_an_error_between_the_masks_ends_requests() -> None:
    h = decoding()
    masks = h.scheduler.grammars.masks
    assert masks is not None
    finish, finished = masks.finish, []

    def spy(*args: Any) -> Any:
        finished.append(len(h.finished))
        return finish(*args)

    def broken(only_started: bool) -> None:
        raise MemoryError("no memory for lists")

    masks.finish = spy  # type: ignore[method-assign]
    h.scheduler.planner.plan_ahead = broken  # type: ignore[method-assign]
    h.steps()
    assert finished == [0]
    del h.scheduler.planner.plan_ahead  # type: ignore[method-assign]
    h.run()
    assert h.tokens == expected()


def test_tokens_that_cannot_be_processed_end_their_requests_and_no_later_ones() -> None:
    """The masks that were started with these tokens belong to no step any more."""
    h = decoding()
    add = h.scheduler._output.add

    def broken(*args: Any) -> int:
        h.scheduler._output.add = add  # type: ignore[method-assign]
        raise RuntimeError("broken tokens")

    h.scheduler._output.add = broken  # type: ignore[method-assign]
    h.steps()
    assert {reason.status_code for reason in h.finished.values()} == {500}
    h.constrain("s9", "regex", "([a-f][0-9]){3}x")
    h.finish()
    assert h.finished["s9"].type == "stop" and len(h.text("s9")) == 7

"""docs/scheduler-states.md, "Generation", row by row: pause, flush, updates and memory requests between steps."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.scheduler.fakes import Harness, chain, generate, kv_entry, logprob_of, next_token, prompt, serving, update
from verl_server.errors import WeightUpdateError
from verl_server.messages.io_struct import (
    AbortReq,
    ContinueGenerationReq,
    ControlReply,
    FinishReq,
    FlushCacheReq,
    GetInternalStateReq,
    PauseGenerationReq,
    WithdrawReq,
)
from verl_server.messages.weight_requests import (
    GetWeightsByNameReq,
    ReleaseMemoryOccupationReq,
    ResumeMemoryOccupationReq,
    UpdateWeightsFromDiskReq,
    UpdateWeightsFromTensorReq,
    UpdateWeightVersionReq,
)

# -- weight updates while serving ------------------------------------------------------------------------------


def test_wait_drains_under_old_weights_and_starts_waiting_requests_under_new_ones() -> None:
    h = serving()
    h.add("queued", prompt(7, 9), 5)
    assert h.control(update(1)) is None
    h.add("late", prompt(8, 9), 5)
    assert h.scheduler.control.draining
    h.run()
    assert h.replies[1].success
    for i in range(2):
        assert h.tokens[f"r{i}"] == generate(prompt(i, 9), 10, 0) and set(h.versions[f"r{i}"]) == {"0"}
    for rid, seed in (("queued", 7), ("late", 8)):
        assert h.tokens[rid] == generate(prompt(seed, 9), 5, 1) and set(h.versions[rid]) == {"1"}


def test_wait_lets_retracted_requests_finish() -> None:
    h = Harness(num_pages=14, chunked_prefill_size=64)
    for i in range(3):
        h.add(f"r{i}", prompt(i, 12), 30)
    while h.scheduler.planner.num_retractions == 0:
        h.steps()
    started = [rid for rid, req in h.scheduler.requests.items() if req.started]
    assert any(req.started for req in h.scheduler.planner.waiting)
    h.add("late", prompt(9, 12), 4)
    h.control(update(1))
    h.run()
    assert h.replies[1].success and started == ["r0", "r1"]
    for i in range(3):
        assert h.tokens[f"r{i}"] == generate(prompt(i, 12), 30, 0 if i < 2 else 1)
    assert h.tokens["late"] == generate(prompt(9, 12), 4, 1)


def test_wait_that_lasts_too_long_is_refused_and_the_old_weights_go_on() -> None:
    h = serving(new=40, control_timeout=5.0)
    h.add("late", prompt(8, 9), 3)
    h.control(update(1))
    h.steps(5)
    h.clock.now = 5.5
    h.steps()
    reply = h.replies[1]
    assert not reply.success and reply.status_code == 504 and "control_timeout" in reply.message
    assert not h.weights.handled, "the refused update is never executed"
    h.run()
    assert h.tokens["late"] == generate(prompt(8, 9), 3, 0)


def test_in_place_keeps_kv_and_versions_tell() -> None:
    h = serving()
    assert h.control(update(1, "in_place")).success
    h.run()
    assert h.versions["r0"] == ["0"] * 3 + ["1"] * 7
    # KV of the prompt and of the first two tokens is old, all later KV is new.
    tokens, kv = prompt(0, 9), chain(prompt(0, 9), 0)
    for step in range(10):
        salt = 0 if step < 3 else 1
        tokens.append(next_token(kv, salt))
        kv.append(kv_entry(kv[-1], tokens[-1], len(tokens) - 1, 0 if step < 2 else 1))
    assert h.tokens["r0"] == tokens[9:]


def test_in_place_pages_serve_nobody_else() -> None:
    h = serving()
    h.control(update(1, "in_place"))
    h.add("same", prompt(0, 9), 6)
    h.run()
    assert h.tokens["same"] == generate(prompt(0, 9), 6, 1)
    h.add("again", prompt(0, 9) + h.tokens["r0"], 4)
    h.run()
    message, index = h.last["again"]
    assert message.cached_tokens[index] == 8, "only the part that `same` computed under the new weights"
    assert h.tokens["again"] == generate(prompt(0, 9) + h.tokens["r0"], 4, 1)
    assert h.scheduler.planner.cache.detached == 0


@pytest.mark.parametrize("paused", [False, True])
def test_in_place_starts_an_unfinished_prefill_again(paused: bool) -> None:
    h = Harness()  # 16 prompt tokens in each step
    h.add("long", prompt(0, 60), 6, return_logprob=True, logprob_start_len=0)
    h.steps(2)
    if paused:
        h.control(PauseGenerationReq(id=1, mode="in_place"))
    assert h.control(update(2, "in_place")).success
    h.scheduler.handle(ContinueGenerationReq(id=3))
    h.run()
    assert h.tokens["long"] == generate(prompt(0, 60), 6, 1) and h.versions["long"] == ["1"] * 6
    found = next(message.prompt_logprobs[0] for message in h.sent if getattr(message, "prompt_logprobs", None))
    assert found.logprobs[1:] == [logprob_of(token, i, 1) for i, token in enumerate(prompt(0, 60)) if i]
    assert h.last["long"][0].num_retractions == [1]


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_flood_of_updates_lets_long_prompts_finish(mode: Any) -> None:
    h = Harness()
    h.add("long", prompt(0, 60), 3)
    h.steps()
    for i in range(20):
        h.scheduler.handle(update(i, mode))
    while "long" not in h.finished:
        h.steps()
    assert len(h.replies) < 20, "the prompt finished before the last updates, which had to wait"
    h.run()
    assert len(h.replies) == 20 and all(reply.success for reply in h.replies.values())


def test_a_retraction_after_an_in_place_update_makes_pages_shareable_again() -> None:
    h = serving(count=1)
    h.control(update(1, "in_place"))
    h.steps(2)
    h.scheduler.planner.retract_all()
    h.run()
    history = prompt(0, 9) + h.tokens["r0"]
    h.add("next", history, 1)
    h.run()
    assert h.last["next"][0].cached_tokens == [16]


def test_retract_recomputes_under_the_new_weights() -> None:
    h = serving()
    first = list(h.tokens["r0"])
    assert h.control(update(1, "retract")).success
    h.run()
    assert h.tokens["r0"] == first + generate(prompt(0, 9) + first, 7, 1)
    message, index = h.last["r0"]
    assert message.num_retractions[index] == 1
    h.add("next", prompt(0, 9) + h.tokens["r0"], 1)
    h.run()
    assert h.last["next"][0].cached_tokens == [16], "all of its KV is of one version again"


@pytest.mark.parametrize("fields", [{"mode": "abort"}, {"abort_all_requests": True}])
def test_abort_returns_partial_output_before_the_reply(fields: dict[str, Any]) -> None:
    h = serving(max_rows=2)
    h.add("queued", prompt(7, 9), 5)
    assert h.control(UpdateWeightsFromTensorReq(id=1, named_tensors=[], **fields)).success
    kinds = [type(message).__name__ for message in h.sent[-2:]]
    assert kinds == ["BatchTokenIDOut", "ControlReply"] and h.sent[-2].weight_version == "0"
    assert all(h.finished[rid].type == "abort" for rid in ("r0", "r1", "queued"))
    assert h.finished["queued"].message == "Abort in waiting queue"
    assert len(h.tokens["r0"]) == 3


def test_a_cached_prompt_is_computed_anew_after_an_update() -> None:
    h = serving()
    h.run()
    assert h.control(update(1)).success and h.scheduler.planner.cache.available_pages() == 64
    h.add("a", prompt(0, 9), 4)
    h.run()
    assert h.last["a"][0].cached_tokens == [0] and h.tokens["a"] == generate(prompt(0, 9), 4, 1)


def test_a_refused_update_keeps_weights_and_cache() -> None:
    h = serving()
    h.run()
    h.weights.next_outcome = "refused"
    assert not h.control(update(1)).success
    h.add("a", prompt(0, 9), 4)
    h.run()
    assert h.last["a"][0].cached_tokens == [8] and h.tokens["a"] == generate(prompt(0, 9), 4, 0)


@pytest.mark.parametrize("mode", ["wait", "in_place", "retract", "abort"])
def test_an_update_that_is_plainly_wrong_disturbs_nobody(mode: Any) -> None:
    h = serving()
    h.add("a", prompt(0, 9), 20)
    h.steps()
    h.stager.next_refusal = WeightUpdateError("no parameter 'foo'")
    reply = h.control(update(1, mode=mode))
    assert reply is not None and not reply.success and "foo" in reply.message
    assert not h.weights.handled
    h.run()
    assert h.tokens["a"] == generate(prompt(0, 9), 20, 0) and h.last["a"][0].num_retractions == [0]


def test_torn_weights_refuse_everyone_until_a_full_update() -> None:
    h = serving(max_rows=2)
    h.add("queued", prompt(7, 9), 5)
    h.weights.next_outcome = "torn"
    assert not h.control(update(1, "in_place")).success
    for rid in ("r0", "r1", "queued"):
        assert h.finished[rid].status_code == 503 and h.finished[rid].message == "The weights are torn."
    assert h.scheduler.planner.cache.num_shareable == 0
    h.add("new", prompt(8, 9), 5)
    h.steps()
    assert h.finished["new"].status_code == 503
    assert h.control(update(2)).success
    h.add("served", prompt(0, 9), 5)
    h.run()
    assert h.tokens["served"] == generate(prompt(0, 9), 5, 2)


# -- several control requests ---------------------------------------------------------------------------------


def test_updates_run_in_order_with_a_step_between_them() -> None:
    h = Harness(max_rows=2)
    for i in range(40):
        h.scheduler.handle(UpdateWeightsFromDiskReq(id=i, model_path="x", mode="in_place"))
    for i in range(3):
        h.add(f"r{i}", prompt(i, 9), 4)
    h.run()
    assert sorted(h.replies) == list(range(40)) == [req.id for req in h.weights.handled]
    assert all(h.finished[f"r{i}"].type == "length" for i in range(3))
    order = [message for message in h.sent if isinstance(message, ControlReply) or message.rids]
    while_alive = order[: max(i for i, message in enumerate(order) if not isinstance(message, ControlReply))]
    pairs = itertools.pairwise(while_alive)
    assert not any(isinstance(a, ControlReply) and isinstance(b, ControlReply) for a, b in pairs)


def test_reads_queue_behind_an_update_that_drains() -> None:
    h = serving()
    h.scheduler.handle(update(1))
    h.scheduler.handle(GetWeightsByNameReq(id=2, name="w"))
    h.scheduler.handle(update(3))
    h.steps()
    assert not h.replies
    h.run()
    assert [type(req).__name__[:6] for req in h.weights.handled] == ["Update", "GetWei", "Update"]


def test_a_drain_ends_when_its_requests_are_aborted_or_finished() -> None:
    h = serving()
    h.control(update(1))
    h.abort("r0")
    h.scheduler.handle(FinishReq(rid="r1"))
    h.steps()
    assert h.replies[1].success and h.finished["r0"].message == "Aborted"


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_a_pause_during_a_drain_lets_the_update_run_at_once(mode: Any) -> None:
    h = serving()
    h.control(update(1))
    assert h.control(PauseGenerationReq(id=2, mode=mode)).success
    assert h.replies[1].success
    h.scheduler.handle(ContinueGenerationReq(id=3))
    h.run()
    assert len(h.finished) == 2 and h.scheduler.planner.cache.detached == 0


def test_a_later_update_that_aborts_ends_in_its_turn() -> None:
    h = serving()
    h.scheduler.handle(update(1))
    h.scheduler.handle(update(2, "abort"))
    h.run()
    assert h.replies[1].success and h.replies[2].success
    assert h.tokens["r0"] == generate(prompt(0, 9), 10, 0), "the first update in the queue still waits for its requests"


def test_relabelling_keeps_weights_and_cache() -> None:
    h = serving()
    assert h.control(UpdateWeightVersionReq(id=1, new_version="v7", abort_all_requests=False)).success
    h.run()
    assert h.tokens["r0"] == generate(prompt(0, 9), 10, 0) and h.versions["r0"] == ["0"] * 3 + ["v7"] * 7
    h.add("a", prompt(0, 9), 10)
    h.steps()
    assert h.last["a"][0].cached_tokens == [8]
    assert h.control(UpdateWeightVersionReq(id=2, new_version="v8")).success
    assert h.finished["a"].type == "abort"


# -- pause -----------------------------------------------------------------------------------------------------


def test_pause_abort_ends_all_and_new_requests_wait() -> None:
    h = serving(max_rows=2)
    h.add("queued", prompt(7, 9), 5)
    assert h.control(PauseGenerationReq(id=1)).success
    assert set(h.finished) == {"r0", "r1", "queued"}
    h.add("new", prompt(8, 9), 5)
    h.steps(5)
    assert "new" not in h.finished and not h.scheduler.has_runnable()
    h.scheduler.handle(ContinueGenerationReq(id=2))
    h.run()
    assert h.tokens["new"] == generate(prompt(8, 9), 5, 0)


def test_pause_wait_begins_when_started_requests_have_finished() -> None:
    h = serving()
    h.add("new", prompt(8, 9), 5)
    h.scheduler.handle(PauseGenerationReq(id=1, mode="wait"))
    h.steps(2)
    assert 1 not in h.replies, "the reply comes with the pause"
    h.run()
    assert h.replies[1].success and sorted(h.finished) == ["r0", "r1"]
    assert h.tokens["r0"] == generate(prompt(0, 9), 10, 0)
    assert h.control(update(2)).success, "nothing runs, so the update need not wait"
    h.scheduler.handle(ContinueGenerationReq(id=3))
    h.run()
    assert h.tokens["new"] == generate(prompt(8, 9), 5, 1)


def test_pause_wait_of_an_idle_or_paused_server_is_answered_at_once() -> None:
    h = Harness()
    assert h.control(PauseGenerationReq(id=1, mode="wait")).success
    frozen = serving()
    frozen.control(PauseGenerationReq(id=1, mode="in_place"))
    assert frozen.control(PauseGenerationReq(id=2, mode="wait")).success
    assert len(frozen.scheduler.planner.running) == 2, "frozen requests stay frozen"


def test_pause_wait_that_lasts_too_long_leaves_generation_running() -> None:
    h = serving(new=40, control_timeout=5.0)
    h.scheduler.handle(PauseGenerationReq(id=1, mode="wait"))
    h.steps(2)
    assert h.scheduler.control.wait_seconds() == 5.0
    h.clock.now = 5.5
    h.steps()
    assert h.replies[1].status_code == 504 and "2 requests" in h.replies[1].message
    h.run()
    assert h.tokens["r0"] == generate(prompt(0, 9), 40, 0)


@pytest.mark.parametrize(
    ("message", "status"), [(ContinueGenerationReq(id=2), 409), (WithdrawReq(id=1), 499)], ids=["continue", "withdraw"]
)
def test_pause_wait_ends_without_a_pause(message: Any, status: int) -> None:
    h = serving()
    h.scheduler.handle(PauseGenerationReq(id=1, mode="wait"))
    h.steps()
    h.scheduler.handle(message)
    h.run()
    assert h.replies[1].status_code == status and not h.scheduler.control.paused
    assert not h.scheduler.control.draining and len(h.finished) == 2


def test_another_pause_ends_the_wait_of_the_first() -> None:
    h = serving()
    h.scheduler.handle(PauseGenerationReq(id=1, mode="wait"))
    h.steps()
    assert h.control(PauseGenerationReq(id=2, mode="abort")).success
    assert h.replies[1].success and h.finished["r0"].message == "Aborted"


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_pause_and_continue_change_no_output(mode: Any) -> None:
    h = serving()
    batches = len(h.runner.batches)
    h.control(PauseGenerationReq(id=1, mode=mode))
    h.steps(3)
    assert len(h.runner.batches) == batches
    assert len(h.scheduler.planner.running) == (2 if mode == "in_place" else 0)
    h.control(ContinueGenerationReq(id=2))
    h.run()
    assert all(h.tokens[f"r{i}"] == generate(prompt(i, 9), 10, 0) for i in range(2))


def test_pausing_twice_applies_the_second_mode_and_aborts_work_while_paused() -> None:
    h = serving()
    h.control(PauseGenerationReq(id=1, mode="in_place"))
    h.abort("r0")
    h.steps()
    assert h.finished["r0"].message == "Aborted" and len(h.tokens["r0"]) == 3
    h.control(PauseGenerationReq(id=2, mode="retract"))
    assert not h.scheduler.planner.running and "r1" in h.scheduler.requests
    h.scheduler.handle(AbortReq(abort_all=True))
    h.steps()
    assert h.finished["r1"].message == "Aborted", "a retracted request has partial output"
    assert len(h.tokens["r1"]) == 3


@pytest.mark.parametrize("outcome", ["ok", "refused", "torn"])
@pytest.mark.parametrize("paused", [False, True])
def test_an_update_with_keep_pause_leaves_generation_paused(paused: bool, outcome: str) -> None:
    h = serving(overlaps=True)
    if paused:
        h.control(PauseGenerationReq(id=1, mode="in_place"))
    h.weights.next_outcome = outcome
    reply = h.control(UpdateWeightsFromDiskReq(id=2, model_path="x", mode="in_place", keep_pause=True))
    assert reply is not None and reply.success == (outcome == "ok")
    assert h.scheduler.control.paused == (paused or outcome == "ok"), "only a success changes it"
    steps = len(h.runner.batches)
    h.steps(3)
    assert (len(h.runner.batches) == steps) == (h.scheduler.control.paused or outcome == "torn")
    assert h.control(ContinueGenerationReq(id=3)).success  # type: ignore[union-attr]
    h.run()
    assert h.finished["r0"].type == ("abort" if outcome == "torn" else "length")


@pytest.mark.parametrize("paused", [False, True])
def test_an_update_without_keep_pause_leaves_the_pause_as_it_is(paused: bool) -> None:
    h = serving()
    if paused:
        h.control(PauseGenerationReq(id=1, mode="in_place"))
    assert h.control(UpdateWeightsFromDiskReq(id=2, model_path="x", mode="in_place")).success  # type: ignore[union-attr]
    assert h.scheduler.control.paused == paused


def test_paused_in_place_update_marks_frozen_requests_private() -> None:
    h = serving()
    h.control(PauseGenerationReq(id=1, mode="in_place"))
    assert h.control(update(2, "wait")).success
    h.control(ContinueGenerationReq(id=3))
    h.run()
    h.add("a", prompt(0, 9), 4)
    h.run()
    assert h.last["a"][0].cached_tokens == [0] and h.tokens["a"] == generate(prompt(0, 9), 4, 1)


def test_retracted_requests_survive_the_colocated_cycle() -> None:
    h = serving()
    first = list(h.tokens["r0"])
    cycle = [
        PauseGenerationReq(id=1, mode="retract"),
        FlushCacheReq(id=2),
        ReleaseMemoryOccupationReq(id=3),
        ResumeMemoryOccupationReq(id=4),
        update(5),
    ]
    for message in cycle:
        assert h.control(message).success
        if message.id == 3:
            h.add("new", prompt(8, 9), 3)
    assert h.control(ContinueGenerationReq(id=6)).success
    h.run()
    assert h.tokens["r0"] == first + generate(prompt(0, 9) + first, 7, 1)
    assert h.tokens["new"] == generate(prompt(8, 9), 3, 1)


def test_continue_into_sleeping_memory_answers_503() -> None:
    h = serving()
    h.control(PauseGenerationReq(id=1, mode="retract"))
    h.control(ReleaseMemoryOccupationReq(id=2))
    h.control(ContinueGenerationReq(id=3))
    assert h.finished["r0"].status_code == 503 and "released" in (h.finished["r0"].message or "")
    assert len(h.tokens["r0"]) == 3, "the request ends with the tokens that it had"


# -- flush and memory ------------------------------------------------------------------------------------------


def test_flush_only_when_idle_and_waits_at_most_its_timeout() -> None:
    h = serving()
    assert h.control(FlushCacheReq(id=1)).success is False
    h.control(FlushCacheReq(id=2, timeout=2.0))
    h.control(FlushCacheReq(id=3, timeout=90.0))
    assert h.scheduler.control.wait_seconds() == 2.0
    h.clock.now = 2.0
    h.steps()
    assert h.replies[2].success is False and 3 not in h.replies
    h.run()
    h.steps()
    assert h.replies[3].success and h.scheduler.planner.cache.available_pages() == 64
    assert h.scheduler.control.wait_seconds() is None


def test_flush_while_paused_ignores_waiting_but_not_frozen_requests() -> None:
    h = serving()
    h.control(PauseGenerationReq(id=1, mode="in_place"))
    assert h.control(FlushCacheReq(id=2)).success is False
    h.control(PauseGenerationReq(id=3, mode="retract"))
    assert h.scheduler.planner.cache.num_shareable > 0
    assert h.control(FlushCacheReq(id=4)).success
    assert h.scheduler.planner.cache.available_pages() == 64
    h.control(ContinueGenerationReq(id=5))
    h.run()
    assert h.tokens["r0"] == generate(prompt(0, 9), 10, 0)


def test_release_is_refused_while_anything_runs() -> None:
    h = serving()
    reply = h.control(ReleaseMemoryOccupationReq(id=1))
    assert reply.status_code == 400 and "2 requests run" in reply.message and not h.weights.handled
    h.control(PauseGenerationReq(id=2, mode="in_place"))
    assert h.control(ReleaseMemoryOccupationReq(id=3)).success is False
    h.control(PauseGenerationReq(id=4, mode="abort"))
    assert h.control(ReleaseMemoryOccupationReq(id=5)).success
    assert h.scheduler.planner.cache.available_pages() == 64, "the cache holds no page of released memory"


def test_internal_state() -> None:
    h = serving(count=3, max_rows=2)
    h.clock.now = 2.0
    state = h.control(GetInternalStateReq(id=1)).payload
    assert state["num_running_reqs"] == 2 and state["num_waiting_reqs"] == 1
    assert state["max_total_num_tokens"] == 256 and 0 < state["num_used_tokens"] <= 32
    assert state["token_usage"] == state["num_used_tokens"] / 256
    assert state["gen_throughput"] == 3.0 and state["output_tokens_total"] == 6
    assert state["weight_version"] == "0" and state["weights_state"] == "serving" and state["refusal"] is None
    assert state["paused"] is False and state["num_retractions"] == 0 and state["cache_hit_rate"] == 0.0

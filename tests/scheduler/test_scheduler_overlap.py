"""Steps in flight: steps planned before the newest tokens are known, dropped steps, and steps that must wait.

The fake runner computes late. In these tests it computes a step only when the result is requested.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.scheduler.fakes import VOCAB, FakeModelRunner, Harness, generate, prompt, update
from verl_server.messages.io_struct import (
    BatchTokenIDOut,
    FinishReq,
    FlushCacheReq,
    PauseGenerationReq,
    TokenizedGenerateReq,
)
from verl_server.messages.weight_requests import ReleaseMemoryOccupationReq
from verl_server.sampling_params import SamplingParams
from verl_server.scheduler.garbage import Garbage
from verl_server.scheduler.rank import SchedulerLoop
from verl_server.scheduler.schedule_batch import Req


def overlapped(**settings: Any) -> Harness:
    h = Harness(overlaps=True, **({"chunked_prefill_size": 64} | settings))
    h.runner.is_early = lambda: False
    return h


def in_flight(runner: FakeModelRunner) -> int:
    assert len(runner.queue) == runner.uncollected
    return runner.uncollected


def test_a_step_is_launched_before_the_one_before_is_known() -> None:
    h = overlapped()
    h.add("a", prompt(1, 6), 4)
    h.steps()
    assert in_flight(h.runner) == 1 and not h.sent
    for known in range(1, 4):
        h.steps()
        assert in_flight(h.runner) == 1 and h.tokens["a"] == generate(prompt(1, 6), known, 0)
    h.run()
    assert h.tokens["a"] == generate(prompt(1, 6), 4, 0) and h.finished["a"].type == "length"
    assert [batch.input_ids for batch in h.runner.batches] == [prompt(1, 6), [-1], [-1], [-1]]
    assert len(h.sent) == 4, "one message for each step"


def test_without_overlap_every_turn_ends_with_its_step_known() -> None:
    h = Harness()
    h.add("a", prompt(1, 6), 4)
    for known in range(1, 5):
        h.steps()
        assert h.runner.uncollected == 0 and len(h.tokens["a"]) == known


def test_the_last_step_is_collected_though_nobody_is_left() -> None:
    h = overlapped()
    h.add("a", prompt(1, 6), 8)
    h.steps(2)
    h.abort("a")
    h.scheduler.emit()
    assert h.finished["a"].type == "abort" and in_flight(h.runner) == 1, "the abort does not wait for the device"
    assert not h.scheduler.requests and h.scheduler.has_work()
    h.run()
    assert h.runner.uncollected == 0 and h.tokens["a"] == generate(prompt(1, 6), 1, 0)


def test_an_end_by_length_is_foreseen() -> None:
    h = overlapped()
    for i, new in enumerate([1, 2, 5]):
        h.add(f"r{i}", prompt(i, 6), new)
    h.run()
    assert [len(batch.rows) for batch in h.runner.batches] == [3, 2, 1, 1, 1]
    assert all(h.tokens[f"r{i}"] == generate(prompt(i, 6), new, 0) for i, new in enumerate([1, 2, 5]))


def test_what_was_launched_beyond_a_stop_token_is_dropped() -> None:
    expected = generate(prompt(1, 8), 10, 0)
    h = overlapped()
    h.add("a", prompt(1, 8), 10, stop_ids=[expected[3]])
    h.add("b", prompt(2, 6), 10)
    h.run()
    assert h.tokens["a"] == expected[:4] and h.finished["a"].matched == expected[3]
    assert h.tokens["b"] == generate(prompt(2, 6), 10, 0)
    assert [len(batch.rows) for batch in h.runner.batches] == [2] * 5 + [1] * 5
    assert h.scheduler.stats.num_output_tokens == 14
    history = prompt(1, 8) + expected[:4]
    h.add("next", [*history, 20], 1)
    h.run()
    assert h.last["next"][0].cached_tokens == [8], "only the dropped step computed the stop token's KV"


def test_rows_and_pages_of_a_request_in_flight_serve_the_next_one() -> None:
    h = overlapped(max_rows=1, num_pages=8)
    h.add("first", prompt(1, 20), 12)
    h.steps(3)
    row = h.scheduler.requests["first"].row
    h.abort("first")
    h.add("second", prompt(2, 20), 12)
    h.steps()
    assert h.scheduler.requests["second"].row == row and in_flight(h.runner) == 1
    h.run()
    assert h.tokens["second"] == generate(prompt(2, 20), 12, 0)
    assert h.tokens["first"] == generate(prompt(1, 20), 2, 0)


def test_prompts_are_shared_when_their_prefill_is_known_to_be_sound() -> None:
    h = overlapped()
    ids = prompt(1, 41)
    for i in range(4):
        h.add(f"r{i}", ids, 6)
    h.steps()
    assert h.scheduler.planner.cache.match(ids, 41).depth == 0
    assert [h.scheduler.requests[f"r{i}"].started for i in range(4)] == [True, False, False, False]
    h.run()
    assert h.runner.computed_tokens == 41 + 3 * 1 + 4 * 5, "the group waited for its first request"
    assert all(h.tokens[f"r{i}"] == generate(ids, 6, 0) for i in range(4))


def test_nan_drops_the_step_on_top_and_leaves_no_pages_behind() -> None:
    h = overlapped()
    h.runner.nan_at = lambda ids: ids == prompt(1, 6)
    h.add("bad", prompt(1, 6), 8)
    h.add("good", prompt(2, 6), 8)
    h.run()
    assert h.finished["bad"].matched == "NaN happened" and h.tokens["bad"] == []
    assert h.scheduler.planner.cache.match(prompt(1, 6), 6).depth == 0
    assert h.tokens["good"] == generate(prompt(2, 6), 8, 0)


def test_nobody_is_retracted_in_flight() -> None:
    h = overlapped(num_pages=24)
    for i in range(6):
        h.add(f"r{i}", prompt(i, 12), 40)
    h.run()
    assert h.scheduler.planner.num_retractions > 0
    assert all(h.tokens[f"r{i}"] == generate(prompt(i, 12), 40, 0) for i in range(6))


def test_forbidden_words_of_several_tokens_know_every_token() -> None:
    h = overlapped()
    h.add("plain", prompt(1, 6), 10)
    # The fake refuses a step in which a token of this request is pending.
    h.add("worded", prompt(2, 6), 4, bad_words_ids=[[1, 2]])
    h.run()
    assert h.tokens["worded"] == generate(prompt(2, 6), 4, 0)
    pending = [batch.input_ids.count(-1) for batch in h.runner.batches]
    assert pending == [0] * 4 + [0] + [1] * 5, "after it ended, steps overlap again"


def test_penalties_do_not_wait_for_tokens() -> None:
    """The sampler counts tokens on the device, so the next step is launched while they are pending."""
    h = overlapped()
    h.add("penalized", prompt(2, 6), 4, frequency_penalty=1.0)
    h.run()
    assert [batch.input_ids.count(-1) for batch in h.runner.batches] == [0, 1, 1, 1]


def test_a_prefill_ends_when_its_last_chunk_was_collected() -> None:
    h = overlapped(chunked_prefill_size=8)
    h.add("a", prompt(1, 20), 0, return_logprob=True, logprob_start_len=0)
    h.add("b", prompt(2, 20), 3)
    h.run()
    assert h.finished["a"].length == 0 and h.tokens["b"] == generate(prompt(2, 20), 3, 0)
    (carrier,) = [message for message in h.sent if getattr(message, "prompt_logprobs", None)]
    assert len(carrier.prompt_logprobs[0].logprobs) == 20
    for seed in (1, 2):
        assert h.scheduler.planner.cache.match(prompt(seed, 20), 20).depth == 5


def test_a_group_shares_the_last_chunk_of_a_prefill_while_its_first_request_goes_on() -> None:
    h = overlapped(chunked_prefill_size=8)
    for i in range(3):
        h.add(f"r{i}", prompt(1, 21), 30)
    h.run()
    assert h.runner.computed_tokens == 21 + 2 * 1 + 3 * 29


# -- failures ---------------------------------------------------------------------------------------------------


def test_a_step_that_cannot_be_launched_leaves_the_one_before_whole() -> None:
    h = overlapped(max_rows=2)
    for i in range(3):
        h.add(f"r{i}", prompt(i, 6), 6)
    h.steps(3)
    h.runner.fail_with = RuntimeError("an operator failed")
    h.run()
    for i in range(2):
        assert h.finished[f"r{i}"].status_code == 500 and "an operator failed" in (h.finished[f"r{i}"].message or "")
        assert h.tokens[f"r{i}"] == generate(prompt(i, 6), 3, 0)
    assert h.tokens["r2"] == generate(prompt(2, 6), 6, 0)


def test_a_step_that_fails_in_flight_ends_its_requests_and_no_others() -> None:
    h = overlapped()
    h.add("old", prompt(1, 6), 6)
    h.steps()
    h.runner.fail_later_with = MemoryError("lost")
    h.steps()
    h.add("new", prompt(2, 6), 6)
    h.run()
    assert h.finished["old"].status_code == 500 and h.tokens["old"] == generate(prompt(1, 6), 1, 0)
    assert sorted(map(len, (batch.rows for batch in h.runner.batches)))[-1] == 2, "`old` was in the step on top"
    assert h.tokens["new"] == generate(prompt(2, 6), 6, 0)


@pytest.mark.parametrize("moment", ["fail_with", "fail_later_with"])
def test_an_error_that_cannot_be_survived_is_raised(moment: str) -> None:
    h = overlapped()
    h.runner.device = torch.device("cuda")
    h.add("a", prompt(1, 6), 6)
    h.steps(2)
    setattr(h.runner, moment, RuntimeError("device-side assert"))
    with pytest.raises(RuntimeError, match="device-side assert"):
        h.run()


# -- control requests -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_an_update_finds_nothing_in_flight_and_tokens_carry_the_version_of_their_step(mode: Any) -> None:
    h = overlapped()
    h.add("a", prompt(1, 9), 10)
    h.steps(3)
    assert len(h.tokens["a"]) == 2 and in_flight(h.runner) == 1
    # The fake asserts that the weights do not change between launch and computation.
    assert h.control(update(1, mode)).success
    h.run()
    assert h.versions["a"] == ["0"] * 3 + ["1"] * 7
    assert h.tokens["a"][:3] == generate(prompt(1, 9), 3, 0)
    if mode == "retract":
        assert h.tokens["a"][3:] == generate(prompt(1, 9) + h.tokens["a"][:3], 7, 1)


def test_a_drain_goes_on_overlapping() -> None:
    h = overlapped()
    h.add("a", prompt(1, 9), 10)
    h.steps(2)
    h.scheduler.handle(update(1, "wait"))
    for _ in range(5):
        h.steps()
        assert in_flight(h.runner) == 1 and h.scheduler.control.draining
    h.run()
    assert h.replies[1].success and h.tokens["a"] == generate(prompt(1, 9), 10, 0) and set(h.versions["a"]) == {"0"}


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_a_pause_is_answered_after_the_tokens_that_were_in_flight(mode: Any) -> None:
    h = overlapped()
    h.add("a", prompt(1, 9), 10)
    h.steps(2)
    h.scheduler.handle(PauseGenerationReq(id=1, mode=mode))
    assert in_flight(h.runner) == 0 and h.replies[1].success
    assert h.tokens["a"] == generate(prompt(1, 9), 2, 0) and isinstance(h.sent[-2], BatchTokenIDOut)


def test_memory_is_released_and_the_cache_flushed_with_nothing_in_flight() -> None:
    h = overlapped()
    h.add("a", prompt(1, 9), 10)
    h.steps(2)
    h.scheduler.handle(FinishReq(rid="a"))
    h.scheduler.handle(FlushCacheReq(id=1))
    h.scheduler.handle(ReleaseMemoryOccupationReq(id=2))
    h.steps()
    assert h.runner.uncollected == 0 and h.replies[1].success and h.replies[2].success


class NoSockets:
    """Sockets without messages, which stop their loop after `turns` turns."""

    def __init__(self, turns: int) -> None:
        self.turns = turns
        self.loop: SchedulerLoop | None = None

    def receive(self) -> list[Any]:
        self.turns -= 1
        if self.turns == 0 and self.loop is not None:
            self.loop.stop()
        return []

    def ring(self) -> None: ...


def test_a_loop_that_stops_collects_its_last_step() -> None:
    h = overlapped()
    h.add("a", prompt(1, 9), 10)
    sockets = NoSockets(turns=3)
    sockets.loop = SchedulerLoop(h.scheduler, sockets, Garbage())  # type: ignore[arg-type]
    sockets.loop.run()
    assert h.runner.uncollected == 0 and h.tokens["a"] == generate(prompt(1, 9), 3, 0)


# -- seeds ------------------------------------------------------------------------------------------------------


def seeds(random_seed: int | None) -> list[int]:
    h = Harness(random_seed=random_seed)
    for i, own in enumerate([None, 7, None, -3]):
        sampling = SamplingParams(max_new_tokens=2, sampling_seed=own)
        h.scheduler.handle(TokenizedGenerateReq(rid=f"r{i}", input_ids=[20], sampling=sampling))
    reqs: list[Req] = list(h.scheduler.requests.values())
    return [req.spec.seed for req in reqs]


def test_every_request_has_a_seed_its_own_or_one_of_the_engine() -> None:
    first, own, second, other = seeds(0)
    assert (own, other) == (7, -3) and first != second
    assert all(0 <= seed < 2**63 for seed in (first, second))
    assert seeds(0) == [first, own, second, other] and seeds(1)[0] != first
    assert max(first, second) > VOCAB, "seeds come from a large range"


def test_engines_without_a_seed_share_no_stream_of_seeds() -> None:
    assert not set(seeds(None)[0::2]) & set(seeds(None)[0::2])

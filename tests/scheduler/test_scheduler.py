"""Generation by the scheduler over the fake runner: batching, prefix sharing, retraction, ends of requests."""

from __future__ import annotations

import pytest
import torch

from tests.scheduler.fakes import VOCAB, Harness, generate, logprob_of, prompt
from verl_server.messages.io_struct import FinishReq, PauseGenerationReq, TokenizedGenerateReq
from verl_server.messages.packed import TokenLogprobs
from verl_server.sampling.spec import NOTHING_ALLOWED, ForwardOutput, SampleSpec
from verl_server.sampling_params import SamplingParams
from verl_server.scheduler import batch_planner
from verl_server.worker.forward_batch import ForwardBatch


def test_mixed_lengths_match_the_reference() -> None:
    h = Harness()
    for i, (length, new) in enumerate([(1, 5), (3, 1), (4, 8), (5, 9), (16, 4), (17, 12), (40, 3), (63, 20)]):
        h.add(f"r{i}", prompt(i, length), new)
    h.run()
    for i, (length, new) in enumerate([(1, 5), (3, 1), (4, 8), (5, 9), (16, 4), (17, 12), (40, 3), (63, 20)]):
        assert h.tokens[f"r{i}"] == generate(prompt(i, length), new, 0)
        assert h.finished[f"r{i}"].type == "length" and h.finished[f"r{i}"].length == new


def test_prefill_chunks_share_the_step_with_decodes_within_the_budget() -> None:
    h = Harness(chunked_prefill_size=8)
    h.add("short", prompt(1, 4), 20)
    h.steps(2)
    h.add("long", prompt(2, 30), 4)
    h.steps(3)
    assert [batch.extend_lens for batch in h.runner.batches[-3:]] == [[1, 8]] * 3
    assert all(batch.sample == [0] for batch in h.runner.batches[-3:]), "an unfinished chunk is not sampled"
    h.run()
    assert h.tokens["long"] == generate(prompt(2, 30), 4, 0)
    assert max(sum(e for e in b.extend_lens if e > 1) for b in h.runner.batches) <= 8


def test_one_message_for_each_step() -> None:
    h = Harness()
    h.add("a", prompt(1, 4), 6)
    h.add("b", prompt(2, 4), 6)
    h.run()
    assert len(h.sent) == len(h.runner.batches) == 6


def test_stop_token_is_included_and_wins_over_length() -> None:
    expected = generate(prompt(1, 6), 10, 0)
    stop = expected[3]
    h = Harness()
    h.add("a", prompt(1, 6), 10, stop_ids=[5, stop])
    h.add("b", prompt(1, 6), 4, stop_ids=[stop])
    h.run()
    for rid in "ab":
        assert h.tokens[rid] == expected[: expected.index(stop) + 1]
        assert h.finished[rid].type == "stop" and h.finished[rid].matched == stop


def test_prefill_only() -> None:
    h = Harness(chunked_prefill_size=8)
    h.add("a", prompt(1, 20), 0, return_logprob=True, logprob_start_len=18)
    h.run()
    assert h.tokens["a"] == [] and h.finished["a"].type == "length" and h.finished["a"].length == 0
    message, index = h.last["a"]
    assert message.prompt_logprobs[index].token_ids == prompt(1, 20)[18:]
    h.add("b", prompt(1, 20), 2)
    h.run()
    assert h.last["b"][0].cached_tokens == [16], "request `a` filled the cache"


def test_nan_ends_the_request_without_the_token_and_leaves_no_pages_behind() -> None:
    h = Harness()
    h.runner.nan_at = lambda ids: ids == prompt(1, 6)
    h.add("bad", prompt(1, 6), 8, return_logprob=True)
    h.add("good", prompt(2, 6), 8)
    h.run()
    assert h.finished["bad"].type == "stop" and h.finished["bad"].matched == "NaN happened"
    assert h.tokens["bad"] == [] and h.logprobs["bad"] == []
    assert h.scheduler.planner.cache.match(prompt(1, 6), 6).depth == 0
    assert h.tokens["good"] == generate(prompt(2, 6), 8, 0)


# -- log-probabilities ---------------------------------------------------------------------------------------


def test_a_request_without_an_allowed_token_ends_with_400_and_harms_nobody() -> None:
    h = Harness()
    compute = h.runner.compute

    def forbid(batch: ForwardBatch, specs: list[SampleSpec]) -> ForwardOutput:
        output = compute(batch, specs)
        output.logprobs = [
            NOTHING_ALLOWED if len(s.output_ids) == 2 else logprob
            for s, logprob in zip(specs, output.logprobs, strict=True)
        ]
        return output

    h.runner.compute = forbid  # type: ignore[method-assign]
    h.add("masked", prompt(1, 6), 8, bad_words_ids=[[1]])
    h.add("plain", prompt(2, 6), 8)
    h.run()
    assert h.finished["masked"].type == "abort" and h.finished["masked"].status_code == 400
    assert "bad_words" in (h.finished["masked"].message or "") and len(h.tokens["masked"]) == 2
    assert h.finished["plain"].matched == "NaN happened", "without a mask, the model is at fault"


def test_a_sampling_mask_is_sent_with_each_token_and_ends_a_request_if_it_is_too_large() -> None:
    h = Harness()
    compute = h.runner.compute

    def with_masks(batch: ForwardBatch, specs: list[SampleSpec]) -> ForwardOutput:
        output = compute(batch, specs)
        for i, s in enumerate(specs):
            if s.sampling_mask_num:
                fits = s.sampling_mask_num == 8 or len(s.output_ids) < 2
                output.sampling_masks[i] = TokenLogprobs.of([0.0] * fits, [output.next_ids[i]] * fits)
        return output

    h.runner.compute = with_masks  # type: ignore[method-assign]
    h.add("small", prompt(1, 6), 3, sampling_mask_num=8)
    h.add("large", prompt(2, 6), 3, sampling_mask_num=4)
    h.add("none", prompt(3, 6), 3)
    h.run()
    message, index = h.last["small"]
    assert message.sampling_masks[index] == [TokenLogprobs.of([0.0], [h.tokens["small"][-1]])]
    assert h.finished["large"].status_code == 400 and "smaller top_k" in (h.finished["large"].message or "")
    assert h.finished["small"].type == h.finished["none"].type == "length"
    assert h.last["none"][1] not in h.last["none"][0].sampling_masks


def test_output_logprobs_and_candidates_only_where_asked() -> None:
    h = Harness()
    h.add("plain", prompt(1, 5), 3)
    h.add("asked", prompt(2, 5), 3, return_logprob=True, top_logprobs_num=2, token_ids_logprob=[7, 8])
    h.run()
    tokens = h.tokens["asked"]
    assert h.logprobs["asked"] == [logprob_of(token, 5 + i, 0) for i, token in enumerate(tokens)]
    assert h.logprobs["plain"] == []
    message, index = h.last["asked"]
    assert message.top_logprobs == {index: [TokenLogprobs.of([-0.5, -0.5], [tokens[-1]] * 2)]}
    assert message.token_ids_logprobs == {index: [TokenLogprobs.of([-1.0, -1.0], [7, 8])]}


@pytest.mark.parametrize("start", [0, 1, 7, 8, 15, 16, 28, 29])
@pytest.mark.parametrize("warm", [False, True])
def test_prompt_logprobs_over_chunks_and_cached_prefixes(start: int, warm: bool) -> None:
    h = Harness(chunked_prefill_size=8)
    ids = prompt(3, 30)
    if warm:
        h.add("warm", ids, 1)
        h.run()
    h.add("a", ids, 2, return_logprob=True, logprob_start_len=start, top_logprobs_num=1, token_ids_logprob=[9])
    h.run()
    carriers = [m for m in h.sent if getattr(m, "prompt_logprobs", None)]
    assert len(carriers) == 1, "the log-probabilities are sent once"
    (got,) = carriers[0].prompt_logprobs.values()
    assert got.token_ids == ids[start:]
    assert got.logprobs == [None] + [logprob_of(ids[p], p, 0) for p in range(start + 1, 30)]
    assert len(got.top) == len(got.requested) == 30 - start and got.top[0] is None
    assert h.last["a"][0].cached_tokens == [min(start, 29) // 4 * 4 if warm else 0]
    assert h.tokens["a"] == generate(ids, 2, 0)


@pytest.mark.parametrize("start", [0, 10])
@pytest.mark.parametrize("candidates", [3, 500])
def test_prompt_logprobs_of_a_step_are_bounded(monkeypatch: pytest.MonkeyPatch, candidates: int, start: int) -> None:
    """With a bound of 40 numbers, steps report ten tokens with three candidates, or one token with 500."""
    monkeypatch.setattr(batch_planner, "_MOST_REPORTED", 40)
    h = Harness(chunked_prefill_size=64)
    options = {"return_logprob": True, "logprob_start_len": start}
    for rid, n in (("a", 1), ("b", 2)):
        h.add(rid, prompt(n, 30), 3, token_ids_logprob=[9] * candidates, **options)
    h.add("plain", prompt(3, 30), 3)
    h.run()
    for batch in h.runner.batches:
        reported = [batch.extend_lens[entry] - first for entry, first, _, _ in batch.prompt_logprobs]
        assert sum(reported) <= (10 if candidates == 3 else 1)
    for rid, n in (("a", 1), ("b", 2), ("plain", 3)):
        assert h.tokens[rid] == generate(prompt(n, 30), 3, 0)
    (got,) = [p for m in h.sent for i, p in m.prompt_logprobs.items() if m.rids[i] == "b"]
    assert got.logprobs == [None] + [logprob_of(prompt(2, 30)[p], p, 0) for p in range(start + 1, 30)]


# -- prefix cache --------------------------------------------------------------------------------------------


def test_a_finished_completion_serves_the_next_turn() -> None:
    h = Harness()
    h.add("turn1", prompt(1, 10), 9)
    h.run()
    history = prompt(1, 10) + h.tokens["turn1"]
    h.add("turn2", history + prompt(2, 5), 4)
    h.run()
    assert h.last["turn2"][0].cached_tokens == [16], "18 of 19 tokens have KV: 4 full pages"
    assert h.tokens["turn2"] == generate(history + prompt(2, 5), 4, 0)


def test_a_group_computes_its_prompt_once() -> None:
    h = Harness(chunked_prefill_size=64)
    ids = prompt(1, 41)
    for i in range(8):
        h.add(f"r{i}", ids, 6)
    h.run()
    assert h.runner.computed_tokens == 41 + 7 * 1 + 8 * 5
    assert [h.last[f"r{i}"][0].cached_tokens[h.last[f"r{i}"][1]] for i in range(8)] == [0] + [40] * 7
    assert all(h.tokens[f"r{i}"] == generate(ids, 6, 0) for i in range(8))


def test_a_common_first_page_costs_one_step_at_most() -> None:
    h = Harness(chunked_prefill_size=64)
    common = prompt(1, 8)
    h.add("first", common + prompt(2, 20), 2)
    h.add("shares", common + prompt(3, 6), 2)
    h.add("own", prompt(4, 6), 2)
    h.steps()
    assert [h.scheduler.requests[rid].started for rid in ("first", "shares", "own")] == [True, False, True]
    h.run()
    assert len(h.runner.batches) == 3
    assert h.tokens["shares"] == generate(common + prompt(3, 6), 2, 0)
    assert h.last["shares"][0].cached_tokens[h.last["shares"][1]] == 8


def test_disabled_cache_shares_nothing() -> None:
    h = Harness(disable_radix_cache=True, chunked_prefill_size=64)
    h.add("x", prompt(1, 20), 4)
    h.add("y", prompt(1, 20), 4)
    h.run()
    assert len(h.runner.batches) == 4, "no request waits for pages that will not be shared"
    for rid in ("a", "b"):
        h.add(rid, prompt(1, 20), 4)
        h.run()
        assert h.last[rid][0].cached_tokens == [0]
        assert h.tokens[rid] == generate(prompt(1, 20), 4, 0)
    assert h.scheduler.planner.pages.available == 64


def test_requests_share_pages_within_their_namespace_only() -> None:
    h = Harness(chunked_prefill_size=64)
    ids = prompt(1, 21)
    for rid, namespace in (("plain", ""), ("salted", "salt"), ("group", "salt"), ("other", "other")):
        h.add(rid, ids, 4, namespace=namespace)
    h.steps()
    started = {rid for rid, req in h.scheduler.requests.items() if req.started}
    assert started == {"plain", "salted", "other"}, "a request waits for a running prefill of its own namespace only"
    h.run()
    h.add("later", ids, 4, namespace="other")
    h.add("new", ids, 4, namespace="new")
    h.run()
    cached = {rid: message.cached_tokens[index] for rid, (message, index) in h.last.items()}
    assert cached == {"plain": 0, "salted": 0, "group": 20, "other": 0, "later": 20, "new": 0}
    assert all(tokens == generate(ids, 4, 0) for tokens in h.tokens.values())


def test_larger_priorities_leave_the_queue_first() -> None:
    h = Harness(max_rows=1, chunked_prefill_size=64)
    h.add("running", prompt(0, 4), 3)
    h.steps()
    for rid, priority in (("low", -1), ("first", 0), ("second", 0), ("high", 7)):
        h.add(rid, prompt(1, 4), 3, priority=priority)
    h.abort("first")
    h.add("third", prompt(1, 4), 3)
    h.run()
    order = [rid for message in h.sent for rid, end in zip(message.rids, message.finish_reasons, strict=True) if end]
    assert order == ["first", "running", "high", "second", "third", "low"], "a running request is not interrupted"


def test_a_retracted_request_keeps_its_place_in_its_priority() -> None:
    h = Harness(chunked_prefill_size=64)
    for rid, priority in (("old", 0), ("older priority", 3)):
        h.add(rid, prompt(1, 9), 30, priority=priority)
    h.steps(3)
    h.scheduler.handle(PauseGenerationReq(id=1, mode="retract"))
    h.steps()
    h.add("new", prompt(2, 9), 30)
    h.add("urgent", prompt(2, 9), 30, priority=5)
    h.add("also 3", prompt(2, 9), 30, priority=3)
    waiting = [req.rid for req in h.scheduler.planner.waiting]
    assert waiting == ["urgent", "older priority", "also 3", "old", "new"]


def test_eviction_under_pressure_keeps_outputs_right() -> None:
    h = Harness(num_pages=16)
    for i in range(20):
        h.add(f"r{i}", prompt(i % 5, 24), 8)
        h.run()
        assert h.tokens[f"r{i}"] == generate(prompt(i % 5, 24), 8, 0)


# -- memory pressure -----------------------------------------------------------------------------------------


def test_retraction_keeps_tokens_and_spares_the_oldest() -> None:
    h = Harness(num_pages=24, chunked_prefill_size=64)
    for i in range(6):
        h.add(f"r{i}", prompt(i, 12), 40, return_logprob=True)
    h.run()
    retractions = {rid: message.num_retractions[index] for rid, (message, index) in h.last.items()}
    assert retractions["r0"] == 0 and sum(retractions.values()) > 0
    assert h.scheduler.planner.num_retractions == sum(retractions.values())
    for i in range(6):
        tokens = generate(prompt(i, 12), 40, 0)
        assert h.tokens[f"r{i}"] == tokens
        assert h.logprobs[f"r{i}"] == [logprob_of(t, 12 + j, 0) for j, t in enumerate(tokens)]


def test_prompt_logprobs_of_a_retracted_prefill_are_computed_anew() -> None:
    h = Harness(chunked_prefill_size=8)
    ids = prompt(3, 30)
    h.add("a", ids, 2, return_logprob=True, logprob_start_len=2)
    h.steps(2)
    h.scheduler.planner.retract_all()
    h.run()
    (carrier,) = [m for m in h.sent if m.prompt_logprobs]
    assert carrier.prompt_logprobs[0].logprobs == [None] + [logprob_of(ids[p], p, 0) for p in range(3, 30)]


def test_prompts_that_fill_the_pool_together_do_not_deadlock() -> None:
    h = Harness(num_pages=16, chunked_prefill_size=8)
    for i in range(4):
        h.add(f"r{i}", prompt(i, 60), 4)
    h.run()
    assert all(h.tokens[f"r{i}"] == generate(prompt(i, 60), 4, 0) for i in range(4))


def test_a_request_as_large_as_the_pool_is_served_and_a_larger_one_refused() -> None:
    h = Harness(num_pages=8)
    h.add("fits", prompt(1, 20), 13)
    h.add("never", prompt(1, 20), 14)
    assert "never" not in h.scheduler.requests
    h.run()
    assert h.tokens["fits"] == generate(prompt(1, 20), 13, 0)
    assert h.finished["never"].status_code == 400 and "KV cache of 32 tokens" in (h.finished["never"].message or "")
    assert h.finished["never"].code == "context_length_exceeded"


def test_max_new_tokens_none_fills_context_or_pool() -> None:
    h = Harness(num_pages=8, context_length=64)
    h.add("pool", prompt(1, 20), None)
    h.run()
    assert len(h.tokens["pool"]) == 13
    h = Harness(num_pages=64, context_length=64)
    h.add("context", prompt(1, 20), None)
    h.run()
    assert len(h.tokens["context"]) == 44


# -- aborts, refusals and failures ----------------------------------------------------------------------------


def test_abort_queued_running_and_unknown() -> None:
    h = Harness(max_rows=1)
    h.add("running", prompt(1, 6), 20)
    h.add("queued", prompt(2, 6), 20)
    h.steps(3)
    for rid in ("running", "queued", "unknown"):
        h.abort(rid)
    h.steps()
    assert h.finished["running"].type == "abort" and h.finished["running"].message == "Aborted"
    assert h.finished["running"].status_code is None
    assert h.tokens["running"] == generate(prompt(1, 6), 3, 0)
    assert h.finished["queued"].message == "Abort in waiting queue" and h.tokens["queued"] == []
    assert not h.scheduler.has_runnable() and "unknown" not in h.finished
    h.add("running", prompt(1, 6), 4)  # the rid can be used again
    h.finished.clear()
    h.tokens.clear()
    h.run()
    assert h.tokens["running"] == generate(prompt(1, 6), 4, 0)


def test_finish_is_silent_and_caches() -> None:
    h = Harness()
    h.add("a", prompt(1, 8), 20)
    h.steps(6)
    h.scheduler.handle(FinishReq(rid="a"))
    h.scheduler.handle(FinishReq(rid="unknown"))
    h.run()
    assert "a" not in h.finished and not h.scheduler.requests
    h.add("b", prompt(1, 8) + generate(prompt(1, 8), 6, 0), 1)
    h.run()
    assert h.last["b"][0].cached_tokens == [12]


def test_a_second_live_rid_is_dropped_without_harm() -> None:
    h = Harness()
    h.add("a", prompt(1, 6), 6)
    h.steps(2)
    h.add("a", prompt(2, 6), 6)
    h.run()
    assert h.tokens["a"] == generate(prompt(1, 6), 6, 0)


@pytest.mark.parametrize(
    ("ids", "new", "fields", "says"),
    [
        ([], 4, {}, "empty"),
        ([1, VOCAB], 4, {}, "input_ids"),
        ([1, -1], 4, {}, "input_ids"),
        ([1] * 512, 0, {}, "context length"),
        ([1] * 500, 13, {}, "context length"),
        ([1, 2], 4, {"return_logprob": True, "token_ids_logprob": [VOCAB]}, "token_ids_logprob"),
        ([1, 2], 4, {"return_logprob": True, "top_logprobs_num": VOCAB + 1}, "top_logprobs_num"),
        ([1, 2], -1, {}, "max_new_tokens"),
        ([1, 2], 4, {"bad_words_ids": [[1], [2, VOCAB]]}, "bad_words_ids"),
        ([1, 2], 4, {"bad_words_ids": [[]]}, "bad_words_ids"),
    ],
)
def test_bad_requests_end_with_400(ids: list[int], new: int, fields: dict[str, object], says: str) -> None:
    h = Harness()
    h.add("bad", ids, new, **fields)
    h.steps()
    reason = h.finished["bad"]
    assert reason.type == "abort" and reason.status_code == 400 and says in (reason.message or "")
    assert reason.code == ("context_length_exceeded" if says == "context length" else None)
    h.add("good", prompt(1, 4), 2)
    h.run()
    assert h.finished["good"].type == "length"


@pytest.mark.parametrize("key", [str(VOCAB), "no id"])
def test_logit_bias_outside_the_vocabulary_is_refused(key: str) -> None:
    h = Harness()
    sampling = SamplingParams(logit_bias={key: 1.0})
    h.scheduler.handle(TokenizedGenerateReq(rid="a", input_ids=[1], sampling=sampling))
    h.steps()
    assert h.finished["a"].status_code == 400 and "logit_bias" in (h.finished["a"].message or "")


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids"])
@pytest.mark.parametrize("wrong", [-1, VOCAB])
def test_token_ids_outside_the_vocabulary_are_refused(name: str, wrong: int) -> None:
    h = Harness()
    sampling = SamplingParams(**{name: [3, wrong, 5]})  # type: ignore[arg-type]
    h.scheduler.handle(TokenizedGenerateReq(rid="a", input_ids=[1], sampling=sampling))
    h.steps()
    message = h.finished["a"].message or ""
    assert h.finished["a"].status_code == 400 and name in message and str(wrong) in message


def test_full_queue_answers_503() -> None:
    h = Harness(max_rows=1, max_queued_requests=2)
    for i in range(3):
        h.add(f"r{i}", prompt(i, 4), 4)
        h.steps(i == 0)
    h.add("r3", prompt(3, 4), 4)
    h.steps()
    assert h.finished["r3"].status_code == 503 and h.finished["r3"].message == "The request queue is full."
    h.run()
    assert all(h.finished[f"r{i}"].type == "length" for i in range(3))


def test_a_failed_step_ends_its_requests_and_serving_goes_on() -> None:
    h = Harness(max_rows=2)
    for i in range(3):
        h.add(f"r{i}", prompt(i, 6), 6)
    h.steps(2)
    h.runner.fail_with = RuntimeError("an operator failed")
    h.run()
    for rid in ("r0", "r1"):
        assert h.finished[rid].status_code == 500 and "an operator failed" in (h.finished[rid].message or "")
        assert len(h.tokens[rid]) == 2
    assert h.tokens["r2"] == generate(prompt(2, 6), 6, 0)


def test_an_error_that_cannot_be_survived_is_raised() -> None:
    h = Harness()
    h.runner.device = torch.device("cuda")
    h.add("a", prompt(1, 6), 6)
    h.runner.fail_with = RuntimeError("device-side assert")
    with pytest.raises(RuntimeError, match="device-side assert"):
        h.run()

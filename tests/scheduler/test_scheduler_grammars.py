"""Requests with a grammar in the scheduler: compilation, masks, overlap, retraction, aborts, and matchers that fail."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from llguidance import LLParserLimits

from tests.grammar.conftest import EOS
from tests.scheduler.constrained import SCHEMA, GrammarHarness, HeldRun, hold, make_late
from tests.scheduler.fakes import VOCAB, FakeStep, Harness, allowed_tokens, generate, prompt, update
from verl_server.grammar import compiler
from verl_server.grammar.mask_executor import MaskExecutor
from verl_server.grammar.source import Grammar, translate
from verl_server.messages.io_struct import (
    ContinueGenerationReq,
    FinishReq,
    GrammarTokenizer,
    PauseGenerationReq,
    TokenizedGenerateReq,
)
from verl_server.sampling.spec import NOTHING_ALLOWED, ForwardOutput, MakeMasks, SampleSpec
from verl_server.sampling_params import SamplingParams
from verl_server.scheduler.step_masks import MaskedStep
from verl_server.worker.forward_batch import ForwardBatch


@pytest.mark.parametrize("overlaps", [True, False])
def test_every_output_follows_its_grammar_beside_free_requests(overlaps: bool) -> None:
    h = GrammarHarness(overlaps)
    for i in range(3):
        h.add(f"r{i}", prompt(i, 9), 20)
        h.constrain(f"s{i}", "json_schema", SCHEMA, new=100)
    h.constrain("g7", "ebnf", 'root ::= "(" root ")" | [0-9]{2}')
    h.constrain("g8", "regex", "[ab]{3,5}c")
    h.finish()
    for i in range(3):
        assert h.tokens[f"r{i}"] == generate(prompt(i, 9), 20, 0), "a free request is not disturbed"
        if h.finished[f"s{i}"].type == "stop":
            assert set(json.loads(h.text(f"s{i}"))) == {"a", "b"}
        else:
            assert h.text(f"s{i}").startswith('{"a":')
    assert {h.finished[f"s{i}"].type for i in range(3)} <= {"stop", "length"}
    assert set(h.text("g8")[:-1]) <= {"a", "b"} and h.text("g8").endswith("c")
    assert h.finished["g8"].type == "stop" and h.finished["g8"].matched == h.tokens["g8"][-1]
    assert set(h.text("g7")) <= set("()0123456789")


def test_the_outputs_with_and_without_overlap_are_equal() -> None:
    results = []
    for overlaps in (True, False):
        h = GrammarHarness(overlaps)
        for i in range(4):
            h.constrain(f"s{i}", "regex", "([a-f][0-9]){2,20}x")
        h.finish()
        results.append((h.tokens, {rid: reason.type for rid, reason in h.finished.items()}))
    assert results[0] == results[1]


def test_a_constrained_step_is_launched_before_the_step_before_it_was_collected() -> None:
    """The forward pass of step n+1 is launched first. Then step n is collected, and the masks are made."""
    h = GrammarHarness()
    h.runner.is_early = lambda: False
    h.constrain("s1", "regex", "[a-z]{50}")
    h.compile()
    seen: list[tuple[int, int]] = []
    h.runner.on_launch = lambda batch: seen.append((h.runner.uncollected, len(h.tokens.get("s1", []))))
    h.steps(4)
    assert seen == [(0, 0), (1, 0), (1, 1), (1, 2)], "each launch finds the step before it in flight"
    assert len(h.tokens["s1"]) == 3 and h.runner.uncollected == 1


def test_a_matcher_is_used_again_after_its_request_ended() -> None:
    h = GrammarHarness()
    compiled: list[str] = []
    h.before_compilation(compiled.append)
    for i in range(4):
        h.constrain(f"s{i}", "regex", "a{2}")
    h.compile()
    h.steps(1)
    h.abort("s3")
    h.run()
    assert len(compiled) == 4, "requests that run at once share no automata"
    for i in range(4, 8):
        h.constrain(f"s{i}", "regex", "a{2}")
    assert not h.scheduler.grammars.waiting, "no request waits, because four matchers are left"
    h.run()
    assert len(compiled) == 4 and all(h.text(f"s{i}") == "aa" for i in range(8) if i != 3)


def test_the_requests_of_an_expensive_grammar_share_its_automata(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl_server.scheduler.grammars._MOST_SECONDS", -1.0)
    h = GrammarHarness()
    compiled: list[str] = []
    h.before_compilation(compiled.append)
    h.constrain("s1", "regex", "[ab]{3}")
    h.compile()
    for i in range(2, 6):
        h.constrain(f"s{i}", "regex", "[ab]{3}")
    h.finish()
    assert len(compiled) == 1 and all(len(h.text(f"s{i}")) == 3 for i in range(1, 6))


def test_the_grammars_that_were_not_used_for_longest_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl_server.scheduler.grammars._MOST_BYTES", 5 * 2**18)
    h = GrammarHarness()
    compiled: list[str] = []
    h.before_compilation(compiled.append)
    for i, letter in enumerate("abca"):
        h.constrain(f"s{i}", "regex", f"{letter}{{2}}")
        h.finish()
    assert len(compiled) == 4, "a was dropped for c"
    h.constrain("s9", "regex", "c{2}")
    h.finish()
    assert len(compiled) == 4 and h.scheduler.grammars._size <= 5 * 2**18


def test_a_request_waits_outside_the_queue_while_its_grammar_is_compiled() -> None:
    """The request delays no other request, keeps its place, and may be aborted."""
    h = GrammarHarness()
    gate = h.hold_compilation()
    h.constrain("s1", "regex", "ab")
    h.constrain("s2", "regex", "abc")
    h.constrain("s3", "regex", "ab")
    h.add("r1", prompt(1, 9), 4)
    h.run()
    assert h.finished["r1"].type == "length" and list(h.scheduler.grammars.waiting) == ["s1", "s2", "s3"]
    assert h.scheduler.internal_state()["num_waiting_reqs"] == 3 and not h.scheduler.has_work()
    h.abort("s2")
    h.scheduler.handle(FinishReq(rid="s3"))
    h.scheduler.emit()
    assert h.finished["s2"].message == "Abort in waiting queue" and "s3" not in h.scheduler.requests
    gate.set()
    h.finish()
    assert h.text("s1") == "ab" and not h.scheduler.requests


def test_a_full_queue_counts_requests_whose_grammar_is_compiled() -> None:
    h = GrammarHarness(max_queued_requests=1)
    gate = h.hold_compilation()
    h.constrain("s1", "regex", "ab")
    h.constrain("s2", "regex", "ab")
    h.scheduler.emit()
    assert h.finished["s2"].status_code == 503
    gate.set()
    h.finish()


def test_a_grammar_that_cannot_be_compiled_ends_its_requests() -> None:
    h = GrammarHarness()
    h.scheduler.handle(
        TokenizedGenerateReq(
            rid="s1", input_ids=[1], sampling=SamplingParams(max_new_tokens=4), grammar='{"grammars": []}'
        )
    )
    h.constrain("s2", "regex", "ab")
    h.finish()
    assert h.finished["s1"].type == "abort" and h.finished["s1"].status_code == 400
    assert h.text("s2") == "ab"


def test_a_server_without_a_tokenizer_refuses_grammars() -> None:
    h = Harness()
    h.scheduler.handle(
        TokenizedGenerateReq(rid="s1", input_ids=[1], sampling=SamplingParams(max_new_tokens=4), grammar="x")
    )
    h.scheduler.emit()
    assert h.finished["s1"].status_code == 400 and "tokenizer" in (h.finished["s1"].message or "")


def test_a_tokenizer_that_cannot_be_read_refuses_grammars_only() -> None:
    h = Harness()
    h.scheduler.handle(GrammarTokenizer(tokenizer=b"{}", eos_token_ids=[EOS]))
    h.scheduler.handle(
        TokenizedGenerateReq(rid="s1", input_ids=[1], sampling=SamplingParams(max_new_tokens=4), grammar="x")
    )
    h.add("r1", prompt(1, 9), 4)
    h.run()
    (grammar,) = [req.grammar for req in h.scheduler.grammars.waiting.values()]
    assert grammar is not None and grammar.start.exception(timeout=60) is not None
    h.run()
    assert "does not permit constrained decoding" in (h.finished["s1"].message or "")
    assert h.finished["r1"].type == "length"


@pytest.mark.parametrize("overlaps", [True, False])
def test_a_retraction_keeps_the_state_of_the_output(overlaps: bool) -> None:
    """With too few pages, requests are retracted and computed again. The outputs are those of a large pool."""
    results = []
    for pages in (16, 200):
        h = GrammarHarness(overlaps, num_pages=pages, disable_radix_cache=True)
        for i in range(4):
            h.constrain(f"s{i}", "regex", "([a-f][0-9]){12}x", new=30)
        h.finish()
        results.append(h.tokens)
        assert (h.scheduler.planner.num_retractions > 0) == (pages == 16)
        assert all(h.finished[f"s{i}"].type == "stop" and len(h.text(f"s{i}")) == 25 for i in range(4))
    assert results[0] == results[1]


@pytest.mark.parametrize("mode", ["in_place", "retract", "wait"])
def test_updates_and_pauses_keep_the_state_of_the_output(mode: str) -> None:
    h = GrammarHarness()
    h.constrain("s1", "regex", "([a-f][0-9]){10}x")
    h.compile()
    h.steps(5)
    h.control(update(1, mode))
    h.steps(3)
    if mode != "wait":
        h.control(PauseGenerationReq(id=2, mode=mode))  # type: ignore[arg-type]
        h.control(ContinueGenerationReq(id=3))
    h.finish()
    text = h.text("s1")
    assert len(text) == 21 and text.endswith("x") and h.finished["s1"].type == "stop"


def test_an_abort_frees_the_matcher_of_a_running_request() -> None:
    h = GrammarHarness()
    h.constrain("s1", "regex", "[a-z]{50}")
    h.constrain("s2", "regex", "[a-z]{9}")
    h.compile()
    h.steps(4)
    h.abort("s1")
    h.run()
    assert h.finished["s1"].type == "abort" and len(h.text("s2")) == 9


# -- the end of an output -----------------------------------------------------------------------------------


def test_eos_is_allowed_where_the_grammar_accepts() -> None:
    """Token 70 is "b". A stop token that is not EOS is allowed at the same places."""
    h = GrammarHarness()
    seen: list[list[int]] = []
    masks = h.scheduler.grammars.masks
    assert masks is not None
    finish = masks.finish

    def spy(*args: Any) -> MaskedStep:
        result = finish(*args)
        seen.append(sorted(allowed_tokens(result.masks, 0)) if result.masks else [])
        return result

    masks.finish = spy  # type: ignore[method-assign]
    h.constrain("s1", "regex", "ab?", stop_ids=[EOS, 300])
    h.finish()
    assert seen[0] == [69] and seen[1] == [EOS, 70, 300]


def test_with_ignore_eos_an_output_ends_where_nothing_else_is_allowed() -> None:
    h = GrammarHarness()
    h.constrain("s1", "regex", "a{1,6}", stop_ids=[], ignore_eos=True)
    h.constrain("s2", "regex", "(|a{0})", stop_ids=[], ignore_eos=True)
    h.finish()
    assert h.text("s1") == "aaaaaa" and h.finished["s1"].type == "stop"
    assert h.tokens["s2"] == [EOS] and h.finished["s2"].type == "stop"


def test_a_length_limit_ends_an_output_unless_it_is_complete() -> None:
    h = GrammarHarness()
    h.constrain("s1", "regex", "a{5}", new=5)
    h.constrain("s2", "regex", "a{5}", new=4)
    h.finish()
    assert h.finished["s1"].type == "stop" and h.finished["s2"].type == "length"


# -- matchers that fail -------------------------------------------------------------------------------------


def test_a_matcher_that_fails_ends_its_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token of s1 needs more states, and s2 needs few."""
    h = GrammarHarness()
    h.constrain("s2", "regex", "[a-z]{9}")
    h.compile()
    monkeypatch.setattr(compiler, "_LIMITS", LLParserLimits(max_lexer_states=12, verbose_errors=False))
    h.constrain("s1", "regex", "[a-z]{40}")
    h.add("r1", prompt(1, 9), 9)
    h.finish()
    reason = h.finished["s1"]
    assert reason.type == "abort" and reason.status_code == 400 and "Use a simpler grammar" in (reason.message or "")
    assert 0 < len(h.text("s1")) < 40 and len(h.text("s2")) == 9 and h.tokens["r1"] == generate(prompt(1, 9), 9, 0)


@pytest.mark.parametrize("call", ["compiler.Matcher.write_mask", "compiler.Matcher.consume"])
def test_a_failure_of_the_library_ends_the_constrained_requests_only(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class PanicError(BaseException):
        pass

    def panic(*args: Any) -> None:
        raise PanicError("index out of bounds")

    h = GrammarHarness()
    h.constrain("s1", "regex", "[a-z]{9}")
    h.add("r1", prompt(1, 9), 9)
    h.compile()
    h.steps(3)
    monkeypatch.setattr(f"verl_server.grammar.{call}", panic)
    h.run()
    assert h.finished["s1"].status_code == 500 and "index out of bounds" in (h.finished["s1"].message or "")
    assert h.tokens["r1"] == generate(prompt(1, 9), 9, 0)


def test_a_row_without_any_allowed_token_ends_with_an_abort() -> None:
    h = GrammarHarness()
    compute = h.runner.compute

    def forbid(batch: ForwardBatch, specs: list[SampleSpec]) -> ForwardOutput:
        output = compute(batch, specs)
        output.logprobs = [NOTHING_ALLOWED for _ in specs]
        return output

    h.runner.compute = forbid  # type: ignore[method-assign]
    h.constrain("s1", "regex", "ab")
    h.finish()
    reason = h.finished["s1"]
    assert reason.type == "abort" and reason.status_code == 400 and "the grammar" in (reason.message or "")


def test_a_step_that_fails_at_its_launch_serves_the_others_again() -> None:
    h = GrammarHarness()
    h.constrain("s1", "regex", "[a-z]{9}")
    h.compile()
    h.steps(3)
    h.runner.fail_with = RuntimeError("broken step")
    h.run()
    assert h.finished["s1"].status_code == 500
    h.constrain("s2", "regex", "[a-z]{9}")
    h.finish()
    assert len(h.text("s2")) == 9


def test_random_arrivals_aborts_and_retractions() -> None:
    """Outputs that end by their grammar match it; all requests end; the invariants hold after every turn."""
    rng = random.Random(5)
    h = GrammarHarness(num_pages=24, disable_radix_cache=False)
    for i in range(40):
        kind = rng.choice(["free", "regex", "schema"])
        if kind == "free":
            h.add(f"r{i}", prompt(i, rng.randrange(2, 12)), rng.randrange(1, 20))
        elif kind == "regex":
            h.constrain(f"s{i}", "regex", "([a-f][0-9]){2,9}x", new=rng.randrange(1, 30))
        else:
            h.constrain(f"j{i}", "json_schema", SCHEMA, new=rng.randrange(1, 30))
        if rng.random() < 0.2:
            h.abort(rng.choice(list(h.scheduler.requests)))
        h.steps(rng.randrange(3))
    h.finish()
    assert len(h.finished) == 40 and not h.scheduler.requests
    for rid, reason in h.finished.items():
        if reason.type == "stop" and rid.startswith("j"):
            assert set(json.loads(h.text(rid))) == {"a", "b"}


def test_copies_of_a_matcher_are_independent() -> None:
    h = GrammarHarness()
    start = h.matchers.compiler.compile(translate(Grammar("regex", "a|b"), {}))
    first, second = start.copy(), start.copy()
    MaskExecutor().consume([(first, 69)])
    first.check()
    assert first.is_complete and not second.is_complete and not start.is_complete
    assert h.matchers.compiler.num_words == -(-VOCAB // 32)


def test_a_launch_that_runs_out_of_memory_after_the_masks_is_repeated() -> None:
    """The step before it was collected meanwhile, so the repeated step finds all tokens on the host."""
    results = []
    for fails in (False, True):
        h = GrammarHarness()
        launch, launches = h.runner.launch, [0]

        def failing(
            batch: ForwardBatch,
            specs: list[SampleSpec] | None,
            make_masks: MakeMasks | None = None,
            launch: Any = launch,
            launches: list[int] = launches,
            fails: bool = fails,
        ) -> FakeStep:
            launches[0] += 1
            if fails and launches[0] == 4:
                assert make_masks is not None
                make_masks(None)
                raise torch.OutOfMemoryError("out of memory")
            step: FakeStep = launch(batch, specs, make_masks)
            return step

        h.runner.launch = failing  # type: ignore[method-assign]
        for i in range(3):
            h.constrain(f"s{i}", "regex", "([a-f][0-9]){6}x")
        h.finish()
        assert all(reason.type == "stop" for reason in h.finished.values())
        results.append(h.tokens)
    assert results[0] == results[1]


# -- masks that are late ------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlaps", [True, False])
def test_a_late_mask_delays_its_own_row_only(overlaps: bool) -> None:
    expected = GrammarHarness(overlaps)
    h = GrammarHarness(overlaps)
    for harness in (expected, h):
        for i in range(1, 6):
            harness.constrain(f"s{i}", "regex", "([a-f][0-9]){6}x")
        harness.add("r1", prompt(1, 9), 9)
        harness.compile()
    h.steps(4)
    slow = make_late(h, "s1")
    before = len(h.tokens["s1"])
    h.steps(6)
    assert len(h.tokens["s1"]) <= before + 1 and len(h.tokens["s2"]) >= before + 5
    slow.clear()
    h.run()
    expected.run()
    assert h.tokens == expected.tokens and {reason.type for reason in h.finished.values()} == {"stop", "length"}


def test_rows_that_are_all_late_are_waited_for() -> None:
    """A step without any token would repeat the forward pass for nothing."""
    h = GrammarHarness()
    for i in range(1, 6):
        h.constrain(f"s{i}", "regex", "[a-f]{4}" if i > 1 else "[a-f]{30}")
    h.compile()
    h.steps(2)
    make_late(h, "s1")
    h.run()
    assert len(h.text("s1")) == 30 and all(len(h.text(f"s{i}")) == 4 for i in range(2, 6))


@pytest.mark.parametrize("has_free", [True, False])
def test_a_step_waits_for_one_mask_unless_a_row_is_free(has_free: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A late row of an earlier step is no free row: its mask may be late again."""
    h = GrammarHarness()
    for i in range(1, 6):
        h.constrain(f"s{i}", "regex", "[a-f]{30}")
    if has_free:
        h.add("r1", prompt(1, 9), 40)
    h.compile()
    h.steps(2)
    make_late(h, "s1")
    waited, wait = [], HeldRun.wait

    def noted(run: HeldRun, is_due: Callable[[], bool] | None, least: int = 0) -> None:
        waited.append(least)
        wait(run, is_due, least)

    monkeypatch.setattr(HeldRun, "wait", noted)
    h.steps(6)
    assert len(waited) >= 5 and set(waited) == {0 if has_free else 1}


def fail_late(h: GrammarHarness, rid: str) -> None:
    """Let the next mask of a request be late, and then fail."""
    grammar = h.scheduler.requests[rid].grammar
    assert grammar is not None
    slow = grammar.open()
    executor = hold(h, lambda matcher: matcher is slow)
    h.steps(2)
    (run,) = [run for run in executor.runs if run.held]
    (row,) = run.held
    run.fail(row)


def test_a_late_mask_that_fails_ends_its_own_request() -> None:
    h = GrammarHarness()
    for i in range(1, 6):
        h.constrain(f"s{i}", "regex", "[a-f]{9}")
    h.compile()
    h.steps(2)
    fail_late(h, "s1")
    h.run()
    assert h.finished["s1"].status_code == 500 and all(len(h.text(f"s{i}")) == 9 for i in range(2, 6))


def test_a_matcher_whose_late_mask_failed_is_not_used_again() -> None:
    """Its request ended before a step saw that the mask had failed, and a reset does not repair a matcher."""
    h = GrammarHarness()
    compiled: list[str] = []
    h.before_compilation(compiled.append)
    for i in range(1, 6):
        h.constrain(f"s{i}", "regex", "[a-f]{9}")
    h.compile()
    h.steps(2)
    fail_late(h, "s1")
    h.abort("s1")
    h.run()
    for i in range(11, 16):
        h.constrain(f"s{i}", "regex", "[a-f]{9}")
    h.finish()
    assert len(compiled) == 6, "four matchers of five are used again"


@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_late_masks_change_no_output(seed: int, overlaps: bool) -> None:
    """Random masks are late, among retractions, chunks of prompts, aborts and pauses."""
    results = []
    for is_late in (False, True):
        rng, late = random.Random(seed), random.Random(seed)
        h = GrammarHarness(overlaps, num_pages=30, chunked_prefill_size=16)
        executor = hold(h, lambda matcher, late=late: late.random() < 0.4) if is_late else None  # type: ignore[misc]
        for i in range(24):
            if rng.random() < 0.3:
                h.add(f"r{i}", prompt(i, 5), rng.randrange(1, 20))
            else:
                h.constrain(f"s{i}", "regex", "([a-f][0-9]){2,9}x", new=rng.randrange(1, 30))
            h.compile()
            h.steps(rng.randrange(4))
            if rng.random() < 0.1:
                h.control(PauseGenerationReq(id=2 * i + 1, mode=rng.choice(["in_place", "retract"])))
                h.control(ContinueGenerationReq(id=2 * i + 2))
        h.finish()
        results.append((h.tokens, {rid: reason.type for rid, reason in h.finished.items()}))
        assert executor is None or executor.num_held > 5
    assert results[0] == results[1]


def test_more_late_masks_than_buffers_are_waited_for() -> None:
    """Every step leaves out one row more, until a step waits for the row that was left out first."""
    h = GrammarHarness(max_rows=16, num_pages=200)
    for i in range(1, 13):
        h.constrain(f"s{i}", "regex", "[a-f]{9}")
    h.compile()
    executor = hold(h, lambda matcher: True)
    h.run()
    assert all(len(h.text(f"s{i}")) == 9 for i in range(1, 13)) and executor.num_held > 8
    assert h.scheduler.grammars.masks is not None and len(h.scheduler.grammars.masks._buffers) == 4

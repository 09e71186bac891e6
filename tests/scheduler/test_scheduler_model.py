"""The scheduler over the real `ModelRunner`: batching, chunks, sharing and retraction change no greedy token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.scheduler.fakes import FakeStager
from verl_server.ipc.tp_group import TpGroup
from verl_server.messages.io_struct import (
    BatchTokenIDOut,
    ContinueGenerationReq,
    FinishReason,
    PauseGenerationReq,
    SchedulerOutput,
    TokenizedGenerateReq,
)
from verl_server.sampling_params import SamplingParams
from verl_server.scheduler.scheduler import Scheduler
from verl_server.server_args import ServerArgs
from verl_server.worker.model_runner import ModelRunner
from verl_server.worker.tp_worker import TpWorker
from verl_server.worker.weights.weight_sources import WeightSources
from verl_server.worker.weights.weight_updater import WeightUpdater


class Engine:
    """A scheduler in this process, and the tokens and log-probabilities that it sent for each request."""

    def __init__(self, folder: Path, overlaps: bool = False, **settings: Any) -> None:
        defaults = {"page_size": 4, "max_total_tokens": 2048, "context_length": 256, "cpu_threads": 1, "random_seed": 0}
        args = ServerArgs(model_path=str(folder), device="cpu", check_invariants=True, **(defaults | settings))
        tp = TpGroup()
        runner = ModelRunner(args, tp, torch.device("cpu"))
        runner.overlaps = overlaps  # also on the CPU: a step is computed at once, and read a turn later
        sources = WeightSources(runner, tp, args)
        worker = TpWorker(runner, WeightUpdater(runner, tp, sources, args), FakeStager(), tp)
        self.scheduler = Scheduler(args, worker, self.receive)
        self.tokens: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[float]] = {}
        self.prompt_logprobs: dict[str, list[float | None]] = {}
        self.reasons: dict[str, FinishReason] = {}

    def receive(self, message: SchedulerOutput) -> None:
        if not isinstance(message, BatchTokenIDOut):
            return
        for index, rid in enumerate(message.rids):
            self.tokens.setdefault(rid, []).extend(message.output_ids[index])
            self.logprobs.setdefault(rid, []).extend(message.output_logprobs[index])
            if index in message.prompt_logprobs:
                self.prompt_logprobs[rid] = message.prompt_logprobs[index].logprobs
            if (reason := message.finish_reasons[index]) is not None:
                self.reasons[rid] = reason

    def add(self, rid: str, prompt: list[int], new: int) -> None:
        self.add_sampled(rid, prompt, SamplingParams(max_new_tokens=new, temperature=0.0))

    def add_sampled(self, rid: str, prompt: list[int], params: SamplingParams) -> None:
        params.verify()
        self.scheduler.handle(
            TokenizedGenerateReq(rid=rid, input_ids=prompt, sampling=params, return_logprob=True, logprob_start_len=0)
        )

    def run(self) -> None:
        for _ in range(3000):
            if not self.scheduler.has_work():
                return
            self.scheduler.advance()
        raise AssertionError("still running")


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(3, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


CASES = {f"r{i}": (prompt(i // 2, 11 + 9 * (i // 2)), 50 + i) for i in range(8)}  # pairs share a prompt


@pytest.fixture(scope="module")
def alone(tiny_llama: Path) -> Engine:
    engine = Engine(tiny_llama, disable_radix_cache=True)
    for rid, (ids, new) in CASES.items():
        engine.add(rid, ids, new)
        engine.run()
    return engine


def assert_same(engine: Engine, alone: Engine) -> None:
    for rid in CASES:
        assert engine.tokens[rid] == alone.tokens[rid], rid
        assert engine.logprobs[rid] == pytest.approx(alone.logprobs[rid], abs=1e-4)
        assert engine.prompt_logprobs[rid][1:] == pytest.approx(alone.prompt_logprobs[rid][1:], abs=1e-4)


@pytest.mark.parametrize("overlaps", [False, True], ids=["in-turn", "overlapped"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"chunked_prefill_size": 7},
        {"max_running_requests": 3},
        {"page_size": 1, "chunked_prefill_size": 5},
        {"max_total_tokens": 120, "chunked_prefill_size": 32},
    ],
    ids=["batched", "chunked", "few-rows", "page1", "retracting"],
)
def test_greedy_output_is_that_of_each_request_alone(
    settings: dict[str, Any], overlaps: bool, tiny_llama: Path, alone: Engine
) -> None:
    engine = Engine(tiny_llama, overlaps, **settings)
    for rid, (ids, new) in CASES.items():
        engine.add(rid, ids, new)
    engine.run()
    assert_same(engine, alone)
    assert (engine.scheduler.planner.num_retractions > 0) == ("max_total_tokens" in settings)


def test_overlapping_changes_no_draw(tiny_llama: Path) -> None:
    """Sampled tokens, with and without penalties, are the same whether the newest tokens are pending or known."""
    results = []
    for overlaps in (False, True):
        engine = Engine(tiny_llama, overlaps)
        for rid, (ids, _) in CASES.items():
            params = SamplingParams(max_new_tokens=40, top_k=20)
            if rid == "r3":  # while this request runs, every step waits for the step before
                params = SamplingParams(max_new_tokens=20, top_k=3, temperature=0.1, frequency_penalty=2.0)
            engine.add_sampled(rid, ids, params)
        engine.run()
        results.append(engine.tokens)
    assert results[0] == results[1]
    assert results[0]["r0"] != results[0]["r1"], "two draws from one prompt"


@pytest.mark.parametrize("overlaps", [False, True], ids=["in-turn", "overlapped"])
@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_pause_changes_nothing(mode: Any, overlaps: bool, tiny_llama: Path, alone: Engine) -> None:
    engine = Engine(tiny_llama, overlaps)
    for rid, (ids, new) in CASES.items():
        engine.add(rid, ids, new)
    for _ in range(5):
        engine.scheduler.advance()
    engine.scheduler.handle(PauseGenerationReq(id=1, mode=mode))
    engine.scheduler.advance()
    engine.scheduler.handle(ContinueGenerationReq(id=2))
    engine.run()
    assert_same(engine, alone)


def test_conversation_turns_hit_the_cache(tiny_llama: Path) -> None:
    cached, plain = Engine(tiny_llama), Engine(tiny_llama, disable_radix_cache=True)
    history = prompt(9, 20)
    for turn in range(4):
        for engine in (cached, plain):
            params = SamplingParams(max_new_tokens=12, temperature=0.0)
            params.verify()
            engine.scheduler.handle(TokenizedGenerateReq(rid=f"t{turn}", input_ids=history, sampling=params))
            engine.run()
        assert cached.tokens[f"t{turn}"] == plain.tokens[f"t{turn}"]
        history = history + cached.tokens[f"t{turn}"] + prompt(10 + turn, 6)
    planner = cached.scheduler.planner
    assert planner.num_cached_tokens > planner.num_prompt_tokens / 2

"""`Backend` and `EngineWorkers` over a fake engine: which requests run when, and which version each token has.

The fake engine has real weights, which the real `WorkerCommands` updates. Each step of a request yields a token that
names the weights with which the step was computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.waiting import eventually
from verl_server.backends.process.backend import Backend
from verl_server.backends.process.driver import EngineInfo, NewTokens, Step
from verl_server.backends.process.worker_commands import WorkerCommands
from verl_server.errors import BadRequestError
from verl_server.ipc.tp_group import TpGroup
from verl_server.messages.io_struct import (
    AbortReq,
    BatchTokenIDOut,
    ContinueGenerationReq,
    ControlReply,
    FinishReason,
    FlushCacheReq,
    PauseGenerationReq,
    SchedulerOutput,
    TokenizedGenerateReq,
)
from verl_server.messages.weight_requests import UpdateWeightsFromTensorReq
from verl_server.models.loader import WeightMap, WeightSlot
from verl_server.sampling_params import SamplingParams
from verl_server.server_args import ServerArgs
from verl_server.weight_sync.trainer.sender import describe_tensors


class FakeModel:
    """One parameter of one element: the weights are a number."""

    def __init__(self) -> None:
        self.parameter = torch.zeros(1)
        self.weight_map = WeightMap({"w": WeightSlot.whole("w", self.parameter)})
        self.device = torch.device("cpu")

    def synchronize(self) -> None: ...

    memory = None


class FakeDriver:
    """Computes a step when the test calls `step`, and only if it is not held."""

    def __init__(self, args: ServerArgs) -> None:
        self.info = EngineInfo("fake 1.0", "cpu", "float32", 512, 320, 4096, 16, 8, 64)
        self.model: Any = FakeModel()
        self.workers = WorkerCommands(self.model, TpGroup(), args)
        self.live: dict[str, tuple[TokenizedGenerateReq, str, int]] = {}
        """Request, cache key and number of tokens, by rid."""
        self.keys: list[tuple[str, str]] = []
        """(rid, cache key) of every submission."""
        self.held = False
        self.retractions = 0
        self._steps: list[Step] = []

    def refusal(self, req: TokenizedGenerateReq) -> BadRequestError | None:
        return BadRequestError("too long") if len(req.input_ids) > 100 else None

    def submit(self, req: TokenizedGenerateReq, seed: int, cache_key: str) -> None:
        assert req.rid not in self.live
        self.live[req.rid] = req, cache_key, 0
        self.keys.append((req.rid, cache_key))

    def abort(self, rids: list[str]) -> None:
        for rid in rids:
            self.live.pop(rid, None)

    def take(self) -> list[Step]:
        steps, self._steps = self._steps, []
        return steps

    def hold(self, timeout: float) -> None:
        assert not self.held
        self.held = True

    def resume(self) -> None:
        assert self.held
        self.held = False

    def retract(self, timeout: float) -> None:
        assert self.held, "only between two steps"
        self.retractions += 1

    def call(self, method: str, argument: bytes, timeout: float) -> list[bytes]:
        assert method == "verl_command"
        return [self.workers.handle(argument)]

    def close(self) -> None: ...

    def step(self) -> None:
        """Compute one token for every request."""
        if self.held:
            return
        step: Step = []
        for rid, (req, key, count) in list(self.live.items()):
            assert req.sampling.max_new_tokens is not None
            is_last = count + 1 == req.sampling.max_new_tokens
            reason = FinishReason(type="length") if is_last else None
            step.append(NewTokens(rid, [int(self.model.parameter)], [], reason))
            self.live[rid] = req, key, count + 1
            if is_last:
                del self.live[rid]
        if step:
            self._steps.append(step)


class Harness:
    def __init__(self, **settings: Any) -> None:
        args = ServerArgs(model_path="/nowhere", device="cpu", engine="vllm", control_timeout=5.0, **settings)
        self.sent: list[SchedulerOutput] = []
        self.now = 0.0
        self.driver = FakeDriver(args)
        self.backend = Backend(args, self.driver, self.sent.append, lambda: self.now)
        self._ids = 0

    def turn(self, *, step: bool = True) -> None:
        if step:
            self.driver.step()
        self.backend.advance()

    def request(self, rid: str, tokens: int = 4, prompt: int = 3, demand: str = "") -> None:
        sampling = SamplingParams(max_new_tokens=tokens)
        req = TokenizedGenerateReq(rid=rid, input_ids=[7] * prompt, sampling=sampling, weight_demand=demand)
        self.backend.handle(req)

    def control(self, kind: Callable[..., Any], **fields: Any) -> int:
        self._ids += 1
        self.backend.handle(kind(id=self._ids, **fields))
        return self._ids

    def update(self, value: float, **fields: Any) -> int:
        """Push the weights `value` from a process's memory: staged on a thread."""
        self.source = torch.full((1,), value)
        described = describe_tensors([("w", self.source)])
        return self.control(UpdateWeightsFromTensorReq, named_tensors=described, **({"mode": "in_place"} | fields))

    def reply(self, request_id: int, *, step: bool = True) -> ControlReply:
        """Run turns until the request is answered. Staging takes any number of turns: with `step`, requests may end."""

        def answered() -> ControlReply | None:
            self.turn(step=step)
            replies = (m for m in self.sent if isinstance(m, ControlReply) and m.id == request_id)
            return next(replies, None)

        assert eventually(answered)
        return next(m for m in self.sent if isinstance(m, ControlReply) and m.id == request_id)

    def tokens(self, rid: str) -> list[tuple[int, str]]:
        """Return (token, version label) of all tokens that were sent."""
        return [
            (token, message.weight_version)
            for message in self.sent
            if isinstance(message, BatchTokenIDOut)
            for each, ids in zip(message.rids, message.output_ids, strict=True)
            if each == rid
            for token in ids
        ]

    def end(self, rid: str) -> FinishReason:
        """Return the only terminal entry of a request."""
        (reason,) = [
            reason
            for message in self.sent
            if isinstance(message, BatchTokenIDOut)
            for each, reason in zip(message.rids, message.finish_reasons, strict=True)
            if each == rid and reason is not None
        ]
        return reason


@pytest.fixture
def harness() -> Harness:
    return Harness()


def test_a_request_runs_to_its_end(harness: Harness) -> None:
    harness.request("a", tokens=3)
    for _ in range(5):
        harness.turn()
    assert harness.tokens("a") == [(0, "default")] * 3
    assert harness.end("a") == FinishReason(type="length", length=3)


def test_a_refused_request_gets_its_end_only(harness: Harness) -> None:
    harness.request("a", prompt=101)
    assert harness.end("a").status_code == 400
    assert not harness.driver.live


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_each_token_has_the_version_that_computed_it(harness: Harness, mode: Any) -> None:
    harness.request("a", tokens=40)
    for _ in range(3):
        harness.turn()
    assert harness.reply(harness.update(1.0, mode=mode, weight_version="one"), step=False).success
    for _ in range(3):
        harness.turn()
    tokens = harness.tokens("a")
    assert {version for token, version in tokens if token == 0} == {"default"}
    assert {version for token, version in tokens if token == 1} == {"one"}
    assert harness.driver.retractions == (mode == "retract")
    assert not harness.driver.held


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_demand_ends_a_request_at_the_border(harness: Harness, mode: Any) -> None:
    """Also a request of which the engine has computed no token yet: it must not start again under the new version."""
    harness.request("running", tokens=40, demand="default")
    harness.request("other", tokens=4)
    for _ in range(3):
        harness.turn()
    harness.request("begun", demand="default")
    harness.turn(step=False)
    assert "begun" in harness.driver.live
    before = len(harness.driver.keys)
    assert harness.reply(harness.update(1.0, mode=mode, weight_version="one"), step=False).success
    for rid, tokens in (("running", 2), ("begun", 0)):
        end = harness.end(rid)
        assert (end.type, end.status_code, end.at_border) == ("abort", 409, True)
        assert end.code == "weight_version_superseded"
        assert harness.tokens(rid) == [(0, "default")] * tokens
    assert list(harness.driver.live) == ["other"] and len(harness.driver.keys) == before
    for _ in range(4):
        harness.turn()
    assert harness.tokens("other")[-1] == (1, "one")


def test_a_demand_is_judged_on_arrival(harness: Harness) -> None:
    assert harness.reply(harness.update(1.0, weight_version="one")).success
    for rid, demand, code in (("old", "default", "superseded"), ("new", "two", "behind")):
        harness.request(rid, demand=demand)
        assert harness.end(rid).code == f"weight_version_{code}"
    harness.request("now", tokens=1, demand="one")
    for _ in range(3):
        harness.turn()
    assert harness.tokens("now") == [(1, "one")]


def test_wait_starts_nothing_before_the_running_requests_have_ended(harness: Harness) -> None:
    harness.request("old", tokens=5)
    harness.turn()
    update = harness.update(1.0, mode="wait", weight_version="one")
    assert eventually(lambda: (harness.turn(step=False), harness.backend.control.draining)[1])
    harness.request("new", tokens=2)
    harness.turn(step=False)
    assert "new" not in harness.driver.live
    assert harness.reply(update).success
    for _ in range(4):
        harness.turn()
    assert harness.tokens("old") == [(0, "default")] * 5
    assert harness.tokens("new") == [(1, "one")] * 2


def test_abort_ends_requests_with_what_they_have(harness: Harness) -> None:
    harness.request("a", tokens=40)
    harness.turn()
    harness.driver.step()
    harness.backend.handle(AbortReq(rid="a"))
    assert harness.end("a").type == "abort"
    assert len(harness.tokens("a")) == 1, "the step that was computed before the abort was sent"
    assert not harness.driver.live


def test_a_pause_holds_the_engine_and_new_requests(harness: Harness) -> None:
    harness.request("a", tokens=10)
    harness.turn()
    harness.turn()
    assert harness.reply(harness.control(PauseGenerationReq, mode="in_place")).success
    assert harness.driver.held
    count = len(harness.tokens("a"))
    harness.request("b", tokens=2)
    for _ in range(3):
        harness.turn()
    assert len(harness.tokens("a")) == count and "b" not in harness.driver.live
    assert harness.reply(harness.update(1.0, weight_version="one")).success
    assert harness.reply(harness.update(2.0, weight_version="two")).success, "the second update waits for no step"
    assert harness.driver.held
    harness.reply(harness.control(ContinueGenerationReq))
    for _ in range(4):
        harness.turn()
    assert harness.tokens("b") == [(2, "two")] * 2
    assert not harness.driver.held


def test_requests_without_a_token_start_again_under_another_cache_key(harness: Harness) -> None:
    harness.request("started", tokens=20)
    harness.turn()
    harness.turn()
    harness.request("queued", tokens=20)
    harness.turn(step=False)
    assert harness.reply(harness.update(1.0), step=False).success
    keys = [key for rid, key in harness.driver.keys if rid == "queued"]
    assert len(keys) == 2 and keys[0] != keys[1]
    assert len([rid for rid, _ in harness.driver.keys if rid == "started"]) == 1


def test_many_updates_let_generation_progress(harness: Harness) -> None:
    """An update that follows another one waits for a step of the running requests."""
    harness.request("a", tokens=40)
    harness.turn()
    harness.turn()
    first, second = harness.update(1.0), None
    harness.reply(first, step=False)
    second = harness.update(2.0)
    for _ in range(5):
        harness.turn(step=False)
    assert not any(isinstance(m, ControlReply) and m.id == second for m in harness.sent)
    assert harness.reply(second).success


def test_a_flush_waits_for_running_requests(harness: Harness) -> None:
    harness.request("a", tokens=4)
    harness.turn()
    refused = harness.reply(harness.control(FlushCacheReq), step=False)
    assert not refused.success and "1 requests run" in refused.message
    for _ in range(5):
        harness.turn()
    assert harness.reply(harness.control(FlushCacheReq)).success
    harness.request("b")
    harness.turn()
    assert len({key for _, key in harness.driver.keys}) == 2


def test_torn_weights_are_not_served(harness: Harness) -> None:
    harness.request("a", tokens=40)
    harness.turn()
    assert not harness.reply(harness.update(float("nan")), step=False).success
    harness.turn()
    assert harness.end("a").status_code == 503
    harness.request("b")
    assert harness.end("b").status_code == 503
    assert harness.reply(harness.update(3.0)).success
    harness.request("c", tokens=1)
    harness.turn()
    harness.turn()
    assert harness.tokens("c")[0][0] == 3


def test_the_loop_sleeps_only_if_something_will_wake_it(harness: Harness) -> None:
    assert harness.backend.wait_seconds() is None
    update = harness.update(1.0)
    wait = harness.backend.wait_seconds()
    assert wait is not None and wait <= 0.02, "the stager's outcome is polled"
    assert harness.reply(update).success
    assert harness.backend.wait_seconds() is None


def test_a_full_queue_refuses() -> None:
    harness = Harness(max_queued_requests=1)
    harness.reply(harness.control(PauseGenerationReq, mode="in_place"))
    harness.request("a")
    harness.request("b")
    assert harness.end("b").message == "The request queue is full."

"""`/health_generate` under load, with a full queue, with a stuck scheduler, and while the server is not ready."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.server.conftest import Stack
from verl_server.messages import io_struct as io
from verl_server.server.dialects.sglang import health_routes

BODY = {"input_ids": [5], "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}


@pytest.fixture(autouse=True)
def short_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_routes, "_LOOK_SECONDS", 0.005)
    monkeypatch.setattr(health_routes, "_STATE_TIMEOUT", 0.05)


@pytest.fixture
def short_health_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the checks that end by this bound. The others must not meet it, however busy the machine is."""
    monkeypatch.setattr(health_routes, "_HEALTH_TIMEOUT", 0.4)


def occupy(stack: Stack, count: int) -> list[threading.Thread]:
    """Send a batch of `count` prompts that the scheduler holds."""
    stack.scheduler.hold = True
    ids = {"input_ids": [[5]] * count}
    thread = threading.Thread(target=lambda: stack.post("/generate", BODY | ids), daemon=True)
    thread.start()
    stack.scheduler.wait_for(io.TokenizedGenerateReq, count)
    return [thread]


def counting(payloads: Callable[[], dict[str, Any]]) -> Callable[[Any], io.ControlReply]:
    return lambda req: io.ControlReply(id=req.id, success=True, payload=payloads())


def refuse_requests(stack: Stack, message: str) -> None:
    """Let the scheduler refuse further requests with `message`."""
    handle = stack.scheduler._handle

    def refuse(received: Any) -> None:
        handle(received)
        if isinstance(received, io.TokenizedGenerateReq):
            reason = io.FinishReason(type="abort", message=message, status_code=503)
            stack.scheduler.emit(stack.scheduler.running.pop(received.rid), [], reason)

    stack.scheduler._handle = refuse  # type: ignore[method-assign]


def full(stack: Stack) -> None:
    refuse_requests(stack, "The request queue is full.")


def test_an_idle_server_generates_a_token(stack: Stack) -> None:
    assert stack.get("/health_generate").status_code == 200
    (probe,) = stack.scheduler.wait_for(io.TokenizedGenerateReq)
    assert probe.sampling.max_new_tokens == 1


def test_any_requests_token_counts_under_load(stack: Stack) -> None:
    occupy(stack, 300)
    answers: list[int] = []
    check = threading.Thread(target=lambda: answers.append(stack.get("/health_generate").status_code))
    check.start()
    stack.scheduler.wait_for(io.GetInternalStateReq)
    running = next(iter(stack.scheduler.running.values()))
    stack.scheduler.emit(running, [7], None)
    check.join(30)
    assert answers == [200]
    assert len(stack.scheduler.wait_for(io.TokenizedGenerateReq)) == 300, "a busy server is sent no probe"
    assert stack.get("/health_generate").status_code == 200, "the token is recent"


def test_steps_without_tokens_count_too(stack: Stack) -> None:
    steps = iter(range(1000))
    occupy(stack, 1)
    stack.scheduler.control = counting(lambda: {"num_steps": next(steps)})
    assert stack.get("/health_generate").status_code == 200, "the prefill of a long prompt yields no token"


def test_a_full_queue_is_no_fault_while_steps_complete(stack: Stack) -> None:
    occupy(stack, 8)
    full(stack)
    stack.manager.last_tokens = stack.manager.loop.time() - 1  # a token of a second ago
    assert stack.get("/health_generate").status_code == 200


def test_a_probe_that_meets_a_full_queue_leaves_the_verdict_to_the_others(stack: Stack) -> None:
    occupy(stack, 4)
    full(stack)

    async def probe() -> None:  # the queue filled up after the check had found the server idle
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await health_routes.HealthApi(stack.manager)._probe()

    stack.manager.run_sync(probe(), timeout=5)


@pytest.mark.usefixtures("short_health_timeout")
def test_a_full_queue_and_a_stuck_scheduler_is_a_fault(stack: Stack) -> None:
    occupy(stack, 8)
    full(stack)
    stack.scheduler.control = counting(lambda: {"num_steps": 41})
    response = stack.get("/health_generate")
    assert response.status_code == 503 and "No step was completed" in response.json()["message"]


@pytest.mark.usefixtures("short_health_timeout")
def test_a_scheduler_that_answers_nothing_is_a_fault(stack: Stack) -> None:
    occupy(stack, 1)
    stack.scheduler.control = lambda req: None
    assert stack.get("/health_generate").status_code == 503


def test_torn_weights_are_a_fault(stack: Stack) -> None:
    refuse_requests(stack, "The weights are torn.")
    response = stack.get("/health_generate")
    assert response.status_code == 503 and "torn" in response.json()["message"]


def test_a_pause_during_the_check_ends_it_well(stack: Stack) -> None:
    occupy(stack, 1)
    answers: list[int] = []
    check = threading.Thread(target=lambda: answers.append(stack.get("/health_generate").status_code))
    check.start()
    stack.scheduler.wait_for(io.GetInternalStateReq)
    assert stack.post("/pause_generation", {"mode": "in_place"}).status_code == 200
    check.join(30)
    assert answers == [200]


def test_liveness(stack: Stack) -> None:
    assert stack.get("/liveness").json() == {"status": "ok"}
    stack.manager.ready = False
    assert stack.get("/liveness").status_code == 503

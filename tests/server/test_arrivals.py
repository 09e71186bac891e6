"""Aborts and pauses see every request that has arrived, also one that the scheduler does not know yet."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.conftest import MakeStack, Stack
from verl_server.messages import io_struct as io
from verl_server.server import tokenizer_manager
from verl_server.server.arrivals import Arrivals
from verl_server.server.slices import Slices

CHAT = {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
REQUESTS: dict[str, dict[str, Any]] = {
    "/generate": {"text": "a", "sampling_params": {"max_new_tokens": 2}},
    "/v1/completions": {"model": "m", "prompt": "a", "max_tokens": 2},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"model": "m", "input": "a", "max_output_tokens": 16},
    "/v1/messages": CHAT,
    "/inference/v1/generate": {"token_ids": [70], "sampling_params": {"max_tokens": 2}},
}
ENDS: dict[str, tuple[str, dict[str, Any]]] = {
    "abort_all": ("/abort_request", {"abort_all": True}),
    "vLLM's abort": ("/abort_requests", {}),
    "pause": ("/pause_generation", {"mode": "abort"}),
    "vLLM's pause": ("/pause?mode=abort", {}),
}


class Held:
    """Reading holds still in the jobs of a stack's text service, until `release`."""

    def __init__(self, stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stack = stack
        self._reading, self._changed = 0, threading.Condition()
        self._go = asyncio.Event()
        text = stack.manager.text
        in_worker = text.in_worker

        async def held(job: Any, body: Any) -> Any:
            with self._changed:
                self._reading += 1
                self._changed.notify_all()
            await self._go.wait()
            return await in_worker(job, body)

        monkeypatch.setattr(text, "on_loop", lambda job, body: None)
        monkeypatch.setattr(text, "in_worker", held)

    def wait_for(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._reading >= count, 20)

    def release(self) -> None:
        self.stack.manager.loop.call_soon_threadsafe(self._go.set)


@pytest.fixture(scope="module")
def stack(text_folder: Path) -> Iterator[Stack]:
    stack = Stack(text_folder, text_timeout=60.0)
    yield stack
    stack.close()


@pytest.fixture
def held(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> Held:
    stack.scheduler.received.clear()
    return Held(stack, monkeypatch)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


def was_aborted(response: httpx.Response) -> bool:
    """Return whether the answer says that the request was aborted, in the words of its dialect."""
    assert response.status_code == 200, response.text
    return '"abort"' in response.text or '"incomplete"' in response.text or '"output_tokens":0' in response.text


def sampled(stack: Stack) -> int:
    return sum(isinstance(message, io.TokenizedGenerateReq) for message in stack.scheduler.received)


@pytest.mark.parametrize("how", ENDS)
def test_every_dialect(how: str, held: Held, pool: ThreadPoolExecutor) -> None:
    path, body = ENDS[how]
    answers = {route: pool.submit(held.stack.post, route, request) for route, request in REQUESTS.items()}
    held.wait_for(len(REQUESTS))
    assert held.stack.post(path, body).status_code == 200
    held.release()
    wrong = {route: answer.result(30).text for route, answer in answers.items() if not was_aborted(answer.result(30))}
    assert not wrong and sampled(held.stack) == 0
    assert not was_aborted(held.stack.post("/generate", REQUESTS["/generate"])), "it arrived after the abort"


def test_one_request_by_its_name(held: Held, pool: ThreadPoolExecutor) -> None:
    generate, inference = REQUESTS["/generate"], REQUESTS["/inference/v1/generate"]
    answers: dict[str, Future[httpx.Response]] = {
        rid: pool.submit(held.stack.post, "/generate", generate | {"rid": rid}) for rid in ("a", "b")
    }
    several = {"rid": "c", "sampling_params": {"max_new_tokens": 2, "n": 3}}
    answers["c"] = pool.submit(held.stack.post, "/generate", generate | several)
    answers["d"] = pool.submit(held.stack.post, "/inference/v1/generate", inference | {"request_id": "d"})
    held.wait_for(4)
    for rid in ("a", "c"):
        assert held.stack.post("/abort_request", {"rid": rid}).status_code == 200
    assert held.stack.post("/abort_requests", {"request_ids": ["d"]}).status_code == 200
    held.release()
    found = {rid: was_aborted(answer.result(30)) for rid, answer in answers.items()}
    assert found == {"a": True, "b": False, "c": True, "d": True}
    assert sampled(held.stack) == 1
    assert not was_aborted(held.stack.post("/generate", generate | {"rid": "a"})), "a later request of this name"


def test_no_name_is_no_name(held: Held, pool: ThreadPoolExecutor) -> None:
    answer = pool.submit(held.stack.post, "/generate", REQUESTS["/generate"])
    held.wait_for(1)
    held.stack.post("/abort_request", {"rid": "None"})
    held.release()
    assert not was_aborted(answer.result(30))


def test_the_name_of_a_request_ends_all_its_samples(make_stack: MakeStack) -> None:
    """After the hand-over as before it, where the samples have names of their own."""
    stack = make_stack()
    stack.scheduler.hold = True
    results: list[Any] = []
    params = {"max_new_tokens": 2, "n": 3}
    pending = threading.Thread(
        target=lambda: results.append(stack.generate(input_ids=[5], rid="s", sampling_params=params))
    )
    pending.start()
    stack.scheduler.wait_for(io.TokenizedGenerateReq, 3)
    stack.post("/abort_request", {"rid": "s"})
    assert len(stack.scheduler.wait_for(io.AbortReq, 3)) == 3
    stack.scheduler.release()
    pending.join(20)
    assert [each["meta_info"]["finish_reason"]["type"] for each in results[0]] == 3 * ["abort"]
    assert not stack.manager._by_name


def test_a_pause_that_aborts_nothing(held: Held, pool: ThreadPoolExecutor) -> None:
    answer = pool.submit(held.stack.post, "/generate", REQUESTS["/generate"])
    held.wait_for(1)
    assert held.stack.post("/pause_generation", {"mode": "in_place"}).status_code == 200
    held.release()
    assert not was_aborted(answer.result(30))


def test_a_stream(held: Held, pool: ThreadPoolExecutor) -> None:
    answer = pool.submit(held.stack.post, "/v1/chat/completions", CHAT | {"stream": True})
    held.wait_for(1)
    held.stack.post("/abort_request", {"abort_all": True})
    held.release()
    assert '"finish_reason":"abort"' in answer.result(30).text and answer.result(30).text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("rid", ["", "s_1"])
def test_samples_that_were_not_handed_over_yet(
    rid: str, make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An abort comes between two slices of the hand-over: no sample follows it to the scheduler."""
    stack = make_stack()
    stack.scheduler.hold = True
    abort = lambda: stack.manager.abort_request(rid, abort_all=not rid)  # noqa: E731

    class Sending(Slices):
        async def end(self) -> None:
            if stack.manager.num_requests == 3:  # the first one was sent
                abort()

    monkeypatch.setattr(tokenizer_manager, "Slices", Sending)
    params = {"max_new_tokens": 2, "n": 3}
    pending = threading.Thread(
        target=lambda: results.append(stack.generate(input_ids=[5], rid="s", sampling_params=params))
    )
    results: list[Any] = []
    pending.start()
    stack.scheduler.wait_for(io.TokenizedGenerateReq)
    stack.scheduler.release()
    pending.join(20)
    assert not pending.is_alive()
    ends = [each["meta_info"]["finish_reason"]["type"] for each in results[0]]
    assert (ends.count("abort"), sampled(stack)) == ((1, 2) if rid else (3, 1))


def test_names_are_forgotten_when_nothing_is_read() -> None:
    arrivals = Arrivals()
    arrivals.abort("a")
    with arrivals.arrive(), arrivals.arrive():
        arrivals.abort("b")
        assert arrivals.hand_over({"a", "b", "c"}) == {"b"}
        assert arrivals.hand_over({"a", "b", "c"}) == set(), "it was handed over"
    with arrivals.arrive():
        assert arrivals.hand_over({"a", "b"}) == set()
    assert arrivals.hand_over({"a"}) == set()

"""A paused server keeps requests waiting as SGLang does, but logs it, and waits no longer than the settings permit."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import httpx
import pytest

from tests.server.conftest import MakeStack, Stack
from verl_server.messages import io_struct as io
from verl_server.server.pause_watch import Pause, PauseWatch

BODY = {"input_ids": [5], "sampling_params": {"max_new_tokens": 2}}


class Request:
    def __init__(self, created: float) -> None:
        self.created = created


class Watched:
    """A `PauseWatch` over requests and times that the test supplies."""

    def __init__(self, bound: float | None) -> None:
        self.pause: Pause | None = Pause("retract", since=0.0, began=100.0)
        self.waiting: list[Any] = []
        self.refused: list[tuple[Any, str]] = []
        self.watch = PauseWatch(bound, lambda: self.pause, lambda: self.waiting, self._refuse)

    def _refuse(self, request: Any, error: Exception) -> None:
        self.waiting.remove(request)
        self.refused.append((request, str(error)))


def test_a_request_waits_from_the_pause_or_its_own_arrival_on() -> None:
    watched = Watched(bound=10.0)
    early, late = Request(created=50.0), Request(created=107.0)
    watched.waiting = [early, late]
    watched.watch.look(109.9)
    assert not watched.refused
    watched.watch.look(110.0)
    ((refused, message),) = watched.refused
    assert refused is early and "paused since" in message and "waited 10 s" in message
    watched.pause = None
    watched.watch.look(200.0)
    assert watched.waiting == [late], "no request is refused after the pause"


def test_by_default_a_request_waits_as_long_as_it_takes() -> None:
    watched = Watched(bound=None)
    watched.waiting = [Request(created=100.0)]
    watched.watch.look(1e9)
    assert watched.waiting and not watched.refused


def test_the_log_warns_again_and_again_while_requests_wait(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched(bound=None)
    watched.watch.look(1000.0)
    assert not caplog.records, "no warning while no request waits"
    watched.waiting = [Request(created=100.0)] * 3
    for now in (1000.0, 1001.0, 1029.0, 1030.0, 1031.0):
        watched.watch.look(now)
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 2 and "for 900 s: 3 requests wait" in texts[0] and "for 930 s" in texts[1]


# -- over HTTP ----------------------------------------------------------------------------------------------


def gauge(stack: Stack) -> float:
    (line,) = (x for x in stack.get("/metrics").text.splitlines() if x.startswith("verl_server:paused_seconds{"))
    return float(line.split()[-1])


def test_a_paused_server_says_since_when(stack: Stack, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "verl_server")
    info = stack.get("/server_info").json()
    assert (info["paused_since"], info["paused_seconds"], gauge(stack)) == (None, None, 0.0)
    before = time.time()
    stack.post("/pause_generation", {"mode": "in_place"})
    stack.post("/pause_generation", {"mode": "retract"})
    info = stack.get("/server_info").json()
    assert before <= info["paused_since"] <= time.time() and info["paused_seconds"] >= 0 and gauge(stack) > 0
    assert stack.get("/health").status_code == 200, "a paused server is healthy"
    ready = stack.get("/ready")
    assert ready.status_code == 503 and "paused since" in ready.json()["message"]
    stack.post("/continue_generation")
    assert stack.get("/server_info").json()["paused_since"] is None and gauge(stack) == 0.0
    assert stack.get("/ready").status_code == 200
    began, ended = (record.getMessage() for record in caplog.records if "Generation" in record.getMessage())
    assert "paused since" in began and "'in_place'" in began and "continues after a pause" in ended


@pytest.mark.parametrize("stream", [False, True])
def test_a_wait_beyond_the_bound_is_a_503_that_names_the_pause(make_stack: MakeStack, stream: bool) -> None:
    stack = make_stack(paused_request_timeout=0.01)
    stack.scheduler.hold = True
    stack.post("/pause_generation", {"mode": "in_place"})
    response = stack.post("/generate", BODY | {"stream": stream})
    if stream:
        assert '"code":503' in response.text and "paused since" in response.text
    else:
        assert response.status_code == 503 and "paused since" in response.json()["message"]
    (request,) = stack.scheduler.wait_for(io.TokenizedGenerateReq)
    (abort,) = stack.scheduler.wait_for(io.AbortReq)
    assert abort.rid == request.rid and stack.manager.num_requests == 0


def test_without_a_bound_a_request_is_answered_after_the_pause(stack: Stack) -> None:
    stack.scheduler.hold = True
    stack.post("/pause_generation", {"mode": "in_place"})
    answers: list[httpx.Response] = []
    thread = threading.Thread(target=lambda: answers.append(stack.post("/generate", BODY)))
    thread.start()
    stack.scheduler.wait_for(io.TokenizedGenerateReq)
    stack.post("/continue_generation")
    stack.scheduler.release()
    thread.join(timeout=10)
    assert answers[0].json()["output_ids"] == [6, 7]

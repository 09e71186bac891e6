"""When callers of control requests give up, the scheduler is informed, and effects that still happen are recorded."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import threading
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from tests.server.conftest import Stack
from verl_server.errors import UnansweredError
from verl_server.messages import io_struct as io
from verl_server.messages.weight_requests import BeginWeightUpdateReq, EndWeightUpdateReq, UpdateWeightsFromDiskReq

UPDATE = UpdateWeightsFromDiskReq(model_path="/new")
SILENT: Callable[[Any], None] = lambda message: None  # noqa: E731


def start(stack: Stack, req: io.ControlReq, timeout: float | None = None) -> Any:
    return asyncio.run_coroutine_threadsafe(stack.manager.control(req, timeout), stack.manager.loop)


def answer(stack: Stack, req: Any, **fields: Any) -> None:
    """Deliver a reply as the scheduler would; return when the manager has received it."""
    message = msgspec.msgpack.encode(io.ControlReply(id=req.id, **{"success": True} | fields))

    async def deliver() -> None:
        stack.manager.controls.on_reply(msgspec.msgpack.decode(message, type=io.ControlReply))

    stack.manager.run_sync(deliver(), timeout=10)


def test_a_cancelled_call_is_withdrawn(stack: Stack) -> None:
    stack.scheduler.control = SILENT
    future = start(stack, msgspec.structs.replace(UPDATE))
    (req,) = stack.scheduler.wait_for(UpdateWeightsFromDiskReq)
    future.cancel()
    (withdrawal,) = stack.scheduler.wait_for(io.WithdrawReq)
    assert withdrawal.id == req.id
    assert stack.manager.controls.in_flight, "the call stays in flight until its outcome is known"
    answer(stack, req, success=False, status_code=499)
    assert not stack.manager.controls.in_flight and stack.manager.controls.model_path != "/new"


def test_a_call_without_an_answer_is_withdrawn(stack: Stack) -> None:
    stack.scheduler.control = SILENT
    with pytest.raises(UnansweredError, match="UpdateWeightsFromDisk"):
        start(stack, msgspec.structs.replace(UPDATE), timeout=0.05).result(10)
    (req,) = stack.scheduler.wait_for(UpdateWeightsFromDiskReq)
    assert stack.scheduler.wait_for(io.WithdrawReq)[0].id == req.id


@pytest.mark.parametrize("keep_pause", [False, True])
def test_an_update_may_leave_generation_paused(stack: Stack, keep_pause: bool) -> None:
    assert start(stack, msgspec.structs.replace(UPDATE, keep_pause=keep_pause)).result(10).success
    assert stack.manager.controls.is_paused == keep_pause
    start(stack, io.ContinueGenerationReq()).result(10)
    assert not stack.manager.controls.is_paused


def test_an_answered_call_is_not_withdrawn(stack: Stack) -> None:
    assert start(stack, msgspec.structs.replace(UPDATE)).result(10).success
    start(stack, io.ContinueGenerationReq()).result(10)
    assert not [message for message in stack.scheduler.received if isinstance(message, io.WithdrawReq)]


def test_what_was_carried_out_all_the_same_is_noted(stack: Stack, caplog: pytest.LogCaptureFixture) -> None:
    stack.scheduler.control = SILENT
    for req in (io.PauseGenerationReq(), msgspec.structs.replace(UPDATE), EndWeightUpdateReq()):
        start(stack, req).cancel()
        (sent,) = stack.scheduler.wait_for(type(req))
        answer(stack, sent, payload={"weight_version": f"after {type(req).__name__}"})
    manager = stack.manager
    assert manager.controls.is_paused and manager.controls.model_path == "/new"
    assert manager.controls.weight_version == "after EndWeightUpdateReq" and not manager.controls.in_flight
    warned = [r.getMessage().split()[0] for r in caplog.records if r.levelname == "WARNING"]
    assert warned == ["PauseGeneration", "UpdateWeightsFromDisk"]


@pytest.mark.parametrize("name", ["mine", None])
def test_a_transaction_that_began_for_nobody_is_given_up(stack: Stack, name: str | None) -> None:
    stack.scheduler.control = SILENT
    start(stack, BeginWeightUpdateReq(transaction_id=name)).cancel()
    (begin,) = stack.scheduler.wait_for(BeginWeightUpdateReq)
    stack.scheduler.wait_for(io.WithdrawReq)
    stack.scheduler.control = None
    answer(stack, begin, payload={"lease_seconds": 100.0})
    (end,) = stack.scheduler.wait_for(EndWeightUpdateReq)
    assert end.discard and end.transaction_id == name
    assert start(stack, io.ContinueGenerationReq()).result(10).success  # the reply to the end was read before this one
    assert not stack.manager.controls.updating_weights and not stack.manager.controls.in_flight


def test_the_reply_may_come_in_the_moment_of_giving_up(stack: Stack) -> None:
    stack.scheduler.control = SILENT

    async def both_at_once() -> None:
        task = asyncio.ensure_future(stack.manager.control(BeginWeightUpdateReq(transaction_id="s")))
        await asyncio.sleep(0)
        (id,) = stack.manager.controls._calls
        stack.manager.controls.on_reply(io.ControlReply(id=id, success=True))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    stack.manager.run_sync(both_at_once(), timeout=10)
    (end,) = stack.scheduler.wait_for(EndWeightUpdateReq)
    assert end.discard and end.transaction_id == "s"
    assert not [message for message in stack.scheduler.received if isinstance(message, io.WithdrawReq)]


def test_an_interrupted_thread_withdraws_its_call(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C arrives while the main thread waits in `run_sync`."""
    stack.scheduler.control = SILENT

    def result(future: Any, timeout: float | None = None) -> Any:
        stack.scheduler.wait_for(UpdateWeightsFromDiskReq)
        raise KeyboardInterrupt

    call = stack.manager.control(msgspec.structs.replace(UPDATE))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(concurrent.futures.Future, "result", result)
        stack.manager.run_sync(call)
    stack.scheduler.wait_for(io.WithdrawReq)


def test_death_of_the_scheduler_ends_calls_that_nobody_waits_for(stack: Stack) -> None:
    stack.scheduler.control = SILENT
    future = start(stack, msgspec.structs.replace(UPDATE))
    stack.scheduler.wait_for(UpdateWeightsFromDiskReq)
    future.cancel()
    stack.scheduler.wait_for(io.WithdrawReq)
    stack.child.code = -9
    while not stack.deaths:
        threading.Event().wait(0.01)
    assert not stack.manager.controls.in_flight
    with pytest.raises(concurrent.futures.CancelledError):
        future.result(10)


BODIES: dict[str, dict[str, Any]] = {
    "/update_weights_from_tensor": {"registration": "r"},
    "/update_weights_from_disk": {"model_path": "/new"},
    "/update_weights_from_distributed": {"names": [], "dtypes": [], "shapes": []},
    "/register_weights": {"description": {"id": "d", "allocations": [], "tensors": []}},
    "/unregister_weights": {},
    "/begin_weight_update": {},
    "/end_weight_update": {},
    "/init_weights_update_group": {"master_address": "h", "master_port": 1, "rank_offset": 1, "world_size": 2},
    "/destroy_weights_update_group": {},
    "/update_weight_version": {"new_version": "x"},
    "/get_weights_by_name": {"name": "w"},
    "/weights_checker": {},
    "/release_memory_occupation": {},
    "/resume_memory_occupation": {},
    "/flush_cache": {},
    "/pause_generation": {},
    "/continue_generation": {},
}


@pytest.mark.parametrize("path", BODIES)
def test_every_control_route_notices_that_its_client_left(stack: Stack, path: str) -> None:
    """The scheduler is always informed, because only the scheduler decides what happens to the request."""
    stack.scheduler.control = SILENT
    messages = [{"type": "http.request", "body": json.dumps(BODIES[path]).encode(), "more_body": False}]

    async def receive() -> Any:
        if messages:
            return messages.pop(0)
        while not stack.manager.controls.in_flight:
            await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        pass

    async def call() -> None:
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1",
            "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"", "headers": [],
            "scheme": "http", "server": ("test", 80), "client": ("test", 1), "root_path": "",
        }  # fmt: skip
        await stack.app(scope, receive, send)

    stack.manager.run_sync(call(), timeout=10)
    (withdrawal,) = stack.scheduler.wait_for(io.WithdrawReq)
    (sent,) = [m for m in stack.scheduler.received if not isinstance(m, io.WithdrawReq)]
    assert withdrawal.id == sent.id

"""Routes for operators, and routes that are refused by name."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from tests.server.conftest import MakeStack, Stack
from verl_server.messages import io_struct as io


@pytest.fixture
def stack(reset_stack: Stack) -> Stack:
    """One stack for all tests of this module."""
    return reset_stack


def test_profiling(stack: Stack) -> None:
    body = {"num_steps": "5", "activities": ["CPU"], "with_stack": None, "profile_id": "x"}
    started = stack.post("/start_profile", body)
    assert started.status_code == 200 and started.text.startswith("Start profiling.\n")
    (req,) = stack.scheduler.wait_for(io.StartProfileReq)
    assert (req.num_steps, req.activities, req.with_stack) == (5, ["CPU"], False)
    assert stack.get("/stop_profile").text.startswith("Stop profiling.")
    assert stack.scheduler.wait_for(io.StopProfileReq)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"start_step": 3}, "start_step"),
        ({"num_steps": 10**9}, "num_steps"),
        ({"activities": ["MEM"]}, "activities"),
        ({"profile_prefix": "../x"}, "profile_prefix"),
        ({"profile_by_stage": True}, "profile_by_stage"),
    ],
)
def test_wrong_profiles_are_named(module_stack: Stack, body: Any, text: str) -> None:
    response = module_stack.post("/start_profile", body)
    assert response.status_code == 400 and text in response.json()["message"]


def test_a_refusal_of_the_scheduler_is_sglangs(stack: Stack) -> None:
    stack.scheduler.control = lambda req: io.ControlReply(id=req.id, success=False, message="off", status_code=400)
    assert stack.post("/start_profile").json()["error"]["message"] == "off"


def test_freeze_gc(module_stack: Stack) -> None:
    assert module_stack.post("/freeze_gc").text == "Garbage collection frozen.\n"
    assert gc.get_freeze_count() > 0
    gc.unfreeze()


def test_settings_cannot_be_changed(module_stack: Stack) -> None:
    assert module_stack.post("/set_internal_state", {"server_args": {}}).json() == [True]
    refused = module_stack.post("/set_internal_state", {"server_args": {"max_running_requests": 1}})
    assert refused.status_code == 400 and "max_running_requests" in refused.json()["message"]
    assert module_stack.post("/set_internal_state", {}).status_code == 400


def test_logging_of_requests_is_refused(module_stack: Stack) -> None:
    assert module_stack.post("/configure_logging", {"log_requests": False}).status_code == 200
    refused = module_stack.post("/configure_logging", {"log_requests": True})
    assert refused.status_code == 400 and "log_requests" in refused.json()["message"]


@pytest.mark.parametrize(
    ("path", "remedy"),
    [
        ("/update_weights_from_ipc", "/update_weights_from_tensor"),
        ("/pull_weights", "/update_weights_from_disk"),
        ("/slow_down", "max_running_requests"),
    ],
)
def test_refused_routes_name_the_alternative(module_stack: Stack, path: str, remedy: str) -> None:
    response = module_stack.post(path, {"zmq_handles": {}})
    assert response.status_code == 400 and path in response.json()["message"] and remedy in response.json()["message"]


def test_operators_need_the_admin_key(make_stack: MakeStack) -> None:
    stack = make_stack(api_key="user", admin_api_key="admin")
    for path in ("/start_profile", "/stop_profile", "/freeze_gc", "/set_internal_state", "/update_weights_from_ipc"):
        assert stack.post(path, headers={"Authorization": "Bearer user"}).status_code == 401, path

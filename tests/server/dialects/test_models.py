"""The routes that OpenAI's and Anthropic's clients share answer each of them in its own shape."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.server.conftest import MakeStack, Stack
from tests.waiting import eventually

ANTHROPIC = {"anthropic-version": "2023-06-01"}
MODEL = {"type": str, "id": str, "display_name": str, "created_at": str, "lifecycle": str}


@pytest.fixture
def stack(make_stack: MakeStack) -> Stack:
    return make_stack(served_model_name="org/policy")


def get(stack: Stack, path: str, status: int = 200) -> Any:
    answer = stack.get(path, headers=ANTHROPIC)
    assert answer.status_code == status, answer.text
    return answer.json()


def test_anthropics_page(stack: Stack) -> None:
    page = get(stack, "/v1/models?limit=1000")
    (model,) = page.pop("data")
    assert page == {"first_id": "org/policy", "last_id": "org/policy", "has_more": False}
    assert {name: type(model[name]) for name in MODEL} == MODEL and model["max_input_tokens"] == 256
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", model["created_at"])
    assert get(stack, "/v1/models/org/policy") == model
    empty = {"data": [], "first_id": None, "last_id": None, "has_more": False}
    for query in ("after_id=org/policy", "before_id=x", "lifecycle[]=retired", "lifecycle=deprecated"):
        assert get(stack, f"/v1/models?{query}") == empty, query
    assert get(stack, "/v1/models?lifecycle[]=active&lifecycle[]=retired")["data"] == [model]


def test_anthropics_errors(stack: Stack) -> None:
    unknown = get(stack, "/v1/models/other", 404)
    assert unknown["type"] == "error" and unknown["error"]["type"] == "not_found_error"
    assert "'other' does not exist" in unknown["error"]["message"]
    stack.child.code = 1
    assert eventually(lambda: bool(stack.deaths), 10)
    for path in ("/v1/models", "/v1/models/org/policy"):
        assert get(stack, path, 503)["error"]["type"] == "overloaded_error"
        assert stack.get(path).json()["error"]["type"] == "InternalServerError"


def test_openais_list_stays(stack: Stack) -> None:
    assert stack.get("/v1/models?after_id=x").json()["object"] == "list"
    assert stack.get("/v1/models/org/policy").json()["object"] == "model"
    missing = stack.get("/v1/models/other")
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found"
    assert missing.json()["error"]["param"] == "model"

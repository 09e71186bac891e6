"""Whatever request brings a LoRA adapter is answered with what to do instead, and then with what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.conftest import Stack
from verl_server import lora

CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
BODIES: dict[str, dict[str, Any]] = {
    "/generate": {"text": "a"},
    "/v1/completions": {"prompt": "a", "model": "m"},
    "/v1/chat/completions": CHAT | {"model": "m"},
    "/v1/responses": {"input": "a", "model": "m", "store": False},
    "/v1/messages": CHAT | {"model": "m"},
    "/inference/v1/generate": {"token_ids": [5], "sampling_params": {"max_tokens": 2}},
}
"""Route of a generation -> a body that it takes."""


def check(message: str, what: str) -> None:
    """Assert that the way comes first in a message, then what is refused."""
    words = message.lower()
    assert lora.PAGE in message and what in message, message
    assert words.index("merge the adapter") < words.index("unmerge") < words.index("adapters are not served"), message


def message_of(response: Any) -> str:
    answer = response.json()
    error = answer.get("error", answer)
    return str(error if isinstance(error, str) else error["message"])


@pytest.mark.parametrize("field", lora.REQUEST_FIELDS)
@pytest.mark.parametrize("path", BODIES)
def test_a_field_that_chooses_an_adapter(module_stack: Stack, path: str, field: str) -> None:
    response = module_stack.post(path, BODIES[path] | {field: "adapter"})
    assert response.status_code == 400, response.text
    check(message_of(response), f"`{field}`")


@pytest.mark.parametrize("field", lora.REQUEST_FIELDS)
@pytest.mark.parametrize("path", ["/generate", "/inference/v1/generate"])
def test_a_field_of_the_sampling_parameters(module_stack: Stack, path: str, field: str) -> None:
    response = module_stack.post(path, BODIES[path] | {"sampling_params": {field: {"lora_name": "adapter"}}})
    assert response.status_code == 400, response.text
    check(message_of(response), f"sampling_params.{field}")


def test_an_empty_field_chooses_none(module_stack: Stack) -> None:
    for path, body in BODIES.items():
        response = module_stack.post(path, body | {"lora_path": ""})
        assert response.status_code == 200, (path, response.text)


@pytest.mark.parametrize("path", [path for path in BODIES if path != "/generate"])
def test_a_model_with_an_adapter(module_stack: Stack, path: str) -> None:
    served = module_stack.manager.controls.model_path
    for base in (served, served.rpartition("/")[2]):
        response = module_stack.post(path, BODIES[path] | {"model": f"{base}:adapter"})
        assert response.status_code == 404, response.text
        check(message_of(response), "adapter")


def test_a_model_with_an_adapter_that_generates_nothing(module_stack: Stack) -> None:
    served = module_stack.manager.controls.model_path
    counted = module_stack.post(
        "/v1/messages/count_tokens", {"messages": CHAT["messages"], "model": f"{served}:adapter"}
    )
    for headers in ({}, {"anthropic-version": "x"}):
        asked = module_stack.get(f"/v1/models{served}:adapter", headers=headers)
        for response in (counted, asked):
            assert response.status_code == 404, response.text
            check(message_of(response), ":adapter")


def test_claudes_names_may_have_colons(module_stack: Stack) -> None:
    name = "anthropic.claude-3-5-sonnet-20241022-v2:0"
    assert module_stack.post("/v1/messages", BODIES["/v1/messages"] | {"model": name}).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/load_lora_adapter",
        "/load_lora_adapter_from_tensors",
        "/unload_lora_adapter",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
    ],
)
def test_a_route_for_adapters(module_stack: Stack, path: str) -> None:
    response = module_stack.post(path, {"lora_name": "a", "lora_path": "/a"})
    assert response.status_code == 400, response.text
    check(message_of(response), path)


@pytest.mark.parametrize("method", ["add_lora", "remove_lora", "list_loras", "pin_lora"])
def test_a_method_of_vllms_workers(module_stack: Stack, method: str) -> None:
    response = module_stack.post("/collective_rpc", {"method": method})
    assert response.status_code == 400, response.text
    check(message_of(response), method)

"""The router's own errors have the shapes of each dialect, and so have the events that end a broken stream."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from tests.fleet.fakes import FakeServer, run, running
from tests.server.test_error_shapes import check_shape
from verl_server.errors import (
    ServerDiedError,
    SessionUnavailableError,
    UnauthorizedError,
    error_for_status,
)
from verl_server.fleet.answers import NoServerError, NotThroughRouterError, error_answer, error_event
from verl_server.fleet.operations import RoutedOperation, server_operations

GENERATING = [each for each in server_operations() if each.generates]
FAILED = ServerDiedError("The server that generated ended.")


def events(stream: bytes) -> list[tuple[str | None, Any]]:
    """Return (name, data) of each event; the data of the last one may be [DONE]."""
    found = []
    for block in stream.decode().strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines())
        data = fields["data"]
        found.append((fields.get("event"), data if data == "[DONE]" else json.loads(data)))
    return found


@pytest.mark.parametrize("operation", GENERATING, ids=lambda operation: operation.name)
def test_a_broken_stream_ends_with_an_error_of_its_dialect(operation: RoutedOperation) -> None:
    name, data = events(error_event(operation, FAILED))[0]
    error = data["error"]
    assert error["message"] == str(FAILED)
    ends = [data for _, data in events(error_event(operation, FAILED))[1:]]
    match operation.name:
        case "/generate":
            assert error == {"message": str(FAILED), "type": "server_error", "code": 503, "retryable": True}
            assert (name, ends) == (None, ["[DONE]"])
        case "/v1/completions" | "/v1/chat/completions":
            assert error["type"] == "InternalServerError" and (name, ends) == (None, ["[DONE]"])
        case "/v1/responses":
            assert (name, data["type"], data["message"], ends) == ("error", "error", str(FAILED), [])
        case "/v1/messages":
            assert (name, data["type"], error["type"], ends) == ("error", "error", "overloaded_error", [])
        case "/inference/v1/generate":
            assert data.keys() == {"error"} and error["code"] == 503 and (name, ends) == (None, ["[DONE]"])
        case _:
            raise AssertionError(f"{operation.name} generates, and this test does not know its stream")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
def test_the_openai_sdk_raises_at_a_broken_stream(path: str) -> None:
    operation = next(each for each in GENERATING if each.name == path)

    def handler(request: httpx.Request) -> httpx.Response:
        return httpx.Response(
            200, content=error_event(operation, FAILED), headers={"content-type": "text/event-stream"}
        )

    with (
        openai.OpenAI(
            api_key="k", base_url="http://x/v1", http_client=httpx.Client(transport=httpx.MockTransport(handler))
        ) as client,
        pytest.raises(openai.APIError, match="The server that generated ended"),
    ):
        match path:
            case "/v1/completions":
                list(client.completions.create(model="m", prompt="a", stream=True))
            case "/v1/chat/completions":
                list(client.chat.completions.create(model="m", messages=[], stream=True))
            case _:
                list(client.responses.create(model="m", input="a", stream=True))


@pytest.mark.parametrize("dialect", ["sglang", "openai", "models", "anthropic", "vllm", "sessions", "server"])
@pytest.mark.parametrize(
    ("error", "status", "headers"),
    [
        (NoServerError("none"), 503, {"retry-after": "1", "x-verl-error": "ServerDiedError"}),
        (SessionUnavailableError("away"), 503, {"retry-after": "1", "x-verl-error": "SessionUnavailableError"}),
        (UnauthorizedError("no"), 401, {"www-authenticate": "Bearer", "x-should-retry": "false"}),
        (NotThroughRouterError("no"), 409, {"x-verl-error": "BadRequestError", "x-should-retry": "false"}),
    ],
)
def test_an_error_of_the_router(dialect: str, error: Any, status: int, headers: dict[str, str]) -> None:
    found, sent, body = error_answer(dialect, error)
    given = {name.decode(): value.decode() for name, value in sent}
    assert found == status and given["content-length"] == str(len(body))
    assert headers.items() <= given.items()
    assert ("retry-after" in given) == (status == 503)
    shape = {"models": "openai"}.get(dialect, dialect)
    response = httpx.Response(status, content=body, headers={"content-type": "application/json"})
    assert check_shape(shape, response, dialect) == str(error)
    assert type(error_for_status(status, "x")).status_code == status or status in (401, 409)


PATHS = {
    "/generate": "sglang",
    "/v1/completions": "openai",
    "/v1/messages": "anthropic",
    "/inference/v1/generate": "vllm",
}


@pytest.mark.parametrize("path", list(PATHS))
def test_no_server_is_there(path: str) -> None:
    async def scenario() -> None:
        server = FakeServer()
        async with running(server, hold_seconds=0.05) as fleet:
            await server.stop()
            await fleet.until_states("dead")
            answer = await fleet.post(path)
            assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
            assert server.url in check_shape(PATHS[path], answer, path)
            assert answer.headers["x-verl-instance"] == answer.headers["x-verl-fleet"] == "fleet"
            other = await fleet.post(path, headers={"x-verl-expected-instance": "another"})
            assert other.status_code == 412 and other.headers["x-verl-error"] == "ServerRestartedError"
            check_shape(PATHS[path], other, path)

    run(scenario())

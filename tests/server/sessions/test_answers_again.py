"""A request of a known idempotency key whose answer is no longer kept is answered from its stored turns, never sampled.

The server is started again on its session store, so the kept answers are gone.
"""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import MakeStack, Stack
from tests.server.fake_scheduler import INFO
from verl_server.messages.io_struct import TokenizedGenerateReq
from verl_server.server.app import create_app
from verl_server.server.sessions.service import SessionService

OWNER = {"Authorization": "Bearer owner"}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
USER = [{"role": "user", "content": "a"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER, "tools": [TOOL], "max_tokens": 200, "logprobs": True},
    "/v1/messages": {"messages": USER, "max_tokens": 200, "model": "m"},
    "/v1/responses": {"input": "a", "max_output_tokens": 200},
    "/v1/completions": {"prompt": "a", "max_tokens": 200, "stop": ["}"]},
    "/generate": {"text": "a", "sampling_params": {"max_new_tokens": 200}, "return_logprob": True},
}
OF_ONE_ANSWER = (
    "e2e_latency",
    "response_sent_to_client_ts",
    "cached_tokens",
    "created",
    "created_at",
    "completed_at",
    "session",
)
"""Fields that differ between two answers to one request."""


class Server:
    """A stack with a session store. It samples another text for each request."""

    def __init__(self, stack: Stack, numbers: Iterator[int]) -> None:
        self.stack = stack
        self.service = SessionService(stack.manager, stack.args)
        stack.app = create_app(stack.manager, stack.args, self.service)
        stack.manager.run_sync(self.service.open(), 20)
        text = stack.text
        stack.scheduler.script = lambda req: [*text.encode(f"{next(numbers)} {CALL}"), text.eos_token_ids[0]]

    @property
    def sampled(self) -> int:
        return sum(isinstance(message, TokenizedGenerateReq) for message in self.stack.scheduler.received)

    def ask(self, path: str, key: str, headers: dict[str, str], **more: Any) -> Any:
        return self.stack.post(path, BODIES[path] | more, headers=headers | {"Idempotency-Key": key})


@pytest.fixture
def start(make_stack: MakeStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Server]]:
    servers: list[Server] = []
    numbers = itertools.count()
    monkeypatch.setitem(INFO, "context_length", 4000)
    monkeypatch.setitem(INFO, "max_req_input_len", 3999)

    def begin() -> Server:
        if servers:
            servers[-1].stack.manager.run_sync(servers[-1].service.close(), 20)
        stack = make_stack(api_key="owner", session_store=str(tmp_path / "store"), weight_version="default")
        servers.append(Server(stack, numbers))
        return servers[-1]

    yield begin
    servers[-1].stack.manager.run_sync(servers[-1].service.close(), 20)


def settled(value: Any) -> Any:
    """Return a JSON value without what differs between two answers to one request, and with float32 numbers."""
    if isinstance(value, float):
        return struct.unpack("f", struct.pack("f", value))[0]
    if isinstance(value, dict):
        return {name: settled(each) for name, each in value.items() if name not in OF_ONE_ANSWER}
    return [settled(each) for each in value] if isinstance(value, list) else value


def text_of(path: str, answer: Any) -> str:
    """Return the text of all events of a stream."""
    found = ""
    for line in answer.text.splitlines():
        if line.startswith("data: {"):
            event = json.loads(line[6:])
            if path == "/generate":
                found = event["text"]
                continue
            for choice in event.get("choices", []):
                found += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
            delta = event.get("delta")
            found += delta if isinstance(delta, str) else (delta or {}).get("text", "")
    return found


@pytest.mark.parametrize("path", BODIES)
def test_the_same_answer_after_a_restart(start: Callable[[], Server], path: str) -> None:
    server = start()
    created = server.stack.post("/sessions", {"limits": {"max_turns": 1}}, headers=OWNER).json()
    headers = {"Authorization": f"Bearer {created['key']}"}
    first = server.ask(path, "k", headers)
    assert first.status_code == 200, first.text
    server = start()
    again = server.ask(path, "k", headers)
    assert again.status_code == 200, again.text
    assert settled(again.json()) == settled(first.json())
    assert (server.sampled, again.headers["X-Session-Turn"]) == (0, "0")
    assert server.ask(path, "k", headers, temperature=0.5).status_code == 409, "another body"
    trajectory = server.stack.get(f"/sessions/{created['id']}/trajectory", headers=OWNER).json()
    assert len(trajectory["branches"]) == 1
    if path != "/v1/responses":
        assert server.ask(path, "another", headers).status_code == 403, "max_turns"


@pytest.mark.parametrize("path", BODIES)
def test_the_same_stream_after_a_restart(start: Callable[[], Server], path: str) -> None:
    server = start()
    created = server.stack.post("/sessions", {}, headers=OWNER).json()
    headers = {"Authorization": f"Bearer {created['key']}"}
    first = text_of(path, server.ask(path, "k", headers, stream=True))
    server = start()
    again = server.ask(path, "k", headers, stream=True)
    assert again.status_code == 200, again.text
    assert text_of(path, again) == first != "" and server.sampled == 0


def test_samples_without_an_end_are_sampled(start: Callable[[], Server]) -> None:
    """One of three samples was not stored before the server died."""
    path, server = "/v1/completions", start()
    created = server.stack.post("/sessions", {}, headers=OWNER).json()
    headers = {"Authorization": f"Bearer {created['key']}"}
    first = server.ask(path, "k", headers, n=3).json()
    session = server.service.ledger.table.find(created["id"])
    stored = [choice["text"] for choice in first["choices"]]
    server = start()
    lost = server.service.ledger.table.find(created["id"])
    assert len(session.turns) == len(lost.turns) == 3
    lost.turns[1] = None
    again = server.ask(path, "k", headers, n=3)
    texts = [choice["text"] for choice in again.json()["choices"]]
    assert texts[:2] == [stored[0], stored[2]] and texts[2] not in stored and server.sampled == 1
    assert again.headers["X-Session-Turn"] == "0,2,3"
    tree = server.stack.get(f"/sessions/{created['id']}", headers=OWNER).json()["tree"]
    assert [turn["turn"] for turn in tree] == [0, 2, 3] and tree[-1]["resampled"]


def test_candidates_are_not_recorded(start: Callable[[], Server]) -> None:
    server = start()
    created = server.stack.post("/sessions", {}, headers=OWNER).json()
    headers = {"Authorization": f"Bearer {created['key']}"}
    more = {"logprobs": True, "top_logprobs": 2}
    server.ask("/v1/chat/completions", "k", headers, **more)
    server = start()
    again = server.ask("/v1/chat/completions", "k", headers, **more)
    assert again.status_code == 409 and "candidates" in again.text and server.sampled == 0

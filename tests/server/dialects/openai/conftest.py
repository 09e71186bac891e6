"""Calls of OpenAI's routes on one stack of a module, whose scheduler writes a given text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.conftest import Stack
from tests.server.test_http_routes import events
from verl_server.messages.io_struct import TokenizedGenerateReq

MESSAGES = [{"role": "user", "content": "hi"}]


class Caller:
    """Sends requests, and returns the parsed answers."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.text = stack.text

    def says(self, text: str, chunk: int | None = None) -> None:
        """Make the scheduler answer every request with this text and EOS, in messages of `chunk` tokens."""
        self.stack.scheduler.script = lambda req: [*self.text.encode(text), self.text.eos_token_ids[0]]
        self.stack.scheduler.chunk = chunk

    def cuts(self, text: str, chunk: int | None = None) -> None:
        """Make the scheduler answer every request with this text, which ends at the largest number of tokens."""
        self.stack.scheduler.script = lambda req: self.text.encode(text)
        self.stack.scheduler.chunk = chunk

    def post(self, path: str, **body: Any) -> Any:
        """Return the JSON answer, which must have status 200."""
        response = self.stack.post(path, body)
        assert response.status_code == 200, response.text
        return response.json()

    def complete(self, **body: Any) -> Any:
        return self.post("/v1/completions", **{"prompt": "ab", "max_tokens": 50} | body)

    def chat(self, **body: Any) -> Any:
        return self.post("/v1/chat/completions", **{"messages": MESSAGES} | body)

    def stream(self, path: str, **body: Any) -> list[Any]:
        """Return the frames of a stream."""
        return events(self.stack.post(path, body | {"stream": True}).text)

    def refusal(self, path: str, **body: Any) -> Any:
        """Return the error of a request, which must be refused with status 400."""
        response = self.stack.post(path, body)
        assert response.status_code == 400, response.text
        return response.json()["error"]

    def sent(self) -> TokenizedGenerateReq:
        """Return the last request that the scheduler received."""
        return [m for m in self.stack.scheduler.received if isinstance(m, TokenizedGenerateReq)][-1]


@pytest.fixture
def call(module_stack: Stack) -> Iterator[Caller]:
    caller = Caller(module_stack)
    caller.cuts("Hello!")
    yield caller
    caller.stack.scheduler.script, caller.stack.scheduler.chunk = None, None

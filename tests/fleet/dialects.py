"""One long generation in each dialect: its request, what its answer or its events say, and how its stream ends."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

Said = Sequence[Any]
"""Token ids or text, whichever all events of the dialect have."""
SEED = 3


@dataclass(frozen=True)
class Dialect:
    path: str
    body: Callable[[int], dict[str, Any]]
    """Number of tokens -> body of a request for exactly as many."""
    said: Callable[[dict[str, Any]], Said]
    """Answer -> its token ids or its text."""
    heard: Callable[[list[dict[str, Any]]], Said]
    """Events of a stream -> their token ids or their text, joined."""

    def __str__(self) -> str:
        return self.path


def _joined(texts: list[str]) -> str:
    return "".join(texts)


def _ids(choices: list[dict[str, Any]]) -> list[int]:
    return [token for choice in choices for token in choice.get("token_ids") or []]


def _chosen(answer: dict[str, Any]) -> list[int]:
    return _ids(answer["choices"])


def _all_chosen(events: list[dict[str, Any]]) -> list[int]:
    return [token for event in events for token in _ids(event["choices"])]


_MESSAGES = [{"role": "user", "content": "a"}]
_DRAWN: dict[str, Any] = {"temperature": 1.0, "seed": SEED}
DIALECTS = [
    Dialect(
        "/generate",
        lambda n: {"text": "a", "sampling_params": {"max_new_tokens": n, "temperature": 1.0, "sampling_seed": SEED}},
        lambda answer: answer["output_ids"],
        lambda events: events[-1]["output_ids"] if events else [],
    ),
    Dialect(
        "/v1/completions",
        lambda n: {"prompt": "a", "max_tokens": n, "return_token_ids": True} | _DRAWN,
        _chosen,
        _all_chosen,
    ),
    Dialect(
        "/v1/chat/completions",
        lambda n: {"messages": _MESSAGES, "max_tokens": n, "return_token_ids": True} | _DRAWN,
        _chosen,
        _all_chosen,
    ),
    Dialect(
        "/v1/responses",
        lambda n: {"input": "a", "max_output_tokens": n} | _DRAWN,
        lambda answer: answer["output"][0]["content"][0]["text"],
        lambda events: _joined([each["delta"] for each in events if each["type"] == "response.output_text.delta"]),
    ),
    Dialect(
        "/v1/messages",
        lambda n: {"model": "m", "messages": _MESSAGES, "max_tokens": n, "temperature": 0.0},
        lambda answer: answer["content"][0]["text"],
        lambda events: _joined([each["delta"]["text"] for each in events if each["type"] == "content_block_delta"]),
    ),
    Dialect(
        "/inference/v1/generate",
        lambda n: {"token_ids": [69], "sampling_params": {"max_tokens": n} | _DRAWN},
        _chosen,
        _all_chosen,
    ),
]
_LAST = {"/v1/messages": "message_stop", "/v1/responses": "response.incomplete"}
"""Path -> type of the event that ends a whole stream, where this is not `[DONE]` because all events are typed."""


class Stream:
    """A stream that is read event by event."""

    def __init__(self, dialect: Dialect, answer: httpx.Response) -> None:
        self.dialect = dialect
        self._lines = answer.iter_lines()
        self.events: list[dict[str, Any]] = []
        """Events with content."""
        self.error: dict[str, Any] | None = None
        """Data of the event that reports an error."""
        self.is_whole = False
        self._name = ""

    def read(self) -> bool:
        """Read the next event. Return False at the end. Raise httpx.HTTPError if the connection broke."""
        for line in self._lines:
            if line.startswith("event: "):
                self._name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                self._take(line.removeprefix("data: "))
                self._name = ""
                return True
        return False

    def _take(self, data: str) -> None:
        assert not self.is_whole, f"an event after the last one: {data}"
        if data == "[DONE]":
            self.is_whole = self.error is None
            return
        content = json.loads(data)
        assert self.error is None, f"an event after the error: {data}"
        if "error" in content:
            self.error = content
            assert (self._name == "error") is (self.dialect.path in _LAST)
            return
        self.is_whole = content.get("type") == _LAST.get(self.dialect.path, "")
        self.events.append(content)

    @property
    def heard(self) -> Said:
        return self.dialect.heard(self.events)

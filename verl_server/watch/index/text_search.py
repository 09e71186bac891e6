"""Finds a text in the lines of episodes, without the tokens.

A line that lacks the text as JSON is passed over without decoding. In the others, the texts of the episode are
searched: observations, actions, messages, reasoning, calls and errors. So the name of a key, or a number, is not found.
"""

from __future__ import annotations

import string
from collections.abc import Iterator
from typing import Any

import msgspec

from verl_server.messages.session_types import Message

_LOWER = str.maketrans(string.ascii_uppercase, string.ascii_lowercase)
_AROUND = 60


class TextSearch:
    def __init__(self, text: str) -> None:
        """ASCII letters match in both cases."""
        self._text = text.translate(_LOWER)
        clean = self._text.encode("utf-8", "replace").decode()
        self._json = msgspec.json.encode(clean)[1:-1].lower()

    def find(self, line: bytes) -> str | None:
        """Return the text of a line with what is around it, or None if the line does not have it."""
        if self._json not in line.lower():
            return None
        try:
            texts = _texts(msgspec.json.decode(line, type=_Texts))
            for text in texts:
                at = text.translate(_LOWER).find(self._text)
                if at >= 0:
                    begin, end = max(0, at - _AROUND), at + len(self._text) + _AROUND
                    return ("…" if begin else "") + text[begin:end] + ("…" if end < len(text) else "")
        except (msgspec.DecodeError, ValueError, RecursionError):
            pass
        return None


class _Turn(msgspec.Struct):
    observation: Any = None
    action: Any = None
    messages: list[Message] = []
    reply: Message | None = None


class _Texts(msgspec.Struct):
    """The fields of a line that have text."""

    turns: list[_Turn] = []
    final_observation: Any = None
    error: str | None = None


def _texts(line: _Texts) -> Iterator[str]:
    for turn in line.turns:
        yield from _strings(turn.observation)
        for message in (*turn.messages, *([] if turn.reply is None else [turn.reply])):
            yield from (message.text, message.reasoning)
            for call in message.calls:
                yield from (call.name, call.arguments)
        yield from _strings(turn.action)
    yield from _strings(line.final_observation)
    if line.error is not None:
        yield line.error


def _strings(value: Any) -> Iterator[str]:
    """Yield the texts in a JSON value, without the keys of objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _strings(part)
    elif isinstance(value, list):
        for part in value:
            yield from _strings(part)

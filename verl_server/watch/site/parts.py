"""`parts_of`: what was read and written in a turn, as pieces with a role: texts, reasoning, tool calls, results.

The pieces come from the messages that the file has. Files of agents of earlier versions have none: then the tokens are
decoded, if there is a tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from verl_server.messages.session_types import Message
from verl_server.rollout.trajectory import Trajectory, Turn
from verl_server.watch.site.token_texts import TokenTexts

PartKind = Literal["text", "reasoning", "call", "result", "data"]
Source = Literal["recorded", "decoded", "none"]

ENVIRONMENT, POLICY = "environment", "policy"


@dataclass(frozen=True, slots=True)
class RawPart:
    """A piece of a turn, as the file has it."""

    role: str
    kind: PartKind
    text: str
    name: str | None = None


def source_of(trajectory: Trajectory, texts: TokenTexts | None) -> Source:
    """Return where the pieces of a trajectory come from."""
    if any(_is_recorded(turn) for turn in trajectory.turns) or not trajectory.turns:
        return "recorded"
    return "none" if texts is None else "decoded"


def _is_recorded(turn: Turn) -> bool:
    return bool(turn.observation or turn.messages or turn.reply)


def parts_of(trajectory: Trajectory, place: int, texts: TokenTexts | None) -> list[RawPart]:
    """Return the pieces of turn `place`: what the policy read, then what it wrote.

    After the last turn comes what the environment answered, which the policy did not read.
    """
    turn = trajectory.turns[place]
    names = _call_names(trajectory, place)
    parts = [*_observed(turn.observation)]
    for message in turn.messages:
        parts += _message(message, names)
    if not parts and source_of(trajectory, texts) == "decoded":
        parts += _decoded(trajectory, turn.observation_span, ENVIRONMENT, texts)
    parts += _written(trajectory, turn, texts)
    if place == len(trajectory.turns) - 1 and trajectory.final_observation:
        parts += _observed(trajectory.final_observation)
    return parts


def _observed(observation: dict[str, Any]) -> Iterator[RawPart]:
    """Yield the pieces of an environment's observation: its text, the result of a tool, and the rest as data."""
    rest = dict(observation)
    if "tool_name" in rest and "result" in rest:
        name = str(rest.pop("tool_name"))
        result, error = rest.pop("result"), rest.pop("error", None)
        yield RawPart(ENVIRONMENT, "result", _text(result if error is None else error), name)
    for key in ("text", "prompt", "message", "content"):
        if isinstance(rest.get(key), str):
            yield RawPart(ENVIRONMENT, "text", rest.pop(key), None if key == "text" else key)
    if isinstance(messages := rest.get("messages"), list):
        del rest["messages"]
        for message in messages:
            role = message.get("role") if isinstance(message, dict) else None
            content = message.get("content") if isinstance(message, dict) else message
            yield RawPart(str(role or ENVIRONMENT), "text", _text(content))
    for key, value in rest.items():
        yield RawPart(ENVIRONMENT, "data", _text(value), str(key))


def _message(message: Message, names: dict[str, str]) -> Iterator[RawPart]:
    """Yield the pieces of an agent's message. `names` are those of the tools by the ids of the calls."""
    cut = f"\n[{message.cut} more characters were not recorded]" if message.cut else ""
    if message.reasoning:
        yield RawPart(message.role, "reasoning", message.reasoning)
    if message.call_id or message.role == "tool":
        yield RawPart(message.role, "result", message.text + cut, names.get(message.call_id) or message.call_id or None)
    elif message.text or cut or not (message.calls or message.reasoning):
        yield RawPart(message.role, "text", message.text + cut)
    for call in message.calls:
        yield RawPart(message.role, "call", call.arguments, call.name)


def _written(trajectory: Trajectory, turn: Turn, texts: TokenTexts | None) -> Iterator[RawPart]:
    if turn.reply is not None:
        for part in _message(turn.reply, {}):
            yield RawPart(POLICY, part.kind, part.text, part.name)
        return
    if not trajectory.session and turn.action is not None:
        yield from _action(turn.action)
    elif texts is not None and turn.action_span[0] < turn.action_span[1]:
        yield from _decoded(trajectory, turn.action_span, POLICY, texts)
    else:
        yield from _action(turn.action or {})


def _action(action: dict[str, Any]) -> Iterator[RawPart]:
    """Yield the pieces of an action: reasoning, text, calls, and the rest as data."""
    rest = dict(action)
    for key in ("reasoning", "reasoning_content"):
        if isinstance(rest.get(key), str):
            yield RawPart(POLICY, "reasoning", rest.pop(key))
    for key in ("text", "message", "content"):
        if isinstance(rest.get(key), str):
            yield RawPart(POLICY, "text", rest.pop(key), None if key == "text" else key)
    for key in ("calls", "tool_calls"):
        if isinstance(calls := rest.get(key), list):
            del rest[key]
            for call in calls:
                yield _call(call)
    if isinstance(rest.get("tool_name"), str):
        name, arguments = rest.pop("tool_name"), rest.pop("arguments", {})
        yield RawPart(POLICY, "call", _text(arguments), name)
    for key, value in rest.items():
        yield RawPart(POLICY, "data", _text(value), str(key))


def _call(call: Any) -> RawPart:
    if not isinstance(call, dict):
        return RawPart(POLICY, "call", _text(call))
    function = call.get("function")
    inner = function if isinstance(function, dict) else call
    return RawPart(POLICY, "call", _text(inner.get("arguments", "")), str(inner.get("name", "")) or None)


def _call_names(trajectory: Trajectory, place: int) -> dict[str, str]:
    """Return id -> tool of the calls of this turn's messages and of the turn before, whose results this one reads."""
    turns = trajectory.turns[max(0, place - 1) : place + 1]
    messages = [message for turn in turns for message in (*turn.messages, turn.reply) if message is not None]
    return {call.id: call.name for message in messages for call in message.calls if call.id}


def _decoded(trajectory: Trajectory, span: tuple[int, int], role: str, texts: TokenTexts | None) -> Iterator[RawPart]:
    if texts is not None and span[0] < span[1]:
        yield RawPart(role, "text", texts.span_text(trajectory.tokens[span[0] : span[1]]))


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, indent=1, default=str)

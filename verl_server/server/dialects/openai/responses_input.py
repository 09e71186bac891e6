"""The items of `input` in `/v1/responses`, as messages of a chat.

An assistant's message of a chat has the reasoning, the text and the calls of one reply. In responses each of them is an
item of its own, so consecutive items of a reply are joined.
"""

from __future__ import annotations

from typing import Any

from verl_server.errors import BadRequestError
from verl_server.server.dialects.openai.messages import joined_parts
from verl_server.server.dialects.openai.responses_tools import custom_arguments, offered_name

NO_STORE = (
    "responses are stored in sessions only: create one with POST /sessions, or send the whole conversation in `input`"
)
_KNOWN = "use messages, function_call, custom_tool_call, the outputs of both, and reasoning"
_NO_ITEMS = {
    "item_reference": NO_STORE,
    "compaction": "its text is encrypted for another server; send the conversation, or a summary as a message",
}

Message = dict[str, Any]


def input_messages(instructions: str | None, items: str | list[dict[str, Any]]) -> list[Message]:
    """Return the instructions and the input as messages. Raise BadRequestError, which names the item."""
    messages: list[Message] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    if not items:
        raise BadRequestError("input cannot be empty.")
    for i, item in enumerate(items):
        _add_item(messages, f"input[{i}]", item)
    return messages


def _add_item(messages: list[Message], place: str, item: dict[str, Any]) -> None:
    kind = item.get("type") or "message"
    if kind == "message":
        role = item.get("role")
        if not isinstance(role, str):
            raise BadRequestError(f"{place} needs a `role`.")
        content = _text(f"{place}.content", item.get("content"))
        if role == "assistant":
            reply = _assistant(messages, "content")
            reply["content"] = reply.get("content", "") + content
        else:
            messages.append({"role": role, "content": content})
    elif kind in ("function_call", "custom_tool_call"):
        call = {"name": offered_name(item.get("namespace"), item.get("name")), "arguments": _arguments(place, item)}
        message = _assistant(messages, None)
        message.setdefault("tool_calls", []).append({"id": item.get("call_id"), "type": "function", "function": call})
    elif kind in ("function_call_output", "custom_tool_call_output"):
        output = _text(f"{place}.output", item.get("output"), of_tool=True)
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
    elif kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        _assistant(messages, "reasoning_content")["reasoning_content"] = _text(f"{place}.content", parts)
    else:
        raise BadRequestError(f"{place}.type {kind!r:.64} is not supported: {_NO_ITEMS.get(str(kind), _KNOWN)}.")


def _arguments(place: str, item: dict[str, Any]) -> str | None:
    """Return the arguments of a call, as JSON text."""
    is_custom = item["type"] == "custom_tool_call"
    name, given = item.get("name"), item.get("input" if is_custom else "arguments")
    if is_custom:
        if not isinstance(name, str) or not isinstance(given, str):
            raise BadRequestError(f"{place} needs `name`, the name of a custom tool, and `input`, a text.")
        return custom_arguments(given)
    if not isinstance(name, str) or not isinstance(given, str | None):
        raise BadRequestError(f"{place} needs `name`, the name of a function, and `arguments`, JSON text.")
    return given


def _assistant(messages: list[Message], new: str | None) -> Message:
    """Return the assistant's message to which the next item belongs. One message has reasoning, content and calls.

    `new` is the key that the item sets, None for calls. A reply begins with its reasoning. A text follows a text of
    the same reply only if a call stands between them: the outputs of calls precede the next reply.
    """
    last = messages[-1] if messages else {}
    follows = last.get("role") == "assistant"
    if new == "content":
        follows = follows and (new not in last or "tool_calls" in last)
    elif new == "reasoning_content":
        follows = False
    if not follows:
        messages.append({"role": "assistant"})
    return messages[-1]


def _text(place: str, content: Any, *, of_tool: bool = False) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequestError(f"{place} must be a string or a list of text parts.")
    return joined_parts(place, content, of_tool=of_tool)

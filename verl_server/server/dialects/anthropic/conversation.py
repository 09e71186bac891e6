"""Converts Anthropic's messages, tools and tool choices into OpenAI's shapes, which `chat.tools` decodes.

An error names the block that it refuses, for example `messages[2].content[0]`. The names of images and documents end
with their type, `messages[2].content[0].image`, as in Anthropic's errors: clients find the block by it, leave it out
and go on.

What a tool returned is not refused, because the policy would lose its episode: it reads a line of text in the place of
an image.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verl_server.errors import BadRequestError
from verl_server.server.dialects.anthropic.client_tools import client_tool

Message = dict[str, Any]

_REDACTED = "its text is encrypted for another server: leave the block out"
_NO_BLOCKS = {
    "document": "send the text in a text block",
    "search_result": "send the text in a text block",
    "redacted_thinking": _REDACTED,
    "container_upload": "the server runs no code",
}
_ATTRIBUTION = "x-anthropic-billing-header:"
"""Beginning of a system block with the version of Claude Code, which is no instruction. It differs between
conversations, so their prompts would have no common beginning."""
_TOOL_SEARCH = "tool_search_tool_"
"""Beginning of the types of Anthropic's tools that find deferred tools, which the server offers like other tools."""


def read_messages(system: str | Sequence[Message] | None, messages: Sequence[Message]) -> list[Message]:
    """Return the conversation in OpenAI's shape. Adjacent messages of one role are joined, as in Anthropic's API."""
    if not messages:
        raise BadRequestError("messages cannot be empty.")
    found: list[Message] = []
    if shown := _without_attribution(system or ""):
        found.append({"role": "system", "content": _text("system", shown)})
    for i, message in enumerate(messages):
        place = f"messages[{i}]"
        role = message.get("role")
        if role == "assistant":
            found.append(_assistant(place, message.get("content")))
        elif role == "user":
            found += _user(place, message.get("content"))
        elif role == "system":
            found.append({"role": "system", "content": _text(f"{place}.content", message.get("content"))})
        else:
            raise BadRequestError(f'{place}.role must be "user", "assistant" or "system", not {role!r:.64}.')
    return _joined(found)


def _without_attribution(system: str | Sequence[Message]) -> Any:
    if isinstance(system, str):
        return system
    return [block for block in system if not str(block.get("text")).startswith(_ATTRIBUTION)]


def _user(place: str, content: Any) -> list[Message]:
    """Return the messages of a user's turn: one for each tool result, and one for the text."""
    results: list[Message] = []
    texts: list[str] = []
    for at, block in _blocks(f"{place}.content", content):
        if block["type"] in _TEXT_OF_BLOCK:
            texts.append(_TEXT_OF_BLOCK[block["type"]](at, block))
        elif block["type"] == "tool_result":
            text = _text(f"{at}.content", block.get("content") or "", _TEXT_OF_RESULT)
            result: Message = {"role": "tool", "tool_call_id": _string(at, block, "tool_use_id"), "content": text}
            results.append(result | ({"is_error": True} if block.get("is_error") else {}))
        else:
            raise _refused(at, block, "a user's message")
    return [*results, {"role": "user", "content": "\n".join(texts)}] if texts or not results else results


def _assistant(place: str, content: Any) -> Message:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[Message] = []
    for at, block in _blocks(f"{place}.content", content):
        if block["type"] == "text":
            texts.append(_string(at, block, "text"))
        elif block["type"] == "thinking":
            thoughts.append(_string(at, block, "thinking"))
        elif block["type"] == "tool_use":
            arguments = block.get("input")
            arguments = {} if arguments is None else arguments
            if not isinstance(arguments, dict):
                raise BadRequestError(f"{at}.input must be an object.")
            function = {"name": _string(at, block, "name"), "arguments": arguments}
            calls.append({"id": _string(at, block, "id"), "type": "function", "function": function})
        else:
            raise _refused(at, block, "the assistant's message")
    message: Message = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _joined(messages: Sequence[Message]) -> list[Message]:
    """Join adjacent messages of the user, and of the assistant if the first message has no tool calls."""
    joined: list[Message] = []
    for message in messages:
        last = joined[-1] if joined else {}
        same = last.get("role") == message["role"]
        if same and message["role"] == "user":
            joined[-1] = last | {"content": f"{last['content']}\n{message['content']}"}
        elif same and message["role"] == "assistant" and "tool_calls" not in last:
            thoughts = last.get("reasoning_content", "") + message.get("reasoning_content", "")
            reasoning = {"reasoning_content": thoughts} if thoughts else {}
            joined[-1] = message | {"content": last["content"] + message["content"]} | reasoning
        else:
            joined.append(message)
    return joined


def _blocks(place: str, content: Any, what: str = "blocks") -> list[tuple[str, Message]]:
    """Return (place, block) of each block of a content.

    The content is a list of `what`, or a string: one text block.
    """
    if isinstance(content, str):
        return [(place, {"type": "text", "text": content})]
    if not isinstance(content, list):
        raise BadRequestError(f"{place} must be a string or a list of {what}.")
    found = [(f"{place}[{i}]", block) for i, block in enumerate(content)]
    for at, block in found:
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise BadRequestError(f"{at} must be an object with `type`.")
    return found


def _text(place: str, content: Any, readers: Readers | None = None) -> str:
    """Return a string, or the joined text of a list of blocks that `readers` read. Default: of text blocks only."""
    texts = []
    for at, block in _blocks(place, content, "text blocks"):
        reader = (readers or _ONLY_TEXT).get(block["type"])
        if reader is None:
            raise _refused(at, block, "this place")
        texts.append(reader(at, block))
    return "\n".join(texts)


def _plain(place: str, block: Message) -> str:
    return _string(place, block, "text")


def _document(place: str, block: Message) -> str:
    """Return title, context and text of a document. Raise BadRequestError if its source is not text in the body."""
    place = f"{place}.document"
    source = block.get("source")
    kind = source.get("type") if isinstance(source, dict) else None
    if isinstance(source, dict) and kind == "text":
        text = _string(f"{place}.source", source, "data")
    elif isinstance(source, dict) and kind == "content":
        text = _text(f"{place}.source.content", source.get("content"))
    else:
        raise BadRequestError(
            f"{place}.source.type {kind!r:.64} is not supported: only text is served. Send a source of the type text "
            "or content, or the text in a text block."
        )
    return _headed(place, block, ("title", "context"), text)


def _document_of_tool(place: str, block: Message) -> str:
    source = block.get("source")
    is_text = not isinstance(source, dict) or source.get("type") in ("text", "content")
    return _document(place, block) if is_text else _left_out(place, block)


def _left_out(place: str, block: Message) -> str:
    return f"[{block['type']}: left out, because the model reads text only]"


def _tool_reference(place: str, block: Message) -> str:
    return f"Found the tool {_string(place, block, 'tool_name')}."


def _search_result(place: str, block: Message) -> str:
    return _headed(place, block, ("title", "source"), _text(f"{place}.content", block.get("content")))


def _headed(place: str, block: Message, heads: Sequence[str], text: str) -> str:
    """Return a text below the `heads` of its block. Raise BadRequestError if the answer should cite the text."""
    citations = block.get("citations")
    if isinstance(citations, dict) and citations.get("enabled"):
        raise BadRequestError(f"{place}.citations is not supported: answers hold no citations. Leave it out.")
    given = [_string(place, block, head) for head in heads if block.get(head)]
    return "\n".join([*given, text])


Readers = Mapping[str, Callable[[str, Message], str]]
"""Type of a block -> function from (place, block) to its text."""
_ONLY_TEXT: Readers = {"text": _plain}
_TEXT_OF_BLOCK: Readers = {"text": _plain, "document": _document, "search_result": _search_result}
"""The blocks of a user's message that are text."""
_TEXT_OF_RESULT: Readers = {
    **_TEXT_OF_BLOCK,
    "document": _document_of_tool,
    "image": _left_out,
    "tool_reference": _tool_reference,
}
"""The blocks of a tool's result, which all have a text."""


def _string(place: str, block: Mapping[str, Any], key: str) -> str:
    value = block.get(key)
    if not isinstance(value, str):
        raise BadRequestError(f"{place}.{key} must be a string.")
    return value


def _refused(place: str, block: Message, where: str) -> BadRequestError:
    kind = block["type"]
    if kind == "image":
        return BadRequestError(f"{place}.image is not supported: only text is served. Leave the block out.")
    remedy = _NO_BLOCKS.get(kind, f"{where} cannot have it")
    return BadRequestError(f"{place} has the type {kind!r:.64}, which is not supported: {remedy}.")


# -- tools --------------------------------------------------------------------------------------------------


def openai_tools(tools: Sequence[Message] | None) -> list[Message]:
    """Return tools in OpenAI's shape, without Anthropic's tool search."""
    offered = [(i, tool) for i, tool in enumerate(tools or ()) if not str(tool.get("type")).startswith(_TOOL_SEARCH)]
    return [_openai_tool(f"tools[{i}]", tool) for i, tool in offered]


def _openai_tool(place: str, tool: Message) -> Message:
    kind = tool.get("type") or "custom"
    if (known := client_tool(str(kind))) is not None:
        meaning, parameters = known
        offered = {"name": _string(place, tool, "name"), "description": meaning, "parameters": parameters}
        return {"type": "function", "function": offered}
    if kind != "custom":
        raise BadRequestError(
            f"{place}.type {kind!r:.64} is not supported: the server has no tools of its own. Declare a tool with "
            "`name`, `description` and `input_schema`."
        )
    if tool.get("allowed_callers") not in (None, [], ["direct"]):
        raise BadRequestError(f"{place}.allowed_callers is not supported: only the client calls tools.")
    if not isinstance(tool.get("input_schema"), dict):
        raise BadRequestError(f"{place}.input_schema must be a JSON schema (an object).")
    description = _described(place, tool)
    function = {"name": tool.get("name"), "description": description, "parameters": tool["input_schema"]}
    if tool.get("strict") is not None:
        function["strict"] = tool["strict"]
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def _described(place: str, tool: Message) -> Any:
    """Return the description of a tool, with its examples if it has some."""
    description, examples = tool.get("description"), tool.get("input_examples")
    if not examples:
        return description
    if not isinstance(examples, list) or not isinstance(description, str | None):
        raise BadRequestError(f"{place}.input_examples must be a list, and description a string.")
    shown = [f"Example: {json.dumps(example, ensure_ascii=False)}" for example in examples]
    return "\n".join([*([description] if description else []), *shown])


def openai_tool_choice(choice: Message | None) -> tuple[Any, bool]:
    """Return (OpenAI's tool_choice, True if several calls are permitted)."""
    if choice is None:
        return None, True
    single = choice.get("disable_parallel_tool_use", False)
    if not isinstance(single, bool | None):
        raise BadRequestError("tool_choice.disable_parallel_tool_use must be true or false.")
    convert = _CHOICES.get(str(choice.get("type")))
    if convert is None:
        raise BadRequestError(f"tool_choice.type must be one of {', '.join(_CHOICES)}, not {choice.get('type')!r:.64}.")
    return convert(choice), not single


def _named(choice: Message) -> Message:
    return {"type": "function", "function": {"name": _string("tool_choice", choice, "name")}}


_CHOICES: dict[str, Callable[[Message], Any]] = {
    "auto": lambda choice: "auto",
    "any": lambda choice: "required",
    "tool": _named,
    "none": lambda choice: "none",
}

"""Messages and template variables of OpenAI's chats, in the form that `chat_prompt.read_chat_prompt` expects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from verl_server.chat.tools import read_tool_choice, read_tools
from verl_server.errors import BadRequestError
from verl_server.server.dialects.openai.files import FILE_PARTS, file_text
from verl_server.server.dialects.openai.protocol import OpenAIRequest
from verl_server.server.text.chat_prompt import ChatPrompt, read_chat_prompt
from verl_server.server.text.text_tools import TextTools

_EFFORT_VARIABLES = ("reasoning_effort", "enable_thinking", "thinking")
"""Template variables that `reasoning_effort` sets. Most templates read none or some of them."""


def read_openai_prompt(
    text: TextTools,
    messages: Sequence[dict[str, Any]],
    options: dict[str, Any],
    *,
    tools: Any = None,
    tool_places: Sequence[str] = (),
    tool_choice: Any = None,
    parallel: bool = True,
    constrained: OpenAIRequest | None = None,
    input_ids: list[int] | None = None,
) -> ChatPrompt:
    """Return the prompt of a conversation in OpenAI's shape. Raise BadRequestError or NeedsWorkerError.

    `tool_places` are the names of `tools` in errors; default: `tools[0]`, `tools[1]`, ...

    `constrained` is the request with the constraints of the output. If the policy may reason or call tools, a JSON
    schema is removed from this request and becomes a part of the prompt's grammar. So the schema does not constrain
    reasoning and calls.
    """
    declared = read_tools(tools, tool_places)
    choice = read_tool_choice(tool_choice, declared)
    if input_ids is None:
        messages = text_messages(messages)
    elif not input_ids:
        raise BadRequestError("input_ids cannot be empty.")
    reasons = text.output_format(options).reasoning_format is not None
    schema = constraint = None
    if constrained is not None:
        schema = constrained.take_schema() if reasons or choice.mode != "none" else None
        constraint = constrained.constraint_name
    prompt = read_chat_prompt(text, messages, options, declared, choice, parallel, schema, constraint, input_ids)
    if constraint is not None and prompt.output.begins_in_reasoning:  # it describes the output from its start
        prompt = msgspec.structs.replace(prompt, output=prompt.output.without_reasoning())
    return msgspec.structs.replace(prompt, unused_options=_unused(prompt.unused_options, options))


def effort_options(effort: str | float | None) -> dict[str, Any]:
    """Return the template variables of a reasoning effort."""
    if effort is None:
        return {}
    thinks = effort != "none"
    return {"reasoning_effort": effort, "enable_thinking": thinks, "thinking": thinks}


def verbosity_options(verbosity: str | None) -> dict[str, Any]:
    """Return the template variable of a verbosity. `medium` is what a model does by default."""
    return {} if verbosity in (None, "medium") else {"verbosity": verbosity}


def _unused(names: list[str], options: Mapping[str, Any]) -> list[str]:
    """Return the unused variables.

    If a template reads one variable of the reasoning effort, none of them counts as unused.
    """
    if "reasoning_effort" not in options:
        return names
    efforts = [name for name in names if name in _EFFORT_VARIABLES]
    others = [name for name in names if name not in efforts]
    return [*others, "reasoning_effort"] if len(efforts) == len(_EFFORT_VARIABLES) else others


def text_messages(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with each `content` as one string. The text of a refusal is the content of its message.

    The role "developer" becomes "system", because the served models' templates lack this role, and some templates drop
    messages of unknown roles.
    """
    if not messages:
        raise BadRequestError("messages cannot be empty.")
    plain = []
    for i, message in enumerate(messages):
        role = message.get("role")
        if not isinstance(role, str):
            raise BadRequestError(f"messages[{i}] needs a `role`.")
        content = message.get("content")
        if content is None and isinstance(message.get("refusal"), str):
            content = message["refusal"]
        if isinstance(content, list):
            content = joined_parts(f"messages[{i}]", content, of_tool=role == "tool")
        elif content is not None and not isinstance(content, str):
            raise BadRequestError(f"messages[{i}].content must be a string or a list of text parts.")
        role = "system" if role == "developer" else role
        plain.append(message | {"role": role, "content": content if content is not None else ""})
    return plain


_TEXT_OF_PART: dict[str | None, str] = {
    None: "text",
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "reasoning_text": "text",
    "summary_text": "text",
    "refusal": "refusal",
}
"""Type of a part that is text, in chats or responses -> the key with the text."""


_IMAGE_PARTS = ("image_url", "input_image")
_NO_IMAGE = "[image: left out, because the model reads text only]"


def joined_parts(place: str, parts: Sequence[Any], *, of_tool: bool = False) -> str:
    """Return the joined text of a content's parts, which may be strings and files of text.

    In the output of a tool (`of_tool`), a text stands in the place of an image: the program that plays did not choose
    what the policy looks at, and an error would end it. Raise BadRequestError for other parts.
    """
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(part, dict) and kind in FILE_PARTS:
            texts.append(file_text(place, part))
            continue
        if of_tool and kind in _IMAGE_PARTS:
            texts.append(_NO_IMAGE)
            continue
        key = _TEXT_OF_PART.get(kind) if isinstance(kind, str | None) else None
        text = part if isinstance(part, str) else part.get(key) if isinstance(part, dict) and key is not None else None
        if not isinstance(text, str):
            raise BadRequestError(f"{place} has a part that is not text; only text is served.")
        texts.append(text)
    return "".join(texts)

"""Parses, renders and tokenizes the bodies of Anthropic's routes, in text workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from jinja2 import TemplateError

from verl_server.chat.tools import read_tool_choice, read_tools
from verl_server.errors import BadRequestError
from verl_server.sampling_params import SamplingParams
from verl_server.server.dialects.anthropic.conversation import openai_tool_choice, openai_tools, read_messages
from verl_server.server.dialects.anthropic.protocol import CountTokensRequest, MessagesRequest, parse_body
from verl_server.server.dialects.openai.constraints import constraint, read_schema
from verl_server.server.text.chat_prompt import ChatOutput, ChatPrompt, ReadConversation, read_chat_prompt
from verl_server.server.text.text_tools import Job, TextTools
from verl_server.web.json_body import parse_json

_SGLANG = ("json_schema", "regex", "ebnf")
"""Fields of SGLang that constrain the output."""
_MIDDLE_SYSTEM = (
    "A message of the role `system` behind the first message is not supported by the chat template: send its text in a "
    "user's message. {error}"
)
"""Claude Code looks for the words "role `system`" and "not supported", and then sends user's messages instead."""


class ReadMessages(ReadConversation, kw_only=True):
    """Result of the job `MESSAGES`."""

    request: MessagesRequest
    """The request without messages, system and tools."""
    sampling_params: dict[str, Any]
    end_of_call: str | None
    """Stop string that ends the output after one call, if only one call is permitted."""


class CountedTokens(msgspec.Struct, kw_only=True):
    """Result of the job `COUNT_TOKENS`."""

    model: str
    """The model that the request names."""
    count: int
    unused_options: list[str]
    unknown_fields: list[str]


def read_message_request(tools: TextTools, body: bytes) -> ReadMessages:
    request, unknown = parse_body(parse_json(body), MessagesRequest)
    tools.decoder(True)  # raises without a tokenizer, which the text of the reply needs
    if "" in (request.stop_sequences or ()):
        raise BadRequestError("stop_sequences cannot hold an empty string.")
    params = request.sampling_params()
    tools.limits.check_sampling(SamplingParams.parse(params))
    given = constraint(_format(request) | {name: getattr(request, name) for name in _SGLANG})
    prompt, parallel = _prompt(tools, request, given)
    # As in Anthropic's API, a message may ask for more tokens than the context has room for.
    room = tools.bounds.longest - prompt.length
    params["max_new_tokens"] = min(request.max_tokens, max(room, 0))
    params |= given if prompt.output.grammar is None else {"ebnf": prompt.output.grammar}
    if prompt.output.keeps_special_tokens:
        params["skip_special_tokens"] = False
    end_of_call = _end_of_call(prompt.output) if not parallel else None
    if end_of_call is not None:
        params["stop"] = [*(request.stop_sequences or ()), end_of_call]
    read = ReadMessages(
        request=request,
        prompts=[prompt.checked(tools)],
        sampling_params=params,
        output=msgspec.structs.replace(prompt.output, grammar=None),
        end_of_call=end_of_call,
        unknown_fields=unknown,
        unused_options=prompt.unused_options,
        next=prompt.next,
    )
    request.messages, request.system, request.tools, request.output_config = [], None, None, None
    request.json_schema = request.regex = request.ebnf = None
    return read


def count_tokens(tools: TextTools, body: bytes) -> CountedTokens:
    request, unknown = parse_body(parse_json(body), CountTokensRequest)
    prompt, _ = _prompt(tools, request, constraint(_format(request)))
    return CountedTokens(
        model=request.model, count=prompt.length, unused_options=prompt.unused_options, unknown_fields=unknown
    )


MESSAGES = Job("messages", read_message_request, ReadMessages)
COUNT_TOKENS = Job("count_tokens", count_tokens, CountedTokens)


def _prompt(tools: TextTools, request: CountTokensRequest, given: Mapping[str, str]) -> tuple[ChatPrompt, bool]:
    """Return (rendered prompt, True if the policy may call several tools). `given` is the constraint of the output."""
    messages = read_messages(request.system, request.messages)
    options: dict[str, Any] = {}
    if messages[-1]["role"] == "assistant":
        if "tool_calls" in messages[-1]:
            raise BadRequestError("The last message calls tools: add a user's message with their tool_result blocks.")
        options |= {"continue_final_message": True}
    thinking = request.thinking
    if thinking is not None and thinking.type in ("enabled", "disabled"):
        options["enable_thinking"] = thinking.type == "enabled"
    elif thinking is not None and thinking.type not in ("adaptive", "between_tools"):
        raise BadRequestError(
            f"thinking.type must be enabled, disabled, adaptive or between_tools, not {thinking.type!r:.64}."
        )
    declared = read_tools(openai_tools(request.tools))
    wanted, parallel = openai_tool_choice(request.tool_choice)
    choice = read_tool_choice(wanted, declared)
    found = read_schema(given["json_schema"]) if "json_schema" in given else False
    schema = None if found is False else found  # false permits nothing, and is left to the sampler
    other = next(iter(given), None) if schema is None else None
    try:
        prompt = read_chat_prompt(tools, messages, options, declared, choice, parallel, schema, other)
    except BadRequestError as error:
        if isinstance(error.__cause__, TemplateError) and any(each["role"] == "system" for each in messages[1:]):
            raise BadRequestError(_MIDDLE_SYSTEM.format(error=error)) from error
        raise
    if other is not None and prompt.output.begins_in_reasoning:  # the constraint describes the output from its start
        prompt = msgspec.structs.replace(prompt, output=prompt.output.without_reasoning())
    return prompt, parallel


def _end_of_call(output: ChatOutput) -> str | None:
    """Return the stop string that ends the output after its first call, or None if there are no tools.

    Raise BadRequestError if the tool format has no such string, and no grammar restricts the output to one call.
    """
    format = output.format.tool_format
    if format is None or not output.tools or output.grammar is not None:
        return None
    if not format.close:
        raise BadRequestError(
            "tool_choice.disable_parallel_tool_use is not supported with type auto for the tool format "
            f"`{output.format.tools}` of the served model: calls have no closing tag. Use type any or tool."
        )
    return format.close


def _format(request: CountTokensRequest) -> dict[str, Any]:
    """Return {"output_config.format": its JSON schema}, or {} if the request has none."""
    format = None if request.output_config is None else request.output_config.format
    if format is None:
        return {}
    schema = format.get("schema")
    if format.get("type") != "json_schema" or not isinstance(schema, dict):
        raise BadRequestError('output_config.format must be {"type": "json_schema", "schema": {...}}.')
    return {"output_config.format": schema}

"""The bodies of `/tokenize` and `/detokenize`, and the jobs that answer them."""

from __future__ import annotations

from typing import Any

import msgspec
import orjson

from verl_server.errors import BadRequestError
from verl_server.server.dialects.openai.messages import read_openai_prompt
from verl_server.server.dialects.openai.protocol import Verbosity, parse_openai
from verl_server.server.dialects.openai.reading import template_options
from verl_server.server.text.text_tools import Job, TextTools
from verl_server.web.json_body import parse_json

TOKENIZE_REFUSED = {"return_token_strs": "use /detokenize", "return_mm_data": "only text is served"}
TOKENIZE_WITHOUT_EFFECT = {
    "model": "a server serves one model",
    "tool_choice": "the chat template gets the tools in any case",
}
DETOKENIZE_WITHOUT_EFFECT = {"model": "a server serves one model"}


class TextReply(msgspec.Struct, kw_only=True):
    """A reply of `/tokenize` or `/detokenize`."""

    json: memoryview
    """The encoded body of the reply."""
    unused_options: list[str] = []
    """See `ChatPrompt.unused_options`."""
    unknown_fields: list[str]


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of `POST /tokenize`. Set exactly one of `prompt` and `messages`."""

    prompt: str | list[str] | None = None
    """A text, or a list of texts."""
    messages: list[dict[str, Any]] | None = None
    """Chat messages, which the chat template renders."""
    add_special_tokens: bool = True
    """Add the tokenizer's special tokens, such as a token for the beginning of the text, to `prompt`. The chat template
    adds those of `messages`."""
    add_generation_prompt: bool = True
    """End `messages` with the tokens that begin a message of the assistant."""
    continue_final_message: bool = False
    """Continue the last message instead of beginning a new one."""
    tools: list[dict[str, Any]] | None = None
    """Tools for the chat template, as in a chat."""
    documents: list[dict[str, Any]] | None = None
    """Documents for the chat template, as in a chat."""
    verbosity: Verbosity | None = None
    """`verbosity` of a chat."""
    reasoning_effort: str | float | None = None
    """`reasoning_effort` of a chat."""
    chat_template: str | None = None
    """A chat template that the operator allows (`allowed_chat_templates`)."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template."""


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of `POST /detokenize`."""

    tokens: list[int | list[int]]
    """Token ids, or a list of such lists."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""


def tokenize(tools: TextTools, body: bytes) -> TextReply:
    request, unknown = parse_openai(parse_json(body), TokenizeRequest, TOKENIZE_REFUSED)
    if (request.prompt is None) == (request.messages is None):
        raise BadRequestError("Give exactly one of `prompt` and `messages`.")
    unused: list[str] = []
    tokens: list[Any]
    if request.messages is not None:
        prompt = read_openai_prompt(tools, request.messages, template_options(request), tools=request.tools)
        tokens, unused = prompt.ids, prompt.unused_options
        count: Any = len(tokens)
    elif isinstance(request.prompt, str):
        (tokens,) = tools.encode([request.prompt], request.add_special_tokens)
        count = len(tokens)
    else:
        tokens = tools.encode(request.prompt or [], request.add_special_tokens)
        count = [len(ids) for ids in tokens]
    reply = {"tokens": tokens, "count": count, "max_model_len": tools.bounds.context_length}
    return TextReply(json=memoryview(orjson.dumps(reply)), unused_options=unused, unknown_fields=unknown)


def detokenize(tools: TextTools, body: bytes) -> TextReply:
    request, unknown = parse_openai(parse_json(body), DetokenizeRequest, {})
    decode = tools.decoder(request.skip_special_tokens)
    nested = bool(request.tokens) and isinstance(request.tokens[0], list)
    if any(isinstance(part, list) != nested for part in request.tokens):
        raise BadRequestError("tokens mixes ids and lists.")
    batch: list[list[int]] = request.tokens if nested else [request.tokens]  # type: ignore[assignment,list-item]
    tools.check_decode(sum(map(len, batch)))
    for ids in batch:
        tools.bounds.check_ids("tokens", ids)
    texts = [decode(ids) for ids in batch]
    text = texts if nested else texts[0]
    return TextReply(json=memoryview(orjson.dumps({"text": text, "prompt": text})), unknown_fields=unknown)


TOKENIZE = Job("tokenize", tokenize, TextReply)
DETOKENIZE = Job("detokenize", detokenize, TextReply)

"""Parses and tokenizes the bodies of OpenAI's routes, on the event loop if they are small, otherwise in a text worker.

Each `Job` is the part of one route's work that grows with the body. Chat templates are rendered in text workers only.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import orjson

from verl_server.errors import BadRequestError
from verl_server.sampling_params import SamplingParams
from verl_server.server.dialects.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    parse_openai,
    text_messages,
)
from verl_server.server.json_body import parse_json
from verl_server.server.text_tools import Ids, Job, TextTools


class ReadCompletion(msgspec.Struct, kw_only=True):
    """Result of the job `COMPLETION`."""

    request: CompletionRequest
    """The request with an empty `prompt`."""
    prompts: list[Ids]
    is_single: bool
    unknown_fields: int


class ReadChat(msgspec.Struct, kw_only=True):
    """Result of the job `CHAT`."""

    request: ChatCompletionRequest
    """The request without `messages`, `input_ids` and `chat_template_kwargs`."""
    prompts: list[Ids]
    """Always one prompt."""
    is_single: bool = True
    unknown_fields: int
    unused_options: list[str]
    """Names in `chat_template_kwargs` that the template does not use. They are no error."""


class TextReply(msgspec.Struct, kw_only=True):
    """A reply of `/tokenize` or `/detokenize`."""

    json: memoryview
    """The encoded body of the reply."""
    unused_options: list[str] = []
    """See `ReadChat.unused_options`."""


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of `POST /tokenize`. Set exactly one of `prompt` and `messages`."""

    prompt: str | list[str] | None = None
    """A text, or a list of texts."""
    messages: list[dict[str, Any]] | None = None
    """Chat messages, which the chat template renders."""
    add_special_tokens: bool = True
    """Add the tokenizer's special tokens, such as a token for the beginning of the text, to `prompt`."""
    add_generation_prompt: bool = True
    """End `messages` with the tokens that begin a message of the assistant."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template."""


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of `POST /detokenize`."""

    tokens: list[int | list[int]]
    """Token ids, or a list of such lists."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""


def read_completion(tools: TextTools, body: bytes) -> ReadCompletion:
    request, unknown = parse_openai(parse_json(body), CompletionRequest)
    tools.decoder(True)  # raises without a tokenizer, which the text of the reply needs
    tools.limits.check_sampling(SamplingParams.parse(request.sampling_params(None)))
    prompts, is_single = _split_prompt(request.prompt)
    tools.limits.check_samples(len(prompts), 1)
    read = tools.prompts(prompts)
    request.prompt = ""
    return ReadCompletion(request=request, prompts=read, is_single=is_single, unknown_fields=unknown)


def read_chat(tools: TextTools, body: bytes) -> ReadChat:
    request, unknown = parse_openai(parse_json(body), ChatCompletionRequest)
    tools.decoder(True)
    tools.limits.check_sampling(SamplingParams.parse(request.sampling_params(None)))
    unused: list[str] = []
    ids = request.input_ids
    if ids is None:
        options = dict(request.chat_template_kwargs or {})
        if request.continue_final_message:
            options["continue_final_message"] = True
        # A prompt that continues a message must not begin another one, so the default of add_generation_prompt changes.
        opens_answer = request.add_generation_prompt and not options.get("continue_final_message", False)
        options.setdefault("add_generation_prompt", opens_answer)
        ids, unused = tools.render(text_messages(request.messages), options)
    elif not ids:
        raise BadRequestError("input_ids cannot be empty.")
    prompts = [tools.prompt(ids)]
    request.messages, request.input_ids, request.chat_template_kwargs = [], None, None
    return ReadChat(request=request, prompts=prompts, unknown_fields=unknown, unused_options=unused)


def tokenize(tools: TextTools, body: bytes) -> TextReply:
    request = _convert(parse_json(body), TokenizeRequest)
    if (request.prompt is None) == (request.messages is None):
        raise BadRequestError("Give exactly one of `prompt` and `messages`.")
    unused: list[str] = []
    tokens: list[Any]
    if request.messages is not None:
        options = dict(request.chat_template_kwargs or {})
        options.setdefault("add_generation_prompt", request.add_generation_prompt)
        tokens, unused = tools.render(text_messages(request.messages), options)
        count: Any = len(tokens)
    elif isinstance(request.prompt, str):
        (tokens,) = tools.encode([request.prompt], request.add_special_tokens)
        count = len(tokens)
    else:
        tokens = tools.encode(request.prompt or [], request.add_special_tokens)
        count = [len(ids) for ids in tokens]
    reply = {"tokens": tokens, "count": count, "max_model_len": tools.bounds.context_length}
    return TextReply(json=memoryview(orjson.dumps(reply)), unused_options=unused)


def detokenize(tools: TextTools, body: bytes) -> TextReply:
    request = _convert(parse_json(body), DetokenizeRequest)
    decode = tools.decoder(request.skip_special_tokens)
    nested = bool(request.tokens) and isinstance(request.tokens[0], list)
    if any(isinstance(part, list) != nested for part in request.tokens):
        raise BadRequestError("tokens mixes ids and lists.")
    batch: list[list[int]] = request.tokens if nested else [request.tokens]  # type: ignore[assignment,list-item]
    tools.check_decode(sum(map(len, batch)))
    for ids in batch:
        tools.bounds.check_ids("tokens", ids)
    texts = [decode(ids) for ids in batch]
    return TextReply(json=memoryview(orjson.dumps({"text": texts if nested else texts[0]})))


COMPLETION = Job("completion", read_completion, ReadCompletion)
CHAT = Job("chat", read_chat, ReadChat)
TOKENIZE = Job("tokenize", tokenize, TextReply)
DETOKENIZE = Job("detokenize", detokenize, TextReply)


def _split_prompt(prompt: str | list[Any]) -> tuple[list[str | list[int]], bool]:
    """Return (prompts, True if the body has one prompt and not a list) for any of the four forms of `prompt`."""
    if isinstance(prompt, str):
        return [prompt], True
    if not prompt:
        raise BadRequestError("prompt cannot be empty.")
    kinds = Counter(map(type, prompt))
    if len(kinds) > 1:
        raise BadRequestError("prompt mixes strings, token ids and lists of them.")
    return ([prompt], True) if int in kinds else (prompt, False)


def _convert(body: Any, kind: type[Any]) -> Any:
    given = {key: value for key, value in body.items() if value is not None} if isinstance(body, dict) else body
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise BadRequestError(str(error).replace("`$.", "`")) from None

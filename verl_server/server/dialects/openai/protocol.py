"""Bodies of `/v1/completions` and `/v1/chat/completions`, and what they mean as a `GenerateReqInput`.

OpenAI's fields plus SGLang's extras. Fields that we know and do not implement are refused when set; unknown
ones are ignored, as the standard's clients expect, and counted by the caller.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from verl_server.errors import BadRequestError
from verl_server.server.generate_request import ACCEPTED_HINTS, UNSUPPORTED_FIELDS

R = TypeVar("R", bound="OpenAIRequest")

_NO_TOOLS = "tool calls are not parsed; put the tools in the messages and read the text"
_NO_GRAMMAR = "constrained decoding is not implemented"
_UNSUPPORTED = UNSUPPORTED_FIELDS | {
    "tools": _NO_TOOLS,
    "functions": _NO_TOOLS,
    "suffix": "fill-in-the-middle is not implemented",
    "regex": _NO_GRAMMAR,
    "ebnf": _NO_GRAMMAR,
    "json_schema": _NO_GRAMMAR,
    "structural_tag": _NO_GRAMMAR,
    "stop_regex": "use stop or stop_token_ids",
    "custom_params": "custom logit processors are not implemented",
    "audio": "only text is served",
    "prediction": "speculative decoding is not implemented",
    "web_search_options": "there are no tools",
}
_HINTS = (
    *ACCEPTED_HINTS,
    "user",
    "safety_identifier",
    "prompt_cache_key",
    "store",
    "metadata",
    "service_tier",
    "parallel_tool_calls",
    "tool_choice",
    "separate_reasoning",
    "stream_reasoning",
    "reasoning_effort",
    "verbosity",
    "response_format",
    "best_of",
    "modalities",
    "return_cached_tokens_details",
    "return_prompt_token_ids",
    "return_meta_info",
)
"""Known fields without effect on tokens, or checked by hand below."""


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool = False
    """Send a last chunk with the token counts."""
    continuous_usage_stats: bool = False
    """Put the token counts so far in every chunk."""


class OpenAIRequest(msgspec.Struct, kw_only=True):
    """Fields common to both routes."""

    model: str = ""
    """Ignored: a server serves one model."""
    max_tokens: int | None = None
    """Most output tokens."""
    temperature: float | None = None
    top_p: float | None = None
    n: int = 1
    """Choices of each prompt."""
    stream: bool = False
    """Answer with server-sent events, each of which has what is new."""
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    """`sampling_seed` of `SamplingParams`."""
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    rid: str | list[str] | None = None
    """Name of the request for `/abort_request`; default: a random one."""
    # SGLang's extras
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    no_stop_trim: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool = False
    """Return token ids with each choice."""

    def sampling_params(self, max_new_tokens: int | None) -> dict[str, Any]:
        """SGLang's names for the same settings; unset ones keep their defaults."""
        params = {
            "n": self.n,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "min_new_tokens": self.min_tokens,
            "stop": self.stop,
            "stop_token_ids": self.stop_token_ids,
            "sampling_seed": self.seed,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "repetition_penalty": self.repetition_penalty,
            "logit_bias": self.logit_bias,
            "no_stop_trim": self.no_stop_trim,
            "ignore_eos": self.ignore_eos,
            "skip_special_tokens": self.skip_special_tokens,
        }
        return {key: value for key, value in params.items() if value is not None} | {"max_new_tokens": max_new_tokens}

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def wants_usage_in_each_chunk(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats


class CompletionRequest(OpenAIRequest, kw_only=True):
    prompt: str | list[str | int | list[int]]
    """Text or token ids, or a list of either."""
    echo: bool = False
    """Repeat the prompt before the completion."""
    logprobs: int | None = None
    """Return log-probabilities, and this many candidates for each position."""


class ChatCompletionRequest(OpenAIRequest, kw_only=True):
    messages: list[dict[str, Any]] = []
    """Chat messages with `role` and `content`, a string or text parts."""
    input_ids: list[int] | None = None
    """A prompt that is tokenized already; the chat template is not applied."""
    max_completion_tokens: int | None = None
    """Most output tokens; wins over `max_tokens`. Default: what the context has room for."""
    logprobs: bool = False
    """Return the log-probability of every output token."""
    top_logprobs: int | None = None
    """Number of most likely candidates returned for each position; needs `logprobs`."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template."""
    continue_final_message: bool = False
    """Continue the last message, an assistant's, instead of beginning a new one."""
    add_generation_prompt: bool = True
    """End the prompt with the marks that begin an assistant's message."""


def parse_openai(body: Any, kind: type[R]) -> tuple[R, int]:
    """Decode strictly; returns the request and how many keys of the body were unknown."""
    if not isinstance(body, dict):
        raise BadRequestError(f"The request body must be a JSON object, not {type(body).__name__}.")
    given = {key: value for key, value in body.items() if value is not None}
    modalities = given.get("modalities")
    for name, remedy in _UNSUPPORTED.items():
        if given.get(name) not in (None, False, 0, "", [], {}) and not (
            name == "modalities" and modalities == ["text"]
        ):
            raise BadRequestError(f"Field `{name}` is not supported: {remedy}.")
    form = given.get("response_format")
    if form is not None and form != {"type": "text"}:
        raise BadRequestError(f"response_format {form!r} is not supported: {_NO_GRAMMAR}; leave it out.")
    if given.get("best_of", given.get("n", 1)) != given.get("n", 1):
        raise BadRequestError("best_of is not supported: use n and choose among the choices.")
    try:
        request = msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise BadRequestError(str(error).replace("`$.", "`")) from None
    known = kind.__struct_fields__
    unknown = sum(1 for key in body if key not in known and key not in _UNSUPPORTED and key not in _HINTS)
    return request, unknown


def text_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with `content` as one string: parts of type "text" are joined, others refused."""
    if not messages:
        raise BadRequestError("messages cannot be empty.")
    plain = []
    for i, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise BadRequestError(f"messages[{i}] needs a `role`.")
        content = message.get("content")
        if isinstance(content, list):
            wrong = [p for p in content if not isinstance(p, dict) or p.get("type") != "text" or "text" not in p]
            if wrong:
                raise BadRequestError(f"messages[{i}] has a part that is no text; only text is served.")
            content = "".join(str(part["text"]) for part in content)
        elif content is not None and not isinstance(content, str):
            raise BadRequestError(f"messages[{i}].content must be a string or a list of text parts.")
        plain.append(message | {"content": content if content is not None else ""})
    return plain

"""Bodies of `/v1/completions` and `/v1/chat/completions`, and their conversion into SGLang's sampling parameters.

The bodies have OpenAI's fields and SGLang's additional fields. Known fields that are not implemented are refused if
they are set. Unknown fields are ignored, as OpenAI's clients expect, and the caller counts them.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from verl_server.errors import BadRequestError
from verl_server.server.generate_request import ACCEPTED_HINTS, UNSUPPORTED_FIELDS

R = TypeVar("R", bound="OpenAIRequest")

_NO_TOOLS = "tool calls are not parsed; put the tools in the messages and read the text"
_NO_GRAMMAR = "constrained decoding is not implemented"
UNSUPPORTED = UNSUPPORTED_FIELDS | {
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
    "web_search_options": "the server has no tools",
}
HINTS = ACCEPTED_HINTS | {
    "user": "it names the caller to OpenAI",
    "safety_identifier": "it names the caller to OpenAI",
    "prompt_cache_key": "the prefix cache finds every prefix by itself",
    "store": "nothing is stored",
    "metadata": "nothing is stored",
    "service_tier": "there is one class of service",
    "parallel_tool_calls": "tool calls are not parsed",
    "tool_choice": "tool calls are not parsed",
    "separate_reasoning": "reasoning is not parsed",
    "stream_reasoning": "reasoning is not parsed",
    "reasoning_effort": "reasoning is not parsed",
    "verbosity": "the model has no such setting",
    "response_format": "checked: only text",
    "best_of": "checked: only the value of n",
    "modalities": "checked: only text",
    "return_cached_tokens_details": "the details are always returned",
    "return_prompt_token_ids": "use return_token_ids",
    "return_meta_info": "use /generate",
}
"""Known fields that have no effect on tokens, or that `parse_openai` checks separately."""


class StreamOptions(msgspec.Struct, kw_only=True):
    """Options of a stream of OpenAI's routes."""

    include_usage: bool = False
    """Send a last chunk with the token counts."""
    continuous_usage_stats: bool = False
    """Send the token counts so far with every chunk."""


class OpenAIRequest(msgspec.Struct, kw_only=True):
    """Fields of both routes."""

    model: str = ""
    """Ignored: a server serves one model."""
    max_tokens: int | None = None
    """Largest number of output tokens."""
    temperature: float | None = None
    """`temperature` of `SamplingParams`."""
    top_p: float | None = None
    """`top_p` of `SamplingParams`."""
    n: int = 1
    """Number of choices for each prompt."""
    stream: bool = False
    """Send server-sent events. Each event contains only what is new."""
    stream_options: StreamOptions | None = None
    """Options of the stream."""
    stop: str | list[str] | None = None
    """`stop` of `SamplingParams`."""
    seed: int | None = None
    """`sampling_seed` of `SamplingParams`."""
    frequency_penalty: float | None = None
    """`frequency_penalty` of `SamplingParams`."""
    presence_penalty: float | None = None
    """`presence_penalty` of `SamplingParams`."""
    logit_bias: dict[str, float] | None = None
    """`logit_bias` of `SamplingParams`."""
    rid: str | list[str] | None = None
    """Name of the request for `/abort_request`. Default: a random name."""
    # SGLang's additional fields
    top_k: int | None = None
    """`top_k` of `SamplingParams`."""
    min_p: float | None = None
    """`min_p` of `SamplingParams`."""
    min_tokens: int | None = None
    """`min_new_tokens` of `SamplingParams`."""
    repetition_penalty: float | None = None
    """`repetition_penalty` of `SamplingParams`."""
    stop_token_ids: list[int] | None = None
    """`stop_token_ids` of `SamplingParams`."""
    no_stop_trim: bool | None = None
    """`no_stop_trim` of `SamplingParams`."""
    ignore_eos: bool | None = None
    """`ignore_eos` of `SamplingParams`."""
    skip_special_tokens: bool | None = None
    """`skip_special_tokens` of `SamplingParams`."""
    return_token_ids: bool = False
    """Return token ids with each choice."""

    def sampling_params(self, max_new_tokens: int | None) -> dict[str, Any]:
        """Return the settings under SGLang's names. Unset fields are left out, so that they keep their defaults."""
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
    """Body of `POST /v1/completions`."""

    prompt: str | list[str | int | list[int]]
    """A text, a list of token ids, or a list of such prompts."""
    echo: bool = False
    """Repeat the prompt before the completion."""
    logprobs: int | None = None
    """Return log-probabilities, and this number of candidates for each position."""


class ChatCompletionRequest(OpenAIRequest, kw_only=True):
    """Body of `POST /v1/chat/completions`."""

    messages: list[dict[str, Any]] = []
    """Chat messages with `role` and `content`. `content` is a string or a list of text parts."""
    input_ids: list[int] | None = None
    """Token ids of the prompt, in place of `messages`. The chat template is not applied."""
    max_completion_tokens: int | None = None
    """Largest number of output tokens; overrides `max_tokens`. Default: as many as the context has room for."""
    logprobs: bool = False
    """Return the log-probability of every output token."""
    top_logprobs: int | None = None
    """Number of most likely candidates that are returned for each position. Needs `logprobs`."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template."""
    continue_final_message: bool = False
    """Continue the last message, which must be the assistant's, instead of beginning a new message."""
    add_generation_prompt: bool = True
    """End the prompt with the tokens that begin a message of the assistant."""


def parse_openai(body: Any, kind: type[R]) -> tuple[R, int]:
    """Decode a body strictly. Return (request, number of unknown keys in the body). Raise BadRequestError."""
    if not isinstance(body, dict):
        raise BadRequestError(f"The request body must be a JSON object, not {type(body).__name__}.")
    given = {key: value for key, value in body.items() if value is not None}
    modalities = given.get("modalities")
    for name, remedy in UNSUPPORTED.items():
        if given.get(name) not in (None, False, 0, "", [], {}) and not (
            name == "modalities" and modalities == ["text"]
        ):
            raise BadRequestError(f"Field `{name}` is not supported: {remedy}.")
    response_format = given.get("response_format")
    if response_format is not None and response_format != {"type": "text"}:
        raise BadRequestError(f"response_format {response_format!r} is not supported: {_NO_GRAMMAR}; leave it out.")
    if given.get("best_of", given.get("n", 1)) != given.get("n", 1):
        raise BadRequestError("best_of is not supported: use n and choose among the choices.")
    try:
        request = msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise BadRequestError(str(error).replace("`$.", "`")) from None
    known = kind.__struct_fields__
    unknown = sum(1 for key in body if key not in known and key not in UNSUPPORTED and key not in HINTS)
    return request, unknown


def text_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with each `content` as one string. Parts of type "text" are joined, other parts refused."""
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
                raise BadRequestError(f"messages[{i}] has a part that is not text; only text is served.")
            content = "".join(str(part["text"]) for part in content)
        elif content is not None and not isinstance(content, str):
            raise BadRequestError(f"messages[{i}].content must be a string or a list of text parts.")
        plain.append(message | {"content": content if content is not None else ""})
    return plain

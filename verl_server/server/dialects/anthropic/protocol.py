"""Bodies of `/v1/messages` and `/v1/messages/count_tokens`, and the fields that are refused or have no effect.

`conversation` converts messages and tools into OpenAI's shapes, and `reading` does the work of a request.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from verl_server import lora
from verl_server.errors import BadRequestError, VerlServerError
from verl_server.web.json_body import given_fields, names_of_unknown
from verl_server.web.json_convert import read_struct

R = TypeVar("R", bound="CountTokensRequest")

REFUSED = {
    "compaction": "the server summarizes nothing: ask for a summary in a message, and send it in the next request",
    "container": "the server runs no code",
    "mcp_servers": "the server calls no tools: declare the tools in `tools` and call them in the client",
    "thread": "the server holds no conversation under the id of a message: send the whole `messages` in each request",
    **lora.REQUEST_FIELDS,
}
"""Known field that is not implemented -> what to do instead."""
WITHOUT_EFFECT = {
    "billing_policy": "nobody is billed",
    "cache_control": "the server reuses the longest cached prefix of every request by itself",
    "context_management": "the server renders the conversation that the client sends, and edits nothing",
    "defer_loading": "the server offers each tool at once, and leaves a tool search out",
    "eager_input_streaming": "arguments are always streamed as they are sampled",
    "diagnostics": "answers hold no diagnostics of the prompt cache",
    "fallback_credit_token": "nobody is billed",
    "fallbacks": "the served model declines nothing, so no other one is asked",
    "inference_geo": "there is one server",
    "metadata": "requests are not recorded by user",
    "service_tier": "there is one tier",
    "speed": "there is one speed",
    "user_profile_id": "requests are not recorded by user",
    "workspace_id": "requests are not recorded by workspace",
}
"""Known field that is accepted and has no effect -> the reason.

The field may also be in a content block or in a tool.
"""


class ThreadUnsupportedError(BadRequestError):
    """The request has `thread`. If Anthropic's clients get this error, they send the whole conversation instead."""

    code = "thread_unsupported_request"


class AdapterNotFoundError(VerlServerError):
    """The request names an adapter of the served model, and adapters are not served."""

    status_code = 404


class Thinking(msgspec.Struct, kw_only=True):
    """Setting of the reasoning."""

    type: str
    """"enabled" and "disabled" set the template variable `enable_thinking`. "adaptive" and "between_tools" leave it to
    the template."""
    budget_tokens: int | None = None
    """Accepted and without effect: `max_tokens` bounds reasoning and answer together."""
    display: str | None = None
    """"omitted" leaves the text of thinking blocks out of the answer."""


class OutputConfig(msgspec.Struct, kw_only=True):
    """Setting of the answer's form."""

    format: dict[str, Any] | None = None
    """{"type": "json_schema", "schema": ...}: the answer is JSON of this schema."""
    effort: str | None = None
    """Accepted and without effect: chat templates have no such variable."""


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """Body of `POST /v1/messages/count_tokens`."""

    model: str = ""
    """Any name, because a server serves one model, except for one of its adapters (`served model:adapter`)."""
    messages: list[dict[str, Any]]
    """Messages of the roles user, assistant and system. Content is a string or a list of blocks of the types text,
    document and search_result (of text), tool_use, tool_result and thinking. The policy continues a last message of
    the assistant."""
    system: str | list[dict[str, Any]] | None = None
    """The system prompt: a string or a list of text blocks."""
    tools: list[dict[str, Any]] | None = None
    """Tools that the policy may call, each with `name`, `input_schema` and `description`."""
    tool_choice: dict[str, Any] | None = None
    """{"type": "auto" | "any" | "tool" | "none"}, with `name` for "tool", and `disable_parallel_tool_use`."""
    thinking: Thinking | None = None
    """Setting of the reasoning. Default: that of the chat template."""
    output_config: OutputConfig | None = None
    """Form of the answer."""


class MessagesRequest(CountTokensRequest, kw_only=True):
    """Body of `POST /v1/messages`."""

    max_tokens: int
    """Largest number of output tokens, including reasoning. The output also ends when the context is full."""
    stop_sequences: list[str] | None = None
    """Strings that end the output. The matched string is returned as `stop_sequence`."""
    stream: bool = False
    """Send server-sent events."""
    temperature: float | None = None
    """`temperature` of `SamplingParams`."""
    top_p: float | None = None
    """`top_p` of `SamplingParams`."""
    top_k: int | None = None
    """`top_k` of `SamplingParams`. 0 keeps the whole vocabulary."""
    return_token_ids: bool = False
    """Return `prompt_token_ids` and `token_ids` with the message (in a stream with `message_delta`). Not in
    Anthropic's API."""
    return_logprob: bool = False
    """Return `token_logprobs`, the log-probability of each of `token_ids`, and `weight_versions`. Not in Anthropic's
    API."""
    min_weight_version: str | None = None
    """`min_weight_version` of `/generate`: the least weight version, NUMBER@INCARNATION, that samples the output.
    Not in Anthropic's API."""
    exact_weight_version: str | None = None
    """`exact_weight_version` of `/generate`: the only weight version that samples the output. Not in
    Anthropic's API."""
    json_schema: str | dict[str, Any] | bool | None = None
    """`json_schema` of `SamplingParams`, as text or as an object: the same as `output_config.format`. Not in
    Anthropic's API."""
    regex: str | None = None
    """`regex` of `SamplingParams`: the whole output matches it, including calls of `tools`. Not in Anthropic's API."""
    ebnf: str | None = None
    """`ebnf` of `SamplingParams`: the whole output is of this grammar, including calls of `tools`. Not in Anthropic's
    API."""

    def sampling_params(self) -> dict[str, Any]:
        """Return the settings under SGLang's names, without those that depend on the tools."""
        params = {
            "max_new_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k or None,
            "stop": self.stop_sequences or None,
        }
        return {key: value for key, value in params.items() if value is not None}


class TokenCount(msgspec.Struct):
    """Answer of `/v1/messages/count_tokens`."""

    input_tokens: int


def parse_body(body: Any, kind: type[R]) -> tuple[R, list[str]]:
    """Decode a body. Return (request, names of unknown fields). Raise BadRequestError, which names a field."""
    given = given_fields(body)
    for name, remedy in REFUSED.items():
        if given.get(name) not in (None, False, [], {}, ""):
            refusal = ThreadUnsupportedError if name == "thread" else BadRequestError
            raise refusal(f"Field `{name}` is not supported: {remedy}.")
    request = read_struct(given, kind)
    return request, names_of_unknown(body, request)

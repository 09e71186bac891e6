"""The body of `/v1/responses`, and its conversion into a chat: messages, tools and sampling settings.

Responses are stored in sessions only. Outside a session, a request sends the whole conversation.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import orjson

from verl_server import lora
from verl_server.errors import BadRequestError
from verl_server.sampling_params import SamplingParams
from verl_server.server.dialects.openai.constraints import response_format_schema
from verl_server.server.dialects.openai.fields import CHAT_REFUSED
from verl_server.server.dialects.openai.messages import effort_options, read_openai_prompt, verbosity_options
from verl_server.server.dialects.openai.protocol import ChatCompletionRequest, Verbosity, at_least, parse_openai
from verl_server.server.dialects.openai.responses_input import NO_STORE, input_messages
from verl_server.server.dialects.openai.responses_tools import CallShape, read_choice, read_offered
from verl_server.server.text.chat_prompt import ReadConversation
from verl_server.server.text.text_tools import Job, TextTools
from verl_server.web.json_body import parse_json

_MOST_METADATA, _LONGEST_METADATA = 16, 512
"""Pairs of `metadata`, and characters of a key or a value. Source: OpenAI."""
_LOGPROBS = "message.output_text.logprobs"
_INCLUDED = (
    *(_LOGPROBS, "reasoning.encrypted_content", "file_search_call.results", "web_search_call.results"),
    *("web_search_call.action.sources", "message.input_image.image_url", "computer_call_output.output.image_url"),
    "code_interpreter_call.outputs",
)
"""Source: OpenAI. Values that concern OpenAI's own tools and images have no effect, because these cannot occur."""

RESPONSES_REFUSED = {
    "conversation": NO_STORE,
    "background_options": "the answer is sent when the response ends; use stream",
    "access_programs": "the server has no such programs",
    "image": "only text is served",
    "background": "the answer is sent when the response ends; use stream",
    "prompt": "prompts are not stored; send the text in `input` and `instructions`",
    "context_management": "the conversation is never shortened",
    "moderation": "the server does not moderate",
} | {
    name: reason
    for name, reason in CHAT_REFUSED.items()
    if name in lora.REQUEST_FIELDS
    or name in ("session_params", "custom_params", "custom_logit_processor", "return_hidden_states")
}
RESPONSES_WITHOUT_EFFECT = {
    "user": "it names the caller to OpenAI",
    "client_metadata": "it names the caller to OpenAI",
    "safety_identifier": "it names the caller to OpenAI",
    "service_tier": "there is one class of service",
    "max_tool_calls": "it bounds calls of OpenAI's own tools, and the server has none",
    "stream_options": "events are never obfuscated, and the last event has the usage",
    "prompt_cache_key": "the prefix cache finds every prefix by itself",
    "prompt_cache_options": "the prefix cache finds every prefix by itself",
    "prompt_cache_retention": "the prefix cache keeps a prefix for as long as it has room",
}


class TextConfig(msgspec.Struct, kw_only=True):
    """Form of the output text."""

    format: dict[str, Any] | None = None
    """{"type": "text"}, {"type": "json_object"}, or {"type": "json_schema", "name", "schema"}."""
    verbosity: Verbosity | None = None
    """`verbosity` of a chat."""


class ReasoningConfig(msgspec.Struct, kw_only=True):
    """Settings of the reasoning."""

    effort: str | None = None
    """`reasoning_effort` of a chat."""
    summary: str | None = None
    """Accepted without effect, because the reasoning itself is returned."""
    generate_summary: str | None = None
    """The older name of `summary`."""


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """Body of `POST /v1/responses`."""

    input: str | list[dict[str, Any]]
    """A text of the user, or a list of items: messages, function calls and their outputs, reasoning."""
    model: str = ""
    """See `/v1/chat/completions`."""
    instructions: str | None = None
    """A system message before the input."""
    max_output_tokens: int | None = None
    """Largest number of output tokens, including reasoning. Default: as many as the context has room for."""
    temperature: float | None = None
    """`temperature` of `SamplingParams`."""
    top_p: float | None = None
    """`top_p` of `SamplingParams`."""
    tools: list[dict[str, Any]] | None = None
    """Tools of the types "function", "namespace" and "custom". OpenAI's hosted tools (`web_search`, ...) are accepted,
    and not offered to the policy."""
    tool_choice: str | dict[str, Any] | None = None
    """See `/v1/chat/completions`."""
    parallel_tool_calls: bool = True
    """See `/v1/chat/completions`."""
    text: TextConfig | None = None
    """Form of the output text."""
    reasoning: ReasoningConfig | None = None
    """Settings of the reasoning."""
    stream: bool = False
    """Send server-sent events with OpenAI's typed events."""
    include: list[str] | None = None
    """`message.output_text.logprobs` returns log-probabilities. `reasoning.encrypted_content` is accepted without
    effect: the reasoning is returned in plain text. So are results of OpenAI's own tools, which the server has not."""
    top_logprobs: int | None = None
    """Number of most likely candidates for each position of the log-probabilities."""
    store: bool | None = None
    """Accepted. A session stores every response, and nothing else stores any. `store` of the answer says whether this
    response is stored."""
    previous_response_id: str | None = None
    """In a session: the response that `input` follows. Its instructions and tools stay."""
    truncation: Literal["auto", "disabled"] | None = None
    """A conversation that is too long is refused, even with "auto"."""
    metadata: dict[str, str] | None = None
    """Returned with the response."""
    # SGLang's additional fields
    request_id: str | None = None
    """Name of the request for `/abort_request`, and the `id` of the response. Default: a random name."""
    stop: str | list[str] | None = None
    """`stop` of `SamplingParams`."""
    seed: int | None = None
    """`sampling_seed` of `SamplingParams`."""
    top_k: int | None = None
    """`top_k` of `SamplingParams`; 0 means off."""
    min_p: float | None = None
    """`min_p` of `SamplingParams`."""
    frequency_penalty: float | None = None
    """`frequency_penalty` of `SamplingParams`."""
    presence_penalty: float | None = None
    """`presence_penalty` of `SamplingParams`."""
    repetition_penalty: float | None = None
    """`repetition_penalty` of `SamplingParams`."""
    regex: str | None = None
    """`regex` of `SamplingParams`."""
    ebnf: str | None = None
    """`ebnf` of `SamplingParams`."""
    json_schema: str | dict[str, Any] | bool | None = None
    """`json_schema` of `SamplingParams`, as text or as an object. True is any JSON."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template."""
    extra_key: str | None = None
    """`extra_key` of `/generate`."""
    cache_salt: str | None = None
    """`cache_salt` of `/generate`."""
    session_id: str | None = None
    """`session_id` of `/generate`: a hint for the prefix cache."""
    priority: int | None = None
    """`priority` of `/generate`."""
    min_weight_version: str | None = None
    """`min_weight_version` of `/generate`: the least weight version, NUMBER@INCARNATION, that samples the output."""
    exact_weight_version: str | None = None
    """`exact_weight_version` of `/generate`: the only weight version that samples the output."""

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or _LOGPROBS in (self.include or ())

    def chat(self) -> ChatCompletionRequest:
        """Return a chat with the same settings, without messages."""
        names = [
            "model",
            "temperature",
            "top_p",
            "stop",
            "seed",
            "top_k",
            "min_p",
            "frequency_penalty",
            "presence_penalty",
            "repetition_penalty",
            "regex",
            "ebnf",
            "json_schema",
            "parallel_tool_calls",
            "top_logprobs",
            "stream",
            "request_id",
            "extra_key",
            "cache_salt",
            "session_id",
            "priority",
            "min_weight_version",
            "exact_weight_version",
        ]
        given: dict[str, Any] = {name: getattr(self, name) for name in names}
        chat = ChatCompletionRequest(max_tokens=self.max_output_tokens, logprobs=self.wants_logprobs, **given)
        if self.text is not None and self.text.format is not None:
            response_format_schema("text.format", self.text.format)  # raises an error that names text.format
            chat.response_format = self.text.format
        return chat

    def check(self, in_session: bool) -> None:
        """Raise BadRequestError for values that the types of the fields permit but this server does not serve."""
        if self.previous_response_id is not None and not in_session:
            raise BadRequestError(f"previous_response_id is not supported here: {NO_STORE}.")
        at_least(1, "max_output_tokens", self.max_output_tokens)
        at_least(0, "top_logprobs", self.top_logprobs)
        metadata = self.metadata or {}
        longest = max((max(len(key), len(value)) for key, value in metadata.items()), default=0)
        if len(metadata) > _MOST_METADATA or longest > _LONGEST_METADATA:
            raise BadRequestError(f"metadata may have {_MOST_METADATA} pairs of {_LONGEST_METADATA} characters each.")
        for name in self.include or ():
            if name not in _INCLUDED:
                raise BadRequestError(
                    f"include has {name!r:.64}, which is not supported; known: {', '.join(_INCLUDED)}."
                )


class ReadResponse(ReadConversation, kw_only=True):
    """Result of the job `RESPONSES`."""

    request: ResponsesRequest
    """The request without `input`, and without the fields in `echoed`."""
    chat: ChatCompletionRequest
    echoed: dict[str, bytes]
    """Fields of the request that the response repeats, as JSON."""
    calls: dict[str, CallShape]
    """See `OfferedTools.shapes`."""
    left_out_tools: list[str]
    """See `OfferedTools.left_out`."""


class _Previous(msgspec.Struct):
    previous_response_id: str | None = None


def previous_response(body: bytes) -> str | None:
    """Return `previous_response_id` of a JSON body. Return None if it is missing, or if the body is malformed."""
    if b"previous_response_id" not in body:
        return None
    try:
        return msgspec.json.decode(body, type=_Previous).previous_response_id
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None


def read_responses(tools: TextTools, body: bytes) -> ReadResponse:
    request, unknown = parse_openai(parse_json(body), ResponsesRequest, RESPONSES_REFUSED)
    tools.decoder(True)
    request.check(tools.session is not None)
    chat = request.chat()
    tools.limits.check_sampling(SamplingParams.parse(chat.sampling_params(chat.max_tokens)))
    effort = request.reasoning.effort if request.reasoning is not None else None
    verbosity = request.text.verbosity if request.text is not None else None
    options = {"add_generation_prompt": True} | effort_options(effort) | verbosity_options(verbosity)
    offered = read_offered(request.tools)
    prompt = read_openai_prompt(
        tools,
        input_messages(request.instructions, request.input),
        options | (request.chat_template_kwargs or {}),
        tools=offered.functions,
        tool_places=offered.places,
        tool_choice=read_choice(request.tool_choice),
        parallel=request.parallel_tool_calls,
        constrained=chat,
    )
    if prompt.output.keeps_special_tokens:
        chat.skip_special_tokens = False
    chat.encode_constraint()
    form = request.text.format if request.text is not None else None
    echoed = {
        "instructions": request.instructions,
        "text": {"format": form or {"type": "text"}, "verbosity": verbosity or "medium"},
        "tools": request.tools or [],
        "tool_choice": request.tool_choice or "auto",
    }
    request.input, request.chat_template_kwargs = "", None
    request.instructions = request.text = request.tools = request.tool_choice = None
    return ReadResponse(
        request=request,
        chat=chat,
        echoed={name: orjson.dumps(value) for name, value in echoed.items()},
        calls=offered.shapes,
        left_out_tools=offered.left_out,
        prompts=[prompt.checked(tools)],
        output=prompt.output,
        unknown_fields=unknown,
        unused_options=prompt.unused_options,
        next=prompt.next,
    )


RESPONSES = Job("responses", read_responses, ReadResponse)

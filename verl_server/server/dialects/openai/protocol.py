"""Bodies of `/v1/completions` and `/v1/chat/completions`, and their conversion into `GenerateReqInput`.

The bodies have OpenAI's fields and the additional fields of vLLM and SGLang. `fields` lists the known fields that are
refused or have no effect. `unknown_fields` judges all other fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import msgspec

from verl_server.errors import BadRequestError
from verl_server.sampling_params import LogprobsMode
from verl_server.server.dialects.openai.constraints import CONSTRAINTS, constraint, read_schema
from verl_server.server.dialects.openai.fields import HARMLESS
from verl_server.server.generate_request import GenerateReqInput, SamplingLogprobsMode
from verl_server.web.json_body import given_fields, names_of_unknown
from verl_server.web.json_convert import read_struct

R = TypeVar("R", bound=msgspec.Struct)
Verbosity = Literal["low", "medium", "high"]

_UNSET: tuple[Any, ...] = (None, False, 0, "", [], {})


class StreamOptions(msgspec.Struct, kw_only=True):
    """Options of a stream of OpenAI's routes."""

    include_usage: bool = False
    """Send a last chunk with the token counts."""
    continuous_usage_stats: bool = False
    """Send the token counts so far with every chunk."""
    include_obfuscation: bool = False
    """Accepted without effect: chunks are never obfuscated."""


class OpenAIRequest(msgspec.Struct, kw_only=True):
    """Fields of both routes."""

    model: str = ""
    """A server serves one model, so any name is accepted, except for a name with an adapter (`model:adapter`)."""
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
    response_format: dict[str, Any] | None = None
    """Format of the output: {"type": "text"}, {"type": "json_object"}, {"type": "json_schema", "json_schema":
    {"schema": ...}}, or {"type": "structural_tag", ...}. A schema is always enforced, with `strict` or without."""
    # Additional fields of SGLang, of vLLM, or of both
    rid: str | list[str] | None = None
    """Name of the request for `/abort_request`, and the `id` of the answer. Default: a random name."""
    request_id: str | None = None
    """vLLM's name of `rid`."""
    top_k: int | None = None
    """`top_k` of `SamplingParams`; 0 means off, as in vLLM."""
    min_p: float | None = None
    """`min_p` of `SamplingParams`."""
    min_tokens: int | None = None
    """`min_new_tokens` of `SamplingParams`. Stop strings in these tokens do not count, as in vLLM."""
    repetition_penalty: float | None = None
    """`repetition_penalty` of `SamplingParams`."""
    stop_token_ids: list[int] | None = None
    """`stop_token_ids` of `SamplingParams`."""
    stop_regex: str | list[str] | None = None
    """`stop_regex` of `SamplingParams`."""
    no_stop_trim: bool | None = None
    """`no_stop_trim` of `SamplingParams`."""
    include_stop_str_in_output: bool | None = None
    """vLLM's name of `no_stop_trim`."""
    ignore_eos: bool | None = None
    """`ignore_eos` of `SamplingParams`."""
    skip_special_tokens: bool | None = None
    """`skip_special_tokens` of `SamplingParams`."""
    spaces_between_special_tokens: bool | None = None
    """`spaces_between_special_tokens` of `SamplingParams`."""
    allowed_token_ids: list[int] | None = None
    """`allowed_token_ids` of `SamplingParams`."""
    bad_words: list[str] | None = None
    """`bad_words` of `SamplingParams`."""
    logprobs_mode: LogprobsMode = "default"
    """`logprobs_mode` of `SamplingParams`."""
    regex: str | None = None
    """`regex` of `SamplingParams`."""
    ebnf: str | None = None
    """`ebnf` of `SamplingParams`."""
    json_schema: str | dict[str, Any] | bool | None = None
    """`json_schema` of `SamplingParams`, as text or as an object. True is any JSON."""
    structured_outputs: dict[str, Any] | None = None
    """vLLM's constraint: an object with one of `json`, `regex`, `choice`, `grammar`, `json_object` and
    `structural_tag`."""
    guided_json: str | dict[str, Any] | bool | None = None
    """`structured_outputs.json` of older versions of vLLM."""
    guided_regex: str | None = None
    """`structured_outputs.regex` of older versions of vLLM."""
    guided_choice: list[str] | None = None
    """`structured_outputs.choice` of older versions of vLLM."""
    guided_grammar: str | None = None
    """`structured_outputs.grammar` of older versions of vLLM."""
    stream_interval: int | None = None
    """`stream_interval` of `SamplingParams`."""
    truncate_prompt_tokens: int | None = None
    """Keep only this many tokens at the end of each prompt. -1: as many as the model can serve together with the
    largest number of output tokens."""
    truncation_side: Literal["left"] | None = None
    """Side from which `truncate_prompt_tokens` removes tokens. Only vLLM's "left" is served."""
    prompt_logprobs: int | None = None
    """Return the log-probability of each prompt token, and this number of candidates for each position, in vLLM's
    shape: null for the first position, and {token id: {"logprob", "rank", "decoded_token"}} for the others. Not with
    `stream`."""
    logprob_token_ids: list[int] | None = None
    """Token ids whose log-probabilities are returned in place of the most likely candidates. Needs `logprobs`."""
    return_token_ids: bool = False
    """Return the token ids of each choice (`token_ids`, in a chat also `response_token_ids`) and of its prompt."""
    return_prompt_token_ids: bool = False
    """Return the token ids of the prompt: in each choice and, in a chat, also in the answer (`prompt_token_ids`)."""
    return_tokens_as_token_ids: bool = False
    """Write each token of the log-probabilities as `token_id:<id>`."""
    return_meta_info: bool = False
    """Return the `meta_info` of `/generate` with each choice. Not with `stream`."""
    return_cached_tokens_details: bool = False
    """Return the number of cached prompt tokens in each kind of memory as `sglext.cached_tokens_details`."""
    extra_key: str | list[str | None] | None = None
    """`extra_key` of `/generate`: a namespace of the prefix cache."""
    cache_salt: str | list[str | None] | None = None
    """`cache_salt` of `/generate`: a second part of the namespace."""
    session_id: str | list[str | None] | None = None
    """`session_id` of `/generate`: a hint for the prefix cache."""
    conversation_id: str | list[str | None] | None = None
    """`conversation_id` of `/generate`."""
    priority: int | None = None
    """`priority` of `/generate`: requests of a larger priority start first, as in SGLang. In vLLM, a smaller number
    starts first."""
    min_weight_version: str | None = None
    """`min_weight_version` of `/generate`: the least weight version, NUMBER@INCARNATION, that samples the output."""
    exact_weight_version: str | None = None
    """`exact_weight_version` of `/generate`: the only weight version that samples the output."""

    def generate_request(self, max_new_tokens: int | None, logprobs: int | None, grammar: str = "") -> GenerateReqInput:
        """Return the request without prompts.

        `logprobs` is the number of candidates that the answer shows for each position; None shows no log-probabilities.
        `grammar` is the grammar of the prompt (`ChatOutput.grammar`).
        """
        prompt_logprobs = self.prompt_logprobs
        top = max(logprobs or 0, prompt_logprobs or 0)
        return GenerateReqInput(
            sampling_params=self.sampling_params(max_new_tokens, grammar),
            rid=self.rid or self.request_id,
            stream=self.stream,
            return_logprob=logprobs is not None or prompt_logprobs is not None,
            logprob_start_len=0 if prompt_logprobs is not None else -1,
            top_logprobs_num=top,
            token_ids_logprob=list(self.logprob_token_ids) if self.logprob_token_ids is not None else None,
            extra_key=self.extra_key,
            cache_salt=self.cache_salt,
            session_id=self.session_id,
            conversation_id=self.conversation_id,
            priority=self.priority,
            min_weight_version=self.min_weight_version,
            exact_weight_version=self.exact_weight_version,
            return_text_in_logprobs=self.return_meta_info,
        )

    def sampling_params(self, max_new_tokens: int | None, grammar: str = "") -> dict[str, Any]:
        """Return the settings under SGLang's names. Unset fields are omitted, so that they keep their defaults."""
        trim = self.no_stop_trim if self.no_stop_trim is not None else self.include_stop_str_in_output
        params = {
            "n": self.n,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": -1 if self.top_k == 0 else self.top_k,
            "min_p": self.min_p,
            "min_new_tokens": self.min_tokens,
            "stop_after_min_new_tokens": bool(self.min_tokens) or None,
            "stop": self.stop,
            "stop_token_ids": self.stop_token_ids,
            "stop_regex": self.stop_regex,
            "sampling_seed": self.seed,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "repetition_penalty": self.repetition_penalty,
            "logit_bias": self.logit_bias,
            "no_stop_trim": trim,
            "ignore_eos": self.ignore_eos,
            "skip_special_tokens": self.skip_special_tokens,
            "spaces_between_special_tokens": self.spaces_between_special_tokens,
            "allowed_token_ids": self.allowed_token_ids,
            "bad_words": self.bad_words or None,
            "logprobs_mode": None if self.logprobs_mode == "default" else self.logprobs_mode,
            "stream_interval": self.stream_interval,
        }
        given = {key: value for key, value in params.items() if value is not None}
        constraints = self._constraint()
        if grammar:
            assert not constraints, "output_grammar permits one constraint"
            constraints = {"ebnf": grammar}
        return given | constraints | {"max_new_tokens": max_new_tokens}

    def _constraint(self) -> dict[str, str]:
        return constraint({name: getattr(self, name) for name in CONSTRAINTS})

    def take_schema(self) -> dict[str, Any] | Literal[True] | None:
        """Remove the JSON schema that constrains the output from the request, and return it; None if there is none.

        The schema false, which permits nothing, stays. Raise BadRequestError for text that is no schema.
        """
        text = self._constraint().get("json_schema")
        schema = read_schema(text) if text else False
        if schema is False:
            return None
        self.response_format = self.structured_outputs = self.guided_json = self.json_schema = None
        return schema

    def encode_constraint(self) -> None:
        """Replace the constraint of the output by its text, so that a later reader need not encode the schema again."""
        found = self._constraint()
        for name in CONSTRAINTS:
            setattr(self, name, None)
        for name, text in found.items():
            if name == "structural_tag":
                self.structured_outputs = {name: text}
            else:
                setattr(self, name, text)

    @property
    def constraint_name(self) -> str | None:
        """The sampling parameter that the constraint of the output sets, or None."""
        return next(iter(self._constraint()), None)

    def check_logprobs(self, name: str, count: int | None) -> None:
        """Check the numbers of candidates. `name` is the field with `count`."""
        at_least(0, name, count)
        at_least(0, "prompt_logprobs", self.prompt_logprobs)
        if self.prompt_logprobs is not None and self.stream:
            raise BadRequestError("prompt_logprobs are not sent in a stream: set stream=false.")
        if self.return_meta_info and self.stream:
            raise BadRequestError("return_meta_info is not available in a stream: set stream=false.")

    @property
    def streaming(self) -> StreamOptions:
        """The options of the stream, or the defaults."""
        return self.stream_options or StreamOptions()


class CompletionRequest(OpenAIRequest, kw_only=True):
    """Body of `POST /v1/completions`."""

    prompt: str | list[str | int | list[int]]
    """A text, a list of token ids, or a list of such prompts."""
    echo: bool = False
    """Repeat the prompt before the completion. With `max_tokens=0`, return the prompt only."""
    logprobs: int | None = None
    """Return log-probabilities, and this number of candidates for each position. The candidates always include the
    sampled token, so there may be one more."""
    best_of: int | None = None
    """Only the value of `n` is served: use `n` and choose among the choices."""
    add_special_tokens: bool = True
    """Add the tokenizer's special tokens, such as a token for the beginning of the text, to prompts that are text."""


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
    tools: list[dict[str, Any]] | None = None
    """Functions that the policy may call. The chat template gets them, whatever `tool_choice` says."""
    tool_choice: str | dict[str, Any] | None = None
    """"auto" (the default with `tools`): the policy decides; "none": the output is not searched for calls; "required",
    or {"type": "function", "function": {"name": ...}}: the output is constrained to calls."""
    parallel_tool_calls: bool = True
    """Allow several calls in one message.

    If false, a forced output is constrained to one call, and of an unforced output the first call is returned.
    """
    separate_reasoning: bool = True
    """Return the reasoning as `reasoning_content` (SGLang) and `reasoning` (vLLM) instead of in the content."""
    stream_reasoning: bool = True
    """Stream the reasoning as it arrives, instead of in one piece."""
    store: bool | None = None
    """Accepted. A session stores every chat, and nothing else stores any. With `store`, the answer has `store`, which
    says whether this chat is stored; in a stream the first chunk of a choice has it."""
    include_reasoning: bool = True
    """Return the reasoning. If false, it is removed from the message."""
    verbosity: Verbosity | None = None
    """Passed to the chat template as `verbosity`, unless it is the default "medium". Most templates do not read it."""
    reasoning_effort: str | float | None = None
    """Passed to the chat template as `reasoning_effort`. "none" also sets `enable_thinking` and `thinking` to false,
    and other values set them to true. A template may use none of them, and the server then warns once in its log."""
    documents: list[dict[str, Any]] | None = None
    """Documents for a chat template that reads `documents`."""
    chat_template: str | None = None
    """A chat template that the operator allows (`allowed_chat_templates`)."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template."""
    continue_final_message: bool = False
    """Continue the last message, which must be the assistant's, instead of beginning a new message."""
    add_generation_prompt: bool = True
    """End the prompt with the tokens that begin a message of the assistant."""
    modalities: list[Literal["text"]] | None = None
    """Only ["text"] is served."""
    return_sampling_mask: bool = False
    """`return_sampling_mask` of `/generate`, in the `meta_info` of each choice. Needs `return_meta_info`."""
    sampling_logprobs_mode: SamplingLogprobsMode | None = None
    """`sampling_logprobs_mode` of `/generate`."""
    return_input_ids_in_sglext: bool = False
    """Return the token ids of the prompt as `sglext.input_ids`. Not with `stream`."""
    return_output_ids_in_sglext: bool = False
    """Return the token ids of each choice as `sglext.output_ids`. Not with `stream`."""


def parse_openai(body: Any, kind: type[R], refused: Mapping[str, str]) -> tuple[R, list[str]]:
    """Decode a body. Return (request, its `names_of_unknown`). Raise BadRequestError."""
    given = given_fields(body)
    for name in given.keys() & refused.keys():
        if given[name] not in (*_UNSET, *HARMLESS.get(name, ())):
            raise BadRequestError(f"Field `{name}` is not supported: {refused[name]}.")
    request = read_struct(given, kind)
    return request, names_of_unknown(body, request)


def at_least(least: int, name: str, value: int | None) -> None:
    if value is not None and value < least:
        raise BadRequestError(f"{name} must be at least {least}, not {value}.")

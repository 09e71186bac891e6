"""Parses the body of `/inference/v1/generate`, on the event loop if it is small, otherwise in a text worker."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from verl_server import lora
from verl_server.errors import BadRequestError
from verl_server.server.dialects.vllm.sampling import VllmSamplingParams
from verl_server.server.generate_request import GenerateReqInput, ReadRequest, read_prompts
from verl_server.server.text.text_tools import Job, TextTools
from verl_server.web.json_body import given_fields, names_of_unknown, parse_json
from verl_server.web.json_convert import read_struct

_NO_MULTIMODAL = "only token ids are served"

REFUSED = {
    "features": _NO_MULTIMODAL,
    "content_parts": _NO_MULTIMODAL,
    "kv_transfer_params": "prefill and decode are not disaggregated",
    "ec_transfer_params": "there is no encoder",
    **lora.REQUEST_FIELDS,
}
"""vLLM's request fields that are refused if they are set, each with the reason."""

WITHOUT_EFFECT = {
    "token_offsets": "the answer has no offsets",
    "parse_context": "vLLM reads it only with output_mode='derender', which is refused",
    "reasoning_ended": "a constraint begins with the first output token",
    "reasoning_parser_kwargs": "a constraint begins with the first output token",
    "metrics": "metrics count every request",
}
"""vLLM's request fields that are accepted and have no effect, each with the reason."""


class StreamOptions(msgspec.Struct, kw_only=True):
    """OpenAI's options of a stream."""

    include_usage: bool = False
    """Send the numbers of tokens in a last event without choices."""
    continuous_usage_stats: bool = False
    """Send the numbers of tokens so far in every event."""


class InferenceRequest(msgspec.Struct, kw_only=True):
    """Body of `POST /inference/v1/generate`."""

    token_ids: list[int]
    """Token ids of the prompt."""
    sampling_params: Any = None
    """The fields of `VllmSamplingParams`."""
    request_id: str | None = None
    """Name of the request for `/abort_requests`. The header `X-Request-Id` takes precedence. Default: a random name."""
    model: str | None = None
    """The server serves one model, so any name is accepted, except for a name with an adapter (`model:adapter`)."""
    stream: bool = False
    """Send server-sent events. Each event holds the tokens since the event before."""
    stream_options: StreamOptions | None = None
    """Options of the stream."""
    cache_salt: str | None = None
    """`cache_salt` of `GenerateReqInput`."""
    priority: int = 0
    """Requests of a smaller priority leave the waiting queue first."""
    return_token_ids: bool = False
    """Return the token ids of the prompt as `prompt_token_ids`."""
    min_weight_version: str | None = None
    """`min_weight_version` of `/generate`: the least weight version, NUMBER@INCARNATION, that samples the output."""
    exact_weight_version: str | None = None
    """`exact_weight_version` of `/generate`: the only weight version that samples the output."""
    output_mode: Literal["tokens", "text"] = "tokens"
    """"text" returns the text too, and log-probabilities with the text of each token."""


class ReadInference(msgspec.Struct, kw_only=True):
    """Result of the job `INFERENCE`."""

    request: InferenceRequest
    """The request without `token_ids` and `sampling_params`."""
    sampling: VllmSamplingParams
    read: ReadRequest
    unknown_fields: list[str]


def read_inference(tools: TextTools, body: bytes) -> ReadInference:
    """Parse the body and check the prompt. Raise BadRequestError or NeedsWorkerError."""
    raw = parse_json(body)
    given = given_fields(raw)
    for name, remedy in REFUSED.items():
        if given.get(name) not in (None, False, 0, "", [], {}):
            raise BadRequestError(f"Field `{name}` is not supported: {remedy}.")
    if given.get("output_mode") == "derender":
        raise BadRequestError("output_mode='derender' is not supported: use /v1/chat/completions.")
    request = read_struct(given, InferenceRequest)
    sampling, unknown = VllmSamplingParams.parse(request.sampling_params)
    tools.bounds.check_ids("sampling_params.stop_token_ids", sampling.stop_token_ids)  # as in vLLM
    if not request.token_ids:
        raise BadRequestError("token_ids cannot be empty.")
    if request.cache_salt == "":
        raise BadRequestError("cache_salt cannot be empty.")
    wanted = {
        "input_ids": request.token_ids,
        "sampling_params": sampling.sglang_params(),
        "stream": request.stream,
        "cache_salt": request.cache_salt,
        "priority": -request.priority,
        "truncate_prompt_tokens": sampling.truncate_prompt_tokens,
        "min_weight_version": request.min_weight_version,
        "exact_weight_version": request.exact_weight_version,
    }
    read = read_prompts(tools, GenerateReqInput.parse(wanted | sampling.logprob_fields(tools.bounds.vocab_size)))
    request.token_ids, request.sampling_params = [], None
    names = [*names_of_unknown(raw, request), *(f"sampling_params.{n}" for n in unknown)]
    return ReadInference(request=request, sampling=sampling, read=read, unknown_fields=names)


INFERENCE = Job("inference", read_inference, ReadInference)

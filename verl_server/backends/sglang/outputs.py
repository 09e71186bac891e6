"""The messages of `HeldScheduler` to `SglangDriver`, and the translation of the new tokens of a step.

SGLang's own outputs contain text and times of each request, which take longer to encode than a step of a small model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from verl_server.backends.process.driver import NewTokens, Step
from verl_server.messages.io_struct import FinishReason, TokenizedGenerateReq
from verl_server.messages.packed import PromptLogprobs, TokenLogprobs, pack_ids, pack_logprobs


class Output(msgspec.Struct, array_like=True, gc=False):
    """The tokens that one step added to a request, with what was requested beside them."""

    rid: str
    """SGLang's id of the request."""
    output_ids: list[int]
    cached_tokens: int
    finish_reason: dict[str, Any] | None = None
    logprobs: list[float] = []
    """Log-probabilities of `output_ids`, if they were requested."""
    top_logprobs: list[list[float]] = []
    top_ids: list[list[int]] = []
    """Candidates of each of `output_ids`, the most likely first, if they were requested."""
    prompt_logprobs: list[float | None] = []
    """Log-probabilities of the prompt from `logprob_start_len`, once, if they were requested. The first is None."""
    prompt_top_logprobs: list[list[float] | None] = []
    prompt_top_ids: list[list[int] | None] = []


class Outputs(msgspec.Struct, tag=True, array_like=True):
    """The outputs of one step."""

    entries: list[Output]


class Reply(msgspec.Struct, tag=True, array_like=True):
    """The end of a call on all ranks."""

    call: str
    data: bytes = b""
    error: str | None = None


MESSAGES = msgspec.msgpack.Decoder(Outputs | Reply)


@dataclass(slots=True)
class RunningRequest:
    req: TokenizedGenerateReq
    cached_tokens: int | None = None
    """Number of prompt tokens that SGLang read from its prefix cache. None before the first output."""


def step_of(outputs: Outputs, running: Mapping[str, RunningRequest]) -> Step:
    """Return the new tokens of the requests in `running`, which has SGLang's ids as keys. The others were aborted."""
    return [_new_tokens(entry, running[entry.rid]) for entry in outputs.entries if entry.rid in running]


def _new_tokens(output: Output, request: RunningRequest) -> NewTokens:
    req = request.req
    if request.cached_tokens is None:  # after a retraction, SGLang counts its own tokens as cached
        request.cached_tokens = output.cached_tokens
    new = NewTokens(req.rid, output.output_ids, output.logprobs, None, request.cached_tokens)
    if output.top_ids:
        new.top_logprobs = TokenLogprobs.rows(np.array(output.top_logprobs), np.array(output.top_ids))
    if output.prompt_logprobs:
        new.prompt_logprobs = _prompt(req, output)
    if output.finish_reason is not None:
        new.finish_reason = _finish_reason(output.finish_reason)
    if not req.sampling.max_new_tokens:
        new.output_ids, new.logprobs, new.top_logprobs = [], [], None
    return new


def _prompt(req: TokenizedGenerateReq, output: Output) -> PromptLogprobs:
    logprobs: Any = output.prompt_logprobs[1:]
    rows = zip(output.prompt_top_logprobs, output.prompt_top_ids, strict=True)
    return PromptLogprobs(
        packed_ids=pack_ids(req.input_ids[req.logprob_start_len :]),
        packed_logprobs=pack_logprobs(logprobs),
        packed_ranks=pack_ids([0] * len(logprobs)),
        top=[TokenLogprobs.of(row, ids) if row and ids else None for row, ids in rows] or None,
    )


def _finish_reason(reason: dict[str, Any]) -> FinishReason:
    matched = reason.get("matched")
    match reason["type"]:
        case "stop" if isinstance(matched, int):
            return FinishReason(type="stop", matched=matched)
        case "stop":  # no stop strings are sent: SGLang says so of a token outside of the vocabulary
            return FinishReason(type="abort", message=f"The engine ended the request: {matched}", status_code=500)
        case "length":
            return FinishReason(type="length")
        case _:
            message = f"The engine ended the request: {reason.get('message')}"
            return FinishReason(type="abort", message=message, status_code=reason.get("status_code") or 500)

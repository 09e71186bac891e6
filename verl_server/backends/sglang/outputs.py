"""Translates SGLang's `BatchTokenIDOutput`, the message of a scheduler with the outputs of one step, to a `Step`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from verl_server.backends.process.driver import NewTokens, Step
from verl_server.messages.io_struct import FinishReason, TokenizedGenerateReq
from verl_server.messages.packed import PromptLogprobs, TokenLogprobs, pack_ids, pack_logprobs


@dataclass(slots=True)
class RunningRequest:
    req: TokenizedGenerateReq
    cached_tokens: int = 0
    """Number of prompt tokens that SGLang read from its prefix cache. 0 before the first output."""
    has_output: bool = False


def step_of(output: Any, running: Mapping[str, RunningRequest]) -> Step:
    """Return the new tokens of a `BatchTokenIDOutput` for the requests in `running`, which has SGLang's ids as keys."""
    return [_new_tokens(output, i, running[rid]) for i, rid in enumerate(output.rids) if rid in running]


def _new_tokens(output: Any, i: int, request: RunningRequest) -> NewTokens:
    req = request.req
    if not request.has_output:  # after a retraction, SGLang counts its own tokens as cached
        request.has_output, request.cached_tokens = True, output.cached_tokens[i]
    new = NewTokens(req.rid, list(output.output_ids[i]), [], None, request.cached_tokens)
    if req.return_logprob and new.output_ids:
        new.logprobs = output.output_token_logprobs_val[i]
        if top := req.top_logprobs_num:
            values, ids = output.output_top_logprobs_val[i], output.output_top_logprobs_idx[i]
            new.top_logprobs = TokenLogprobs.rows(np.array(values)[:, :top], np.array(ids)[:, :top])
    if req.logprob_start_len >= 0 and output.input_token_logprobs_val[i]:
        new.prompt_logprobs = _prompt(req, output, i)
    if output.finished_reasons[i] is not None:
        new.finish_reason = _finish_reason(output.finished_reasons[i])
    if not req.sampling.max_new_tokens:
        new.output_ids, new.logprobs, new.top_logprobs = [], [], None
    return new


def _prompt(req: TokenizedGenerateReq, output: Any, i: int) -> PromptLogprobs:
    """Read the log-probabilities of the prompt from `logprob_start_len`. The entry of the first token is None."""
    values, top = output.input_token_logprobs_val[i], None
    if num := req.top_logprobs_num:
        rows = zip(output.input_top_logprobs_val[i], output.input_top_logprobs_idx[i], strict=True)
        top = [None if not row else TokenLogprobs.of(row[:num], ids[:num]) for row, ids in rows]
    return PromptLogprobs(
        packed_ids=pack_ids(req.input_ids[req.logprob_start_len :]),
        packed_logprobs=pack_logprobs(values[1:]),
        packed_ranks=pack_ids([0] * (len(values) - 1)),
        top=top,
    )


def _finish_reason(reason: dict[str, Any]) -> FinishReason:
    match reason["type"]:
        case "stop":
            return FinishReason(type="stop", matched=reason.get("matched"))
        case "length":
            return FinishReason(type="length")
        case _:
            message = f"The engine ended the request: {reason.get('message')}"
            return FinishReason(type="abort", message=message, status_code=reason.get("status_code") or 500)

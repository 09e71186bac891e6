"""`RunningRequest`: a request that vLLM computes, and the translation of its outputs to `NewTokens`.

`VllmDriver` calls it with each `EngineCoreOutput`, the message of vLLM's engine process for one request in one step.
vLLM's own `OutputProcessor` is not used: it builds objects for each token that this server does not need.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from verl_server.backends.process.driver import NewTokens
from verl_server.messages.io_struct import FinishReason, TokenizedGenerateReq
from verl_server.messages.packed import PromptLogprobs, TokenLogprobs, pack_array, pack_ids


@dataclass(slots=True)
class RunningRequest:
    req: TokenizedGenerateReq
    cached_tokens: int = 0
    """Number of prompt tokens that vLLM read from its prefix cache. 0 before the first output."""
    has_output: bool = False

    def new_tokens(self, output: Any) -> NewTokens:
        """Return the new tokens that an `EngineCoreOutput` adds to the request."""
        req = self.req
        if not self.has_output:  # after a retraction, vLLM counts its own tokens as cached
            self.has_output = True
            if output.prefill_stats is not None:
                self.cached_tokens = output.prefill_stats.num_cached_tokens
        new = NewTokens(req.rid, output.new_token_ids, [], None, self.cached_tokens)
        if output.new_logprobs is not None:
            _add_logprobs(new, output.new_logprobs, req.top_logprobs_num)
        if output.finish_reason is not None:
            new.finish_reason = _finish_reason(str(output.finish_reason), new.output_ids, output.stop_reason)
        if output.new_prompt_logprobs_tensors is not None:
            new.prompt_logprobs = _prompt(req, output.new_prompt_logprobs_tensors)
        return new if req.sampling.max_new_tokens else _without_tokens(new)


def _add_logprobs(new: NewTokens, lists: Any, top: int) -> None:
    """Read vLLM's `LogprobsLists`, with one row for each token: the sampled token, then the most likely tokens."""
    new.logprobs = lists.logprobs[:, 0].tolist()
    if top:
        new.top_logprobs = TokenLogprobs.rows(lists.logprobs[:, 1 : top + 1], lists.logprob_token_ids[:, 1 : top + 1])


def _without_tokens(new: NewTokens) -> NewTokens:
    """Drop the one token that vLLM generates for a request that wants none."""
    reason = FinishReason(type="length") if new.output_ids else new.finish_reason
    return NewTokens(new.rid, [], [], reason, new.cached_tokens, prompt_logprobs=new.prompt_logprobs)


def _prompt(req: TokenizedGenerateReq, tensors: Any) -> PromptLogprobs:
    """Read vLLM's `LogprobsTensors`. Row i belongs to the prompt's token i + 1, which is in the first column."""
    start, top = req.logprob_start_len, req.top_logprobs_num
    values, ids = np.asarray(tensors.logprobs[start:]), np.asarray(tensors.logprob_token_ids[start:])
    return PromptLogprobs(
        packed_ids=pack_ids(req.input_ids[start:]),
        packed_logprobs=pack_array(values[:, 0]),
        packed_ranks=pack_array(np.asarray(tensors.selected_token_ranks[start:])),
        top=[None, *TokenLogprobs.rows(values[:, 1 : top + 1], ids[:, 1 : top + 1])] if top else None,
    )


def _finish_reason(name: str, ids: list[int], stop_reason: int | str | None) -> FinishReason:
    """Return the finish reason for vLLM's `name`. `matched` is the stop token, which stays in the output."""
    match name:
        case "stop":
            return FinishReason(type="stop", matched=ids[-1] if ids else stop_reason)
        case "length":
            return FinishReason(type="length")
        case other:
            return FinishReason(type="abort", message=f"The engine ended the request: {other}.", status_code=500)

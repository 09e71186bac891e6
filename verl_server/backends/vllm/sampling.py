"""Translates requests to vLLM's `SamplingParams`, and vLLM's outputs to `NewTokens`."""

from __future__ import annotations

from typing import Any

from verl_server.backends.process.driver import NewTokens
from verl_server.io_struct import FinishReason, PromptLogprobs, TokenizedGenerateReq, TokenLogprobs
from verl_server.sampling_params import TOP_K_ALL

_SEED_MASK = (1 << 63) - 1
"""vLLM's seeds are signed integers of 64 bits that torch accepts: the sign is dropped."""


def refusal(req: TokenizedGenerateReq) -> str | None:
    """Return the first setting of `req` that this driver does not translate yet, as an error; None if there is none."""
    unsupported = {
        "max_new_tokens=0": req.sampling.max_new_tokens == 0,
        "a grammar (json_schema, regex, ebnf, structural_tag)": bool(req.grammar),
        "return_sampling_mask": bool(req.sampling_mask_num),
        "token_ids_logprob": req.token_ids_logprob is not None,
        "bad_words": bool(req.bad_words_ids),
        "logprobs_mode": req.sampling.logprobs_mode != "default",
    }
    named = [name for name, is_set in unsupported.items() if is_set]
    return f"engine='vllm' does not support {named[0]}." if named else None


def sampling_params(req: TokenizedGenerateReq, seed: int) -> Any:
    """Return vLLM's `SamplingParams` for `req`. Stop strings are left out, because the front matches them."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    ours = req.sampling
    return SamplingParams(
        max_tokens=ours.max_new_tokens,
        min_tokens=ours.min_new_tokens,
        temperature=ours.temperature,
        top_p=ours.top_p,
        top_k=0 if ours.top_k == TOP_K_ALL else ours.top_k,
        min_p=ours.min_p,
        frequency_penalty=ours.frequency_penalty,
        presence_penalty=ours.presence_penalty,
        repetition_penalty=ours.repetition_penalty,
        logit_bias={int(token): bias for token, bias in (ours.logit_bias or {}).items()} or None,
        allowed_token_ids=ours.allowed_token_ids,
        seed=seed & _SEED_MASK,
        stop_token_ids=req.stop_ids,
        ignore_eos=True,  # the front has put the model's EOS tokens into `stop_ids`
        logprobs=req.top_logprobs_num if req.return_logprob else None,
        prompt_logprobs=req.top_logprobs_num if req.logprob_start_len >= 0 else None,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def new_tokens(req: TokenizedGenerateReq, output: Any) -> NewTokens:
    """Return what vLLM's `RequestOutput` with the tokens of one step adds to `req`."""
    completion = output.outputs[0]
    ids = list(completion.token_ids)
    positions = completion.logprobs or []
    new = NewTokens(
        rid=req.rid,
        output_ids=ids,
        logprobs=[position[token].logprob for token, position in zip(ids, positions, strict=False)],
        finish_reason=_finish_reason(completion, ids),
        cached_tokens=output.num_cached_tokens or 0,
    )
    if req.top_logprobs_num:
        new.top_logprobs = [_top(position, req.top_logprobs_num) for position in positions]
    if output.prompt_logprobs is not None:
        new.prompt_logprobs = _prompt(req, output.prompt_logprobs)
    return new


def _finish_reason(completion: Any, ids: list[int]) -> FinishReason | None:
    """`matched` is the stop token, which vLLM leaves in the output, as this project does."""
    match completion.finish_reason:
        case None:
            return None
        case "stop":
            return FinishReason(type="stop", matched=ids[-1] if ids else completion.stop_reason)
        case "length":
            return FinishReason(type="length")
        case other:
            message = f"The engine ended the request: {other}."
            return FinishReason(type="abort", message=message, status_code=500)


def _top(position: dict[int, Any], count: int) -> TokenLogprobs:
    """The `count` most likely candidates. vLLM adds the sampled token where it is not one of them."""
    best = sorted(position.items(), key=lambda item: item[1].rank)[:count]
    return TokenLogprobs([entry.logprob for _, entry in best], [token for token, _ in best])


def _prompt(req: TokenizedGenerateReq, positions: list[dict[int, Any] | None]) -> PromptLogprobs:
    start = req.logprob_start_len
    ids = req.input_ids[start:]
    entries = [None if i == 0 else position for i, position in enumerate(positions[start:])]
    own = [None if entry is None else entry[token] for token, entry in zip(ids, entries, strict=True)]
    top = [None if entry is None else _top(entry, req.top_logprobs_num) for entry in entries]
    return PromptLogprobs(
        token_ids=ids,
        logprobs=[None if one is None else one.logprob for one in own],
        ranks=[None if one is None else one.rank for one in own],
        top=top if req.top_logprobs_num else None,
    )

"""Translates requests to vLLM's `SamplingParams`. `outputs` translates what comes back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verl_server.io_struct import TokenizedGenerateReq
from verl_server.sampling_params import TOP_K_ALL

_SEED_MASK = (1 << 63) - 1
"""vLLM's seeds are signed integers of 64 bits that torch accepts: the sign is dropped."""


UNSUPPORTED: dict[str, Callable[[TokenizedGenerateReq], bool]] = {
    "grammars (json_schema, regex, ebnf, structural_tag)": lambda req: bool(req.grammar),
    "return_sampling_mask": lambda req: bool(req.sampling_mask_num),
    "token_ids_logprob": lambda req: req.token_ids_logprob is not None,
    "bad_words": lambda req: bool(req.bad_words_ids),
    "logprobs_mode='raw'": lambda req: req.sampling.logprobs_mode == "raw",
    "logprobs_mode='sampling' at temperature 0": lambda req: (
        req.sampling.logprobs_mode == "sampling" and req.sampling.temperature == 0
    ),
}
"""Settings that this driver does not translate -> whether a request has them."""


def refusal(req: TokenizedGenerateReq) -> str | None:
    """Return the first setting of `req` that is not supported, as an error; None if there is none."""
    named = [name for name, is_set in UNSUPPORTED.items() if is_set(req)]
    return f"engine='vllm' does not support {named[0]}." if named else None


def sampling_params(req: TokenizedGenerateReq, seed: int) -> Any:
    """Return vLLM's `SamplingParams` for `req`. Stop strings are left out, because the front matches them."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    ours = req.sampling
    return SamplingParams(
        max_tokens=max(ours.max_new_tokens or 0, 1),
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

"""Translates requests to vLLM's `SamplingParams`. `outputs` translates the results."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from verl_server.messages.io_struct import TokenizedGenerateReq
from verl_server.sampling_params import TOP_K_ALL

_SEED_MASK = (1 << 63) - 1
"""Mask that clears the sign of a seed. vLLM's seeds are signed 64-bit integers, which torch must accept."""


UNSUPPORTED: dict[str, Callable[[TokenizedGenerateReq], bool]] = {
    "a grammar within a structural_tag": lambda req: bool(req.grammar) and structured_outputs(req.grammar) is None,
    "ignore_eos with a grammar": lambda req: bool(req.grammar) and req.sampling.ignore_eos,
    "return_sampling_mask": lambda req: bool(req.sampling_mask_num),
    "token_ids_logprob": lambda req: req.token_ids_logprob is not None,
    "logprobs_mode='raw'": lambda req: req.sampling.logprobs_mode == "raw",
    "logprobs_mode='sampling' at temperature 0": lambda req: (
        req.sampling.logprobs_mode == "sampling" and req.sampling.temperature == 0
    ),
}
"""Setting that this driver does not translate -> a function that returns True if a request has the setting."""


def refusal(req: TokenizedGenerateReq) -> str | None:
    """Return an error for the first setting of `req` that is not supported, or None if all are supported."""
    named = [name for name, is_set in UNSUPPORTED.items() if is_set(req)]
    return f"engine='vllm' does not support {named[0]}." if named else None


def structured_outputs(grammar: str) -> dict[str, str] | None:
    """Return vLLM's field for a grammar in llguidance's format; None if vLLM has no field for it."""
    grammars = json.loads(grammar)["grammars"]
    match grammars:
        case [{"json_schema": schema}]:
            return {"json": json.dumps(schema)}
        case [{"lark_grammar": str(lark)}]:
            return {"grammar": lark}
    return None


def sampling_params(req: TokenizedGenerateReq, seed: int) -> Any:
    """Return vLLM's `SamplingParams` for `req`. Stop strings are omitted, because the front process matches them."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    ours = req.sampling
    grammar = structured_outputs(req.grammar) if req.grammar else None
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
        bad_words=ours.bad_words,
        structured_outputs=StructuredOutputsParams(**grammar) if grammar is not None else None,
        seed=seed & _SEED_MASK,
        stop_token_ids=req.stop_ids,
        ignore_eos=True,  # the front has put the model's EOS tokens into `stop_ids`
        logprobs=req.top_logprobs_num if req.return_logprob else None,
        prompt_logprobs=req.top_logprobs_num if req.logprob_start_len >= 0 else None,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )

"""Translates requests to SGLang's messages. `outputs` translates the results."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

from verl_server.messages.io_struct import TokenizedGenerateReq

_SIGN = 1 << 63

UNSUPPORTED: dict[str, Callable[[TokenizedGenerateReq], bool]] = {
    "allowed_token_ids": lambda req: req.sampling.allowed_token_ids is not None,
    "bad_words": lambda req: bool(req.bad_words_ids),
    "ignore_eos with a grammar": lambda req: bool(req.grammar) and req.sampling.ignore_eos,
    "return_sampling_mask": lambda req: bool(req.sampling_mask_num),
    "token_ids_logprob": lambda req: req.token_ids_logprob is not None,
    "logprobs_mode='raw'": lambda req: req.sampling.logprobs_mode == "raw",
    "logprobs_mode='sampling'": lambda req: req.sampling.logprobs_mode == "sampling",
}
"""Setting that this driver does not translate -> a function that returns True if a request has the setting."""
NEEDS_TOKENIZER: dict[str, Callable[[TokenizedGenerateReq], bool]] = {
    "a grammar": lambda req: bool(req.grammar),
    "min_new_tokens": lambda req: req.sampling.min_new_tokens > 0,
}
"""Setting that SGLang computes with a tokenizer -> a function that returns True if a request has the setting."""


def refusal(req: TokenizedGenerateReq, has_tokenizer: bool) -> str | None:
    """Return an error for the first setting of `req` that is not supported, or None if all are supported."""
    for name, is_set in UNSUPPORTED.items():
        if is_set(req):
            return f"engine='sglang' does not support {name}."
    for name, is_set in NEEDS_TOKENIZER.items():
        if not has_tokenizer and is_set(req):
            return f"engine='sglang' needs a tokenizer for {name}: start the server without skip_tokenizer_init."
    return None


def tokenized_request(req: TokenizedGenerateReq, rid: str, seed: int, cache_key: str) -> Any:
    """Return SGLang's message for `req`. Stop strings are omitted, because the front process matches them."""
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput

    message = TokenizedGenerateReqInput(
        rid=rid,
        input_text=None,
        input_ids=array("q", req.input_ids),
        input_embeds=None,
        mm_inputs=None,
        token_type_ids=None,
        sampling_params=_sampling_params(req, seed),
        return_logprob=req.return_logprob or req.logprob_start_len >= 0,
        logprob_start_len=req.logprob_start_len,
        top_logprobs_num=req.top_logprobs_num,
        token_ids_logprob=None,
        stream=True,
        priority=req.priority,
        extra_key=cache_key,
    )
    message.wrap_pickle_fields()
    return message


def _sampling_params(req: TokenizedGenerateReq, seed: int) -> Any:
    from sglang.srt.sampling.sampling_params import SamplingParams

    ours = req.sampling
    params = SamplingParams(
        max_new_tokens=ours.max_new_tokens,
        min_new_tokens=ours.min_new_tokens,
        temperature=ours.temperature,
        top_p=ours.top_p,
        top_k=ours.top_k,
        min_p=ours.min_p,
        frequency_penalty=ours.frequency_penalty,
        presence_penalty=ours.presence_penalty,
        repetition_penalty=ours.repetition_penalty,
        logit_bias=ours.logit_bias,
        json_schema=req.grammar or None,
        sampling_seed=((seed + _SIGN) & (2 * _SIGN - 1)) - _SIGN,  # `draws` needs a signed integer of 64 bits
        stop_token_ids=set(req.stop_ids),  # the front has put the model's EOS tokens into it
        ignore_eos=not req.stop_ids,
        stream_interval=1,
    )
    # What SGLang's `normalize` sets, which would need a tokenizer here for `min_new_tokens`.
    params.stop_strs, params.stop_regex_strs, params.is_normalized = [], [], True
    return params

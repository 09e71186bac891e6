"""Checks of one request, before the `Scheduler` accepts it. A wrong value must not reach a step of other requests."""

from __future__ import annotations

from verl_server.errors import BadRequestError, ContextLengthError
from verl_server.messages.io_struct import TokenizedGenerateReq


def check_request(message: TokenizedGenerateReq, vocab_size: int, context_length: int, capacity: int) -> None:
    """Raise BadRequestError if a request can never be computed.

    `capacity` is the capacity of the KV cache in tokens.
    """
    prompt_len, new_len = len(message.input_ids), message.sampling.max_new_tokens or 0
    if prompt_len == 0:
        raise BadRequestError("The prompt is empty. It needs at least one token.")
    _check_values(message, vocab_size)
    if prompt_len + new_len > context_length or prompt_len >= context_length:
        raise ContextLengthError.of(prompt_len, new_len, context_length)
    # The KV of the last sampled token is never computed, so this token needs no place in the pool.
    if prompt_len + max(new_len - 1, 0) > capacity:
        cause = (
            f"the KV cache of {capacity} tokens holds no more: raise max_total_tokens, kv_cache_gib or "
            "mem_fraction_static"
        )
        raise ContextLengthError.of(prompt_len, new_len, capacity + 1, cause)


def _check_values(message: TokenizedGenerateReq, vocab_size: int) -> None:
    """Raise BadRequestError for values that would be invalid indices on the device or make a whole step fail."""
    message.sampling.verify()
    message.sampling.verify_vocab(vocab_size)
    words = message.bad_words_ids
    if any(not word for word in words):
        raise BadRequestError("bad_words_ids must be sequences of at least one token id.")
    given = [("input_ids", message.input_ids), ("token_ids_logprob", message.token_ids_logprob)]
    for name, ids in [*given, *(("bad_words_ids", word) for word in words)]:
        if ids and (min(ids) < 0 or max(ids) >= vocab_size):
            raise BadRequestError(f"{name} must be token ids in 0..{vocab_size - 1}, the model's vocabulary.")
    if not 0 <= message.sampling_mask_num <= vocab_size:
        raise BadRequestError(f"sampling_mask_num must be in 0..{vocab_size}, not {message.sampling_mask_num}.")
    if not 0 <= message.top_logprobs_num <= vocab_size:
        raise BadRequestError(f"top_logprobs_num must be in 0..{vocab_size}, not {message.top_logprobs_num}.")

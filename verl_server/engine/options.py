"""Keyword options that several methods of an engine share.

`EngineBase`, `EngineWeights` and `VerlEngine` accept them as `**options: Unpack[...]`, so that editors list the options
and type checkers verify them. `check_names` raises an error for an unknown option at run time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from verl_server.errors import BadRequestError
from verl_server.messages.weight_requests import UpdateMode
from verl_server.weight_version import AnyVersion


class GenerateOptions(TypedDict, total=False):
    """Options of `generate` and `async_generate`. A list has one entry for each prompt."""

    rid: str | list[str] | None
    """Name of the request, for `abort_request`; default: a random name."""
    return_logprob: bool | list[bool]
    """Return the log-probability of every output token."""
    logprob_start_len: int | list[int] | None
    """First prompt position whose log-probability is returned; default: no prompt position."""
    top_logprobs_num: int | list[int] | None
    """Number of the most likely candidates that are returned for each position."""
    token_ids_logprob: list[int] | list[list[int]] | None
    """Token ids whose log-probabilities are returned for each position."""
    return_text_in_logprobs: bool
    """Return the text of each token as the third entry of its log-probability triple."""
    return_prompt_token_ids: bool
    """Return the token ids of the prompt."""
    return_sampling_mask: bool | list[bool]
    """Return all tokens that each output token was drawn from. Needs greedy sampling or a small `top_k`."""
    sampling_logprobs_mode: str | list[str | None] | None
    """With `return_sampling_mask`, the log-probabilities of the sampled tokens ("selected", the default) or of all
    tokens that could be drawn ("support")."""
    extra_key: str | list[str | None] | None
    """Namespace of the prefix cache. A request shares the KV cache only with requests of the same `extra_key` and
    `cache_salt`."""
    cache_salt: str | list[str | None] | None
    """A second part of the namespace of the prefix cache."""
    session_id: str | list[str | None] | None
    """Session of the request: a hint for the prefix cache, which changes no output. Send one id, of at most 128
    characters, with every turn of a conversation, and call `close_session` after the last. A server of another project
    does not receive it."""
    priority: int | None
    """Requests of a larger priority leave the waiting queue first; default: 0."""
    truncate_prompt_tokens: int | None
    """Keep only this many tokens at the end of each prompt; -1: as many as the model can serve."""
    min_weight_version: AnyVersion | None
    """Sample every token with this weight version or a later one of its incarnation, or raise VersionBehindError or
    VersionSupersededError. A free label has no order, and is refused."""
    exact_weight_version: AnyVersion | None
    """Sample every token with the weights of this label, or raise VersionBehindError or VersionSupersededError. If
    another version comes while the request runs, the output ends there, with finish_reason.type "abort"."""
    image_data: Any
    """Not supported: an error when it is set. The name is SGLang's."""
    lora_path: str | list[str] | None
    """Not supported: an error when it is set. The name is SGLang's."""
    custom_logit_processor: str | list[str] | None
    """Not supported: an error when it is set. The name is SGLang's."""


class UpdateOptions(TypedDict, total=False):
    """Options of every weight update."""

    mode: UpdateMode
    """Treatment of running requests: "wait" (default; they finish before the update), "in_place" (they keep their KV
    cache), "retract" (their KV cache is computed again) or "abort" (they return their partial output)."""
    abort_all_requests: bool
    """Shorthand for mode="abort"."""
    allow_nonfinite: bool
    """Serve weights that contain NaN or infinity; otherwise such an update fails and the weights are torn."""
    transaction_id: str | None
    """Id of the transaction that the update belongs to; default: the transaction that this engine opened, if any."""


class TensorUpdateOptions(UpdateOptions, total=False):
    """Options of updates from named tensors."""

    strict_dtype: bool
    """Refuse to convert floating dtypes during the copy."""
    partial: bool
    """True: parameters that are missing keep their values, and the answer names them. False: an update in which a
    parameter is missing raises WeightUpdateError and writes nothing. Default: False, but True in a transaction, whose
    end checks all calls together, for `LocalSerializedTensor`s, and for tensors of a process group."""


class PushOptions(TensorUpdateOptions, total=False):
    """Options of updates from the trainer's memory."""

    checksums: dict[str, str] | None
    """Tensor name -> `tensor_checksum` of the whole source tensor. The update is refused if a checksum differs."""


def check_names(options: Mapping[str, Any], kind: type, call: str) -> None:
    """Raise BadRequestError if `options` has a name that the TypedDict `kind` does not declare.

    Python does not check the names in `**options`. `call` names the method in the message.
    """
    unknown = [name for name in options if name not in kind.__annotations__]
    if unknown:
        raise BadRequestError(f"Unknown option(s) {unknown}; {call} takes {', '.join(kind.__annotations__)}.")

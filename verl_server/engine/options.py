"""The keyword options that several methods of an engine share, each defined once.

`EngineBase`, `EngineWeights` and `VerlEngine` take them as `**options: Unpack[...]`, so that editors list them and type
checkers check them; `check_names` refuses unknown ones at run time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from verl_server.errors import BadRequestError
from verl_server.io_struct import UpdateMode


class GenerateOptions(TypedDict, total=False):
    """What `generate` and `async_generate` take besides the prompt. A list has one entry for each prompt."""

    rid: str | list[str] | None
    """Name of the request for `abort_request`; default: a random one."""
    return_logprob: bool | list[bool]
    """Return the log-probability of every output token."""
    logprob_start_len: int | list[int] | None
    """First prompt position whose log-probability is returned, too; default: none is."""
    top_logprobs_num: int | list[int] | None
    """Number of most likely candidates returned for each position."""
    token_ids_logprob: list[int] | list[list[int]] | None
    """Token ids whose log-probabilities are returned for each position."""
    return_text_in_logprobs: bool
    """Fill the third entry of each log-probability triple."""
    return_prompt_token_ids: bool
    """Return the ids of the prompt, too."""
    image_data: Any
    """SGLang's; refused when it is set, as are the two below."""
    lora_path: str | list[str] | None
    custom_logit_processor: str | list[str] | None


class UpdateOptions(TypedDict, total=False):
    """What every weight update takes."""

    mode: UpdateMode
    """What happens to running requests: "wait" (default; they finish first), "in_place" (they keep their KV cache),
    "retract" (their KV cache is computed again) or "abort" (they return what they have)."""
    abort_all_requests: bool
    """Shorthand for mode="abort"."""
    allow_nonfinite: bool
    """Serve weights that hold NaN or infinity; otherwise such an update fails and the weights are torn."""
    transaction_id: str | None
    """Id of the open transaction that the update belongs to; default: the one that this engine began."""


class TensorUpdateOptions(UpdateOptions, total=False):
    """What updates from named tensors take besides."""

    strict_dtype: bool
    """Refuse to convert floating dtypes during the copy."""
    partial: bool
    """False: refuse an update that does not bring every parameter."""


class PushOptions(TensorUpdateOptions, total=False):
    """What updates from the trainer's memory take besides."""

    checksums: dict[str, str] | None
    """`tensor_checksum` of whole source tensors by name; one that does not match refuses the update."""


def check_names(options: Mapping[str, Any], kind: type, call: str) -> None:
    """Raise BadRequestError for options that the TypedDict `kind` does not have (Python checks no `**options`)."""
    unknown = [name for name in options if name not in kind.__annotations__]
    if unknown:
        raise BadRequestError(f"Unknown option(s) {unknown}; {call} takes {', '.join(kind.__annotations__)}.")

"""Columns: token ids and log-probabilities as arrays in a `columnar` reply of `/generate`.

A column is one array of little-endian int32 or float32 in place of a list of numbers or triples: raw bytes in a msgpack
reply, base64 text in a JSON reply. `ReqState` packs columns with the functions below. `unpack` turns a reply of either
kind into the ordinary result; `HttpServerEngineAdapter` calls it and returns that result.

    output_ids, prompt_token_ids        token ids
    meta_info.output_token_logprobs     log-probabilities, one for each of output_ids
    meta_info.output_token_policy_logprobs   the same
    meta_info.output_token_has_choice   0 or 1 for each of output_ids
    meta_info.input_token_logprobs      {"logprobs", "token_ids"}; NaN where the list has null
    meta_info.*_top_logprobs,
    meta_info.*_token_ids_logprobs      {"counts", "logprobs", "token_ids"}: position i has counts[i] candidates, or -1
                                        where the list has null; the candidates of all positions are concatenated
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any

from verl_server.messages.packed import (
    PromptLogprobs,
    TokenLogprobs,
    pack_ids,
    pack_logprobs,
    unpack_ids,
    unpack_logprobs,
)
from verl_server.messages.results import LogprobTriple

MSGPACK = "application/msgpack"
"""Content type of a reply whose columns are raw bytes. The Accept header requests it."""
POLICY, CHOICE = "output_token_policy_logprobs", "output_token_has_choice"
"""Fields of `meta_info`; `results.MetaInfo` describes them."""
Column = bytes | str
"""A column of a msgpack reply (bytes) or of a JSON reply (base64 text)."""


# -- packing ------------------------------------------------------------------------------------------------


def prompt(found: PromptLogprobs | None) -> dict[str, bytes]:
    """Pack prompt log-probabilities. None (the first token has no log-probability) becomes NaN."""
    if found is None:
        return {"logprobs": b"", "token_ids": b""}
    missing = pack_logprobs([math.nan] * found.num_missing)
    return {"logprobs": missing + found.packed_logprobs, "token_ids": found.packed_ids}


def candidates(positions: Sequence[TokenLogprobs | None]) -> dict[str, bytes]:
    """Pack the candidates of each position; the module docstring describes the format."""
    some = [each for each in positions if each is not None]
    return {
        "counts": pack_ids([-1 if each is None else len(each) for each in positions]),
        "logprobs": b"".join([each.packed_logprobs for each in some]),
        "token_ids": b"".join([each.packed_ids for each in some]),
    }


# -- unpacking ----------------------------------------------------------------------------------------------


def unpack(result: dict[str, Any]) -> dict[str, Any]:
    """Turn columns back into lists, in place. Return `result`, now in the form of a reply without `columnar`.

    A result without columns is not changed.
    """
    if isinstance(result.get("output_ids"), list):
        return result
    for name in ("output_ids", "prompt_token_ids"):
        if name in result:
            result[name] = _ids(result[name])
    meta = result["meta_info"]
    for name in _CANDIDATES & meta.keys():
        meta[name] = candidate_lists(meta[name])
    if "output_token_logprobs" in meta:
        meta["output_token_logprobs"] = triples(_logprobs(meta["output_token_logprobs"]), result["output_ids"])
        values = _with_nulls(meta["input_token_logprobs"]["logprobs"])
        meta["input_token_logprobs"] = triples(values, _ids(meta["input_token_logprobs"]["token_ids"]))
    if POLICY in meta:
        meta[POLICY] = _logprobs(meta[POLICY])
    if CHOICE in meta:
        meta[CHOICE] = _ids(meta[CHOICE])
    return result


_CANDIDATES = {f"{side}_{kind}_logprobs" for side in ("input", "output") for kind in ("top", "token_ids")}


def _ids(column: Column) -> list[int]:
    return unpack_ids(_bytes(column))


def _logprobs(column: Column) -> list[float]:
    return unpack_logprobs(_bytes(column))


def _bytes(column: Column) -> bytes:
    return base64.b64decode(column) if isinstance(column, str) else column


def _with_nulls(column: Column) -> list[float | None]:
    return [None if math.isnan(value) else value for value in _logprobs(column)]


def triples(
    values: Sequence[float | None], token_ids: Sequence[int], texts: Iterable[str | None] = repeat(None)
) -> list[LogprobTriple]:
    """Return the triples (log-probability or None, token id, text or None) of tokens.

    They are tuples, which the garbage collector stops to visit once it has seen that they hold no containers. It would
    visit lists in every full collection for as long as the caller keeps them.
    """
    assert len(values) == len(token_ids)
    return list(zip(values, token_ids, texts, strict=False))  # `texts` may have no end


def candidate_lists(
    columns: Mapping[str, Column], as_triples: Callable[[list[float], list[int]], list[LogprobTriple]] = triples
) -> list[list[LogprobTriple] | None]:
    """Turn what `candidates` returned into the triples of each position. `as_triples` makes those of all positions."""
    found = as_triples(_logprobs(columns["logprobs"]), _ids(columns["token_ids"]))
    positions: list[list[LogprobTriple] | None] = []
    start = 0
    for count in _ids(columns["counts"]):
        positions.append(None if count < 0 else found[start : start + count])
        start += max(0, count)
    return positions

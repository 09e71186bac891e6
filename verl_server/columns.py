"""Columns: how a `columnar` reply of `/generate` carries token ids and log-probabilities.

Each is one array of little-endian int32 or float32 in place of a list of numbers or triples: raw bytes in a msgpack
reply, base64 text in a JSON one. `ReqState` packs with the functions below; `unpack` turns a reply, however it came,
into the ordinary result, which is what `HttpServerEngineAdapter` returns.

    output_ids, prompt_token_ids        ids
    meta_info.output_token_logprobs     log-probabilities, one for each of output_ids
    meta_info.input_token_logprobs      {"logprobs", "token_ids"}; where the list has null, NaN
    meta_info.*_top_logprobs,
    meta_info.*_token_ids_logprobs      {"counts", "logprobs", "token_ids"}: counts[i] candidates belong to position i,
                                        those of all positions in a row; -1 where the list has null
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from verl_server.io_struct import TokenLogprobs

MSGPACK = "application/msgpack"
"""Content type of a reply whose columns are raw bytes; asked for with the Accept header."""
Column = bytes | str
"""An array as msgpack carries it, or JSON."""


# -- packing ------------------------------------------------------------------------------------------------


def ids(values: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)  # several times faster than numpy with a list


def logprobs(values: Sequence[float]) -> bytes:
    """float32 holds all of them exactly: the model's are no longer."""
    return struct.pack(f"<{len(values)}f", *values)


def prompt(values: Sequence[float | None], token_ids: Sequence[int]) -> dict[str, Any]:
    return {"logprobs": logprobs([math.nan if v is None else v for v in values]), "token_ids": ids(token_ids)}


def candidates(positions: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
    some = [each for each in positions if each is not None]
    return {
        "counts": ids([-1 if each is None else len(each.token_ids) for each in positions]),
        "logprobs": logprobs([value for each in some for value in each.logprobs]),
        "token_ids": ids([token for each in some for token in each.token_ids]),
    }


# -- unpacking ----------------------------------------------------------------------------------------------


def unpack(result: dict[str, Any]) -> dict[str, Any]:
    """The result object as it is without `columnar`. Changes `result` and returns it; one without columns passes."""
    if isinstance(result.get("output_ids"), list):
        return result
    for name in ("output_ids", "prompt_token_ids"):
        if name in result:
            result[name] = _ids(result[name]).tolist()
    meta = result["meta_info"]
    for name in _CANDIDATES & meta.keys():
        meta[name] = _candidate_lists(meta[name])
    if "output_token_logprobs" in meta:
        values = _logprobs(meta["output_token_logprobs"]).tolist()
        meta["output_token_logprobs"] = _triples(values, result["output_ids"])
        values = _with_nulls(meta["input_token_logprobs"]["logprobs"])
        meta["input_token_logprobs"] = _triples(values, _ids(meta["input_token_logprobs"]["token_ids"]).tolist())
    return result


_CANDIDATES = {f"{side}_{kind}_logprobs" for side in ("input", "output") for kind in ("top", "token_ids")}


def _ids(column: Column) -> npt.NDArray[np.int32]:
    return np.frombuffer(_bytes(column), dtype="<i4")


def _logprobs(column: Column) -> npt.NDArray[np.float32]:
    return np.frombuffer(_bytes(column), dtype="<f4")


def _bytes(column: Column) -> bytes:
    return base64.b64decode(column) if isinstance(column, str) else column


def _with_nulls(column: Column) -> list[float | None]:
    return [None if math.isnan(value) else value for value in _logprobs(column).tolist()]


def _triples(values: Sequence[float | None], token_ids: Sequence[int]) -> list[list[Any]]:
    return [[value, token, None] for value, token in zip(values, token_ids, strict=True)]


def _candidate_lists(columns: dict[str, Any]) -> list[list[list[Any]] | None]:
    triples = _triples(_logprobs(columns["logprobs"]).tolist(), _ids(columns["token_ids"]).tolist())
    positions: list[list[list[Any]] | None] = []
    start = 0
    for count in _ids(columns["counts"]).tolist():
        positions.append(None if count < 0 else triples[start : start + count])
        start += max(0, count)
    return positions

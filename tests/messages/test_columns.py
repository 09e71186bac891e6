"""A client unpacks columnar results to the same results that it would get without columns."""

from __future__ import annotations

import base64
import math
from typing import Any

import msgspec
import orjson
import pytest

from verl_server.messages.columns import unpack
from verl_server.messages.io_struct import BatchTokenIDOut, FinishReason, TokenizedGenerateReq
from verl_server.messages.packed import PromptLogprobs, TokenLogprobs
from verl_server.sampling_params import SamplingParams
from verl_server.server.http.responses import json_response
from verl_server.server.request_state import ReqState

FULL = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2, "token_ids_logprob": [7]}


def finished(columnar: bool, **asked: Any) -> dict[str, Any]:
    """Return the result of a request for 2 tokens after a prompt of 3 tokens, with the options in `asked`."""
    req = TokenizedGenerateReq(rid="1:a", input_ids=[3, 4, 5], sampling=SamplingParams(max_new_tokens=2), **asked)
    if asked:
        req.grammar = "a grammar"
    state = ReqState("a", req, None, return_prompt_token_ids=True, columnar=columnar)
    pair, other = TokenLogprobs.of([-0.5, -1.25], [151935, 0]), TokenLogprobs.of([-1.5, -2.0], [8, 9])
    one = TokenLogprobs.of([-math.inf], [7])
    out = BatchTokenIDOut(
        rids=["1:a"],
        output_ids=[[151935, 9]],
        output_logprobs=[[-0.5, -0.1234130859375] if asked else []],
        finish_reasons=[FinishReason(type="length", length=2)],
        weight_version="3",
        cached_tokens=[0],
        num_retractions=[0],
    )
    if asked:
        out.policy_logprobs[0], out.has_choice[0] = [-1.5, -2.25], [True, False]
        out.top_logprobs[0], out.token_ids_logprobs[0] = [pair, TokenLogprobs.of([], [])], [one, one]
        out.prompt_logprobs[0] = PromptLogprobs.of(
            token_ids=[3, 4, 5],
            logprobs=[-2.5, -3.0],
            ranks=[1, 2],
            top=[None, pair, other],
            requested=[None, one, one],
        )
    state.extend(out, 0)
    result = state.result()
    for name in ("e2e_latency", "response_sent_to_client_ts"):
        del result["meta_info"][name]
    return result


@pytest.mark.parametrize("asked", [FULL, {"return_logprob": True}, {}])
def test_a_client_gets_the_ordinary_result(asked: dict[str, Any]) -> None:
    ordinary, columnar = (finished(flag, **asked) for flag in (False, True))
    assert columnar != ordinary
    assert unpack(orjson.loads(json_response(columnar).body)) == ordinary
    assert unpack(msgspec.msgpack.decode(msgspec.msgpack.encode(columnar))) == ordinary


def test_an_ordinary_result_passes() -> None:
    ordinary = finished(False, **FULL)
    assert unpack(finished(False, **FULL)) == ordinary


def test_the_documented_layout() -> None:
    result = orjson.loads(json_response(finished(True, **FULL)).body)
    meta = result["meta_info"]
    assert base64.b64decode(result["output_ids"]) == b"\x7f\x51\x02\x00" + b"\x09\x00\x00\x00"  # little-endian int32
    assert base64.b64decode(meta["output_token_logprobs"])[:4] == b"\x00\x00\x00\xbf"  # -0.5 as float32
    assert base64.b64decode(meta["input_top_logprobs"]["counts"]) == b"\xff\xff\xff\xff" + 2 * b"\x02\x00\x00\x00"
    assert meta["output_token_logprobs_length"] == 2

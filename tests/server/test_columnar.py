"""`/generate` with `columnar` and `Accept: application/msgpack` returns the same numbers in other encodings."""

from __future__ import annotations

import msgspec
import orjson
import pytest

from tests.server.conftest import Stack
from verl_server.messages.columns import unpack


def test_numbers_come_in_columns_when_asked(stack: Stack) -> None:
    body = {"input_ids": [7, 8], "sampling_params": {"max_new_tokens": 3}, "return_logprob": True}
    lists = stack.generate(**body)
    assert lists["output_ids"] == [9, 10, 11], "the default is SGLang's lists"
    in_json = stack.post("/generate", body | {"columnar": True})
    assert isinstance(in_json.json()["output_ids"], str)
    packed = stack.post("/generate", body | {"columnar": True}, headers={"Accept": "application/msgpack"})
    assert packed.headers["content-type"] == "application/msgpack"
    for result in (unpack(in_json.json()), unpack(msgspec.msgpack.decode(packed.content))):
        assert result["output_ids"] == lists["output_ids"]
        ours, theirs = (r["meta_info"]["output_token_logprobs"] for r in (result, lists))
        assert [tuple(t[1:]) for t in ours] == [tuple(t[1:]) for t in theirs]
        assert [t[0] for t in ours] == pytest.approx([t[0] for t in theirs], rel=1e-6)


def test_msgpack_without_columns_holds_lists(stack: Stack) -> None:
    body = {"input_ids": [[7], [8]], "sampling_params": {"max_new_tokens": 1}}
    answer = stack.post("/generate", body, headers={"Accept": "application/msgpack, application/json;q=0.5"})
    assert [result["output_ids"] for result in msgspec.msgpack.decode(answer.content)] == [[8], [9]]


def test_streams_take_columns_too(stack: Stack) -> None:
    stack.scheduler.chunk = 1
    body = {"input_ids": [7], "sampling_params": {"max_new_tokens": 3}, "stream": True, "columnar": True}
    lines = stack.post("/generate", body, headers={"Accept": "application/msgpack"}).text.splitlines()
    assert lines[-2] == "data: [DONE]"
    assert unpack(orjson.loads(lines[-4].removeprefix("data: ")))["output_ids"] == [8, 9, 10]


def test_columns_have_no_place_for_text(stack: Stack) -> None:
    body = {"input_ids": [7], "return_logprob": True, "return_text_in_logprobs": True, "columnar": True}
    answer = stack.post("/generate", body)
    assert answer.status_code == 400 and "return_text_in_logprobs" in answer.json()["error"]["message"]
    assert stack.manager.num_requests == 0

"""A prompt of `/generate` as int32 in front of the JSON: the same request in other bytes."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from tests.server.conftest import Stack
from verl_server import columns
from verl_server.engine.http_answers import pack_prompt
from verl_server.io_struct import PROMPT_HEADER


def send(stack: Stack, prompt: bytes, body: dict[str, Any], header: str | None = None) -> Any:
    content = prompt + orjson.dumps(body)
    headers = {PROMPT_HEADER: header or str(len(prompt)), "Content-Type": "application/json"}
    return stack.request("POST", "/generate", content=content, headers=headers)


def test_a_packed_prompt_is_that_of_json(stack: Stack) -> None:
    ids = list(range(40))
    body = {
        "sampling_params": {"max_new_tokens": 3},
        "return_logprob": True,
        "logprob_start_len": 0,
        "return_prompt_token_ids": True,
    }
    packed = send(stack, columns.ids(ids), body).json()
    listed = stack.generate(input_ids=ids, **body)
    for name in ("output_ids", "prompt_token_ids"):
        assert packed[name] == listed[name]
    for name in ("prompt_tokens", "input_token_logprobs", "output_token_logprobs"):
        assert packed["meta_info"][name] == listed["meta_info"][name]
    assert packed["prompt_token_ids"] == ids


def test_samples_and_truncation(stack: Stack) -> None:
    ids = list(range(40))
    found = send(stack, columns.ids(ids), {"sampling_params": {"max_new_tokens": 1, "n": 2}}).json()
    assert [result["output_ids"] for result in found] == [[40], [40]]
    body = {"truncate_prompt_tokens": 5, "return_prompt_token_ids": True, "sampling_params": {"max_new_tokens": 1}}
    assert send(stack, columns.ids(ids), body).json()["prompt_token_ids"] == ids[-5:]


@pytest.mark.parametrize(
    ("prompt", "body", "header", "said"),
    [
        (columns.ids([1, 2]), {}, "7", "must be the number of bytes"),
        (columns.ids([1, 2]), {}, "0", "must be the number of bytes"),
        (columns.ids([1, 2]), {}, "4000", "must be the number of bytes"),
        (columns.ids([1, 2]), {}, "eight", "must be the number of bytes"),
        (columns.ids([1, 2]), {"input_ids": [1]}, None, "leave out text and input_ids"),
        (columns.ids([1, 10**6]), {}, None, "token id 1000000, outside the vocabulary"),
        (columns.ids([1, -1]), {}, None, "token id -1, outside the vocabulary"),
        (columns.ids([1] * 5000), {}, None, "longer than the model's context length"),
        (columns.ids([1]), {"note": "x" * 200_000}, None, "send the whole request as JSON"),
        (columns.ids([1]), {"sampling_params": {"stop_regex": "a" * 200}}, None, "send the whole request as JSON"),
    ],
)
def test_wrong_bodies_are_refused(stack: Stack, prompt: bytes, body: Any, header: str | None, said: str) -> None:
    answer = send(stack, prompt, body, header)
    assert answer.status_code == 400 and said in answer.json()["error"]["message"]
    assert stack.manager.num_requests == 0


def test_the_adapter_packs_long_prompts_of_ids_only() -> None:
    ids = list(range(2000))
    packed, rest = pack_prompt({"input_ids": ids, "rid": "a"})
    assert columns.id_list(packed) == ids and rest == {"rid": "a"}
    for body in (
        {"text": "x" * 5000},
        {"input_ids": ids[:100]},
        {"input_ids": [ids, ids]},
        {"input_ids": [*ids, "x"]},
        {"input_ids": ids, "sampling_params": {"stop_regex": "a+"}},
    ):
        assert pack_prompt(body) == (b"", body)

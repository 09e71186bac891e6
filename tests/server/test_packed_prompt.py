"""Prompts of `/generate` as int32 in front of the JSON: the same request in other bytes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.engine.restartable_server import Server
from tests.server.conftest import Stack
from verl_server import BadRequestError, HttpServerEngineAdapter
from verl_server.engine.http_answers import generate_content, pack_prompts
from verl_server.messages.io_struct import PROMPT_HEADER, PROMPT_JSON_BYTES, TokenizedGenerateReq
from verl_server.messages.packed import pack_ids, unpack_ids
from verl_server.server.slices import Slices


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
    packed = send(stack, pack_ids(ids), body).json()
    listed = stack.generate(input_ids=ids, **body)
    for name in ("output_ids", "prompt_token_ids"):
        assert packed[name] == listed[name]
    for name in ("prompt_tokens", "input_token_logprobs", "output_token_logprobs"):
        assert packed["meta_info"][name] == listed["meta_info"][name]
    assert packed["prompt_token_ids"] == ids


def test_samples_and_truncation(stack: Stack) -> None:
    ids = list(range(40))
    found = send(stack, pack_ids(ids), {"sampling_params": {"max_new_tokens": 1, "n": 2}}).json()
    assert [result["output_ids"] for result in found] == [[40], [40]]
    body = {"truncate_prompt_tokens": 5, "return_prompt_token_ids": True, "sampling_params": {"max_new_tokens": 1}}
    assert send(stack, pack_ids(ids), body).json()["prompt_token_ids"] == ids[-5:]


@pytest.mark.parametrize(
    ("prompt", "body", "header", "said"),
    [
        (pack_ids([1, 2]), {}, "7", "must be the number of bytes"),
        (pack_ids([1, 2]), {}, "0", "must be the number of bytes"),
        (pack_ids([1, 2]), {}, "4000", "must be the number of bytes"),
        (pack_ids([1, 2]), {}, "eight", "must be the number of bytes"),
        (pack_ids([1, 2]), {}, "x" * 500, "X-Verl-Prompt-Bytes is '" + "x" * 40 + "', but"),
        (pack_ids([1, 2]), {}, "-8", "must be the number of bytes"),
        (pack_ids([1, 2]), {}, "4", "After the 4 bytes of X-Verl-Prompt-Bytes: The body is not valid JSON"),
        (pack_ids([1, 2]), [], None, "must be a JSON object"),
        (pack_ids([1, 2]), {"input_ids": [1]}, None, "leave out text and input_ids"),
        (pack_ids([1, 2]), {"text": "a", "prompt_lengths": [1, 1]}, None, "leave out text and input_ids"),
        (pack_ids([1, 2]), {"prompt_lengths": []}, None, "prompt_lengths cannot be empty"),
        (pack_ids([1, 2]), {"prompt_lengths": [2, 0]}, None, "prompt_lengths[1] must be in 1..2"),
        (pack_ids([1, 2]), {"prompt_lengths": [3, -1]}, None, "prompt_lengths[0] must be in 1..2"),
        (pack_ids([1, 2]), {"prompt_lengths": [1]}, None, "The sum of prompt_lengths is 1, but"),
        (pack_ids([1, 2]), {"prompt_lengths": [2, 1]}, None, "announces 2 token ids (8 bytes)"),
        (pack_ids([1, 2]), {"prompt_lengths": [1, "x"]}, None, "`int`, got `str` - at `prompt_lengths[1]`"),
        (pack_ids([1, 2]), {"prompt_lengths": [True, 1]}, None, "got `bool` - at `prompt_lengths[0]`"),
        (pack_ids([1, 2]), {"prompt_lengths": 2}, None, "prompt_lengths"),
        (pack_ids([1, 2]), {"prompt_lengths": [2**64 - 1, 1]}, None, "prompt_lengths"),
        (pack_ids([10**6] * 20_000), {"prompt_lengths": [1] * 20_000}, None, "max_samples_per_request"),
        (pack_ids([1, 2]), {"prompt_lengths": [1, 1], "rid": ["a"]}, None, "rid has 1 entries for 2 prompt(s)"),
        (pack_ids([1, 10**6]), {"prompt_lengths": [1, 1]}, None, "token id 1000000, outside the vocabulary"),
        (
            pack_ids([1] * 301),
            {"prompt_lengths": [1, 300]},
            None,
            "This model's maximum context length is 256 tokens",
        ),
        (pack_ids([1, 10**6]), {}, None, "token id 1000000, outside the vocabulary"),
        (pack_ids([1, -1]), {}, None, "token id -1, outside the vocabulary"),
        (pack_ids([1] * 5000), {}, None, "This model's maximum context length is 256 tokens"),
        (pack_ids([1]), {"note": "x" * 200_000}, None, "send the whole request as JSON"),
        (pack_ids([1]), {"sampling_params": {"stop_regex": "a" * 200}}, None, "send the whole request as JSON"),
    ],
)
def test_wrong_bodies_are_refused(stack: Stack, prompt: bytes, body: Any, header: str | None, said: str) -> None:
    answer = send(stack, prompt, body, header)
    error = answer.json()
    assert answer.status_code == 400 and said in error.get("error", error)["message"]
    assert stack.manager.num_requests == 0


@pytest.mark.parametrize("header", [None, "8"])
def test_lengths_need_the_header(stack: Stack, header: str | None) -> None:
    body = {"input_ids": [[1], [2]], "prompt_lengths": [1, 1]}
    headers = {} if header is None else {PROMPT_HEADER: header}
    content = (b"" if header is None else pack_ids([1, 2])) + orjson.dumps(body)
    answer = stack.request("POST", "/generate", content=content, headers=headers)
    said = "prompt_lengths needs the header X-Verl-Prompt-Bytes" if header is None else "leave out text and input_ids"
    assert answer.status_code == 400 and said in answer.json()["error"]["message"]


BATCH = [list(range(40)), [7], [300, 2, 5], [9, 9]]


def packed(prompts: list[list[int]], body: dict[str, Any]) -> tuple[bytes, dict[str, Any]]:
    return b"".join(map(pack_ids, prompts)), body | {"prompt_lengths": [len(prompt) for prompt in prompts]}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"sampling_params": [{"max_new_tokens": n} for n in (1, 2, 3, 1)], "return_logprob": [True, False, True, True]},
        {"sampling_params": {"max_new_tokens": 1, "n": 2}, "logprob_start_len": 0, "return_logprob": True},
        {"truncate_prompt_tokens": 2, "sampling_params": {"max_new_tokens": 2}},
        {"truncate_prompt_tokens": -1, "sampling_params": {"max_new_tokens": 250}},
        {"rid": ["a", "b", "c", "d"], "session_id": ["a", None, "c", "d"], "extra_key": ["x", "y", "z", None]},
        {"rid": "r", "columnar": True, "return_logprob": True, "sampling_params": {"stop_regex": "z+"}},
    ],
)
def test_a_packed_batch_is_that_of_json(stack: Stack, fields: dict[str, Any]) -> None:
    body = {"return_prompt_token_ids": True, "sampling_params": {"max_new_tokens": 3}} | fields
    listed = stack.generate(input_ids=BATCH, **body)
    answer = send(stack, *packed(BATCH, body))
    assert answer.status_code == 200, answer.text
    found = answer.json()
    for result in (*listed, *found):
        for name in ("id", "e2e_latency", *[name for name in result["meta_info"] if name.endswith(("_time", "_ts"))]):
            result["meta_info"].pop(name, None)
    assert found == listed
    messages = stack.scheduler.wait_for(TokenizedGenerateReq, 2 * len(listed))
    first, second = messages[: len(listed)], messages[len(listed) :]
    for one, other in zip(first, second, strict=True):
        assert (one.input_ids, one.sampling, one.session_id, one.namespace) == (
            other.input_ids,
            other.sampling,
            other.session_id,
            other.namespace,
        )


def test_a_batch_of_one_is_answered_with_a_list(stack: Stack) -> None:
    (result,) = send(stack, *packed([[5, 6]], {"sampling_params": {"max_new_tokens": 1}})).json()
    assert result["output_ids"] == [7]
    found = send(stack, pack_ids([5, 6]), {"sampling_params": {"max_new_tokens": 1}, "prompt_lengths": None}).json()
    assert found["output_ids"] == [7]


def test_a_stream_of_a_packed_batch(stack: Stack) -> None:
    body = {"stream": True, "sampling_params": {"max_new_tokens": 1}}
    lines = send(stack, *packed([[5], [8]], body)).text.splitlines()
    events = [line[6:] for line in lines if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    assert {(event["index"], *event["output_ids"]) for event in map(orjson.loads, events)} == {(0, 6), (1, 9)}


def test_the_loop_works_while_a_large_batch_is_read(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    slices: list[int] = []
    end = Slices.end

    async def counted(self: Slices) -> None:
        slices.append(1)
        await end(self)

    monkeypatch.setattr(Slices, "end", counted)
    ids, body = packed([[5]] * 3000, {"sampling_params": [{}]})
    answer = send(stack, ids, body)
    assert answer.status_code == 400 and "sampling_params has 1 entries" in answer.text
    assert len(slices) == 3000


LONG = list(range(2000))


@pytest.mark.parametrize(
    ("ids", "rest"),
    [
        (LONG, {}),
        ([LONG, LONG[:3]], {"prompt_lengths": [2000, 3]}),
        ([LONG[:600]] * 2, {"prompt_lengths": [600, 600]}),
        ([LONG], {"prompt_lengths": [2000]}),
    ],
)
def test_the_adapter_packs_many_ids(ids: Any, rest: dict[str, Any]) -> None:
    flat = ids if isinstance(ids[0], int) else [token for prompt in ids for token in prompt]
    found, others = pack_prompts({"input_ids": ids, "rid": "a"})
    assert unpack_ids(found) == flat and others == {"rid": "a"} | rest
    content, headers = generate_content({"input_ids": ids, "rid": "a"})
    assert headers == {PROMPT_HEADER: str(len(found))}
    assert content[: len(found)] == found and orjson.loads(content[len(found) :]) == others


@pytest.mark.parametrize(
    "body",
    [
        {"text": "x" * 5000},
        {"text": ["x" * 5000]},
        {"input_ids": LONG[:100]},
        {"input_ids": [LONG[:100]] * 2},
        {"input_ids": []},
        {"input_ids": [LONG, []]},
        {"input_ids": [LONG, 5]},
        {"input_ids": [LONG, [*LONG, "x"]]},
        {"input_ids": [LONG, [2**40]]},
        {"input_ids": [*LONG, "x"]},
        {"input_ids": LONG, "sampling_params": {"stop_regex": "a+"}},
        {"input_ids": [LONG, LONG], "sampling_params": [{}, {"stop_regex": "a+"}]},
        {"input_ids": LONG, "sampling_params": {"logit_bias": {str(i): 0.5 for i in range(PROMPT_JSON_BYTES // 8)}}},
    ],
)
def test_the_adapter_sends_other_requests_as_json(body: dict[str, Any]) -> None:
    content, headers = generate_content(body)
    assert orjson.loads(content) == body and not headers


def test_the_adapter_and_its_server_agree(text_folder: Path) -> None:
    server = Server(text_folder)
    try:
        with HttpServerEngineAdapter.attach(server.url) as engine:
            ids = [[5] * 600, [6, 7], [8] * 600]
            found = engine.generate(
                input_ids=ids, sampling_params={"max_new_tokens": 2}, truncate_prompt_tokens=20, return_logprob=True
            )
            assert [result["output_ids"] for result in found] == [[6, 7], [8, 9], [9, 10]]
            with pytest.raises(BadRequestError, match="outside the vocabulary"):
                engine.generate(input_ids=[[5] * 1200, [10**6]], truncate_prompt_tokens=20)
        sent = server.stack.scheduler.wait_for(TokenizedGenerateReq, 3)
        assert [message.input_ids for message in sent] == [prompt[-20:] for prompt in ids]
    finally:
        server.stop()


def test_the_example_of_the_reference_runs(text_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "http.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python\n(.*?)^```", page.split("## Binary prompts")[1], re.M | re.S)[:1]
    server = Server(text_folder)
    try:
        assert "http://127.0.0.1:30000" in example
        exec(compile(example.replace("http://127.0.0.1:30000", server.url), "http.md", "exec"), {})
    finally:
        server.stop()
    assert capsys.readouterr().out.splitlines() == ["[14, 15, 16, 17]", "[[14, 15, 16, 17], [23, 24, 25, 26]]"]

"""A request within each limit succeeds, and the refusal of a request beyond it names the setting."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import orjson
import pytest

from tests.server.conftest import MakeStack, Stack
from tests.server.test_http_routes import events
from tests.server.test_tokenizer_manager import run as generate
from verl_server import ServerArgs
from verl_server.errors import BadRequestError
from verl_server.server.generate_request import GenerateReqInput
from verl_server.server.limits import Limits

SMALL = {
    "max_text_length": 40,
    "max_samples_per_request": 6,
    "max_prompt_tokens_per_request": 12,
    "max_top_logprobs": 3,
    "max_token_ids_logprob": 2,
    "max_logprobs_per_request": 60,
    "max_stop_strings": 2,
    "max_stop_length": 4,
    "max_stop_token_ids": 2,
    "max_logit_bias": 2,
}
_FEW = {"max_new_tokens": 2, "ignore_eos": True}
_OF_THE_PROMPT = {"input_ids": [5] * 8, "return_logprob": True, "top_logprobs_num": 3, "logprob_start_len": 0}
_ASK = [{"role": "user", "content": "x"}]


def _generate(sampling: dict[str, Any] | None = None, **body: Any) -> tuple[str, dict[str, Any]]:
    return "/generate", {"input_ids": [5], "sampling_params": _FEW | (sampling or {})} | body


def _bias(count: int) -> dict[str, float]:
    return {str(i): 1.0 for i in range(count)}


CASES: list[tuple[str, tuple[str, dict[str, Any]], tuple[str, dict[str, Any]]]] = [
    # (setting, a request within the limit, a request beyond the limit)
    ("max_text_length", ("/tokenize", {"prompt": "x" * 40}), ("/tokenize", {"prompt": "x" * 41})),
    ("max_text_length", ("/tokenize", {"prompt": ["x" * 20] * 2}), ("/tokenize", {"prompt": ["x" * 21] * 2})),
    ("max_text_length", ("/detokenize", {"tokens": [[5] * 40]}), ("/detokenize", {"tokens": [[5] * 21] * 2})),
    (
        "max_text_length",
        ("/tokenize", {"messages": _ASK, "add_generation_prompt": False}),
        ("/tokenize", {"messages": [{"role": "user", "content": "x" * 41}]}),
    ),
    ("max_samples_per_request", _generate({"n": 6}), _generate({"n": 7})),
    ("max_samples_per_request", _generate(input_ids=[[5]] * 6), _generate(input_ids=[[5]] * 7)),
    ("max_samples_per_request", _generate({"n": 3}, input_ids=[[5]] * 2), _generate({"n": 3}, input_ids=[[5]] * 3)),
    ("max_samples_per_request", _generate({"n": 6}), _generate({"n": 10**12})),
    ("max_prompt_tokens_per_request", _generate({"n": 4}, input_ids=[5] * 3), _generate({"n": 4}, input_ids=[5] * 4)),
    (
        "max_prompt_tokens_per_request",
        _generate(input_ids=[[5] * 6, [5] * 6]),
        _generate(input_ids=[[5] * 6, [5] * 7]),
    ),
    (
        "max_top_logprobs",
        _generate(return_logprob=True, top_logprobs_num=3),
        _generate(return_logprob=True, top_logprobs_num=4),
    ),
    (
        "max_top_logprobs",
        ("/v1/completions", {"prompt": "x", "logprobs": 3}),
        ("/v1/completions", {"prompt": "x", "logprobs": 4}),
    ),
    (
        "max_token_ids_logprob",
        _generate(return_logprob=True, token_ids_logprob=[5, 6]),
        _generate(return_logprob=True, token_ids_logprob=[5, 6, 7]),
    ),
    (
        "max_logprobs_per_request",
        _generate({"max_new_tokens": 20}, return_logprob=True, top_logprobs_num=3),
        _generate({"max_new_tokens": 21}, return_logprob=True, top_logprobs_num=3),
    ),
    (
        "max_logprobs_per_request",
        _generate({"max_new_tokens": 3, "n": 4}, return_logprob=True, top_logprobs_num=3, token_ids_logprob=[5, 6]),
        _generate({"max_new_tokens": 4, "n": 4}, return_logprob=True, top_logprobs_num=3, token_ids_logprob=[5, 6]),
    ),
    (
        "max_logprobs_per_request",
        _generate(
            {"max_new_tokens": 12}, input_ids=[5] * 8, return_logprob=True, top_logprobs_num=3, logprob_start_len=0
        ),
        _generate(
            {"max_new_tokens": 13}, input_ids=[5] * 8, return_logprob=True, top_logprobs_num=3, logprob_start_len=0
        ),
    ),
    ("max_stop_strings", _generate({"stop": ["a", "b"]}), _generate({"stop": ["a", "b", "c"]})),
    ("max_stop_strings", _generate(), ("/v1/completions", {"prompt": "x", "stop": ["a", "b", "c"]})),
    ("max_stop_length", _generate({"stop": "abcd"}), _generate({"stop": "abcde"})),
    ("max_stop_token_ids", _generate({"stop_token_ids": [9, 8]}), _generate({"stop_token_ids": [9, 8, 7]})),
    ("max_logit_bias", _generate({"logit_bias": _bias(2)}), _generate({"logit_bias": _bias(3)})),
    ("max_logit_bias", _generate(), ("/v1/chat/completions", {"messages": _ASK, "logit_bias": _bias(3)})),
]


@pytest.fixture(scope="module")
def limited(text_folder: Any) -> Any:
    stack = Stack(text_folder, **SMALL)
    yield stack
    stack.close()


@pytest.mark.parametrize("padding", [0, 200_000], ids=["on_the_loop", "in_a_worker"])
@pytest.mark.parametrize(("setting", "within", "beyond"), CASES, ids=[f"{i}-{case[0]}" for i, case in enumerate(CASES)])
def test_limit(
    limited: Stack,
    setting: str,
    within: tuple[str, dict[str, Any]],
    beyond: tuple[str, dict[str, Any]],
    padding: int,
) -> None:
    def post(request: tuple[str, dict[str, Any]]) -> Any:
        data = json.dumps(request[1]).encode()
        return limited.request("POST", request[0], content=data[:-1] + b" " * padding + data[-1:])

    accepted = post(within)
    assert accepted.status_code == 200, accepted.text
    refused = post(beyond)
    assert refused.status_code == 400 and setting in refused.text, refused.text
    assert len(refused.content) < 1000


def test_what_known_clients_send_is_within_the_defaults() -> None:
    limits = Limits.of(ServerArgs(model_path="model"), context_length=131072)
    limits.check_candidates(100, list(range(100)))
    limits.check_reply(100 * 10_000)
    limits.check_samples(1024, 16)
    limits.check_prompt_tokens(1024 * 16 * 2048)
    limits.check_text(131072 * 5, "token ids to decode")


def test_an_open_number_of_tokens_becomes_what_the_reply_may_hold(limited: Stack) -> None:
    body = {
        "input_ids": [5] * 4,
        "return_logprob": True,
        "top_logprobs_num": 3,
        "logprob_start_len": 0,
        "sampling_params": {"max_new_tokens": None, "n": 2, "ignore_eos": True},
    }
    answers = limited.generate(**body)
    assert [a["meta_info"]["completion_tokens"] for a in answers] == [6, 6]  # 2 * (4 + 6) * 3 candidates


def test_a_long_request_id_is_refused(stack: Stack) -> None:
    for rid in ("r" * 1025, ["r" * 1025]):
        with pytest.raises(BadRequestError, match="rid has 1025 characters"):
            list(GenerateReqInput(input_ids=[[5]], rid=rid).expand(1, False, Limits.of(stack.args, context_length=256)))


def test_many_equal_request_ids_are_one_short_error() -> None:
    limits = Limits.of(ServerArgs(model_path="model", max_samples_per_request=10**6), context_length=256)
    rids = [f"r{i % 100_000}" for i in range(200_000)]
    with pytest.raises(BadRequestError, match="and 99992 more") as caught:
        GenerateReqInput(rid=rids).expand(200_000, False, limits)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("key", ["9" * 5000, "9" * 20, "x" * 100_000])
def test_a_bias_for_no_token_is_a_short_error(stack: Stack, key: str) -> None:
    refused = stack.post("/generate", {"input_ids": [5], "sampling_params": {"logit_bias": {key: 1.0}}})
    assert refused.status_code == 400 and "logit_bias" in refused.text and len(refused.content) < 1000


# -- large replies --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accept", ["application/json", "application/msgpack"])
def test_candidates_are_the_same_however_they_are_written(make_stack: MakeStack, accept: str) -> None:
    stack = make_stack()
    body: dict[str, Any] = {
        "input_ids": [5, 6],
        "return_logprob": True,
        "top_logprobs_num": 7,
        "token_ids_logprob": [9, 8],
        "sampling_params": {"max_new_tokens": 5, "n": 2},
    }
    plain = generate(stack, **body)
    answer = stack.request("POST", "/generate", json=body, headers={"Accept": accept})
    sent = answer.json() if "json" in accept else msgspec.msgpack.decode(answer.content)
    names = [name for name in plain[0]["meta_info"] if name.endswith("logprobs")]
    assert len(names) == 7, "six kinds of log-probabilities, and where those of the policy are"
    for result, expected in zip(sent, plain, strict=True):
        for name in names:
            assert result["meta_info"][name] == orjson.loads(orjson.dumps(expected["meta_info"][name])), name


def test_a_reply_of_several_pieces_arrives_whole(stack: Stack) -> None:
    prompt = "ab" * 200_000
    answer = stack.post("/tokenize", {"prompt": prompt})
    assert len(answer.content) > 2**20 and answer.headers["content-length"] == str(len(answer.content))
    assert answer.json()["tokens"] == stack.text.encode("ab") * 200_000


def test_a_stream_of_candidates_is_cumulative_and_ends_once(stack: Stack) -> None:
    stack.scheduler.chunk = 1
    sampling = _FEW | {"max_new_tokens": 6}
    body = {"input_ids": [5], "return_logprob": True, "top_logprobs_num": 3, "sampling_params": sampling}
    plain = stack.generate(**body)["meta_info"]["output_top_logprobs"]
    frames = events(stack.post("/generate", body | {"stream": True}).text)
    for frame in frames:
        assert frame["meta_info"]["output_top_logprobs"] == plain[: len(frame["output_ids"])]
    assert [frame["meta_info"]["finish_reason"] is None for frame in frames] == [True] * (len(frames) - 1) + [False]


def test_a_streamed_chat_has_each_log_probability_once(stack: Stack) -> None:
    stack.scheduler.chunk = 1
    body = {"messages": _ASK, "max_tokens": 6, "logprobs": True, "top_logprobs": 2, "ignore_eos": True}
    whole = stack.post("/v1/chat/completions", body).json()["choices"][0]["logprobs"]["content"]
    chunks = events(stack.post("/v1/chat/completions", body | {"stream": True}).text)
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    assert [entry for part in parts if part for entry in part["content"]] == whole

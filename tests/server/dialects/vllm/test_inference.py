"""`/inference/v1/generate` and the aborts that go with it, over a fake scheduler."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from tests.server.conftest import MakeStack, Stack
from verl_server.messages import io_struct as io

ROUTE = "/inference/v1/generate"
PARAMS = {"max_tokens": 3, "ignore_eos": True}


@pytest.fixture
def stack(reset_stack: Stack) -> Stack:
    """One stack for all tests of this module."""
    return reset_stack


def generate(stack: Stack, **body: Any) -> Any:
    response = stack.post(ROUTE, {"token_ids": [10], "sampling_params": PARAMS} | body)
    assert response.status_code == 200, response.text
    return response.json()


def sent(stack: Stack) -> io.TokenizedGenerateReq:
    found: io.TokenizedGenerateReq = stack.scheduler.wait_for(io.TokenizedGenerateReq)[-1]
    return found


def test_tokens_in_tokens_out(stack: Stack) -> None:
    answer = generate(stack, request_id="r1", return_token_ids=True)
    assert answer["request_id"] == "generate-tokens-r1" and answer["prompt_token_ids"] == [10]
    (choice,) = answer["choices"]
    assert choice["token_ids"] == [11, 12, 13] and choice["logprobs"] is None
    assert (choice["index"], choice["finish_reason"], choice["stop_reason"]) == (0, "length", None)
    assert choice["weight_versions"] == [{"version": "default", "start": 0, "end": 3}]
    assert answer["usage"]["prompt_tokens"] == 1 and answer["usage"]["completion_tokens"] == 3
    assert answer["usage"]["total_tokens"] == 4


def test_the_sampled_token_comes_first_and_its_name_is_its_id(stack: Stack) -> None:
    answer = generate(stack, token_ids=[0], sampling_params=PARAMS | {"logprobs": 2})
    content = answer["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == ["token_id:1", "token_id:2", "token_id:3"]
    assert [entry["logprob"] for entry in content] == [-0.01, -0.02, -0.03]
    # The fake's candidates are the tokens 0 and 1. Token 1 was sampled first; token 2 was not a candidate.
    assert [(top["token"], top["rank"]) for top in content[0]["top_logprobs"]] == [("token_id:1", 2), ("token_id:0", 1)]
    assert [top["token_id"] for top in content[1]["top_logprobs"]] == [2, 0, 1]
    assert content[1]["rank"] is None and content[1]["bytes"] is None


def test_log_probabilities_without_candidates(stack: Stack) -> None:
    content = generate(stack, sampling_params=PARAMS | {"logprobs": 0})["choices"][0]["logprobs"]["content"]
    assert [[top["token"] for top in entry["top_logprobs"]] for entry in content] == [
        ["token_id:11"], ["token_id:12"], ["token_id:13"],
    ]  # fmt: skip
    assert sent(stack).top_logprobs_num == 0


def test_requested_token_ids(stack: Stack) -> None:
    content = generate(stack, sampling_params=PARAMS | {"logprob_token_ids": [7]})["choices"][0]["logprobs"]["content"]
    assert [(top["token_id"], top["logprob"]) for top in content[0]["top_logprobs"]] == [(11, -0.11), (7, -2.0)]


def test_prompt_logprobs(stack: Stack) -> None:
    answer = generate(stack, token_ids=[5, 6, 7], sampling_params=PARAMS | {"prompt_logprobs": 0})
    assert answer["prompt_logprobs"][0] is None
    assert answer["prompt_logprobs"][2] == {"7": {"logprob": -0.875, "rank": 2, "decoded_token": None}}
    assert answer["choices"][0]["logprobs"] is None, "log-probabilities of output tokens were not requested"


def test_values_that_json_cannot_hold_are_vllms_lowest(stack: Stack) -> None:
    stack.scheduler.hold = True
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(generate(stack, sampling_params={"logprobs": 0})))
    thread.start()
    (req,) = stack.scheduler.wait_for(io.TokenizedGenerateReq)
    out = io.BatchTokenIDOut(
        rids=[req.rid],
        output_ids=[[4]],
        output_logprobs=[[float("-inf")]],
        cached_tokens=[0],
        num_retractions=[0],
        finish_reasons=[io.FinishReason(type="length", length=1)],
        weight_version="7",
    )
    stack.scheduler.send(out)
    thread.join(10)
    assert answers[0]["choices"][0]["logprobs"]["content"][0]["logprob"] == -9999.0


def test_vllms_parameters_become_ours(stack: Stack) -> None:
    params = {
        "max_tokens": 4, "min_tokens": 1, "temperature": 0.5, "top_k": 0, "top_p": 0.9, "min_p": 0.1, "seed": 3,
        "stop_token_ids": [9], "include_stop_str_in_output": True, "presence_penalty": 0.5, "frequency_penalty": 0.25,
        "repetition_penalty": 1.5, "logit_bias": {"4": 1.0}, "skip_special_tokens": False, "output_kind": 2,
    }  # fmt: skip
    generate(stack, sampling_params=params)
    sampling = sent(stack).sampling
    assert (sampling.max_new_tokens, sampling.min_new_tokens, sampling.temperature) == (4, 1, 0.5)
    assert sampling.stop_after_min_new_tokens
    assert sampling.top_k > 1 << 20, "top_k=0 is off"
    assert (sampling.top_p, sampling.min_p, sampling.sampling_seed) == (0.9, 0.1, 3)
    assert sampling.no_stop_trim and sampling.stop_token_ids == [9] and sampling.logit_bias == {"4": 1.0}
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.5, 0.25, 1.5)


def test_without_max_tokens_the_context_is_the_limit(stack: Stack) -> None:
    stack.scheduler.script = lambda req: [1]
    generate(stack, sampling_params={})
    assert sent(stack).sampling.max_new_tokens == 255


def test_n_choices_and_a_priority(stack: Stack) -> None:
    answer = generate(stack, sampling_params=PARAMS | {"n": 2}, priority=5, request_id="x", cache_salt="v1")
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["usage"]["completion_tokens"] == 6
    assert sent(stack).priority == -5, "vLLM's smaller priority comes first, ours is the larger"
    assert sent(stack).namespace


@pytest.mark.parametrize(("params", "matched"), [({"stop_token_ids": [12]}, 12), ({"stop": ["c"]}, "c")])
def test_stop_reasons(stack: Stack, params: dict[str, Any], matched: Any) -> None:
    if "stop" in params:
        stack.scheduler.script = lambda req: stack.text.encode("abcd")
    choice = generate(stack, sampling_params={"max_tokens": 8} | params)["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", matched)


def test_eos_is_no_stop_reason(stack: Stack) -> None:
    eos = next(iter(stack.text.eos_token_ids))
    stack.scheduler.script = lambda req: [5, eos, 6]
    choice = generate(stack, sampling_params={})["choices"][0]
    assert (choice["token_ids"], choice["finish_reason"], choice["stop_reason"]) == ([5, eos], "stop", None)


def test_text_mode(stack: Stack) -> None:
    stack.scheduler.script = lambda req: stack.text.encode("hé")
    choice = generate(stack, output_mode="text", sampling_params={"logprobs": 0})["choices"][0]
    assert choice["text"] == "hé"
    assert choice["logprobs"]["content"][0] == {
        "token": "h", "token_id": stack.text.encode("h")[0], "logprob": choice["logprobs"]["content"][0]["logprob"],
        "bytes": [104], "rank": None, "top_logprobs": choice["logprobs"]["content"][0]["top_logprobs"],
    }  # fmt: skip


def test_a_stream_has_the_new_tokens_only(stack: Stack) -> None:
    stack.scheduler.chunk = 1
    body = {"token_ids": [10], "sampling_params": PARAMS | {"logprobs": 1}, "stream": True, "return_token_ids": True}
    response = stack.post(ROUTE, body | {"stream_options": {"include_usage": True}})
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    events = [json.loads(line) for line in lines[:-1]]
    choices = [choice for event in events for choice in event["choices"]]
    assert [token for choice in choices for token in choice["token_ids"]] == [11, 12, 13]
    names = [entry["token"] for choice in choices for entry in choice["logprobs"]["content"]]
    assert names == ["token_id:11", "token_id:12", "token_id:13"]
    assert [choice["finish_reason"] for choice in choices][-1] == "length"
    assert choices[-1]["weight_versions"] == [{"version": "default", "start": 0, "end": 3}]
    assert events[0]["prompt_token_ids"] == [10] and "prompt_token_ids" not in events[1]
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        ({"token_ids": []}, 400, "token_ids cannot be empty"),
        ({"token_ids": [9999]}, 400, "9999"),
        ({"token_ids": "ab"}, 400, "token_ids"),
        ({"model": "base:adapter"}, 404, "does not exist"),
        ({"features": {"mm_hashes": {}}}, 400, "`features` is not supported"),
        ({"content_parts": [{"type": "image_url"}]}, 400, "`content_parts` is not supported"),
        ({"kv_transfer_params": {"a": 1}}, 400, "`kv_transfer_params` is not supported"),
        ({"output_mode": "derender"}, 400, "/v1/chat/completions"),
        ({"sampling_params": 3}, 400, "must be an object"),
        ({"sampling_params": {"temperature": "hot"}}, 400, "temperature"),
        ({"sampling_params": {"logprobs": -2}}, 400, "logprobs"),
        ({"sampling_params": {"extra_args": {"a": 1}}}, 400, "extra_args is not supported"),
        ({"sampling_params": {"structured_outputs": {}}}, 400, "exactly one"),
        ({"cache_salt": ""}, 400, "cache_salt"),
        ({"sampling_params": {"stop_token_ids": [320]}}, 400, "sampling_params.stop_token_ids holds token id 320"),
        ({"sampling_params": {"logit_bias": {"320": 1.0}}}, 400, "logit_bias holds token id 320"),
        ({"sampling_params": {"allowed_token_ids": [320]}}, 400, "allowed_token_ids holds token id 320"),
        ({"sampling_params": {"logprob_token_ids": [320]}}, 400, "token_ids_logprob holds token id 320"),
    ],
)
def test_errors_have_vllms_shape(module_stack: Stack, body: dict[str, Any], status: int, text: str) -> None:
    response = module_stack.post(ROUTE, {"token_ids": [10]} | body)
    assert response.status_code == status
    error = response.json()["error"]
    assert text in error["message"] and error["code"] == status and error["type"]


def test_the_header_names_the_request_and_other_ranks_are_refused(stack: Stack) -> None:
    body = {"token_ids": [10], "sampling_params": PARAMS, "request_id": "body"}
    headers = {"X-Request-Id": "header", "X-Session-ID": "s", "X-SMG-Routing-Key": "k", "X-data-parallel-rank": "0"}
    assert stack.post(ROUTE, body, headers=headers).json()["request_id"] == "generate-tokens-header"
    refused = stack.post(ROUTE, body, headers={"X-data-parallel-rank": "1"})
    assert refused.status_code == 400 and "X-data-parallel-rank" in refused.text


def test_an_abort_names_a_bounded_number_of_requests(stack: Stack) -> None:
    reply = stack.post("/abort_requests", {"request_ids": ["a"] * 16385})
    assert reply.status_code == 400 and "16,385 ids" in reply.text
    assert stack.post("/abort_requests", {"request_ids": ["a" * 2**21]}).status_code == 413


@pytest.mark.parametrize("name", ["r1", "generate-tokens-r1"])
@pytest.mark.parametrize("route", ["/abort_requests", "/inference/v1/abort_requests"])
def test_abort_ends_all_choices_with_partial_output(stack: Stack, name: str, route: str) -> None:
    stack.scheduler.hold = True
    answers: list[Any] = []
    params = PARAMS | {"n": 2}
    thread = threading.Thread(
        target=lambda: answers.append(generate(stack, request_id="r1", sampling_params=params)), daemon=True
    )
    thread.start()
    stack.scheduler.wait_for(io.TokenizedGenerateReq, 2)
    assert stack.post(route, {"request_ids": ["unknown"]}).json() == {"status": "aborted", "aborted": 0}
    assert stack.post(route, {"request_ids": [name]}).json() == {"status": "aborted", "aborted": 1}
    thread.join(10)
    assert [choice["finish_reason"] for choice in answers[0]["choices"]] == ["abort", "abort"]


def test_abort_of_all_needs_the_admin_key(make_stack: MakeStack) -> None:
    stack = make_stack(admin_api_key="admin")
    assert stack.post("/abort_requests", {"request_ids": ["a"]}).status_code == 200
    assert stack.post("/abort_requests", {}).status_code == 401
    assert stack.post("/abort_requests", {}, headers={"Authorization": "Bearer admin"}).status_code == 200
    assert stack.scheduler.wait_for(io.AbortReq)[0].abort_all


def test_version_and_load(module_stack: Stack) -> None:
    assert module_stack.get("/version").json()["version"]
    assert module_stack.get("/load").json() == {"server_load": 0}

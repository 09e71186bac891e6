"""Unknown fields and query parameters. `test_fields` sends them to every operation."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import Stack
from verl_server.messages.io_struct import AbortReq
from verl_server.web.json_body import MOST_NAMES

HEADER = "x-verl-unknown-fields"
CHAT = {"model": "m", "messages": [{"role": "user", "content": "a"}], "max_tokens": 1}


@pytest.fixture(scope="module")
def stack(text_folder: Path) -> Iterator[Stack]:
    stack = Stack(text_folder)
    yield stack
    stack.close()


def generate(stack: Stack, path: str = "/generate", **more: Any) -> Any:
    return stack.post(path, {"input_ids": [70], "sampling_params": {"max_new_tokens": 1}, **more})


def test_a_stream_names_them_before_it_begins(stack: Stack) -> None:
    response = generate(stack, stream=True, of_a_newer_client=1)
    assert response.status_code == 200 and response.headers[HEADER] == "of_a_newer_client"
    assert HEADER not in generate(stack).headers


def test_a_field_of_another_operation_is_no_slip(stack: Stack) -> None:
    """`max_tokens` is near nothing here, and `logprobs`, a field of chats, would be near `logprob`."""
    assert generate(stack, logprobs=True, max_tokens=3).headers[HEADER] == "logprobs, max_tokens"


def test_names_are_bounded_and_escaped(stack: Stack) -> None:
    given = {f"x{i}_{'y' * 100}": i for i in range(3 * MOST_NAMES)}
    header = generate(stack, **given).headers[HEADER]
    assert header.count(",") > 20 and len(header) < 4096
    assert generate(stack, **{"a\r\nb": 1, "\u00e9": 2}).headers[HEADER] == "a%0D%0Ab, %C3%A9"
    wide = {chr(0x1F600 + i) * 60: i for i in range(MOST_NAMES)}
    assert len(generate(stack, **wide).headers[HEADER]) < 4096, "clients bound the length of a header"
    metrics = stack.get("/metrics").text
    assert metrics.count("verl_server:ignored_request_fields_total{") <= 110
    assert 'field="other"' in metrics


def test_query_parameters(stack: Stack) -> None:
    refused = stack.post("/flush_cache?timout=1", {})
    assert refused.status_code == 400 and "`timout`. Did you mean `timeout`?" in refused.text
    assert stack.post("/flush_cache?api-version=1&timeout=1", {}).headers[HEADER] == "?api-version"


@pytest.mark.parametrize("name", ["request_id", "rid", "rids", "ids", "requests", "of_a_newer_client"])
def test_an_abort_of_one_request_does_not_become_an_abort_of_all(name: str, stack: Stack) -> None:
    refused = stack.post("/abort_requests", {name: ["a"]})
    assert refused.status_code == 400 and "request_ids" in refused.text


def test_only_one_path_aborts_all_without_a_name(stack: Stack) -> None:
    assert stack.post("/abort_requests", {}).status_code == 200
    assert stack.post("/abort_requests", {"request_ids": None}).status_code == 200
    assert stack.post("/inference/v1/abort_requests", {}).status_code == 400
    stack.scheduler.received.clear()
    assert stack.post("/inference/v1/abort_requests", {"request_ids": []}).json()["aborted"] == 0
    assert not any(isinstance(message, AbortReq) for message in stack.scheduler.received)


def test_null_asks_for_nothing(stack: Stack) -> None:
    assert generate(stack, temprature=None, of_a_newer_client=None).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/release_memory_occupation", {"tag": ["kv_cache"]}, "`tag`. Did you mean `tags`?"),
        ("/pause_generation", {"mod": "in_place"}, "`mod`. Did you mean `mode`?"),
        ("/sleep?tag=weights", {}, "`tag`. Did you mean `tags`?"),
        (
            "/init_weight_transfer_engine",
            {"init_info": {"master_adress": "h"}},
            "`init_info.master_adress`. Did you mean `init_info.master_address`?",
        ),
    ],
)
def test_slips_that_would_change_what_a_control_call_does(
    path: str, body: dict[str, Any], says: str, stack: Stack
) -> None:
    refused = stack.post(path, body)
    assert refused.status_code == 400 and says in refused.text


def test_model_is_no_slip_of_mode(stack: Stack) -> None:
    assert stack.post("/pause_generation", {"model": "m", "mode": "in_place"}).status_code == 200
    assert stack.post("/continue_generation", {"model": "m"}).headers[HEADER] == "model"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"limits": {"max_turn": 1}}, "`limits.max_turn`. Did you mean `limits.max_turns`?"),
        ({"limits": {"turns": 1}}, "unknown field `limits.turns`"),
        ({"surprise": 1}, "unknown field `surprise`"),
        ({"sampling_params": {"temprature": 0}}, "sampling_params: "),
        ({"forced_sampling_params": {"temperature": -1}}, "forced_sampling_params: "),
        ({"sampling_params": {"n": 3}}, "sampling_params.n must be 1"),
    ],
)
def test_a_session_that_could_not_be_meant_so(body: dict[str, Any], says: str, text_folder: Path) -> None:
    stack = Stack(text_folder, api_key="owner")
    try:
        refused = stack.post("/sessions", body, headers={"Authorization": "Bearer owner"})
        assert refused.status_code == 400 and says in refused.text
        fine = {"sampling_params": {"min_new_tokens": 200}, "limits": {"max_turns": 2}}
        assert stack.post("/sessions", fine, headers={"Authorization": "Bearer owner"}).status_code == 201
    finally:
        stack.close()


def test_in_the_words_of_the_dialect(stack: Stack) -> None:
    openai = stack.post("/v1/chat/completions", CHAT | {"temprature": 0})
    assert openai.status_code == 400
    assert openai.json()["error"]["message"] == "Unknown field `temprature`. Did you mean `temperature`?"
    anthropic = stack.post("/v1/messages", CHAT | {"temprature": 0})
    assert anthropic.status_code == 400 and anthropic.json()["type"] == "error"


def test_refuse(text_folder: Path) -> None:
    stack = Stack(text_folder, unknown_fields="refuse")
    try:
        response = generate(stack, of_a_newer_client=1)
        assert response.status_code == 400
        assert "`of_a_newer_client`" in response.text and "unknown_fields=refuse" in response.text
        assert stack.post("/flush_cache?api-version=1", {}).status_code == 400
        assert generate(stack).status_code == 200
    finally:
        stack.close()

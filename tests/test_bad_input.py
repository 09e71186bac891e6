"""Each row of bad input gets a clear error within a bound, and the server still serves afterwards.

One server serves the whole table. After every row it must answer a good request exactly as before.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import torch

from tests.waiting import eventually
from verl_server import Engine, HttpServerEngineAdapter, ServerLaunchError, VerlServerError, WeightUpdateError
from verl_server.weight_sync.handles import LocalSerializedTensor
from verl_server.weight_sync.trainer.sender import describe_tensors

BOUND = 10.0
GOOD = {"input_ids": [5, 6, 7], "sampling_params": {"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True}}
NORM = "model.norm.weight"
LONG = [2**62] * 17
"""A shape of more dimensions than any tensor has. With 60,000 dimensions, the number of elements took minutes."""
LONG_HANDLE = {
    "allocation": {"id": "a", "kind": "shm", "nbytes": 4},
    "dtype": "float32",
    "shape": LONG,
    "stride": LONG,
}


@pytest.fixture(scope="module")
def server(tiny_llama: Path) -> Iterator[HttpServerEngineAdapter]:
    with HttpServerEngineAdapter(model_path=str(tiny_llama), port=0, kv_cache_gib=0.05, cpu_threads=1) as adapter:
        yield adapter


@pytest.fixture(scope="module")
def good(server: HttpServerEngineAdapter) -> list[int]:
    ids: list[int] = post(server, "/generate", GOOD).json()["output_ids"]
    return ids


@pytest.fixture(autouse=True)
def still_serves(server: HttpServerEngineAdapter, good: list[int]) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < BOUND, "the error took too long"
    assert post(server, "/generate", GOOD).json()["output_ids"] == good
    assert httpx.get(f"{server.url}/health", timeout=BOUND).status_code == 200
    state = server.get_internal_state()
    assert (state["num_running_reqs"], state["num_waiting_reqs"]) == (0, 0), "a bad request was left in the scheduler"


def post(server: HttpServerEngineAdapter, path: str, body: Any) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {server.admin_api_key}"}
    return httpx.post(f"{server.url}{path}", content=content, headers=headers, timeout=BOUND)


# -- HTTP bodies --------------------------------------------------------------------------------------------

_SAMPLING: list[tuple[Any, str]] = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": 0}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"max_new_tokens": -5}, "max_new_tokens"),
    ({"max_new_tokens": 1.5}, "max_new_tokens"),
    ({"max_new_tokens": 10**6}, "This model's maximum context length is 512 tokens. However, you"),
    ({"min_new_tokens": 9, "max_new_tokens": 3}, "min_new_tokens"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"frequency_penalty": 9}, "frequency_penalty"),
    ({"n": 0}, "sampling_params.n"),
    ({"n": 10**12}, "max_samples_per_request"),
    ({"stream_interval": 2**70}, "stream_interval"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["x"] * 40}, "max_stop_strings"),
    ({"stop_token_ids": ["x"]}, "stop_token_ids"),
    ({"logit_bias": {"1000000000": 1.0}}, "1000000000"),
    ({"allowed_token_ids": [10**9]}, "1000000000"),
    ({"stop_token_ids": [True]}, "stop_token_ids"),
    ({"logit_bias": {"word": 1.0}}, "logit_bias"),
    ({"logit_bias": {"-1": 1.0}}, "-1"),
    ({"sampling_seed": 2**70}, "sampling_seed"),
    ({"regex": "(a"}, "unclosed group"),
    ({"json_schema": "{"}, "json_schema is not valid JSON"),
    ({"json_schema": {"type": "object"}}, "json_schema"),
    ({"ebnf": "root ::= missing"}, "the rule `missing`"),
    ({"structural_tag": "{}"}, "`structures`"),
    ({"regex": "a", "ebnf": "b"}, "set at most one"),
    ({"regex": "a" * 300_000}, "max_grammar_length"),
    ({"max_tokens": 5}, "unknown field `max_tokens`"),
    ([], "sampling_params has 0 entries"),
    ("none", "sampling_params must be an object"),
]

_BODIES: list[tuple[str, Any, int, str]] = [
    ("/generate", b"", 400, "Neither was given"),
    ("/generate", b"{", 400, "not valid JSON"),
    ("/generate", b"[" * 100_000, 400, "not valid JSON"),
    ("/generate", b"\xff\xfe", 400, "not valid JSON"),
    ("/generate", b'{"text": "a", "sampling_params": {"temperature": NaN}}', 400, "NaN"),
    ("/generate", b'{"text": "a", "sampling_params": {"temperature": Infinity}}', 400, "NaN"),
    ("/generate", b'{"text": "a", "sampling_params": {"temperature": 1e999}}', 400, "JSON"),
    ("/generate", b'"text"', 400, "JSON object"),
    ("/generate", [GOOD], 400, "JSON object"),
    ("/generate", {"text": ["a", 5]}, 400, "text"),
    ("/generate", {"input_ids": []}, 400, "input_ids cannot be empty"),
    ("/generate", {"input_ids": [[]]}, 400, "input_ids cannot be empty"),
    ("/generate", {"input_ids": [True, False]}, 400, "bool"),
    ("/generate", {"input_ids": [1.5]}, 400, "float"),
    ("/generate", {"input_ids": [-1]}, 400, "token id -1, outside the vocabulary of 320"),
    ("/generate", {"input_ids": [320]}, 400, "token id 320, outside the vocabulary of 320"),
    ("/generate", {"input_ids": [5] * 512}, 400, "prompt is too long: 512 tokens > 511 maximum"),
    ("/generate", {"text": "x" * 100_000}, 400, "This model's maximum context length is 512 tokens"),
    ("/generate", {"text": ["a"] * 2, "rid": ["r", "r"]}, 400, "Duplicate request IDs"),
    ("/generate", GOOD | {"logprob_start_len": -2}, 400, "logprob_start_len"),
    ("/generate", GOOD | {"logprob_start_len": 4}, 400, "logprob_start_len"),
    ("/generate", GOOD | {"top_logprobs_num": -1}, 400, "top_logprobs_num"),
    ("/generate", GOOD | {"top_logprobs_num": 10**9}, 400, "top_logprobs_num"),
    ("/generate", GOOD | {"token_ids_logprob": [320]}, 400, "320"),
    ("/generate", GOOD | {"stream": "yes"}, 400, "stream"),
    ("/generate", GOOD | {"rid": 7}, 400, "rid"),
    ("/generate", GOOD | {"lora_path": "adapter"}, 400, "lora_path"),
    ("/generate", GOOD | {"image_data": "x.png"}, 400, "image_data"),
    ("/generate", GOOD | {"return_hidden_states": True}, 400, "return_hidden_states"),
    *[("/generate", GOOD | {"sampling_params": params}, 400, says) for params, says in _SAMPLING],
    ("/v1/completions", {"model": "m"}, 400, "prompt"),
    ("/v1/completions", {"prompt": "a", "max_tokens": -1}, 400, "max_tokens"),
    ("/v1/completions", {"prompt": "a" * 600}, 400, "This model's maximum context length is 512 tokens"),
    ("/v1/chat/completions", {"messages": "hi"}, 400, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "user"}], "tools": [{"type": "function"}]}, 400, "tools"),
    ("/tokenize", {"prompt": 5}, 400, "prompt"),
    ("/detokenize", {"tokens": [5, "x"]}, 400, "tokens"),
    ("/flush_cache?timeout=-1", {}, 400, "timeout"),
    ("/pause_generation", {"mode": "sometimes"}, 400, "mode"),
    ("/abort_request", {"abort_all": "perhaps"}, 400, "abort_all"),
    ("/get_weights_by_name", {"name": "no.such.weight"}, 400, "no.such.weight"),
    ("/get_weights_by_name", {}, 400, "name"),
    ("/get_weights_by_name", {"name": NORM, "truncate_size": -1}, 400, "truncate_size"),
    ("/weights_checker", {"action": "guess"}, 400, "guess"),
    ("/release_memory_occupation", {"tags": ["everything"]}, 400, "everything"),
    ("/resume_memory_occupation", {"tags": ["weights"]}, 400, "weights"),
    ("/update_weights_from_disk", {"model_path": "/no/such/folder"}, 400, "/no/such/folder"),
    ("/update_weights_from_disk", {}, 400, "model_path"),
    ("/update_weights_from_tensor", {"serialized_named_tensors": ["gASV"]}, 400, "payload was refused"),
    ("/update_weights_from_tensor", {"serialized_named_tensors": []}, 400, "0 entries"),
    ("/update_weights_from_tensor", {"serialized_named_tensors": ["gASV"], "registration": "r"}, 400, "exactly one"),
    ("/update_weights_from_tensor", {"registration": "r"}, 404, "Send their description"),
    ("/update_weights_from_tensor", {"registration": "r", "keep": True}, 400, "keep=True"),
    ("/update_weights_from_tensor", {"named_tensors": [], "transaction_id": "t"}, 409, "'t' is not open"),
    ("/update_weights_from_tensor", {"description": {"id": "d", "allocations": [], "tensors": []}}, 400, "no tensors"),
    ("/update_weights_from_distributed", {"names": ["w"], "dtypes": ["float32"], "shapes": [[1]]}, 400, "init_weights"),
    ("/update_weights_from_distributed", {"names": ["w"], "dtypes": ["f"], "shapes": [[1]]}, 400, "'f'"),
    ("/update_weights_from_distributed", {"names": ["w"], "dtypes": ["float32"], "shapes": [LONG]}, 400, "<= 16"),
    ("/update_weights_from_tensor", {"named_tensors": [[NORM, {"values": [LONG_HANDLE]}]]}, 400, "<= 16"),
    ("/update_weights", {"update_info": {"names": ["w"], "dtype_names": ["f"], "shapes": [LONG]}}, 400, "<= 16"),
    ("/destroy_weights_update_group", {}, 400, "does not exist"),
    ("/end_weight_update", {}, 400, "no weight-update session is open"),
    ("/end_weight_update", {"transaction_id": "t"}, 409, "'t' is not open"),
    ("/begin_weight_update", {"lease_seconds": 0}, 400, "lease_seconds"),
    ("/begin_weight_update", {"selector": "draft"}, 400, "draft"),
    ("/update_weights_from_tensor", {"named_tensors": [["w", {"values": []}]]}, 400, "w"),
    ("/update_weights_from_tensor", {"named_tensors": [["w"]]}, 400, "named_tensors"),
    ("/update_weight_version", {}, 400, "new_version"),
]


@pytest.mark.parametrize(
    ("path", "body", "status", "says"), _BODIES, ids=[f"{i}-{row[0]}-{row[3]}" for i, row in enumerate(_BODIES)]
)
def test_bad_body(server: HttpServerEngineAdapter, path: str, body: Any, status: int, says: str) -> None:
    response = post(server, path, body)
    assert response.status_code == status, response.text
    assert says in response.text.replace('\\"', '"')


def test_unknown_route_and_method(server: HttpServerEngineAdapter) -> None:
    assert post(server, "/no_such_route", {}).status_code == 404
    assert httpx.get(f"{server.url}/generate", timeout=BOUND).status_code == 405


def test_duplicate_rid_in_flight(server: HttpServerEngineAdapter) -> None:
    server.pause_generation("in_place")
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(post(server, "/generate", GOOD | {"rid": "twice"})))
    try:
        thread.start()
        assert eventually(lambda: server.get_internal_state()["num_waiting_reqs"])
        second = post(server, "/generate", GOOD | {"rid": "twice"})
        assert second.status_code == 400 and "Duplicate request ID detected: twice" in second.text
    finally:
        server.continue_generation()
        thread.join(timeout=BOUND)
    assert answers[0].status_code == 200


# -- connections --------------------------------------------------------------------------------------------


def test_body_of_100_mb(server: HttpServerEngineAdapter) -> None:
    response = post(server, "/generate", b'{"text": "' + b"x" * 100_000_000 + b'"}')
    assert response.status_code == 413 and "max_request_bytes" in response.text

    def chunks() -> Iterator[bytes]:
        for _ in range(100):
            yield b"x" * 1_000_000

    try:
        undeclared = httpx.post(f"{server.url}/generate", content=chunks(), timeout=BOUND)
    except httpx.TransportError:
        return  # the answer arrived and the connection closed while this client was still sending
    assert undeclared.status_code == 413


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_disconnects(server: HttpServerEngineAdapter, stream: bool) -> None:
    body = json.dumps(GOOD | {"stream": stream, "sampling_params": {"max_new_tokens": 500, "ignore_eos": True}})
    server.pause_generation("in_place")
    try:
        with raw_connection(server) as sock:
            sock.sendall(f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
            wait_until(lambda: server.get_internal_state()["num_waiting_reqs"] == 1)
        wait_until(lambda: server.get_internal_state()["num_waiting_reqs"] == 0)
    finally:
        server.continue_generation()


@pytest.mark.parametrize(
    "sent",
    [b"", b"\x00\x01\x02\r\n\r\n", b"POST /generate HTTP/1.1\r\nContent-Length: 50\r\n\r\n{", b"GET / HTTP/9.9\r\n"],
)
def test_broken_http(server: HttpServerEngineAdapter, sent: bytes) -> None:
    with raw_connection(server) as sock:
        sock.sendall(sent)


def raw_connection(server: HttpServerEngineAdapter) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.server_args.port), timeout=BOUND)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + BOUND
    while not condition():
        assert time.monotonic() < deadline, "the condition did not hold within the bound"
        time.sleep(0.01)


# -- weights ------------------------------------------------------------------------------------------------

_TENSORS: list[tuple[str, torch.Tensor, str]] = [
    ("no.such.weight", torch.ones(64), "no.such.weight"),
    (NORM, torch.ones(65), "65"),
    (NORM, torch.ones(64, 1), "shape"),
    (NORM, torch.ones(64, dtype=torch.int64), "int64"),
]


@pytest.mark.parametrize(("name", "tensor", "says"), _TENSORS)
def test_wrong_tensor(server: HttpServerEngineAdapter, name: str, tensor: torch.Tensor, says: str) -> None:
    first = ("model.layers.0.input_layernorm.weight", torch.full((64,), 7.0))  # right, but must not be installed
    with pytest.raises(WeightUpdateError, match=says):
        server.update_weights_from_tensor([first, (name, tensor)])


def test_missing_names(server: HttpServerEngineAdapter) -> None:
    with pytest.raises(WeightUpdateError, match=r"missing: .model\.embed_tokens\.weight"):
        server.update_weights_from_tensor([(NORM, torch.ones(64))])


def test_handle_that_lies(server: HttpServerEngineAdapter) -> None:
    kept = torch.ones(64)
    ((_, honest),) = describe_tensors([(NORM, kept)])
    body = json.loads(json.dumps(_to_json(honest)))
    for change in ({"pid": 2**30}, {"fd": 9999}, {"nbytes": 8}, {"nbytes": 2**50}):
        handle = json.loads(json.dumps(body))
        handle["values"][0]["allocation"] |= change | {"id": f"lie-{change}"}
        response = post(server, "/update_weights_from_tensor", {"named_tensors": [[NORM, handle]]})
        assert response.status_code == 400 and NORM in response.text, (change, response.text)
    for change in ({"storage_offset": 10**9}, {"stride": [10**6]}, {"shape": [-1]}, {"dtype": "complex999"}):
        handle = json.loads(json.dumps(body))
        handle["values"][0] |= change
        response = post(server, "/update_weights_from_tensor", {"named_tensors": [[NORM, handle]]})
        assert response.status_code == 400, (change, response.text)


def _to_json(tensor: LocalSerializedTensor) -> Any:
    return msgspec.to_builtins(tensor)


# -- starting -----------------------------------------------------------------------------------------------


def test_two_servers_on_one_port(server: HttpServerEngineAdapter, tiny_llama: Path) -> None:
    with pytest.raises(ServerLaunchError, match=rf"127\.0\.0\.1:{server.server_args.port}.*in use"):
        HttpServerEngineAdapter(model_path=str(tiny_llama), port=server.server_args.port)


def test_unknown_model_path(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(ServerLaunchError, match="model_path="):
            Engine(model_path=str(path))


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--tp-size", "0"], "--tp-size"),
        (["--port", "70000"], "port"),
        (["--host", "0.0.0.0"], "without a key"),
        (["--nnodes", "2", "--tp-size", "2"], "--nnodes 2 needs --dist-init-addr"),
        (["--no-such-flag"], "--no-such-flag"),
        (["--dtype", "int3"], "int3"),
    ],
)
def test_bad_flags(tiny_llama: Path, flags: list[str], says: str) -> None:
    command = [sys.executable, "-m", "verl_server", "serve", "--model-path", str(tiny_llama), *flags]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=BOUND, env=os.environ | {"COLUMNS": "200"})
    assert ended.returncode != 0 and says in ended.stderr + ended.stdout
    assert "Traceback" not in ended.stderr


def test_no_shared_memory_left(server: HttpServerEngineAdapter, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises((VerlServerError, OSError), match=r"shared memory|No space left"):
        server.update_weights_from_tensor([(NORM, torch.ones(64))])

"""Methods, bodies, reply shapes and statuses of every native route, against a fake scheduler."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.server.conftest import MakeStack, Stack
from verl_server.messages import io_struct as io
from verl_server.messages.weight_requests import (
    BeginWeightUpdateReq,
    DestroyWeightsUpdateGroupReq,
    EndWeightUpdateReq,
    GetWeightsByNameReq,
    InitWeightsUpdateGroupReq,
    RegisterWeightsReq,
    ReleaseMemoryOccupationReq,
    ResumeMemoryOccupationReq,
    UnregisterWeightsReq,
    UpdateWeightsFromDistributedReq,
    UpdateWeightsFromTensorReq,
    WeightsCheckerReq,
)


def events(text: str) -> list[Any]:
    """Return the decoded frames of an event stream, which must end with [DONE]."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


# -- generate -----------------------------------------------------------------------------------------------


def test_single_batch_and_n_shapes(stack: Stack) -> None:
    params = {"max_new_tokens": 2, "ignore_eos": True}
    assert stack.generate(input_ids=[10], sampling_params=params)["output_ids"] == [11, 12]
    batch = stack.generate(input_ids=[[10], [20]], sampling_params=params)
    assert [r["output_ids"] for r in batch] == [[11, 12], [21, 22]]
    several = stack.generate(input_ids=[[10], [20]], sampling_params=params | {"n": 2})
    assert [r["output_ids"][0] for r in several] == [11, 11, 21, 21]
    assert len({r["meta_info"]["id"] for r in several}) == 4
    assert len(stack.generate(input_ids=[[10]], sampling_params=params)) == 1, (
        "a batch of one prompt must return a list"
    )
    put = stack.request("PUT", "/generate", json={"input_ids": [10], "sampling_params": params})
    assert put.json()["output_ids"] == [11, 12]


def test_text_in_text_out(stack: Stack) -> None:
    ids = stack.text.encode("hello")
    stack.scheduler.script = lambda req: stack.text.encode(" world")
    out = stack.generate(text="hello", sampling_params={"max_new_tokens": 6}, return_prompt_token_ids=True)
    assert (out["text"], out["prompt_token_ids"]) == (" world", ids)


def test_stream_frames(stack: Stack) -> None:
    stack.scheduler.chunk = 1
    body = {"input_ids": [10], "sampling_params": {"max_new_tokens": 4}, "stream": True}
    response = stack.post("/generate", body)
    assert response.headers["content-type"].startswith("text/event-stream")
    frames = events(response.text)
    assert frames[-1]["output_ids"] == [11, 12, 13, 14]
    assert frames[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 4}


def error_body(message: str, kind: str, status: int) -> dict[str, Any]:
    """Return the body of an error: SGLang's object, and the same facts under `error`."""
    facts = {"message": message, "type": kind, "param": None, "code": status}
    return {"object": "error", **facts, "error": facts}


def test_errors_have_sglangs_shapes(stack: Stack) -> None:
    unknown = stack.post("/generate", {"text": "a", "sampling_params": {"seed": 1}})
    assert unknown.status_code == 400
    assert "unknown field `seed`, expected one of `max_new_tokens`" in unknown.json()["error"]["message"]
    invalid = stack.post("/generate", {"input_ids": []})
    assert (invalid.status_code, invalid.json()) == (400, error_body("input_ids cannot be empty.", "Bad Request", 400))
    malformed = stack.request("POST", "/generate", content=b'{"text": NaN}')
    assert malformed.status_code == 400
    assert malformed.json()["type"] == "Bad Request" and malformed.json()["code"] == 400
    missing = stack.get("/no_such_route")
    assert (missing.status_code, missing.json()["object"]) == (404, "error")
    assert stack.get("/generate").status_code == 405


def test_stream_of_a_bad_request_is_a_plain_400(stack: Stack) -> None:
    response = stack.post("/generate", {"input_ids": [9999], "stream": True})
    assert response.status_code == 400 and "9999" in response.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_refusal_by_the_scheduler_is_shape_b(stack: Stack, stream: bool) -> None:
    stack.scheduler.hold = True
    answers: list[Any] = []
    body = {"input_ids": [5], "stream": stream}
    thread = threading.Thread(target=lambda: answers.append(stack.post("/generate", body)))
    thread.start()
    (req,) = stack.scheduler.wait_for(io.TokenizedGenerateReq)
    running = stack.scheduler.running.pop(req.rid)

    def refuse(message: Any) -> io.ControlReply:
        reason = io.FinishReason(type="abort", message="The weights are torn.", status_code=503)
        stack.scheduler.emit(running, [], reason)
        return io.ControlReply(id=message.id, success=True)

    stack.scheduler.control = refuse
    stack.post("/continue_generation")
    thread.join(timeout=10)
    if stream:
        (frame,) = events(answers[0].text)
        assert frame["error"] == {
            "message": "The weights are torn.", "type": "server_error", "code": 503, "retryable": False,
        }  # fmt: skip
    else:
        expected = error_body("The weights are torn.", "503", 503)
        assert (answers[0].status_code, answers[0].json()) == (503, expected)


def test_unknown_top_level_keys_are_ignored_and_counted(stack: Stack) -> None:
    stack.generate(input_ids=[5], sampling_params={"max_new_tokens": 1}, my_key=1, other=2)
    stack.post("/pause_generation", {"surprise": True})
    text = stack.get("/metrics").text
    label = f'model_name="{Path(stack.args.model_path).name}"'
    for name in ("my_key", "other"):
        assert f'verl_server:ignored_request_fields_total{{field="{name}",{label},route="/generate"}} 1.0' in text
    assert str(Path(stack.args.model_path).parent) not in text, "everybody may read the metrics, not the server's paths"
    assert f'verl_server:ignored_request_fields_total{{field="surprise",{label},route="/pause_generation"}} 1.0' in text


def connect_and_leave(stack: Stack, path: str, body: bytes, more_body: bool = False) -> None:
    """Send `body` and disconnect: at once if `more_body`, otherwise when the request runs."""
    messages = [{"type": "http.request", "body": body, "more_body": more_body}]

    async def receive() -> Any:
        if messages:
            return messages.pop(0)
        while stack.manager.num_requests == 0 and not more_body:
            await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        pass

    async def call() -> None:
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1",
            "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"", "headers": [],
            "scheme": "http", "server": ("test", 80), "client": ("test", 1), "root_path": "",
        }  # fmt: skip
        await stack.app(scope, receive, send)

    stack.manager.run_sync(call(), timeout=10)


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/update_weights_from_tensor", "/tokenize"])
def test_client_that_leaves_while_it_sends_is_counted_in_silence(
    stack: Stack, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    connect_and_leave(stack, path, b'{"input_ids": [5', more_body=True)
    assert not caplog.records
    label = f'model_name="{Path(stack.args.model_path).name}"'
    assert f"verl_server:client_disconnects_total{{{label}}} 1.0" in stack.get("/metrics").text


@pytest.mark.parametrize("stream", [False, True])
def test_disconnected_client_is_aborted(stack: Stack, stream: bool) -> None:
    stack.scheduler.hold = True
    connect_and_leave(stack, "/generate", json.dumps({"input_ids": [5], "stream": stream}).encode())
    (req,) = stack.scheduler.wait_for(io.TokenizedGenerateReq)
    (abort,) = stack.scheduler.wait_for(io.AbortReq)
    assert abort.rid == req.rid and stack.manager.num_requests == 0


def test_body_beyond_the_limit_is_413(make_stack: MakeStack) -> None:
    stack = make_stack(max_request_bytes=1000)
    declared = stack.request("POST", "/generate", content=b"x" * 2000)
    assert declared.status_code == 413 and "max_request_bytes" in declared.json()["message"]

    async def chunks() -> Any:
        for _ in range(20):
            yield b"x" * 100

    assert stack.request("POST", "/generate", content=chunks()).status_code == 413
    assert stack.post("/pause_generation", {"mode": "x" * 2000}).status_code == 413
    assert stack.post("/v1/completions", {"prompt": "x" * 2000}).status_code == 413
    stack.generate(input_ids=[5], sampling_params={"max_new_tokens": 1})


def test_a_body_that_is_parsed_on_the_event_loop_is_small(make_stack: MakeStack) -> None:
    stack = make_stack(max_request_bytes=2**23, admin_api_key="a")
    large, key = {"x": "y" * 2**22}, {"authorization": "Bearer a"}
    carry = {
        *("/update_weights_from_tensor", "/update_weights_from_distributed", "/register_weights", "/update_weights"),
        *("/unregister_weights", "/begin_weight_update", "/end_weight_update", "/collective_rpc"),
        *("/init_weights_update_group", "/destroy_weights_update_group"),
    }
    control = {
        *("/abort_request", "/abort_requests", "/pause_generation", "/continue_generation", "/accept_restart"),
        *("/update_weights_from_disk", "/update_weight_version", "/post_process_weights", "/get_weights_by_name"),
        *("/weights_checker", "/release_memory_occupation", "/resume_memory_occupation", "/configure_logging"),
        *("/pause", "/init_weight_transfer_engine", "/finish_weight_update", "/init_broadcaster"),
        *("/sessions", "/sessions/s/finish", "/open_session", "/close_session"),
    }
    codes = {path: stack.post(path, large, headers=key).status_code for path in carry | control}
    assert {path for path, code in codes.items() if code == 413} == control
    message = stack.post("/pause_generation", large, headers=key).json()["message"]
    assert "takes at most 2097152" in message and "max_request_bytes" not in message


# -- health and info ----------------------------------------------------------------------------------------


def test_health_says_yes_only_after_the_warm_up(stack: Stack) -> None:
    stack.manager.ready = False
    for path in ("/health", "/health_generate", "/ready", "/ping"):
        assert stack.get(path).status_code == 503, path
    stack.manager.ready = True
    for path in ("/health", "/health_generate", "/ready", "/ping"):
        response = stack.get(path)
        assert (response.status_code, response.content) == (200, b""), path


def test_health_while_paused(stack: Stack) -> None:
    assert stack.post("/pause_generation").json() == {
        "message": "Generation paused successfully.", "status": "ok",
    }  # fmt: skip
    stack.scheduler.hold = True
    assert [stack.get(p).status_code for p in ("/health", "/health_generate", "/ready", "/ping")] == [
        200, 200, 503, 200,
    ]  # fmt: skip
    assert stack.post("/continue_generation").json() == {
        "message": "Generation continued successfully.", "status": "ok",
    }  # fmt: skip
    assert stack.get("/ready").status_code == 200


def test_health_during_a_weight_update_that_blocks_the_scheduler(stack: Stack) -> None:
    release = threading.Event()

    def slow(message: Any) -> io.ControlReply:
        release.wait(10)
        return io.ControlReply(id=message.id, success=True)

    stack.scheduler.control = slow
    answers: list[Any] = []
    body = {"model_path": "/new"}
    thread = threading.Thread(target=lambda: answers.append(stack.post("/update_weights_from_disk", body)))
    thread.start()
    try:
        while not stack.manager.controls.in_flight:
            threading.Event().wait(0.001)
        stack.manager.last_message -= 1000
        assert stack.get("/health").status_code == 200
        assert stack.get("/health_generate").status_code == 200
    finally:
        release.set()
        thread.join(timeout=10)
    assert answers[0].json() == {"success": True, "message": "", "num_paused_requests": 0}
    assert stack.get("/model_info").json()["model_path"] == "/new"


def test_health_asks_a_silent_scheduler(stack: Stack) -> None:
    stack.manager.last_message -= 1000
    assert stack.get("/health").status_code == 200
    assert stack.scheduler.wait_for(io.GetInternalStateReq)


def test_health_is_503_while_the_scheduler_hangs(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl_server.server.dialects.sglang.health_routes._HEALTH_TIMEOUT", 0.2)
    stack.scheduler.control = lambda message: None
    stack.manager.last_message -= 1000
    answers: list[int] = []
    threads = [threading.Thread(target=lambda: answers.append(stack.get("/health").status_code)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=10)
    assert answers == [503, 503]


def test_health_of_a_dead_scheduler(stack: Stack) -> None:
    stack.child.code = 1
    while not stack.deaths:
        threading.Event().wait(0.01)
    for path in ("/health", "/health_generate", "/ready", "/model_info", "/v1/models"):
        response = stack.get(path)
        assert response.status_code == 503 and "Boom: the reason" in response.json()["message"], path
        assert response.headers["X-Verl-Error"] == "ServerDiedError"
    assert stack.post("/generate", {"input_ids": [5]}).status_code == 503


def test_info_routes(make_stack: MakeStack) -> None:
    stack = make_stack(api_key="secret-1", admin_api_key="secret-2")
    stack.scheduler.control = lambda m: io.ControlReply(id=m.id, success=True, payload={"num_running_reqs": 3})
    stack.manager.scheduler_info = stack.manager.scheduler_info | {"device": "cuda:0"}
    headers = {"Authorization": "Bearer secret-1"}
    for path in ("/server_info", "/get_server_info"):
        response = stack.get(path, headers=headers)
        info = response.json()
        assert "secret" not in response.text
        assert info["max_total_num_tokens"] == 4096 and info["tp_size"] == 1 and isinstance(info["version"], str)
        assert info["device"] == "cuda", "an adapter that attaches reads the setting"
        assert info["scheduler_info"]["device"] == "cuda:0" and info["scheduler_info"]["vocab_size"] == 320
        assert info["internal_states"] == [{"num_running_reqs": 3}]
    model = stack.get("/get_model_info", headers=headers).json()
    assert model == stack.get("/model_info", headers=headers).json()
    assert (model["is_generation"], model["weight_version"], model["model_type"]) == (True, "default", "llama")
    assert stack.get("/get_weight_version", headers=headers).json()["weight_version"] == "default"
    load = stack.get("/v1/loads?include=core,queues", headers=headers).json()["loads"][0]
    assert (load["num_running_reqs"], load["num_waiting_reqs"], load["dp_rank"]) == (3, 0, 0)
    assert stack.get("/v1/loads?include=bogus", headers=headers).status_code == 400
    assert "verl-server" in stack.get("/", headers=headers).text


def test_metrics_have_sglangs_names(stack: Stack) -> None:
    gauges = ("num_running_reqs", "token_usage", "gen_throughput", "cache_hit_rate")
    state = {"num_waiting_reqs": 7} | dict.fromkeys(gauges, 0.5)
    stack.scheduler.control = lambda m: io.ControlReply(id=m.id, success=True, payload=state)
    stack.generate(input_ids=[10, 11], sampling_params={"max_new_tokens": 3})
    text = stack.get("/metrics").text
    for name in gauges:
        assert f"\nsglang:{name}{{" in text
    for line in ("sglang:num_queue_reqs", "sglang:prompt_tokens_total", "sglang:generation_tokens_total"):
        (value,) = [row.split()[-1] for row in text.splitlines() if row.startswith(line + "{")]
        assert float(value) == {"sglang:num_queue_reqs": 7, "sglang:prompt_tokens_total": 2}.get(line, 3)
    assert "sglang:e2e_request_latency_seconds_bucket" in text
    assert "sglang:time_to_first_token_seconds_bucket" in text


# -- control ------------------------------------------------------------------------------------------------

_CONTROL = [
    ("/pause_generation", io.PauseGenerationReq),
    ("/continue_generation", io.ContinueGenerationReq),
    ("/release_memory_occupation", ReleaseMemoryOccupationReq),
    ("/resume_memory_occupation", ResumeMemoryOccupationReq),
    ("/weights_checker", WeightsCheckerReq),
]


@pytest.mark.parametrize("content", [None, b"", b"{}", b"null", b'{"rid": null, "http_worker_ipc": null, "x": 1}'])
@pytest.mark.parametrize(("path", "kind"), _CONTROL)
def test_control_bodies_may_be_absent(stack: Stack, path: str, kind: type[Any], content: bytes | None) -> None:
    response = stack.request("POST", path, content=content)
    assert response.status_code == 200, response.text
    stack.scheduler.wait_for(kind)


def test_release_and_resume_reply_null(stack: Stack) -> None:
    for path in ("/release_memory_occupation", "/resume_memory_occupation"):
        response = stack.post(path, {"tags": ["kv_cache"]})
        assert (response.status_code, response.content) == (200, b"null")
        assert stack.get(path).content == b"null"
    sent = stack.scheduler.wait_for(ReleaseMemoryOccupationReq, 2)
    assert [m.tags for m in sent] == [["kv_cache"], None]


def test_refused_control_calls(stack: Stack) -> None:
    stack.scheduler.control = lambda m: io.ControlReply(id=m.id, success=False, message="No, because.", status_code=400)
    said = error_body("No, because.", "Bad Request", 400)
    for path in ("/release_memory_occupation", "/resume_memory_occupation", "/pause_generation", "/flush_cache"):
        response = stack.post(path)
        assert (response.status_code, response.json()) == (400, said)
    weights = stack.post("/get_weights_by_name", {"name": "x"})
    assert (weights.status_code, weights.json()) == (400, said)
    update = stack.post("/update_weights_from_disk", {"model_path": "/x"})
    assert (update.status_code, update.json()) == (400, said | {"success": False, "num_paused_requests": 0})


def test_flush_cache(stack: Stack) -> None:
    for method in ("GET", "POST"):
        response = stack.request(method, "/flush_cache?timeout=1.5")
        assert response.status_code == 200 and response.text.startswith("Cache flushed.\n")
        assert response.headers["content-type"].startswith("text/plain")
    assert stack.scheduler.wait_for(io.FlushCacheReq, 2)[0].timeout == 1.5
    for wrong in ("-1", "nan", "soon", "inf"):
        assert stack.get(f"/flush_cache?timeout={wrong}").status_code == 400


def test_abort_request_is_always_200(stack: Stack) -> None:
    for body in (None, {}, {"rid": "unknown"}, {"rid": "", "abort_all": False}):
        response = stack.post("/abort_request", body)
        assert (response.status_code, response.content) == (200, b"")
    stack.post("/abort_request", {"abort_all": True})
    assert [m.abort_all for m in stack.scheduler.wait_for(io.AbortReq)] == [True]


def test_update_weights_from_tensor(stack: Stack) -> None:
    handle = {
        "allocation": {"id": "a", "kind": "shm", "nbytes": 8, "pid": 1, "fd": 3, "handle": "aGk="},
        "dtype": "float32", "shape": [2], "stride": [1],
    }  # fmt: skip
    body = {"named_tensors": [["w", {"values": [handle]}]], "weight_version": "v7", "flush_cache": "false"}
    assert stack.post("/update_weights_from_tensor", body).json() == {"success": True, "message": ""}
    (req,) = stack.scheduler.wait_for(UpdateWeightsFromTensorReq)
    assert req.named_tensors[0][0] == "w" and req.named_tensors[0][1].get(0).allocation.handle == b"hi"
    assert (req.weight_version, req.flush_cache) == ("v7", False)
    assert stack.post("/update_weights_from_tensor", {"serialized_named_tensors": ["gASV"]}).status_code == 200
    assert stack.scheduler.wait_for(UpdateWeightsFromTensorReq, 2)[1].serialized_named_tensors == ["gASV"]


_DESCRIPTION = {
    "id": "d1",
    "allocations": [{"id": "a", "kind": "shm", "nbytes": 8, "pid": 1, "fd": 3, "inode": 5}],
    "tensors": [
        {"name": "w", "dtype": "float32", "shape": [2], "shards": [
            {"allocation": 0, "shape": [2], "offset": [0], "stride": [1]}]}
    ],
}  # fmt: skip
_WEIGHT_CALLS: list[tuple[str, dict[str, Any], type[Any]]] = [
    ("/update_weights_from_tensor", {"description": _DESCRIPTION, "keep": True}, UpdateWeightsFromTensorReq),
    ("/update_weights_from_tensor", {"registration": "d1", "forget": ["d0"]}, UpdateWeightsFromTensorReq),
    ("/register_weights", {"description": _DESCRIPTION}, RegisterWeightsReq),
    ("/unregister_weights", {"registrations": ["d1"]}, UnregisterWeightsReq),
    ("/unregister_weights", {}, UnregisterWeightsReq),
    ("/begin_weight_update", {"selector": "all"}, BeginWeightUpdateReq),
    ("/begin_weight_update", {"transaction_id": "t", "lease_seconds": "5", "full": True}, BeginWeightUpdateReq),
    ("/end_weight_update", {}, EndWeightUpdateReq),
    (
        "/init_weights_update_group",
        {"master_address": "h", "master_port": "29500", "rank_offset": 1, "world_size": 3, "backend": "gloo"},
        InitWeightsUpdateGroupReq,
    ),
    ("/destroy_weights_update_group", {"group_name": "g"}, DestroyWeightsUpdateGroupReq),
    (
        "/update_weights_from_distributed",
        {"names": ["w"], "dtypes": ["bfloat16"], "shapes": [[2]], "load_format": "flattened_bucket"},
        UpdateWeightsFromDistributedReq,
    ),
]


@pytest.mark.parametrize(("path", "body", "kind"), _WEIGHT_CALLS)
def test_weight_routes_are_their_struct_in_and_success_out(
    stack: Stack, path: str, body: dict[str, Any], kind: type[Any]
) -> None:
    payload = {"weight_version": "7", "lease_seconds": 60.0, "internal": 1}
    stack.scheduler.control = lambda m: io.ControlReply(id=m.id, success=True, message="Success", payload=payload)
    response = stack.post(path, body)
    expected = {"success": True, "message": "Success", "weight_version": "7", "lease_seconds": 60.0}
    assert (response.status_code, response.json()) == (200, expected)
    (req,) = stack.scheduler.wait_for(kind)
    for name, value in body.items():
        found = msgspec.to_builtins(getattr(req, name), builtin_types=())
        if isinstance(value, dict):
            assert found["id"] == value["id"] and found["tensors"][0]["shards"] == value["tensors"][0]["shards"]
        else:
            assert found == value or str(found).removesuffix(".0") == value


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, "WeightUpdateError"),
        (404, "UnknownRegistrationError"),
        (409, "UpdateConflictError"),
        (503, "ServerUnavailableError"),
        (504, "ControlTimeoutError"),
    ],
)
def test_a_refused_update_says_why_by_status_and_class(stack: Stack, status: int, error: str) -> None:
    stack.scheduler.control = lambda m: io.ControlReply(id=m.id, success=False, message="No.", status_code=status)
    response = stack.post("/update_weights_from_tensor", {"registration": "d1"})
    kind = "Bad Request" if status == 400 else str(status)
    assert (response.status_code, response.json()) == (status, error_body("No.", kind, status) | {"success": False})
    assert response.headers["X-Verl-Error"] == error, "the header must tell the server's errors from a proxy's"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/update_weights_from_tensor", {"registration": "d1", "partial": "true"}),
        ("/update_weights_from_distributed", {"names": ["w"], "dtypes": ["float32"], "shapes": [[1]]}),
        ("/end_weight_update", {"transaction_id": "t", "partial": True}),
    ],
)
def test_an_answer_names_what_a_partial_update_did_not_cover(stack: Stack, path: str, body: dict[str, Any]) -> None:
    """Weights of which something was not covered are not confirmed after a restart."""
    for count in (3, 0):
        coverage = {"count": count, "names": ["a", "b", "c"][:count]}
        stack.manager.controls.weights_confirmed = False
        payload = {"weight_version": "9", "not_covered": coverage}
        stack.scheduler.control = lambda m, payload=payload: io.ControlReply(id=m.id, success=True, payload=payload)
        assert stack.post(path, body).json()["not_covered"] == coverage
        assert stack.scheduler.received[-1].partial
        assert stack.manager.controls.weights_confirmed == (count == 0)


def test_post_process_weights_is_harmless(stack: Stack) -> None:
    assert stack.post("/post_process_weights", {"restore_weights_before_load": False}).json()["success"]
    assert stack.post("/post_process_weights").status_code == 200


def test_health_while_a_transaction_holds_generation(stack: Stack) -> None:
    """While a transaction holds generation, health routes answer for the process alone, since no token can arrive."""
    stack.scheduler.control = lambda m: io.ControlReply(id=m.id, success=True, payload={"lease_seconds": 60.0})
    stack.post("/begin_weight_update")
    stack.scheduler.hold = True
    assert stack.manager.controls.updating_weights
    assert stack.get("/health_generate").status_code == 200
    stack.scheduler.control = None
    stack.post("/end_weight_update")
    assert not stack.manager.controls.updating_weights


def test_update_weight_version_and_get_weights(stack: Stack) -> None:
    stack.scheduler.control = lambda m: io.ControlReply(
        id=m.id, success=True, message="Weight version updated to 9", payload={"weight_version": "9"}
    )
    expected = {"success": True, "message": "Weight version updated to 9", "new_version": "9"}
    assert stack.post("/update_weight_version", {"new_version": ""}).status_code == 400
    assert stack.post("/update_weight_version", {"new_version": "9"}).json() == expected
    assert stack.get("/get_weight_version").json()["weight_version"] == "9"
    stack.scheduler.control = lambda m: io.ControlReply(id=m.id, success=True, payload=[[1.0, 2.0]])
    for method in ("GET", "POST"):
        response = stack.request(method, "/get_weights_by_name", json={"name": "w", "truncate_size": "1"})
        assert response.json() == [[1.0, 2.0]]
    assert stack.scheduler.wait_for(GetWeightsByNameReq, 2)[0].truncate_size == 1


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/begin_weight_update", {"lease_seconds": -1}, "lease_seconds"),
        ("/update_weights_from_tensor", {"serialized_named_tensors": "gASV"}, "serialized_named_tensors"),
        ("/init_weights_update_group", {"master_address": "h"}, "master_port"),
        ("/pause_generation", {"mode": "later"}, "mode"),
        ("/update_weights_from_disk", {}, "model_path"),
        ("/get_weights_by_name", {"name": 5}, "name"),
        ("/release_memory_occupation", {"tags": "weights"}, "tags"),
        ("/abort_request", ["r"], "JSON object"),
    ],
)
def test_bad_control_bodies_are_400(stack: Stack, path: str, body: Any, says: str) -> None:
    response = stack.post(path, body)
    assert response.status_code == 400 and says in response.json()["message"]


def test_unanswered_control_call_is_504(make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl_server.server.scheduler_calls._CONTROL_GRACE", 0.0)
    stack = make_stack(control_timeout=0.05)
    stack.scheduler.control = lambda m: None
    response = stack.post("/pause_generation")
    assert response.status_code == 504 and "PauseGeneration" in response.json()["message"]

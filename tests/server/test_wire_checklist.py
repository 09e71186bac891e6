"""The conformance checklist of SGLang's wire: thirteen rows that clients of RL frameworks rely on, by number."""

from __future__ import annotations

import io as files
import pickle
import threading
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from tests.scheduler.fakes import Harness
from tests.server.conftest import MakeStack, Stack
from tests.weight_sync import sglang_payloads as sglang
from tests.weight_sync.fakes import Ranks
from verl_server.errors import BadRequestError
from verl_server.messages import io_struct as io
from verl_server.messages.weight_requests import (
    GetWeightsByNameReq,
    InitWeightsUpdateGroupReq,
    ReleaseMemoryOccupationReq,
    ResumeMemoryOccupationReq,
    UpdateWeightsFromTensorReq,
)
from verl_server.weight_sync.group.group_connection import _prefixed
from verl_server.weight_sync.sglang.payloads import parse_payload

PARAMS = {"max_new_tokens": 3, "ignore_eos": True}
ABSENT = [None, b"", b"{}"]


@pytest.fixture
def stack(reset_stack: Stack) -> Stack:
    """One stack for all tests of this module."""
    return reset_stack


def started(stack: Stack, **body: Any) -> tuple[threading.Thread, list[Any]]:
    """Send a request that the scheduler holds. Return its thread and the list of its answer."""
    stack.scheduler.hold = True
    answers: list[Any] = []
    sent = {"input_ids": [10], "sampling_params": PARAMS} | body
    thread = threading.Thread(target=lambda: answers.append(stack.post("/generate", sent)), daemon=True)
    thread.start()
    stack.scheduler.wait_for(io.TokenizedGenerateReq)
    return thread, answers


def refuse(stack: Stack, message: str, status: int) -> None:
    """End the one running request with an error of the scheduler."""
    (running,) = stack.scheduler.running.values()
    stack.scheduler.running.clear()
    stack.scheduler.emit(running, [], io.FinishReason(type="abort", message=message, status_code=status))


def test_1_health_generate_after_a_token_and_503_while_loading(stack: Stack) -> None:
    stack.manager.ready = False
    assert stack.get("/health_generate").status_code == 503
    stack.manager.ready = True
    response = stack.get("/health_generate")
    assert (response.status_code, response.content) == (200, b"")
    assert stack.scheduler.wait_for(io.TokenizedGenerateReq), "a real token was generated"
    stack.scheduler.control = lambda req: io.ControlReply(id=req.id, success=True, payload={"lease_seconds": 60.0})
    stack.post("/begin_weight_update")
    stack.scheduler.hold = True
    assert stack.get("/health_generate").status_code == 200, "nobody is evicted during a weight update"


def test_2_shapes_of_generate_and_its_errors(stack: Stack) -> None:
    body = {"sampling_params": PARAMS, "no_such_key": 1}
    single = stack.post("/generate", body | {"input_ids": [10]})
    assert single.status_code == 200 and single.json()["output_ids"] == [11, 12, 13]
    assert len(stack.generate(input_ids=[[10], [20]], sampling_params=PARAMS)) == 2
    assert len(stack.generate(input_ids=[10], sampling_params=PARAMS | {"n": 3})) == 3
    unknown = stack.post("/generate", {"input_ids": [10], "sampling_params": {"seed": 1}})
    assert unknown.status_code == 400 and "unknown field `seed`" in unknown.json()["error"]["message"]
    wrong = stack.post("/generate", {"input_ids": [10], "sampling_params": {"top_p": 0}})
    assert wrong.status_code == 400 and wrong.json()["error"]["message"]


def test_3_meta_info_from_which_clients_rebuild_the_sequence(stack: Stack) -> None:
    plain = stack.generate(input_ids=[10], sampling_params=PARAMS)["meta_info"]
    keys = {"id", "finish_reason", "prompt_tokens", "completion_tokens", "cached_tokens", "weight_version"}
    assert keys <= set(plain) and not [key for key in plain if "logprob" in key]
    out = stack.generate(
        input_ids=[10], sampling_params={"max_new_tokens": 8, "stop_token_ids": [13]}, return_logprob=True
    )
    triples = out["meta_info"]["output_token_logprobs"]
    assert [token for _, token, _ in triples] == out["output_ids"] == [11, 12, 13], "the stop token is included"
    assert {text for _, _, text in triples} == {None}
    assert len(triples) == out["meta_info"]["completion_tokens"]
    assert out["meta_info"]["finish_reason"] == {"type": "stop", "matched": 13}


def test_4_an_abort_is_200_with_partial_output_and_a_refusal_is_shape_b(stack: Stack) -> None:
    thread, answers = started(stack, rid="r1")
    (running,) = stack.scheduler.running.values()
    stack.scheduler.emit(running, [11, 12], None)
    assert stack.post("/abort_request", {"rid": "r1"}).status_code == 200
    thread.join(10)
    assert answers[0].status_code == 200 and answers[0].json()["output_ids"] == [11, 12]
    assert answers[0].json()["meta_info"]["finish_reason"]["type"] == "abort"
    for message in ("The request queue is full.", "The request timed out."):
        thread, answers = started(stack)
        stack.scheduler.wait_for(io.TokenizedGenerateReq, len(stack.scheduler.wait_for(io.TokenizedGenerateReq)))
        while not stack.scheduler.running:
            threading.Event().wait(0.001)
        refuse(stack, message, 503)
        thread.join(10)
        error = answers[0].json()
        assert answers[0].status_code == 503 and (error["object"], error["code"]) == ("error", 503)
        assert error["message"] == message and error["type"] == "503" and error["param"] is None


def test_5_an_abort_of_nobody_is_200(stack: Stack) -> None:
    thread, answers = started(stack)
    assert stack.post("/abort_request", {"rid": "", "abort_all": False}).status_code == 200
    stack.scheduler.release()
    thread.join(10)
    assert answers[0].json()["meta_info"]["finish_reason"]["type"] == "length", "nobody was aborted"


@pytest.mark.parametrize("content", ABSENT)
def test_6_control_bodies_may_be_absent(stack: Stack, content: bytes | None) -> None:
    def post(path: str) -> Any:
        return stack.request("POST", path, content=content)

    assert post("/pause_generation").json() == {"message": "Generation paused successfully.", "status": "ok"}
    assert post("/continue_generation").json() == {"message": "Generation continued successfully.", "status": "ok"}
    for path in ("/release_memory_occupation", "/resume_memory_occupation"):
        assert (post(path).status_code, post(path).content) == (200, b"null")
    assert post("/abort_request").status_code == 200


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_7_both_methods_of_older_routes(stack: Stack, method: str) -> None:
    paths = ("/flush_cache", "/release_memory_occupation", "/resume_memory_occupation", "/weights_checker")
    for path in paths:
        assert stack.request(method, path).status_code == 200, path
    weights = stack.request(method, "/get_weights_by_name", json={"name": "w"})
    assert weights.status_code == 200
    assert stack.scheduler.wait_for(GetWeightsByNameReq)[0].name == "w"


def test_8_flush_cache_is_text_and_400_when_busy(stack: Stack) -> None:
    done = stack.get("/flush_cache?timeout=2")
    assert done.status_code == 200 and done.headers["content-type"].startswith("text/plain")
    assert stack.scheduler.wait_for(io.FlushCacheReq)[0].timeout == 2
    stack.scheduler.control = lambda req: io.ControlReply(id=req.id, success=False, message="busy", status_code=400)
    assert stack.post("/flush_cache").status_code == 400


def test_9_updates_with_and_without_a_transaction_and_lenient_fields(stack: Stack) -> None:
    group = {"master_address": "h", "master_port": "29500", "rank_offset": 1, "world_size": 2, "extra": 1}
    assert stack.post("/init_weights_update_group", group).json()["success"]
    assert stack.scheduler.wait_for(InitWeightsUpdateGroupReq)[0].master_port == 29500
    update = {"serialized_named_tensors": ["gASV"], "abort_all_request": True}
    assert stack.post("/update_weights_from_tensor", update).json()["success"], "no transaction is needed"
    for path in ("/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update"):
        assert stack.post(path, update if "tensor" in path else {}).status_code == 200
    assert stack.scheduler.wait_for(UpdateWeightsFromTensorReq, 2)


def test_9_base64_pickles_of_all_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        tensor = torch.arange(6, dtype=torch.float32)
        ((name, handle),) = parse_payload(sglang.dumps([("w", tensor)]), None)
        assert (name, handle.dtype, handle.shape) == ("w", "float32", [6])
        entry = sglang.FlattenedTensorMetadata("w", torch.Size([2]), torch.float32, 0, 0, 2)
        for flat, start, end in ((tensor, 2, 4), (tensor.view(torch.uint8), 8, 16)):
            entry.start_idx, entry.end_idx = start, end
            with sglang.stub_modules(**{f"{sglang.BUCKETS}:FlattenedTensorMetadata": sglang.FlattenedTensorMetadata}):
                payload = sglang.dumps({"flattened_tensor": flat, "metadata": [entry]})
            ((name, handle),) = parse_payload(payload, "flattened_bucket")
            assert (handle.shape, handle.storage_offset) == ([2], 2), "indices count elements, or bytes of uint8"
        with pytest.raises(BadRequestError, match="Hugging Face names"):
            parse_payload(sglang.dumps([("w", tensor)]), "direct")
    finally:
        torch.multiprocessing.set_sharing_strategy("file_descriptor")


def test_10_groups_meet_by_the_prefix_store_recipe() -> None:
    store = HashStore()
    _prefixed(store, "weight_update_group", "cuda").set("0", "id")
    assert store.get("weight_update_group/weight_update_group//cuda//0") == b"id"


def test_11_wrong_orders_are_400_and_nothing_dies(stack: Stack) -> None:
    ranks = Ranks(1)
    assert ranks.handle(ReleaseMemoryOccupationReq(tags=["weights"])).success
    assert ranks.handle(ReleaseMemoryOccupationReq(tags=["weights"])).status_code == 400, "released twice"
    assert ranks.handle(ResumeMemoryOccupationReq(tags=["kv_cache"])).status_code == 400, "not released"
    h = Harness()
    h.add("busy", [1, 2, 3], 20)
    h.steps(3)
    assert h.control(ReleaseMemoryOccupationReq(id=1)).status_code == 400
    h.run()
    assert len(h.tokens["busy"]) == 20, "the request goes on"
    bad = files.BytesIO()
    pickle.dump({"not": "tensors"}, bad)
    with pytest.raises(BadRequestError):
        parse_payload(bad.getvalue(), None)
    for content in (b"", b"{", b"[]", b'"x"', b'{"serialized_named_tensors": 5}'):
        response = stack.request("POST", "/update_weights_from_tensor", content=content)
        assert response.status_code in (200, 400), "an empty body is the scheduler's to refuse"


def test_12_names_of_both_generations(stack: Stack) -> None:
    assert stack.get("/get_model_info").json() == stack.get("/model_info").json()
    assert stack.get("/get_server_info").json()["version"] == stack.get("/server_info").json()["version"]
    assert stack.get("/get_weight_version").json()["weight_version"] == "default"
    load = stack.get("/v1/loads?include=core,disagg,queues").json()["loads"][0]
    assert (load["num_running_reqs"], load["num_waiting_reqs"]) == (0, 0)
    for path in ("/add_worker", "/workers"):
        assert stack.get(path).status_code == 404, "routes of the router"


def test_13_replies_find_their_calls_in_any_order(make_stack: MakeStack) -> None:
    stack = make_stack()
    held: list[Any] = []

    def hold(req: Any) -> None:
        held.append(req)
        if len(held) == 2:  # answer in the reverse order
            for one in reversed(held):
                stack.scheduler.send(io.ControlReply(id=one.id, success=True, payload=[[float(one.name)]]))

    stack.scheduler.control = hold
    answers: dict[str, Any] = {}

    def ask(name: str) -> None:
        answers[name] = stack.post("/get_weights_by_name", {"name": name}).json()

    threads = [threading.Thread(target=ask, args=(name,)) for name in ("1", "2")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert answers == {"1": [[1.0]], "2": [[2.0]]}

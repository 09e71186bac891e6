"""vLLM's and prime-rl's control routes: the control requests that they become, and their answers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.server.conftest import MakeStack, Stack
from tests.server.fake_scheduler import FakeScheduler
from verl_server.messages import io_struct as io
from verl_server.messages.weight_requests import (
    BeginWeightUpdateReq,
    DestroyWeightsUpdateGroupReq,
    EndWeightUpdateReq,
    InitWeightsUpdateGroupReq,
    ReleaseMemoryOccupationReq,
    ResumeMemoryOccupationReq,
    UpdateWeightsFromDistributedReq,
)
from verl_server.server.dialects.vllm.control_routes import VllmControlApi
from verl_server.server.dialects.vllm.sleep import Sleep
from verl_server.server.http.responses import ClientDisconnectedError


class Memory:
    """A scheduler that only keeps account of released memory. It refuses kinds in `refuses` with 400."""

    def __init__(self, scheduler: FakeScheduler) -> None:
        self.released: list[str] = []
        self.refuses: tuple[type[Any], ...] = ()
        self.calls: list[Any] = []
        scheduler.control = self

    def __call__(self, req: Any) -> io.ControlReply:
        if isinstance(req, self.refuses):
            return io.ControlReply(id=req.id, success=False, message="refused", status_code=400)
        if isinstance(req, ReleaseMemoryOccupationReq):
            self.released += req.tags or []
        elif isinstance(req, ResumeMemoryOccupationReq):
            self.released = [tag for tag in self.released if tag not in (req.tags or [])]
        if isinstance(req, io.GetInternalStateReq):
            return io.ControlReply(id=req.id, success=True, payload={"released": self.released})
        self.calls.append(req)
        return io.ControlReply(id=req.id, success=True)

    @property
    def names(self) -> list[str]:
        return [type(req).__name__.removesuffix("Req") for req in self.calls]


@pytest.fixture
def stack(reset_stack: Stack) -> Stack:
    """One stack for all tests of this module."""
    return reset_stack


@pytest.fixture
def memory(stack: Stack) -> Memory:
    return Memory(stack.scheduler)


# -- pause ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query", "body", "mode"),
    [
        ("", None, "abort"),
        ("?mode=keep", None, "in_place"),
        ("?mode=wait&clear_cache=false", None, "wait"),
        ("", {"mode": "wait"}, "wait"),
        ("?mode=keep", {"mode": "abort"}, "in_place"),
        ("?wait_for_inflight_requests=true", None, "wait"),
    ],
)
def test_pause_modes(stack: Stack, memory: Memory, query: str, body: Any, mode: str) -> None:
    assert stack.get("/is_paused").json() == {"is_paused": False}
    assert stack.post(f"/pause{query}", body).json() == {"status": "paused"}
    assert memory.calls[-1].mode == mode
    assert stack.get("/is_paused").json() == {"is_paused": True}
    assert stack.post("/resume").json() == {"status": "resumed"}
    assert stack.get("/is_paused").json() == {"is_paused": False}


def test_an_unknown_mode_is_named(module_stack: Stack) -> None:
    for kwargs in ({"params": {"mode": "freeze"}}, {"json": {"mode": "freeze"}}):
        response = module_stack.post("/pause", **kwargs)
        assert response.status_code == 400 and "freeze" in response.json()["error"]["message"]
    assert module_stack.post("/pause", params={"wait_for_inflight_requests": "maybe"}).status_code == 400


# -- weights --------------------------------------------------------------------------------------------------

INIT = {"master_address": "10.0.0.7", "master_port": "51216", "rank_offset": 1, "world_size": 2}
BROADCASTER = {"host": "10.0.0.7", "port": 29501, "rank_offset": 2, "inference_world_size": 4, "timeout": 1200}
TENSORS = {"names": ["w"], "dtype_names": ["bfloat16"], "shapes": [[2, 3]]}


@pytest.mark.parametrize(
    ("init", "update", "load_format", "buffer"),
    [
        ({}, {}, None, 1 << 30),
        ({}, {"packed": True}, "packed", 1 << 30),
        ({"packed": True, "packed_buffer_size_bytes": 4096}, {}, "packed", 4096),
        ({"packed": True}, {"packed": False}, None, 1 << 30),
        ({}, {"packed": True, "packed_buffer_size_bytes": 512, "packed_num_buffers": 3}, "packed", 512),
    ],
)
def test_the_four_calls_of_an_nccl_transfer(
    stack: Stack, memory: Memory, init: Any, update: Any, load_format: str | None, buffer: int
) -> None:
    def post(path: str, body: Any) -> Any:
        response = stack.post(path, body)
        assert response.status_code == 200, response.text
        return response.json()

    assert stack.get("/get_world_size").json() == {"world_size": 1}
    assert post("/init_weight_transfer_engine", {"init_info": INIT | init})["message"]
    assert post("/start_weight_update", {"is_checkpoint_format": True})["message"]
    assert post("/update_weights", {"update_info": TENSORS | update}) == {"message": "Weights updated"}
    assert post("/finish_weight_update", {"weight_version": "v7"})["message"]
    leave, join, begin, received, end = memory.calls
    assert isinstance(leave, DestroyWeightsUpdateGroupReq), "an earlier trainer's group makes room"
    assert isinstance(join, InitWeightsUpdateGroupReq)
    assert (join.master_address, join.master_port, join.rank_offset, join.world_size) == ("10.0.0.7", 51216, 1, 2)
    assert join.rendezvous == "unique_id" and join.backend == "nccl" and join.group_name == leave.group_name
    assert isinstance(begin, BeginWeightUpdateReq) and begin.mode == "wait" and begin.transaction_id is None
    assert isinstance(received, UpdateWeightsFromDistributedReq) and received.group_name == join.group_name
    assert (received.names, received.dtypes, received.shapes) == (["w"], ["bfloat16"], [[2, 3]])
    assert (received.load_format, received.packed_buffer_size_bytes) == (load_format, buffer)
    assert isinstance(end, EndWeightUpdateReq) and end.weight_version == "v7"


def test_an_ipc_transfer(stack: Stack, memory: Memory) -> None:
    assert stack.post("/init_weight_transfer_engine", {"init_info": {}}).status_code == 200
    update = TENSORS | {"ipc_handles_pickled": "gASV", "tensor_sizes": [12]}
    assert stack.post("/update_weights", {"update_info": update}).status_code == 200
    (req,) = memory.calls
    assert req.ipc_handles.names == ["w"] and req.ipc_handles.handles == "gASV" and req.ipc_handles.sizes == [12]


def test_an_answer_names_what_a_trainer_did_not_cover(stack: Stack) -> None:
    """Trainers of vLLM may send a part of the weights; their clients ignore this key."""
    coverage = {"not_covered": {"count": 9, "names": ["a"]}}
    stack.scheduler.control = lambda m: io.ControlReply(id=m.id, success=True, payload=coverage)
    update = TENSORS | {"ipc_handles_pickled": "gASV"}
    assert stack.post("/update_weights", {"update_info": update}).json() == {"message": "Weights updated"} | coverage
    assert stack.post("/finish_weight_update").json() == {"message": "Weight update finished"} | coverage


def test_a_first_trainer_finds_no_group_to_leave(stack: Stack, memory: Memory) -> None:
    memory.refuses = (DestroyWeightsUpdateGroupReq,)
    assert stack.post("/init_weight_transfer_engine", {"init_info": INIT}).status_code == 200
    assert memory.names == ["InitWeightsUpdateGroup"]


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("/init_weight_transfer_engine", {}, "init_info"),
        ("/init_weight_transfer_engine", {"init_info": {"master_address": "a"}}, "master_port"),
        ("/init_weight_transfer_engine", {"init_info": {"nccl_unique_id_b64": "AA=="}}, "nccl_unique_id_b64"),
        ("/update_weights", {}, "update_info"),
        ("/update_weights", {"update_info": TENSORS}, "/init_weight_transfer_engine"),
        ("/update_weights", {"update_info": TENSORS, "weight_dir": "/x"}, "either"),
        ("/update_weights", {"update_info": {"names": ["w"]}}, "dtype_names"),
        ("/update_weights", {"update_info": TENSORS | {"ipc_handles": [{}]}}, "ipc_handles_pickled"),
        ("/start_draft_weight_update", {}, "draft"),
        ("/init_broadcaster", {"host": "a"}, "port"),
        ("/init_broadcaster", BROADCASTER | {"quantize_in_weight_transfer": True}, "quantize_in_weight_transfer"),
        ("/init_broadcaster", BROADCASTER | {"session_id": "default"}, "NIXL"),
        ("/sleep?level=3", None, "level"),
        ("/sleep?tags=scheduling", None, "scheduling"),
        ("/wake_up?tags=everything", None, "everything"),
        ("/collective_rpc", {"method": "__reduce__"}, "__reduce__"),
        ("/collective_rpc", {"method": "apply_model"}, "apply_model"),
        ("/collective_rpc", {"method": "check_health", "args": [1]}, "no arguments"),
        ("/collective_rpc", {"method": "reload_weights", "kwargs": {"path": "/x"}}, "weights_path"),
        ("/collective_rpc", {"method": "update_weights_from_path"}, "path of the weights"),
        ("/collective_rpc", {}, "method"),
    ],
)
def test_refusals_name_what_is_wrong(stack: Stack, memory: Memory, path: str, body: Any, text: str) -> None:
    response = stack.post(path, body)
    assert response.status_code == 400 and text in response.json()["error"]["message"], response.text
    assert not memory.calls, "nothing was carried out"


def test_a_refusal_of_the_scheduler_keeps_its_status(stack: Stack) -> None:
    stack.scheduler.control = lambda req: io.ControlReply(id=req.id, success=False, message="busy", status_code=409)
    response = stack.post("/start_weight_update", {})
    assert response.status_code == 409 and response.json()["error"]["message"] == "busy"


def test_prime_rls_updates_from_disk(stack: Stack, memory: Memory) -> None:
    body = {"weight_dir": "/weights/step_3", "skip_prefix_cache_reset": True}
    assert stack.post("/update_weights", body).json() == {"status": "ok"}
    assert stack.post("/reload_weights").json() == {"status": "ok"}
    assert [req.model_path for req in memory.calls] == ["/weights/step_3", stack.args.model_path]
    assert {req.mode for req in memory.calls} == {"in_place"}, "running requests keep their KV cache"
    assert stack.get("/weight_info").json() == {"weight_version": "default"}


@pytest.mark.parametrize("update", [{"weight_dir": "/run/broadcasts/step_3"}, {"weight_dir": None}])
def test_prime_rls_updates_from_broadcasts(stack: Stack, memory: Memory, update: Any) -> None:
    body = BROADCASTER | {"quantize_in_weight_transfer": False}
    assert stack.post("/init_broadcaster", body).json() == {"status": "ok"}
    assert stack.post("/update_weights", update).json() == {"status": "ok"}
    leave, join, received = memory.calls
    assert isinstance(leave, DestroyWeightsUpdateGroupReq), "an earlier trainer's group makes room"
    assert isinstance(join, InitWeightsUpdateGroupReq) and join.group_name == leave.group_name
    assert (join.master_address, join.master_port, join.rank_offset, join.world_size) == ("10.0.0.7", 29501, 3, 5)
    assert join.rendezvous == "unique_id" and join.backend == "nccl"
    assert isinstance(received, UpdateWeightsFromDistributedReq) and received.group_name == join.group_name
    assert received.load_format == "state_dicts" and not received.names and not received.partial
    assert received.mode == "in_place", "running requests keep their KV cache"
    response = stack.post("/update_weights", {"update_info": TENSORS})
    assert response.status_code == 400 and "either" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [("/shutdown_weight_transfer_engine", None), ("/init_weight_transfer_engine", {"init_info": INIT})],
)
def test_without_a_broadcaster_folders_are_loaded_again(stack: Stack, memory: Memory, path: str, body: Any) -> None:
    stack.post("/init_broadcaster", BROADCASTER)
    assert stack.post(path, body).status_code == 200
    memory.calls.clear()
    assert stack.post("/update_weights", {"weight_dir": "/weights"}).status_code == 200
    assert memory.names == ["UpdateWeightsFromDisk"]


def test_a_broadcaster_that_could_not_be_joined_is_forgotten(stack: Stack, memory: Memory) -> None:
    stack.post("/init_broadcaster", BROADCASTER)
    memory.refuses = (InitWeightsUpdateGroupReq,)
    assert stack.post("/init_broadcaster", BROADCASTER).status_code == 400
    assert stack.post("/update_weights", {"weight_dir": "/weights"}).status_code == 200
    assert memory.names[-1] == "UpdateWeightsFromDisk"


def test_ipc_handles_are_read_after_a_broadcaster_was_left(stack: Stack, memory: Memory) -> None:
    stack.post("/init_broadcaster", BROADCASTER)
    assert stack.post("/init_weight_transfer_engine", {"init_info": {}}).status_code == 200
    response = stack.post("/update_weights", {"update_info": TENSORS | {"ipc_handles_pickled": "gASV"}})
    assert response.status_code == 200, response.text
    assert memory.names[-2:] == ["DestroyWeightsUpdateGroup", "UpdateWeightsFromTensor"]


def test_a_group_that_could_not_be_joined_leaves_none(stack: Stack, memory: Memory) -> None:
    stack.post("/init_broadcaster", BROADCASTER)
    memory.refuses = (InitWeightsUpdateGroupReq,)
    assert stack.post("/init_weight_transfer_engine", {"init_info": INIT}).status_code == 400
    assert stack.post("/update_weights", {"weight_dir": "/weights"}).status_code == 200
    assert memory.names[-1] == "UpdateWeightsFromDisk", "no broadcast of the group that was left is awaited"


# -- cache and memory -----------------------------------------------------------------------------------------


def test_reset_prefix_cache(stack: Stack, memory: Memory) -> None:
    assert stack.post("/reset_prefix_cache?reset_external=true").json() == {"success": True}
    memory.refuses = (io.FlushCacheReq,)
    assert stack.post("/reset_prefix_cache").json() == {"success": False}, "running requests hold the cache"
    memory.refuses, memory.calls = (), []
    assert stack.post("/reset_prefix_cache?reset_running_requests=true").json() == {"success": True}
    assert memory.names == ["PauseGeneration", "FlushCache", "ContinueGeneration"]
    assert memory.calls[0].mode == "retract"
    stack.post("/pause?mode=keep")
    memory.calls = []
    stack.post("/reset_prefix_cache?reset_running_requests=true")
    assert memory.names == ["PauseGeneration", "FlushCache"], "a pause that was there before stays"
    assert stack.post("/reset_mm_cache").status_code == stack.post("/reset_encoder_cache").status_code == 200


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_and_wake_up_in_two_parts(stack: Stack, memory: Memory, level: int) -> None:
    assert stack.get("/is_sleeping").json() == {"is_sleeping": False}
    assert stack.post(f"/sleep?level={level}").json() == {"status": "sleeping", "level": level}
    assert memory.names == ["PauseGeneration", "ReleaseMemoryOccupation"]
    assert set(memory.released) == {"weights", "kv_cache", "cuda_graph"}
    assert memory.calls[1].cpu_backup is (level == 1), "level 1 keeps the weights' contents"
    assert stack.get("/is_sleeping").json() == {"is_sleeping": True}
    assert stack.post("/wake_up?tags=weights").json() == {"status": "sleeping", "tags": ["weights"]}
    assert stack.get("/is_paused").json() == {"is_paused": True}
    assert stack.post("/wake_up?tags=kv_cache").json()["status"] == "awake"
    assert memory.names[-1] == "ContinueGeneration" and memory.released == []
    assert stack.get("/is_sleeping").json() == {"is_sleeping": False}


def test_sleep_of_one_tag_twice_and_waking_what_is_awake(stack: Stack, memory: Memory) -> None:
    assert stack.post("/wake_up").json()["status"] == "awake"
    assert memory.calls == []
    stack.post("/sleep?level=2&tags=kv_cache&mode=wait")
    assert memory.calls[0].mode == "wait" and memory.released == ["kv_cache", "cuda_graph"]
    stack.post("/sleep?level=2")
    assert memory.calls[-1].tags == ["weights"], "what is released already stays released"
    assert stack.post("/wake_up").json()["status"] == "awake"


def test_a_pause_that_was_there_before_sleep_stays(stack: Stack, memory: Memory) -> None:
    stack.post("/pause")
    stack.post("/sleep")
    stack.post("/wake_up")
    assert stack.get("/is_paused").json() == {"is_paused": True}


def test_level_0_only_pauses(stack: Stack, memory: Memory) -> None:
    stack.post("/sleep?level=0&mode=keep")
    assert memory.names == ["PauseGeneration"] and stack.get("/is_sleeping").json() == {"is_sleeping": True}
    assert stack.post("/wake_up?tags=scheduling").json() == {"status": "awake", "tags": ["scheduling"]}
    assert memory.names[-1] == "ContinueGeneration"


def test_a_failed_sleep_leaves_generation_running(stack: Stack, memory: Memory) -> None:
    memory.refuses = (ReleaseMemoryOccupationReq,)
    assert stack.post("/sleep").status_code == 400
    assert stack.get("/is_paused").json() == {"is_paused": False}


def test_a_client_that_is_gone_before_the_release_leaves_generation_running(stack: Stack, memory: Memory) -> None:
    async def carry_out(req: Any) -> io.ControlReply:
        if isinstance(req, ReleaseMemoryOccupationReq):
            raise ClientDisconnectedError
        return await stack.manager.control(req)

    with pytest.raises(ClientDisconnectedError):
        stack.manager.run_sync(Sleep(stack.manager).sleep(carry_out, 2, None, "abort"), timeout=10)
    assert memory.names == ["PauseGeneration", "ContinueGeneration"]
    assert not stack.manager.controls.is_paused


def test_two_calls_of_sleep_at_the_same_time_release_memory_once(stack: Stack, memory: Memory) -> None:
    sleep = Sleep(stack.manager)

    async def carry_out(req: Any) -> io.ControlReply:
        return await stack.manager.control(req)

    async def both() -> None:
        await asyncio.gather(*(sleep.sleep(carry_out, 2, None, "abort") for _ in range(2)))

    stack.manager.run_sync(both(), timeout=10)
    assert memory.names == ["PauseGeneration", "ReleaseMemoryOccupation", "PauseGeneration"]


# -- methods of workers ---------------------------------------------------------------------------------------

JOINED = ["DestroyWeightsUpdateGroup", "InitWeightsUpdateGroup"]


@pytest.mark.parametrize(
    ("body", "calls"),
    [
        ({"method": "reload_weights"}, ["UpdateWeightsFromDisk"]),
        ({"method": "reload_weights", "kwargs": {"weights_path": "/w"}}, ["UpdateWeightsFromDisk"]),
        ({"method": "update_weights_from_path", "args": ["/w"]}, ["UpdateWeightsFromDisk"]),
        ({"method": "check_health"}, []),
        ({"method": "init_weight_update_group", "args": ["h", 5, 1, 2]}, JOINED),
        ({"method": "update_weight", "args": ["w", "float32", [2]]}, ["UpdateWeightsFromDistributed"]),
        ({"method": "init_weight_transfer_engine", "args": [{}]}, []),
        ({"method": "start_weight_update", "kwargs": {"is_checkpoint_format": True}}, ["BeginWeightUpdate"]),
        ({"method": "update_weights", "args": [TENSORS]}, ["UpdateWeightsFromDistributed"]),
        ({"method": "finish_weight_update", "args": ["3"]}, ["EndWeightUpdate"]),
        ({"method": "skyrl_start_weight_update"}, ["BeginWeightUpdate"]),
        ({"method": "skyrl_finish_weight_update"}, ["EndWeightUpdate"]),
        ({"method": "wake_up", "args": [["weights"]], "timeout": 5}, []),
    ],
)
def test_methods_of_the_closed_table(stack: Stack, memory: Memory, body: Any, calls: list[str]) -> None:
    if calls == ["UpdateWeightsFromDistributed"]:
        stack.post("/init_weight_transfer_engine", {"init_info": INIT})
        memory.calls.clear()
    response = stack.post("/collective_rpc", body)
    assert response.status_code == 200, response.text
    assert response.json() == {"results": [None]} and memory.names == calls


def test_the_path_of_a_worker_method_is_not_read_with_a_broadcaster(stack: Stack, memory: Memory) -> None:
    stack.post("/init_broadcaster", BROADCASTER)
    stack.post("/collective_rpc", {"method": "update_weights_from_path", "args": ["/w"]})
    assert memory.names == [*JOINED, "UpdateWeightsFromDistributed"]


@pytest.mark.parametrize("name", ["report_device_id", "skyrl_get_gpu_uuid"])
def test_the_device_of_a_rank(module_stack: Stack, name: str) -> None:
    assert module_stack.post("/collective_rpc", {"method": name}).json() == {"results": ["CPU"]}


def test_every_method_is_tested_here(module_stack: Stack) -> None:
    names = {body["method"] for body, _ in test_methods_of_the_closed_table.pytestmark[0].args[1]}
    assert names | {"report_device_id", "skyrl_get_gpu_uuid"} == set(VllmControlApi(module_stack.manager).methods)


# -- access ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "/pause", "/resume", "/init_weight_transfer_engine", "/shutdown_weight_transfer_engine", "/start_weight_update",
        "/update_weights", "/finish_weight_update", "/reload_weights", "/init_broadcaster", "/reset_prefix_cache",
        "/sleep", "/wake_up", "/collective_rpc",
    ],
)  # fmt: skip
def test_control_routes_need_the_admin_key(make_stack: MakeStack, path: str) -> None:
    stack = make_stack(api_key="user", admin_api_key="admin")
    assert stack.post(path, headers={"Authorization": "Bearer user"}).status_code == 401
    assert stack.get("/is_paused", headers={"Authorization": "Bearer user"}).status_code == 200

"""Settings, loads and versions: what routers and RL frameworks read of them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.conftest import MakeStack, Stack
from tests.server.fake_scheduler import INFO
from verl_server.messages import io_struct as io

STATE: dict[str, Any] = {
    "num_running_reqs": 16, "num_waiting_reqs": 2, "num_retracted_reqs": 1, "num_used_tokens": 100,
    "num_waiting_uncached_tokens": 40, "num_total_tokens": 140, "token_usage": 0.1, "gen_throughput": 5.5,
    "cache_hit_rate": 0.5, "memory": {"weight_bytes": 2**30, "kv_cache_bytes": 2**29}, "paused": False,
}  # fmt: skip


@pytest.fixture
def stack(reset_stack: Stack) -> Stack:
    """One stack for all tests of this module."""
    return reset_stack


@pytest.fixture
def loaded(stack: Stack) -> Stack:
    stack.scheduler.control = lambda req: io.ControlReply(id=req.id, success=True, payload=STATE)
    return stack


def test_get_load_is_a_list(loaded: Stack) -> None:
    (entry,) = loaded.get("/get_load").json()
    assert (entry["dp_rank"], entry["num_reqs"], entry["num_waiting_reqs"], entry["num_tokens"]) == (0, 18, 2, 140)


def test_get_load_of_a_busy_scheduler(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl_server.server.dialects.sglang.info_routes._STATE_TIMEOUT", 0.05)
    stack.scheduler.control = lambda req: None
    (entry,) = stack.get("/get_load").json()
    assert entry["num_reqs"] == 0


def test_loads(loaded: Stack) -> None:
    answer = loaded.get("/v1/loads").json()
    assert "T" in answer["timestamp"] and answer["num_accelerators"] == 1
    (load,) = answer["loads"]
    assert (load["num_running_reqs"], load["num_waiting_reqs"], load["num_total_tokens"]) == (16, 2, 140)
    assert load["num_active_tokens"] == 140 and load["num_waiting_uncached_tokens"] == 40
    assert load["utilization"] == 0.25, "16 of 64 requests"
    assert load["memory"] == {"weight_gb": 1.0, "kv_cache_gb": 0.5, "graph_gb": 0.0, "token_capacity": 4096}
    assert load["queues"]["retracted"] == 1 and load["disaggregation"] == {"mode": "null"}
    core = loaded.get("/v1/loads?include=core").json()["loads"][0]
    assert "queues" not in core and "memory" not in core
    assert "memory" not in loaded.get("/v1/loads?include=core,disagg,queues").json()["loads"][0]


def test_loads_as_prometheus_gauges(loaded: Stack) -> None:
    response = loaded.get("/v1/loads?format=prometheus&dp_rank=0")
    assert response.headers["content-type"].startswith("text/plain")
    lines = response.text.splitlines()
    assert 'sglang_num_running_reqs{dp_rank="0"} 16' in lines and "# TYPE sglang_token_usage gauge" in lines
    assert 'sglang_memory_weight_gb{dp_rank="0"} 1.0' in lines
    assert not [line for line in lines if line.startswith("sglang_dp_rank") or "True" in line or "False" in line]


@pytest.mark.parametrize("query", ["format=xml", "dp_rank=1", "include=all,bogus"])
def test_wrong_queries_are_named(module_stack: Stack, query: str) -> None:
    assert module_stack.get(f"/v1/loads?{query}").status_code == 400


def test_server_info_has_what_external_engines_are_checked_for(loaded: Stack) -> None:
    info = loaded.get("/server_info").json()
    assert (info["dp_size"], info["pp_size"], info["ep_size"], info["disaggregation_mode"]) == (1, 1, 1, "null")
    assert info["tokenizer_path"] == info["model_path"] == loaded.args.model_path
    assert "vllm_config" not in info


@pytest.mark.parametrize("releases", [True, False])
def test_what_is_reported_is_what_the_server_does(
    make_stack: MakeStack, monkeypatch: pytest.MonkeyPatch, releases: bool
) -> None:
    resolved = {"attention_backend": "cpp", "disable_cuda_graph": True, "disable_overlap_schedule": True}
    for name, value in (resolved | {"releases_memory": releases}).items():
        monkeypatch.setitem(INFO, name, value)
    stack = make_stack(skip_tokenizer_init=not releases, tool_call_parser="llama3")
    stack.manager.controls.model_path = "updated"
    info = stack.get("/server_info?config_format=json").json()
    assert {name: info[name] for name in resolved} == resolved
    assert info["enable_memory_saver"] is info["vllm_config"]["model_config"]["enable_sleep_mode"] is releases
    assert info["grammar_backend"] == ("llguidance" if releases else "none")
    assert info["model_path"] == "updated" and info["tokenizer_path"] == stack.args.model_path
    assert info["vllm_config"]["model_config"]["max_logprobs"] == stack.args.max_top_logprobs
    model = stack.get("/model_info").json()
    assert (model["tool_call_parser"], model["reasoning_parser"]) == ("llama3_json", None)


def test_vllm_config_has_what_trl_reads(module_stack: Stack) -> None:
    config = module_stack.get("/server_info?config_format=json").json()["vllm_config"]
    assert config["weight_transfer_config"] == {"backend": "nccl"} and config["lora_config"] is None
    assert config["model_config"]["dtype"] == "torch.float32" and config["model_config"]["max_model_len"] == 256
    assert config["model_config"]["logprobs_mode"] == "processed_logprobs"
    assert config["parallel_config"]["world_size"] == config["parallel_config"]["tensor_parallel_size"] == 1
    assert config["parallel_config"]["data_parallel_size"] == 1
    assert isinstance(module_stack.get("/server_info?config_format=text").json()["vllm_config"], str)
    assert module_stack.get("/server_info?config_format=yaml").status_code == 400


def test_weight_version_has_two_names(module_stack: Stack) -> None:
    for path in ("/weight_version", "/get_weight_version"):
        assert module_stack.get(path).json()["weight_version"] == "default"

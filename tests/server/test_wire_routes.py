"""One table of SGLang's routes: method, body, and the shape of the answer."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.conftest import Stack
from verl_server.messages import io_struct as io
from verl_server.messages.weight_requests import GetWeightsByNameReq

TEXT = "text/plain"
SUCCESS = {"success": bool, "message": str}
DISK = SUCCESS | {"num_paused_requests": int}
SAID = {"message": str, "status": str}
GENERATED = {"text": str, "output_ids": list, "meta_info": dict}
GROUP = {"master_address": "h", "master_port": 1, "rank_offset": 1, "world_size": 2}
PARAMS = {"max_new_tokens": 2, "ignore_eos": True}

ROUTES: list[tuple[str, str, Any, Any]] = [
    ("POST", "/generate", {"input_ids": [5], "sampling_params": PARAMS}, GENERATED),
    ("PUT", "/generate", {"input_ids": [5], "sampling_params": PARAMS}, GENERATED),
    ("POST", "/generate", {"input_ids": [[5], [6]], "sampling_params": PARAMS}, [GENERATED]),
    ("GET", "/", None, TEXT),
    ("GET", "/health", None, b""),
    ("GET", "/health_generate", None, b""),
    ("GET", "/ready", None, b""),
    ("GET", "/ping", None, b""),
    ("GET", "/liveness", None, {"status": str}),
    ("GET", "/model_info", None, {"model_path": str, "tokenizer_path": str, "weight_version": str}),
    ("GET", "/get_model_info", None, {"model_path": str}),
    ("GET", "/server_info", None, {"tp_size": int, "dp_size": int, "internal_states": list, "page_size": int}),
    ("GET", "/get_server_info", None, {"max_total_num_tokens": int, "enable_memory_saver": bool}),
    ("GET", "/weight_version", None, {"weight_version": str}),
    ("GET", "/get_weight_version", None, {"weight_version": str}),
    ("GET", "/v1/loads", None, {"timestamp": str, "version": str, "num_accelerators": int, "loads": list}),
    ("GET", "/v1/loads?format=prometheus", None, TEXT),
    ("GET", "/get_load", None, [{"dp_rank": int, "num_reqs": int, "num_waiting_reqs": int, "num_tokens": int}]),
    ("GET", "/metrics", None, TEXT),
    ("GET", "/flush_cache", None, TEXT),
    ("POST", "/flush_cache", {}, TEXT),
    ("POST", "/abort_request", {"rid": "x"}, b""),
    ("POST", "/pause_generation", {"mode": "in_place"}, SAID),
    ("POST", "/continue_generation", {"torch_empty_cache": True}, SAID),
    ("POST", "/update_weights_from_disk", {"model_path": "/m", "is_async": False}, DISK),
    ("POST", "/begin_weight_update", {"selector": "all"}, SUCCESS),
    ("POST", "/end_weight_update", {}, SUCCESS),
    ("POST", "/update_weights_from_tensor", {"serialized_named_tensors": ["gASV"]}, SUCCESS),
    ("POST", "/init_weights_update_group", GROUP, SUCCESS),
    ("POST", "/destroy_weights_update_group", {}, SUCCESS),
    ("POST", "/update_weights_from_distributed", {"names": ["w"], "dtypes": ["bfloat16"], "shapes": [[2]]}, SUCCESS),
    ("POST", "/update_weight_version", {"new_version": "7"}, SUCCESS | {"new_version": str}),
    ("POST", "/post_process_weights", {"post_process_quantization": True}, SUCCESS),
    ("GET", "/get_weights_by_name", {"name": "w"}, [list]),
    ("POST", "/get_weights_by_name", {"name": "w", "truncate_size": 1}, [list]),
    ("GET", "/release_memory_occupation", None, b"null"),
    ("POST", "/release_memory_occupation", {"tags": ["kv_cache"]}, b"null"),
    ("POST", "/resume_memory_occupation", {"tags": None}, b"null"),
    ("GET", "/weights_checker", None, SUCCESS),
    ("POST", "/weights_checker", {"action": "checksum"}, SUCCESS),
    ("POST", "/start_profile", {"num_steps": 1}, TEXT),
    ("POST", "/stop_profile", None, TEXT),
    ("POST", "/freeze_gc", None, TEXT),
    ("POST", "/set_internal_state", {"server_args": {}}, [bool]),
    ("POST", "/configure_logging", {}, b""),
    ("GET", "/v1/models", None, {"object": str, "data": list}),
    ("POST", "/v1/completions", {"prompt": "a", "max_tokens": 2}, {"id": str, "choices": list, "usage": dict}),
    ("POST", "/tokenize", {"prompt": "a"}, {"tokens": list, "count": int, "max_model_len": int}),
    ("POST", "/v1/tokenize", {"prompt": ["a", "b"]}, {"tokens": list, "count": list}),
    ("POST", "/detokenize", {"tokens": [65]}, {"text": str}),
]  # fmt: skip


def matches(value: Any, shape: Any) -> bool:
    """Return True if a JSON value has the types of `shape`. Further keys of an object are permitted."""
    if isinstance(shape, dict):
        return isinstance(value, dict) and all(matches(value.get(key), part) for key, part in shape.items())
    if isinstance(shape, list):
        return isinstance(value, list) and bool(value) and all(matches(one, shape[0]) for one in value)
    return isinstance(value, shape)


def reply(req: Any) -> io.ControlReply:
    payload: Any = [[1.0]] if isinstance(req, GetWeightsByNameReq) else {"num_running_reqs": 1}
    return io.ControlReply(id=req.id, success=True, message="Success", payload=payload)


@pytest.mark.parametrize(("method", "path", "body", "shape"), ROUTES, ids=[f"{m} {p}" for m, p, _, _ in ROUTES])
def test_route(module_stack: Stack, method: str, path: str, body: Any, shape: Any) -> None:
    module_stack.scheduler.control = reply
    response = module_stack.request(method, path, json=body) if body is not None else module_stack.request(method, path)
    assert response.status_code == 200, response.text
    if isinstance(shape, bytes):
        assert response.content == shape
    elif shape == TEXT:
        assert response.headers["content-type"].startswith(TEXT) and response.text
    else:
        assert matches(response.json(), shape), response.json()

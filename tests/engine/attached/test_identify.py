"""`attach` recognizes the server at a URL without configuration."""

from __future__ import annotations

import pytest

from tests.engine.attached.conftest import Start
from verl_server import HttpServerEngineAdapter
from verl_server.errors import BadRequestError, ServerUnavailableError
from verl_server.messages.io_struct import INSTANCE_HEADER

MODELS = (200, {"data": [{"id": "m", "root": "/models/m", "max_model_len": 64}]})


def test_a_server_of_ours_is_known_by_its_header(start: Start) -> None:
    server = start({"/server_info": (200, {"model_path": "m", "internal_states": [{}]})}, {INSTANCE_HEADER: "run"})
    with HttpServerEngineAdapter.attach(server.url) as adapter:
        assert adapter.instance_id == "run" and adapter._attached is None


def test_sglang(start: Start) -> None:
    server = start({"/server_info": (200, {"version": "0.5.16", "tp_size": 2, "internal_states": [{}]})})
    with HttpServerEngineAdapter.attach(server.url) as adapter:
        assert adapter._attached is not None and adapter._attached.name == "SGLang 0.5.16"


@pytest.mark.parametrize("info", [(404, {}), (200, {"vllm_config": {"model_config": {}}})])
def test_vllm_with_and_without_its_development_routes(start: Start, info: tuple[int, object]) -> None:
    server = start({"/server_info": info, "/version": (200, {"version": "0.26.0"}), "/v1/models": MODELS})
    with HttpServerEngineAdapter.attach(server.url) as adapter:
        assert adapter.get_server_info()["scheduler_info"]["context_length"] == 64
        assert adapter.get_model_info()["model_path"] == "/models/m"


def test_another_server_is_refused(start: Start) -> None:
    with pytest.raises(BadRequestError, match="neither verl-server nor SGLang nor vLLM"):
        HttpServerEngineAdapter.attach(start({}).url)


def test_a_server_that_fails_is_not_taken_for_another(start: Start) -> None:
    with pytest.raises(ServerUnavailableError):
        HttpServerEngineAdapter.attach(start({"/server_info": (503, {"error": "loading"})}).url)


def test_a_wrong_key_is_said(start: Start) -> None:
    with pytest.raises(BadRequestError, match="api_key"):
        HttpServerEngineAdapter.attach(start({"/server_info": (401, {"error": "Unauthorized"})}).url)

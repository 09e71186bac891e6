"""Options and results are declared once, and the declarations match the code. (`typed_calls.py` checks the types.)"""

from __future__ import annotations

import inspect
from typing import Any, get_args, get_type_hints

import msgspec
import pytest

from tests.fake_engine import FakeEngine
from verl_server import BadRequestError, EngineBase, HttpServerEngineAdapter, VerlEngine
from verl_server.engine import verl_engine
from verl_server.engine.options import GenerateOptions, PushOptions, TensorUpdateOptions, UpdateOptions
from verl_server.messages.io_struct import AbortReq, AcceptRestartReq, ControlReq
from verl_server.messages.weight_requests import (
    UpdateWeightsFromDiskReq,
    UpdateWeightsFromDistributedReq,
    UpdateWeightsFromTensorReq,
)
from verl_server.server.dialects.sglang.admin_routes import ControlApi
from verl_server.server.dialects.sglang.ops_routes import OpsApi
from verl_server.server.generate_fields import UNSUPPORTED_FIELDS
from verl_server.server.generate_request import GenerateReqInput

METHODS = [
    "generate",
    "update_weights_from_tensor",
    "register_weights",
    "push_weights",
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "init_weights_update_group",
    "begin_weight_update",
    "end_weight_update",
    "close_session",
    "pause_generation",
    "release_memory_occupation",
]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("engine", [EngineBase, HttpServerEngineAdapter, VerlEngine])
def test_an_editor_sees_every_argument(engine: type, method: str) -> None:
    signature = inspect.signature(getattr(engine, method))
    # `engine.weights` imports some names for type checkers only; `engine.verl_engine` imports them at run time.
    hints = get_type_hints(getattr(engine, method), localns=vars(verl_engine), include_extras=True)
    for name, parameter in signature.parameters.items():
        assert parameter.kind is not parameter.VAR_POSITIONAL, f"*{name} hides the arguments"
        if parameter.kind is parameter.VAR_KEYWORD:
            (options,) = get_args(hints[name])
            assert options.__annotations__, f"**{name} hides the arguments"
    assert hints["return"] is not Any


@pytest.mark.parametrize("method", [name for name in METHODS if name != "generate"])
def test_both_faces_take_the_same_arguments(method: str) -> None:
    here, there = (inspect.signature(getattr(engine, method)).parameters for engine in (EngineBase, VerlEngine))
    assert {name: p.default for name, p in here.items()} == {name: p.default for name, p in there.items()}


def test_generate_and_async_generate_take_the_same_arguments() -> None:
    assert inspect.signature(EngineBase.generate).parameters == inspect.signature(EngineBase.async_generate).parameters


@pytest.mark.parametrize(
    ("options", "request_kind"),
    [
        (PushOptions, UpdateWeightsFromTensorReq),
        (TensorUpdateOptions, UpdateWeightsFromDistributedReq),
        (UpdateOptions, UpdateWeightsFromDiskReq),
    ],
)
def test_update_options_are_fields_of_the_request(options: type, request_kind: type[msgspec.Struct]) -> None:
    assert set(options.__annotations__) <= set(request_kind.__struct_fields__)


def test_generate_options_are_fields_of_the_request() -> None:
    assert set(GenerateOptions.__annotations__) <= {*GenerateReqInput.__struct_fields__, *UNSUPPORTED_FIELDS}


def test_unknown_options_are_refused_by_name() -> None:
    engine = FakeEngine()
    with pytest.raises(BadRequestError, match=r"\['return_logprobs'\]; generate takes rid, return_logprob,"):
        engine.generate("a", return_logprobs=True)  # type: ignore[call-overload]
    with pytest.raises(BadRequestError, match=r"\['vesion'\]; an update takes mode,"):
        engine.update_weights_from_tensor([], vesion="3")  # type: ignore[call-arg]
    with pytest.raises(BadRequestError, match=r"\['partial'\]; update_weights_from_disk takes mode,"):
        engine.update_weights_from_disk("folder", partial=False)  # type: ignore[call-arg]
    assert not engine.requests


def test_every_control_request_has_one_route_and_the_server_mounts_it() -> None:
    routes = [kind.route for kind in (*get_args(ControlReq), AbortReq, AcceptRestartReq)]
    assert len(set(routes)) == len(routes)
    apis = (ControlApi, OpsApi)
    mounted = {operation.path for api in apis for operation in api.operations(object.__new__(api))}
    assert mounted >= {*routes} - {"/server_info"}

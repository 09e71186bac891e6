"""Routes that change the server: weights, memory, cache, abort, pause. `server.auth` checks who may call them.

Each body is a control struct of `io_struct`. Bodies are decoded leniently: "29500" is an integer, unknown keys are
ignored and counted, and an empty body is {}. The struct is sent to the scheduler, and the response has SGLang's shape.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from verl_server.errors import BadRequestError, VerlServerError, WeightUpdateError, error_for_status
from verl_server.messages.io_struct import (
    AbortReq,
    AcceptRestartReq,
    ContinueGenerationReq,
    ControlReply,
    ControlReq,
    FlushCacheReq,
    PauseGenerationReq,
)
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
    UpdateWeightsFromDiskReq,
    UpdateWeightsFromDistributedReq,
    UpdateWeightsFromTensorReq,
    UpdateWeightVersionReq,
    WeightsCheckerReq,
)
from verl_server.server.auth import AccessRules
from verl_server.server.http.operation import BOTH, JSON, POST, TEXT, Access, Handler, Operation
from verl_server.server.http.responses import (
    error_headers,
    json_response,
    read_json,
    unless_disconnected,
)
from verl_server.server.http.unknown_fields import judge_unknown
from verl_server.server.tokenizer_manager import TokenizerManager
from verl_server.web.error_bodies import sglang_error_body
from verl_server.web.json_body import given_fields, names_of_unknown
from verl_server.web.json_convert import read_struct

S = TypeVar("S", bound=msgspec.Struct)

_FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. "
    "(When there are running or waiting requests, the operation will not be performed.)\n"
)
_BASE_FIELDS = {
    "rid": "a control request needs no name",
    "http_worker_ipc": "it names a process inside SGLang",
    "selector": "there is one model, and no draft model",
    "torch_empty_cache": "the weights are written in place, so there is no cache to empty",
    "is_async": "every update prepares while requests run",
    "recapture_cuda_graph": "CUDA graphs read the weights in place and stay valid",
    "token_step": "the label of a version names it",
    "disable_draft_model": "there is no draft model",
    "abort_message": "the answer of an aborted request says that it was aborted",
    "finished_reason": "the answer of an aborted request says that it was aborted",
    "abort_all_request": "AReaL writes abort_all_requests so, and pauses generation by itself before each update",
}
"""Keys of SGLang's control bodies that are accepted and have no effect, each with the reason."""

_PLAIN_REQS: tuple[type[ControlReq], ...] = (
    UpdateWeightsFromTensorReq,
    UpdateWeightsFromDistributedReq,
    RegisterWeightsReq,
    UnregisterWeightsReq,
    BeginWeightUpdateReq,
    EndWeightUpdateReq,
    InitWeightsUpdateGroupReq,
    DestroyWeightsUpdateGroupReq,
)
"""Requests whose route only sends the struct to the scheduler and returns {"success", "message"}."""
_PAYLOAD_KEYS = (
    "weight_version",
    "num_tensors",
    "not_covered",
    "lease_seconds",
    "registration",
    "seconds",
    "prepare_seconds",
    "pause_seconds",
)
"""Further keys of such a response, if the scheduler's reply has them."""


class ControlApi:
    def __init__(self, manager: TokenizerManager, rules: AccessRules) -> None:
        self._manager = manager
        self._rules = rules

    def operations(self) -> list[Operation]:
        timeout = {"timeout": "Longest wait for an idle scheduler, in seconds."}
        says_success: dict[str, Any] = {"answer_error": unsuccessful}
        return [
            Operation(
                FlushCacheReq.route, self.flush_cache, BOTH, access="control", query=timeout, media_types=(TEXT,)
            ),
            _operation(AbortReq, self.abort_request, access="key", media_types=()),
            _operation(PauseGenerationReq, self._ok(PauseGenerationReq, "Generation paused successfully.")),
            _operation(ContinueGenerationReq, self._ok(ContinueGenerationReq, "Generation continued successfully.")),
            *(_operation(kind, self._plain(kind), **says_success) for kind in _PLAIN_REQS),
            _operation(UpdateWeightsFromDiskReq, self.update_weights_from_disk, **says_success),
            _operation(UpdateWeightVersionReq, self.update_weight_version, **says_success),
            _operation(AcceptRestartReq, self.accept_restart, **says_success),
            Operation("/post_process_weights", self.post_process_weights, POST, access="control", **says_success),
            _operation(GetWeightsByNameReq, self.get_weights_by_name, BOTH),
            _operation(WeightsCheckerReq, self.weights_checker, BOTH, **says_success),
            _operation(ReleaseMemoryOccupationReq, self._null(ReleaseMemoryOccupationReq), BOTH),
            _operation(ResumeMemoryOccupationReq, self._null(ResumeMemoryOccupationReq), BOTH),
        ]

    # -- cache, abort, pause --------------------------------------------------------------------------------

    async def flush_cache(self, request: Request) -> Response:
        """Return text/plain, as SGLang does. `?timeout=` is the longest wait in seconds for an idle scheduler."""
        given = request.query_params.get("timeout", "0")
        try:
            timeout = float(given)
        except ValueError:
            timeout = -1.0
        if not 0 <= timeout < float("inf"):
            raise BadRequestError(f"timeout must be a number of seconds >= 0, not {given!r}.")
        reply = await self._control(request, FlushCacheReq(timeout=timeout))
        if not reply.success:
            raise error_for_status(reply.status_code, reply.message or "Flush cache failed.")
        return PlainTextResponse(_FLUSHED)

    async def abort_request(self, request: Request) -> Response:
        """Return 200 with an empty body, even if no request has this `rid`. With `abort_all`, this is a control route.
        Without `abort_all`, every caller that may generate may end a request whose `rid` the caller knows."""
        req = await self._parse(request, AbortReq)
        if req.abort_all and (refusal := self._rules.control_refusal(request.scope)) is not None:
            raise refusal
        self._manager.check_serving()
        self._manager.abort_request(req.rid, req.abort_all)
        return Response()

    def _ok(self, kind: type[ControlReq], message: str) -> Handler:
        """Return the handler of a request whose answer reports success only."""

        async def change_generation(request: Request) -> Response:
            """Return {"message", "status"}."""
            reply = await self._control(request, await self._parse(request, kind))
            _check(reply)
            return json_response({"message": message, "status": "ok"})

        return change_generation

    # -- weights --------------------------------------------------------------------------------------------

    def _plain(self, kind: type[ControlReq]) -> Handler:
        """Return the handler of one of `_PLAIN_REQS`."""

        async def change_weights(request: Request) -> Response:
            """Return {"success", "message"} and, if the scheduler returned them, "weight_version", "num_tensors",
            "not_covered" ({"count", "names"} of the parameters that the update did not write, at most 8 names),
            "lease_seconds", "registration" and "seconds"."""
            reply = await self._control(request, await self._parse(request, kind, carries_tensors=True))
            payload = reply.payload if isinstance(reply.payload, dict) else {}
            return _success(reply, **{key: payload[key] for key in _PAYLOAD_KEYS if key in payload})

        return change_weights

    async def post_process_weights(self, request: Request) -> Response:
        """Do nothing, because weights are not quantized here. Older clients call this route after their updates."""
        await read_json(request, self._manager.server_args.max_request_bytes)
        self._manager.check_serving()
        return json_response({"success": True, "message": "Success"})

    async def accept_restart(self, request: Request) -> Response:
        """Return {"success", "message", "weight_version"}."""
        await self._parse(request, AcceptRestartReq)
        self._manager.check_serving()
        self._manager.controls.weights_confirmed = True
        version = self._manager.controls.weight_version
        return json_response({"success": True, "message": "Success", "weight_version": version})

    async def update_weights_from_disk(self, request: Request) -> Response:
        """Return {"success", "message", "num_paused_requests"} and, after a success, "weight_version"."""
        reply = await self._control(request, await self._parse(request, UpdateWeightsFromDiskReq))
        return _success(reply, num_paused_requests=0, **_known_version(reply))

    async def update_weight_version(self, request: Request) -> Response:
        """Return {"success", "message", "new_version"}."""
        req = await self._parse(request, UpdateWeightVersionReq)
        return _success(await self._control(request, req), new_version=req.new_version)

    async def get_weights_by_name(self, request: Request) -> Response:
        """Return the first `truncate_size` rows of the parameter as nested lists; 400 if no parameter has the name."""
        reply = await self._control(request, await self._parse(request, GetWeightsByNameReq))
        _check(reply)
        return json_response(reply.payload)

    async def weights_checker(self, request: Request) -> Response:
        """Return {"success", "message"} and the results of the action."""
        reply = await self._control(request, await self._parse(request, WeightsCheckerReq))
        extra = reply.payload if isinstance(reply.payload, dict) else {}
        return _success(reply, **extra)

    # -- memory ---------------------------------------------------------------------------------------------

    def _null(self, kind: type[ControlReq]) -> Handler:
        """Return the handler of a request whose answer is null."""

        async def change_memory(request: Request) -> Response:
            """Return null."""
            reply = await self._control(request, await self._parse(request, kind))
            _check(reply)
            return json_response(None)

        return change_memory

    # -- shared ---------------------------------------------------------------------------------------------

    async def _control(self, request: Request, req: ControlReq) -> ControlReply:
        """Send `req` to the scheduler and return the reply.

        If the client disconnects, a request that has not begun is withdrawn: the client may now write the memory that a
        push would read.
        """
        return await unless_disconnected(request, self._manager.control(req))

    async def _parse(self, request: Request, kind: type[S], *, carries_tensors: bool = False) -> S:
        body = await read_json(request, self._manager.server_args.max_request_bytes, carries_tensors=carries_tensors)
        if body is None:
            body = {}
        known = set(kind.__struct_fields__) - {"id"}
        given = {name: value for name, value in given_fields(body).items() if name in known}
        read = read_struct(given, kind, f"{request.scope['path']}: ")
        judge_unknown(request, names_of_unknown(body, read))
        return read


def _operation(
    kind: type[msgspec.Struct],
    handler: Handler,
    methods: tuple[str, ...] = POST,
    access: Access = "control",
    media_types: tuple[str, ...] = (JSON,),
    **declared: Any,
) -> Operation:
    """Return the operation of a request of `io_struct`, whose route the request names."""
    others = {name: reason for name, reason in _BASE_FIELDS.items() if name not in kind.__struct_fields__}
    path: str = kind.route  # type: ignore[attr-defined]
    declared |= {"access": access, "without_effect": others, "media_types": media_types}
    return Operation(path, handler, methods, body=kind, **declared)


def _success(reply: ControlReply, **extra: Any) -> Response:
    """Return the response of a weight route: {"success", "message", ...}."""
    if not reply.success:
        return unsuccessful(error_for_status(reply.status_code, reply.message, WeightUpdateError), **extra)
    return json_response({"success": True, "message": reply.message} | extra)


def unsuccessful(error: VerlServerError, **extra: Any) -> Response:
    """Return the answer to an error of a route whose answer has `success`."""
    content = sglang_error_body(error) | extra | {"success": False}
    return json_response(content, error.status_code, error_headers(error))


def _known_version(reply: ControlReply) -> dict[str, Any]:
    payload = reply.payload if isinstance(reply.payload, dict) else {}
    return {"weight_version": payload["weight_version"]} if "weight_version" in payload else {}


def _check(reply: ControlReply) -> None:
    """Raise the error of a reply that is a refusal."""
    if not reply.success:
        raise error_for_status(reply.status_code, reply.message)

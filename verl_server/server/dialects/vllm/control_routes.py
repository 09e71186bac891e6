"""vLLM's routes that change the server: pause, weight transfer, sleep, prefix cache, and `/collective_rpc`.

The routes of prime-rl's servers are here too, because they share paths with vLLM's. Each call becomes control requests
of `io_struct`. Bodies are decoded leniently.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Literal, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from verl_server import lora
from verl_server.errors import BadRequestError, WeightUpdateError, error_for_status
from verl_server.messages.io_struct import (
    ContinueGenerationReq,
    ControlReply,
    ControlReq,
    FlushCacheReq,
    GetInternalStateReq,
    PauseGenerationReq,
    PauseMode,
)
from verl_server.messages.weight_requests import UpdateWeightsFromDiskReq
from verl_server.server.dialects.vllm.errors import vllm_error
from verl_server.server.dialects.vllm.sleep import Sleep
from verl_server.server.dialects.vllm.weight_transfer import (
    TRANSFER_FIELDS,
    CarryOut,
    FinishWeightUpdateReq,
    InitBroadcasterReq,
    InitWeightTransferReq,
    VllmUpdateWeightsReq,
    WeightTransfer,
    path_text,
)
from verl_server.server.http.operation import POST, Handler, Operation
from verl_server.server.http.responses import json_response, read_json, unless_disconnected
from verl_server.server.http.unknown_fields import judge_unknown
from verl_server.server.tokenizer_manager import TokenizerManager
from verl_server.web.json_body import MOST_NAMES, given_fields, names_of_unknown
from verl_server.web.json_convert import read_struct

S = TypeVar("S", bound=msgspec.Struct)

PAUSE_MODES: dict[str, PauseMode] = {"abort": "abort", "wait": "wait", "keep": "in_place"}
"""vLLM's name of a pause mode -> this project's name."""
_BROADCASTER_REFUSED = {
    "quantize_in_weight_transfer": "tensors in the layout of vLLM's kernels fit no other engine. Set "
    "weight_broadcast.quantize_in_weight_transfer=false",
    "session_id": "transfers through NIXL are not implemented. Set weight_broadcast.type='nccl' or 'filesystem'",
}
_QUERY_MODE = "Treatment of running requests: abort, wait (they finish) or keep (they continue later)."


class PauseReq(msgspec.Struct, kw_only=True):
    """Body of `POST /pause`. A query parameter of the same name takes precedence."""

    mode: Literal["abort", "wait", "keep"] | None = None
    """Treatment of running requests. "abort", the default: they end with partial output. "wait": they finish, and the
    answer is sent then. "keep": they wait and keep their KV cache."""


class CollectiveRpcReq(msgspec.Struct, kw_only=True):
    """Body of `POST /collective_rpc`."""

    method: str
    """Name of the method."""
    args: list[Any] = []
    """Positional arguments of the method."""
    kwargs: dict[str, Any] = {}
    """Keyword arguments of the method."""
    timeout: float | None = None
    """No effect, because each method has the time limit of its control request."""


_CARRY_TENSORS = (VllmUpdateWeightsReq, CollectiveRpcReq)
"""Bodies that may name each tensor of a model."""


class VllmControlApi:
    """Handlers of vLLM's control routes, and the calls that `/collective_rpc` offers.

    A handler takes the HTTP request. A call takes the function `carry_out`, and its own arguments by name. `_serve`
    makes a route of a call. `/collective_rpc` calls the functions in `methods`.
    """

    def __init__(self, manager: TokenizerManager) -> None:
        self._manager = manager
        self._sleep = Sleep(manager)
        self._transfer = transfer = WeightTransfer()
        self.methods: dict[str, Callable[..., Awaitable[Any]]] = {
            "check_health": self.check_health,
            "report_device_id": self.device_uuid,
            "skyrl_get_gpu_uuid": self.device_uuid,
            "reload_weights": self.reload_weights,
            "update_weights_from_path": transfer.update_from_path,
            "init_weight_update_group": transfer.init_group,
            "update_weight": transfer.update_one,
            "init_weight_transfer_engine": transfer.init,
            "start_weight_update": transfer.start,
            "skyrl_start_weight_update": transfer.start,
            "update_weights": transfer.update_tensors,
            "finish_weight_update": transfer.finish,
            "skyrl_finish_weight_update": transfer.finish,
            "wake_up": self._sleep.wake_up,
        }
        """Name of a method that RL clients call on vLLM's workers -> the call. Other names are refused."""

    def operations(self) -> list[Operation]:
        transfer = self._transfer
        start = {"is_checkpoint_format": "tensors have the names and shapes of the checkpoint"}
        skip = {"skip_prefix_cache_reset": "a KV page of an older version is never used for a new request"}
        return [
            _control(
                "/pause",
                self.pause,
                PauseReq,
                query={
                    "mode": _QUERY_MODE,
                    "wait_for_inflight_requests": "An older name of mode=wait.",
                    "clear_cache": "No effect: a KV page of an older version is never used for a new request.",
                },
            ),
            self._serve("/resume", self.resume),
            Operation("/is_paused", self.is_paused, answer_error=vllm_error),
            self._serve("/init_weight_transfer_engine", transfer.init, InitWeightTransferReq),
            self._serve("/shutdown_weight_transfer_engine", transfer.shutdown),
            self._serve("/start_weight_update", transfer.start, without_effect=start),
            self._serve("/start_draft_weight_update", transfer.start_draft),
            self._serve("/update_weights", transfer.update, VllmUpdateWeightsReq, without_effect=skip),
            self._serve("/finish_weight_update", transfer.finish, FinishWeightUpdateReq),
            self._serve("/reload_weights", self.reload_weights),
            self._serve(
                "/init_broadcaster",
                transfer.init_broadcaster,
                InitBroadcasterReq,
                refused=_BROADCASTER_REFUSED,
                without_effect={"timeout": "each wait has the bound `control_timeout` of the server"},
            ),
            Operation("/weight_info", self.weight_info, answer_error=vllm_error),
            Operation(
                "/get_world_size",
                self.get_world_size,
                answer_error=vllm_error,
                query={"include_dp": "No effect: there is one data-parallel rank."},
            ),
            _control(
                "/reset_prefix_cache",
                self.reset_prefix_cache,
                query={
                    "reset_running_requests": "Retract running requests first; they compute their KV cache again.",
                    "reset_external": "No effect: there is no external cache.",
                },
            ),
            _control("/reset_mm_cache", self.reset_absent_cache, media_types=()),
            _control("/reset_encoder_cache", self.reset_absent_cache, media_types=()),
            _control(
                "/sleep",
                self.sleep,
                query={
                    "level": "0: pause only. 1: keep the weights on the host. 2: drop the weights.",
                    "tags": "Release only weights or kv_cache. May be repeated.",
                    "mode": _QUERY_MODE,
                },
            ),
            _control(
                "/wake_up",
                self.wake_up,
                query={"tags": "weights, kv_cache or scheduling, repeated. Default: all."},
            ),
            Operation("/is_sleeping", self.is_sleeping, answer_error=vllm_error),
            _control("/collective_rpc", self.collective_rpc, CollectiveRpcReq),
            _control("/v1/load_lora_adapter", self.refuse_adapter),
            _control("/v1/unload_lora_adapter", self.refuse_adapter),
        ]

    async def pause(self, request: Request) -> Response:
        """Return {"status": "paused"}. New requests wait until `/resume`."""
        body = await self._parse(request, PauseReq)
        default = "wait" if query_flag(request, "wait_for_inflight_requests", False) else body.mode or "abort"
        await self._carry_out(request)(PauseGenerationReq(mode=pause_mode(request.query_params.get("mode", default))))
        return json_response({"status": "paused"})

    async def resume(self, carry_out: CarryOut) -> dict[str, Any]:
        """Return {"status": "resumed"}."""
        await carry_out(ContinueGenerationReq())
        return {"status": "resumed"}

    async def is_paused(self, request: Request) -> Response:
        """Return {"is_paused"}."""
        self._manager.check_serving()
        return json_response({"is_paused": self._manager.controls.is_paused})

    async def reload_weights(self, carry_out: CarryOut, weights_path: Any = msgspec.UNSET) -> dict[str, Any]:
        """Load the weights of the server's start again, and return {"status": "ok"}."""
        path = self._manager.server_args.model_path if weights_path is msgspec.UNSET else path_text(weights_path)
        await carry_out(UpdateWeightsFromDiskReq(model_path=path, mode="in_place"))
        return {"status": "ok"}

    async def weight_info(self, request: Request) -> Response:
        """Return {"weight_version"}."""
        return json_response({"weight_version": self._manager.controls.weight_version})

    async def get_world_size(self, request: Request) -> Response:
        """Return {"world_size"}: the number of tensor-parallel ranks."""
        query_flag(request, "include_dp", True)
        return json_response({"world_size": self._manager.server_args.tp_size})

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Empty the prefix cache. Return {"success"}, which is false if running requests hold the cache."""
        retract = query_flag(request, "reset_running_requests", False)
        query_flag(request, "reset_external", False)
        was_paused = self._manager.controls.is_paused
        try:
            if retract:
                await self._carry_out(request)(PauseGenerationReq(mode="retract"))
            reply = await unless_disconnected(request, self._manager.control(FlushCacheReq()))
        finally:
            if retract and not was_paused:
                await self._manager.control(ContinueGenerationReq())
        return json_response({"success": reply.success})

    async def reset_absent_cache(self, request: Request) -> Response:
        """Do nothing and return 200, because there is no cache of images or of an encoder."""
        self._manager.check_serving()
        return Response()

    async def sleep(self, request: Request) -> Response:
        """Return {"status": "sleeping", "level"}. The memory is released when the answer is sent."""
        given = request.query_params.get("level", "1")
        if given not in ("0", "1", "2"):
            raise BadRequestError(f"level must be 0, 1 or 2, not {given!r:.100}.")
        mode = pause_mode(request.query_params.get("mode", "abort"))
        tags = request.query_params.getlist("tags") or None
        await self._sleep.sleep(self._carry_out(request), int(given), tags, mode)
        return json_response({"status": "sleeping", "level": int(given)})

    async def wake_up(self, request: Request) -> Response:
        """Return {"status", "tags"}. The status is "awake" if nothing remains released, else "sleeping"."""
        tags = request.query_params.getlist("tags") or None
        return json_response(await self._sleep.wake_up(self._carry_out(request), tags))

    async def is_sleeping(self, request: Request) -> Response:
        """Return {"is_sleeping"}: true if any memory is released, or if `/sleep?level=0` paused generation."""
        return json_response({"is_sleeping": await self._sleep.is_sleeping(self._carry_out(request))})

    # -- methods of workers ---------------------------------------------------------------------------------

    async def collective_rpc(self, request: Request) -> Response:
        """Return {"results"} with one entry for each rank; 400 for a method that is not in the table."""
        body = await self._parse(request, CollectiveRpcReq)
        if lora.first_named([body.method]):
            raise BadRequestError(lora.refusal(f"The method {body.method!r:.100}"))
        if body.method not in self.methods:
            raise BadRequestError(
                f"The method {body.method!r:.100} cannot be called. This server has {', '.join(sorted(self.methods))}."
            )
        method = self.methods[body.method]
        result = await method(self._carry_out(request), **_arguments(method, body.args, body.kwargs))
        if isinstance(result, dict):  # the answer of a route, where the method of vLLM's workers returns nothing
            result = None
        return json_response({"results": [result] * self._manager.server_args.tp_size})

    async def refuse_adapter(self, request: Request) -> Response:
        """Return 400 with what to do instead: merge the adapter and push the weights."""
        raise BadRequestError(lora.refusal(request.url.path))

    async def check_health(self, carry_out: CarryOut) -> None:
        """Wait for an answer of the scheduler."""
        await carry_out(GetInternalStateReq())

    async def device_uuid(self, carry_out: CarryOut) -> str:
        """Return the UUID of the GPU."""
        if self._manager.server_args.tp_size > 1:
            raise BadRequestError("The UUIDs of the GPUs of several ranks are not known here; use /server_info.")
        uuid = self._manager.scheduler_info.get("device_uuid")
        return f"GPU-{uuid}" if uuid else "CPU"

    # -- shared ---------------------------------------------------------------------------------------------

    def _serve(
        self,
        path: str,
        call: Callable[..., Awaitable[dict[str, Any]]],
        body: type[msgspec.Struct] | None = None,
        refused: Mapping[str, str] = {},
        **others: Any,
    ) -> Operation:
        """Return the operation of a call whose arguments are the fields of `body`.

        Its answer is the result of the call.
        """

        async def handler(request: Request) -> Response:
            given = {} if body is None else msgspec.structs.asdict(await self._parse(request, body, refused))
            return json_response(await call(self._carry_out(request), **given))

        handler.__doc__ = call.__doc__
        return _control(path, handler, body, refused=refused, **others)

    def _carry_out(self, request: Request) -> CarryOut:
        """Return the function that sends a control request. If the client disconnects, the request is withdrawn."""

        async def carry_out(req: ControlReq) -> ControlReply:
            reply = await unless_disconnected(request, self._manager.control(req))
            if not reply.success:
                raise error_for_status(reply.status_code, reply.message, WeightUpdateError)
            return reply

        return carry_out

    async def _parse(self, request: Request, kind: type[S], refused: Mapping[str, str] = {}) -> S:
        limit = self._manager.server_args.max_request_bytes
        body = await read_json(request, limit, carries_tensors=kind in _CARRY_TENSORS)
        given = given_fields(body)
        for name, remedy in refused.items():
            if given.get(name) not in (None, False):
                raise BadRequestError(f"Field `{name}` is not supported: {remedy}.")
        known = {name: given[name] for name in kind.__struct_fields__ if name in given}
        read = read_struct(known, kind, f"{request.url.path}: ")
        inside = [(name, fields) for name, fields in TRANSFER_FIELDS.items() if isinstance(given.get(name), dict)]
        deeper = [f"{name}.{key}" for name, fields in inside for key in given[name] if key not in fields]
        judge_unknown(request, [*names_of_unknown(given, read), *deeper[:MOST_NAMES]])
        return read


def pause_mode(given: str) -> PauseMode:
    """Return this project's name of a pause mode of vLLM. Raise BadRequestError for an unknown name."""
    if given not in PAUSE_MODES:
        raise BadRequestError(f"mode must be one of {', '.join(PAUSE_MODES)}, not {given!r:.100}.")
    return PAUSE_MODES[given]


def query_flag(request: Request, name: str, default: bool) -> bool:
    """Return a boolean of the query string. Raise BadRequestError for another value."""
    given = request.query_params.get(name)
    if given is None:
        return default
    values = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if given.lower() not in values:
        raise BadRequestError(f"{name} must be true or false, not {given!r:.100}.")
    return values[given.lower()]


def _arguments(method: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the given arguments of a method by name. Raise BadRequestError for too many, or for another name."""
    names = list(inspect.signature(method).parameters)[1:]  # the first one is `carry_out`
    if len(args) > len(names) or (unknown := set(kwargs) - set(names[len(args) :])):
        wrong = f"{len(args)} arguments" if len(args) > len(names) else f"the arguments {sorted(unknown)}"
        raise BadRequestError(f"The method takes {', '.join(names) or 'no arguments'}, not {wrong}.")
    return dict(zip(names, args, strict=False)) | kwargs


def _control(path: str, handler: Handler, body: type[msgspec.Struct] | None = None, **others: Any) -> Operation:
    fields = () if body is None else body.__struct_fields__
    inside = {name: known for name, known in TRANSFER_FIELDS.items() if name in fields}
    return Operation(path, handler, POST, access="control", body=body, inside=inside, answer_error=vllm_error, **others)

"""vLLM's routes that change the server: pause, weight transfer, sleep, prefix cache, and `/collective_rpc`.

The routes of prime-rl's servers are here too, because they share paths with vLLM's. Each call becomes control requests
of `io_struct`. Bodies are decoded leniently.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from verl_server.errors import BadRequestError, WeightUpdateError, error_for_status
from verl_server.messages.io_struct import (
    ContinueGenerationReq,
    ControlReply,
    ControlReq,
    FlushCacheReq,
    PauseGenerationReq,
    PauseMode,
)
from verl_server.messages.weight_requests import UpdateWeightsFromDiskReq, VersionLabel
from verl_server.server.dialects.vllm.errors import answers_errors
from verl_server.server.dialects.vllm.sleep import Sleep
from verl_server.server.dialects.vllm.weight_transfer import (
    TRANSFER_FIELDS,
    CarryOut,
    InitBroadcasterReq,
    WeightTransfer,
)
from verl_server.server.dialects.vllm.worker_methods import METHODS, CollectiveRpcReq, Methods
from verl_server.server.http.operation import POST, Handler, Operation
from verl_server.server.http.responses import json_response, read_json, unless_disconnected
from verl_server.server.http.unknown_fields import judge_unknown
from verl_server.server.tokenizer_manager import TokenizerManager
from verl_server.server_args import ServerArgs
from verl_server.web.json_body import MOST_NAMES, names_of_unknown
from verl_server.web.json_convert import convert_json

S = TypeVar("S", bound=msgspec.Struct)

PAUSE_MODES: dict[str, PauseMode] = {"abort": "abort", "wait": "wait", "keep": "in_place"}
"""vLLM's name of a pause mode -> ours."""
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


class InitWeightTransferReq(msgspec.Struct, kw_only=True):
    """Body of `POST /init_weight_transfer_engine`."""

    init_info: dict[str, Any]
    """NCCL: `master_address`, `master_port`, `rank_offset`, `world_size`, `packed`, `packed_buffer_size_bytes`. IPC: an
    empty object."""


class VllmUpdateWeightsReq(msgspec.Struct, kw_only=True):
    """Body of `POST /update_weights`: vLLM's `update_info`, or prime-rl's `weight_dir`."""

    update_info: dict[str, Any] | None = None
    """`names`, `dtype_names` and `shapes` of the tensors that the trainer broadcasts; or, with `ipc_handles_pickled`
    (and `tensor_sizes` for one buffer), of tensors in its memory."""
    weight_dir: str | None = None
    """Folder of safetensors files on the server's host. Not read after `/init_broadcaster`."""


class FinishWeightUpdateReq(msgspec.Struct, kw_only=True):
    """Body of `POST /finish_weight_update`."""

    weight_version: VersionLabel | None = None
    """Label of the new version; default: the next integer."""


_CARRY_TENSORS = (VllmUpdateWeightsReq, CollectiveRpcReq)
"""Bodies that may name each tensor of a model."""


class VllmControlApi:
    def __init__(self, manager: TokenizerManager, server_args: ServerArgs) -> None:
        self._manager, self._args = manager, server_args
        self._transfer = WeightTransfer()
        self._sleep = Sleep(manager)

    def operations(self) -> list[Operation]:
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
            _control("/resume", self.resume),
            Operation("/is_paused", answers_errors(self.is_paused)),
            _control("/init_weight_transfer_engine", self.init_weight_transfer_engine, InitWeightTransferReq),
            _control("/shutdown_weight_transfer_engine", self.shutdown_weight_transfer_engine),
            _control("/start_weight_update", self.start_weight_update, without_effect=start),
            _control("/start_draft_weight_update", self.start_draft_weight_update),
            _control("/update_weights", self.update_weights, VllmUpdateWeightsReq, without_effect=skip),
            _control("/finish_weight_update", self.finish_weight_update, FinishWeightUpdateReq),
            _control("/reload_weights", self.reload_weights),
            _control(
                "/init_broadcaster",
                self.init_broadcaster,
                InitBroadcasterReq,
                refused=_BROADCASTER_REFUSED,
                without_effect={"timeout": "each wait has the bound `control_timeout` of the server"},
            ),
            Operation("/weight_info", answers_errors(self.weight_info)),
            Operation(
                "/get_world_size",
                answers_errors(self.get_world_size),
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
            Operation("/is_sleeping", answers_errors(self.is_sleeping)),
            _control("/collective_rpc", self.collective_rpc, CollectiveRpcReq),
        ]

    # -- pause ----------------------------------------------------------------------------------------------

    async def pause(self, request: Request) -> Response:
        """Return {"status": "paused"}. New requests wait until `/resume`."""
        body = await self._parse(request, PauseReq)
        default = "wait" if query_flag(request, "wait_for_inflight_requests", False) else body.mode or "abort"
        await self._carry_out(request)(PauseGenerationReq(mode=pause_mode(request.query_params.get("mode", default))))
        return json_response({"status": "paused"})

    async def resume(self, request: Request) -> Response:
        """Return {"status": "resumed"}."""
        await self._carry_out(request)(ContinueGenerationReq())
        return json_response({"status": "resumed"})

    async def is_paused(self, request: Request) -> Response:
        """Return {"is_paused"}."""
        self._manager.check_serving()
        return json_response({"is_paused": self._manager.controls.is_paused})

    # -- weights --------------------------------------------------------------------------------------------

    async def init_weight_transfer_engine(self, request: Request) -> Response:
        """Return {"message"}, when the trainer and all ranks of the server have met."""
        body = await self._parse(request, InitWeightTransferReq)
        await self._transfer.init(self._carry_out(request), body.init_info)
        return json_response({"message": "Weight transfer initialized"})

    async def shutdown_weight_transfer_engine(self, request: Request) -> Response:
        """Return {"message"}."""
        await self._transfer.shutdown(self._carry_out(request))
        return json_response({"message": "Weight transfer shut down"})

    async def start_weight_update(self, request: Request) -> Response:
        """Return {"message"}. No step is taken until `/finish_weight_update`. Running requests finish before, unless
        generation is paused. The transaction ends if it receives no call for `weight_update_lease` seconds."""
        await self._transfer.start(self._carry_out(request))
        return json_response({"message": "Weight update started"})

    async def start_draft_weight_update(self, request: Request) -> Response:
        """Return 400: there is no draft model."""
        raise BadRequestError("There is no draft model. Use /start_weight_update.")

    async def update_weights(self, request: Request) -> Response:
        """Return {"message"} for `update_info`, {"status": "ok"} for `weight_dir`. After `/init_broadcaster`, the
        weights are received from the trainer, and `weight_dir` is not read. With `update_info` outside
        `/start_weight_update` there is "not_covered", too; see `/finish_weight_update`."""
        body = await self._parse(request, VllmUpdateWeightsReq)
        of_prime_rl = body.weight_dir is not None or self._transfer.has_broadcaster
        if (body.update_info is not None) == of_prime_rl:
            raise BadRequestError("The body needs either `update_info` (vLLM) or `weight_dir` (prime-rl).")
        if body.update_info is not None:
            coverage = await self._transfer.update(self._carry_out(request), body.update_info)
            return json_response({"message": "Weights updated"} | coverage)
        await self._transfer.update_from_path(self._carry_out(request), body.weight_dir)
        return json_response({"status": "ok"})

    async def finish_weight_update(self, request: Request) -> Response:
        """Return {"message", "not_covered"}. What was written since `/start_weight_update` is one new version.
        `not_covered` has the number and the first names of the parameters that were not written."""
        body = await self._parse(request, FinishWeightUpdateReq)
        coverage = await self._transfer.finish(self._carry_out(request), body.weight_version)
        return json_response({"message": "Weight update finished"} | coverage)

    async def reload_weights(self, request: Request) -> Response:
        """Return {"status": "ok"}, when the weights of the server's start are loaded again."""
        await self._carry_out(request)(UpdateWeightsFromDiskReq(model_path=self._args.model_path, mode="in_place"))
        return json_response({"status": "ok"})

    async def init_broadcaster(self, request: Request) -> Response:
        """Return {"status": "ok"}, when the trainer and all inference ranks have met. Every later `/update_weights`
        receives one broadcast of all weights from the trainer, until `/shutdown_weight_transfer_engine`."""
        body = await self._parse(request, InitBroadcasterReq, _BROADCASTER_REFUSED)
        await self._transfer.init_broadcaster(self._carry_out(request), body)
        return json_response({"status": "ok"})

    async def weight_info(self, request: Request) -> Response:
        """Return {"weight_version"}."""
        return json_response({"weight_version": self._manager.controls.weight_version})

    async def get_world_size(self, request: Request) -> Response:
        """Return {"world_size"}: the number of tensor-parallel ranks."""
        query_flag(request, "include_dp", True)
        return json_response({"world_size": self._args.tp_size})

    # -- cache and memory -----------------------------------------------------------------------------------

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Return {"success"}. False: running requests hold the cache."""
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
        """Return 200: there is no cache of images or of an encoder."""
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
        awake = await self._sleep.wake_up(self._carry_out(request), tags)
        return json_response({"status": "awake" if awake else "sleeping", "tags": tags})

    async def is_sleeping(self, request: Request) -> Response:
        """Return {"is_sleeping"}: whether any memory is released, or `/sleep?level=0` paused generation."""
        return json_response({"is_sleeping": await self._sleep.is_sleeping(self._carry_out(request))})

    # -- methods of workers ---------------------------------------------------------------------------------

    async def collective_rpc(self, request: Request) -> Response:
        """Return {"results"} with one entry for each rank; 400 for a method that is not in the table."""
        body = await self._parse(request, CollectiveRpcReq)
        if body.method not in METHODS:
            raise BadRequestError(
                f"The method {body.method!r:.100} cannot be called. This server has {', '.join(sorted(METHODS))}."
            )
        methods = Methods(self._manager, self._args, self._transfer, self._sleep, self._carry_out(request))
        result = await METHODS[body.method](methods, body.args, body.kwargs)
        return json_response({"results": [result] * self._args.tp_size})

    # -- shared ---------------------------------------------------------------------------------------------

    def _carry_out(self, request: Request) -> CarryOut:
        """Return the function that sends a control request. If the client disconnects, the request is withdrawn."""

        async def carry_out(req: ControlReq) -> ControlReply:
            reply = await unless_disconnected(request, self._manager.control(req))
            if not reply.success:
                raise error_for_status(reply.status_code, reply.message, WeightUpdateError)
            return reply

        return carry_out

    async def _parse(self, request: Request, kind: type[S], refused: Mapping[str, str] = {}) -> S:
        body = await read_json(request, self._args.max_request_bytes, carries_tensors=kind in _CARRY_TENSORS)
        if not isinstance(body, dict):
            raise BadRequestError(f"The request body must be a JSON object, not {type(body).__name__}.")
        for name, remedy in refused.items():
            if body.get(name) not in (None, False):
                raise BadRequestError(f"Field `{name}` is not supported: {remedy}.")
        known = kind.__struct_fields__
        inside = {name: fields for name, fields in TRANSFER_FIELDS.items() if isinstance(body.get(name), dict)}
        given = {key: body[key] for key in known if body.get(key) is not None}
        try:
            read = convert_json(given, kind)
        except msgspec.ValidationError as error:
            raise BadRequestError(f"{request.url.path}: {error}".replace("`$.", "`")) from None
        deeper = [f"{name}.{key}" for name, known in inside.items() for key in body[name] if key not in known]
        judge_unknown(request, [*names_of_unknown(body, read), *deeper[:MOST_NAMES]])
        return read


def pause_mode(given: str) -> PauseMode:
    """Return our name of a pause mode of vLLM. Raise BadRequestError for another name."""
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


def _control(path: str, handler: Handler, body: type[msgspec.Struct] | None = None, **others: Any) -> Operation:
    fields = () if body is None else body.__struct_fields__
    inside = {name: known for name, known in TRANSFER_FIELDS.items() if name in fields}
    return Operation(path, answers_errors(handler), POST, access="control", body=body, inside=inside, **others)

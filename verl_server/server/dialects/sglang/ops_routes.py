"""SGLang's routes for operators: profiling, garbage collection, settings, and the update routes that are refused.

Each refusal names the field or the route to use instead, because a missing route would look like a wrong address.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from verl_server import lora
from verl_server.errors import BadRequestError, error_for_status
from verl_server.messages.io_struct import ControlReq, StartProfileReq, StopProfileReq
from verl_server.server.http.operation import BOTH, POST, TEXT, Operation
from verl_server.server.http.responses import json_response, read_json, unless_disconnected
from verl_server.server.http.unknown_fields import judge_unknown
from verl_server.server.tokenizer_manager import TokenizerManager
from verl_server.web.json_body import MOST_NAMES
from verl_server.web.json_convert import read_struct

_NO_CHANGE = "no setting can be changed while the server runs: restart it"
_PROFILE_REFUSED = {
    "start_step": "the recording begins with the next step",
    "profile_by_stage": "a step holds prompts and decodes together",
    "profile_stages": "a step holds prompts and decodes together",
    "merge_profiles": "rank 0 is recorded",
    "detailed_annotations": "use record_shapes",
}
_PROFILE_IGNORED = {"profile_id": "the name of the file has the time"}
_LOGGING_REFUSED = {
    "log_requests": "requests are not logged",
    "log_requests_level": "requests are not logged",
    "log_requests_format": "requests are not logged",
    "dump_requests_folder": "requests are not written to files",
    "dump_requests_threshold": "requests are not written to files",
    "crash_dump_folder": "requests are not written to files",
}
_REFUSALS = {
    "/update_weights_from_ipc": (
        "the ZeroMQ sockets of checkpoint-engine are not read. A trainer on the server's GPUs can send its handles "
        "with /update_weights_from_tensor or /update_weights. Others can use /update_weights_from_distributed, or save "
        "a checkpoint and call /update_weights_from_disk."
    ),
    "/pull_weights": (
        "this server writes no files to a folder that a caller names, and reads no deltas. Publish whole checkpoints "
        "(slime: --update-weight-mode full without --update-weight-local-checkpoint-dir), and call "
        "/update_weights_from_disk with the folder of the version as model_path."
    ),
    "/slow_down": "this server is not slowed down on purpose. Limit max_running_requests at its start.",
}
"""Route of SGLang or of a fork -> why it is refused, and what to do instead."""
_ADAPTER_ROUTES = ("/load_lora_adapter", "/load_lora_adapter_from_tensors", "/unload_lora_adapter")


class SetInternalStateReq(msgspec.Struct, kw_only=True):
    """Body of `POST /set_internal_state`."""

    server_args: dict[str, Any]
    """Settings to change. Must be empty: no setting can be changed while the server runs."""


class ConfigureLoggingReq(msgspec.Struct, kw_only=True):
    """Body of `POST /configure_logging`. All fields are refused if they are set."""


class OpsApi:
    def __init__(self, manager: TokenizerManager) -> None:
        self._manager = manager

    def operations(self) -> list[Operation]:
        return [
            Operation(
                StartProfileReq.route,
                self.start_profile,
                BOTH,
                access="control",
                body=StartProfileReq,
                refused=_PROFILE_REFUSED,
                without_effect=_PROFILE_IGNORED,
                media_types=(TEXT,),
            ),
            Operation(StopProfileReq.route, self.stop_profile, BOTH, access="control", media_types=(TEXT,)),
            Operation("/freeze_gc", self.freeze_gc, BOTH, access="control", media_types=(TEXT,)),
            Operation(
                "/set_internal_state",
                self.set_internal_state,
                ("POST", "PUT"),
                access="control",
                body=SetInternalStateReq,
            ),
            Operation(
                "/configure_logging",
                self.configure_logging,
                BOTH,
                access="control",
                body=ConfigureLoggingReq,
                refused=_LOGGING_REFUSED,
                media_types=(),
            ),
            *(Operation(path, self.refuse, BOTH, access="control") for path in _REFUSALS),
            *(Operation(path, self.refuse_adapter, POST, access="control") for path in _ADAPTER_ROUTES),
        ]

    async def start_profile(self, request: Request) -> Response:
        """Start to record steps, and return a line of text.

        The trace is written to `ServerArgs.profile_folder` at `/stop_profile`, or after `num_steps` steps.
        """
        body = await self._body(request, StartProfileReq.__struct_fields__, _PROFILE_REFUSED)
        given = {name: body[name] for name in StartProfileReq.__struct_fields__ if body.get(name) is not None}
        given.pop("id", None)
        req = read_struct(given, StartProfileReq, "/start_profile: ")
        return await self._profile(request, req, "Start profiling.\n")

    async def stop_profile(self, request: Request) -> Response:
        """Return a line of text when the trace is written."""
        return await self._profile(request, StopProfileReq(), "Stop profiling. This will take some time.\n")

    async def _profile(self, request: Request, req: ControlReq, text: str) -> Response:
        reply = await unless_disconnected(request, self._manager.control(req))
        if not reply.success:
            raise error_for_status(reply.status_code, reply.message)
        return PlainTextResponse(text + reply.message + "\n")

    async def freeze_gc(self, request: Request) -> Response:
        """Exclude the present objects of the front process from later garbage collections. Return a line of text.

        The scheduler does the same at its start.
        """
        self._manager.check_serving()
        gc.freeze()
        return PlainTextResponse("Garbage collection frozen.\n")

    async def set_internal_state(self, request: Request) -> Response:
        """Return [true] if there are no settings. Otherwise return 400, which names the settings."""
        given = (await self._body(request, SetInternalStateReq.__struct_fields__, {})).get("server_args")
        if not isinstance(given, dict):
            raise BadRequestError("server_args must be an object of settings.")
        if given:
            raise BadRequestError(f"server_args {', '.join(sorted(map(str, given)))[:200]}: {_NO_CHANGE}.")
        return json_response([True])

    async def configure_logging(self, request: Request) -> Response:
        """Return 200 with an empty body. Return 400 if a field is set, because requests are not logged."""
        await self._body(request, (), _LOGGING_REFUSED)
        return Response()

    async def refuse(self, request: Request) -> Response:
        """Return 400 with the reason and the alternative."""
        path = request.url.path.rstrip("/")
        raise BadRequestError(f"{path} is not supported: {_REFUSALS[path]}")

    async def refuse_adapter(self, request: Request) -> Response:
        """Return 400 with what to do instead: merge the adapter and push the weights."""
        raise BadRequestError(lora.refusal(request.url.path))

    async def _body(self, request: Request, fields: Iterable[str], refused: dict[str, str]) -> dict[str, Any]:
        """Return the body, which may have `fields`. Raise BadRequestError if a field of `refused` is set."""
        body = await read_json(request, self._manager.server_args.max_request_bytes)
        if not isinstance(body, dict):
            raise BadRequestError(f"The request body must be a JSON object, not {type(body).__name__}.")
        self._manager.check_serving()
        for name, remedy in refused.items():
            if body.get(name) not in (None, False, 0, "", [], {}):
                raise BadRequestError(f"Field `{name}` is not supported: {remedy}.")
        judge_unknown(request, [name for name in body if name not in fields][:MOST_NAMES])
        return body

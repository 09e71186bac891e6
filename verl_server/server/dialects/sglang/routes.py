"""SGLang's routes that do not change the server: `/generate`, health, information, load and metrics.

`app.create_app` mounts the routes. The handlers run on the TokenizerManager's event loop and call it directly.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from verl_server import __version__
from verl_server.columns import MSGPACK
from verl_server.errors import (
    BadRequestError,
    ControlTimeoutError,
    ServerDiedError,
    ServerUnavailableError,
    VerlServerError,
)
from verl_server.io_struct import GetInternalStateReq
from verl_server.results import GenerateResult, ModelInfo, ServerInfo
from verl_server.server.dialects.operation import EVENTS, JSON, TEXT, Operation
from verl_server.server.generate_request import ACCEPTED_HINTS, GENERATE, UNSUPPORTED_FIELDS, GenerateReqInput
from verl_server.server.generation import Generation
from verl_server.server.json_body import MalformedBodyError
from verl_server.server.metrics import CONTENT_TYPE
from verl_server.server.responses import (
    SSE_DONE,
    EventStream,
    bad_request,
    json_response,
    message_error,
    read_body,
    result_response,
    result_writer,
    run_job,
    sse,
    status_error,
    unless_disconnected,
)
from verl_server.server.tokenizer_manager import TokenizerManager
from verl_server.server_args import ServerArgs

logger = logging.getLogger(__name__)

_LIVE_SECONDS = 5.0
"""A scheduler that sent a message within this time is alive. Otherwise, it is sent a request."""
_HEALTH_TIMEOUT = 20.0
"""Longest time to wait for a token, or for the scheduler's answer, in a health check."""
_STATE_TIMEOUT = 2.0
"""Longest time to wait for the scheduler's figures, which a long update may delay."""


class NativeApi:
    """Handlers of SGLang's routes that do not change the server."""

    def __init__(self, manager: TokenizerManager, server_args: ServerArgs) -> None:
        self._manager = manager
        self._args = server_args
        self._started = time.time()

    def operations(self) -> list[Operation]:
        return [
            Operation("/", self.root, media_types=(TEXT,)),
            Operation(
                "/generate",
                self.generate,
                ("POST", "PUT"),
                body=GenerateReqInput,
                refused=UNSUPPORTED_FIELDS,
                without_effect=ACCEPTED_HINTS,
                answer=GenerateResult | list[GenerateResult],
                media_types=(JSON, EVENTS, MSGPACK),
            ),
            Operation("/health", self.health, aliases=("/ping",), media_types=()),
            Operation("/health_generate", self.health_generate, media_types=()),
            Operation("/ready", self.ready, media_types=()),
            Operation("/model_info", self.model_info, aliases=("/get_model_info",), answer=ModelInfo),
            Operation("/server_info", self.server_info, aliases=("/get_server_info",), answer=ServerInfo),
            Operation("/get_weight_version", self.weight_version),
            Operation("/v1/loads", self.loads, query={"include": "Parts of the answer, separated by commas."}),
            Operation("/metrics", self.metrics, media_types=(TEXT,)),
        ]

    async def root(self, request: Request) -> Response:
        """Return a line of text."""
        return PlainTextResponse("verl-server is running.\n")

    # -- generate -------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> Response:
        """Return a `GenerateResult`, or a list of them for several prompts or for `n` above 1. With `stream`, each
        server-sent event is the `GenerateResult` so far, and the last event is `[DONE]`."""
        try:
            body = await read_body(request, self._args.max_request_bytes)
        except BadRequestError as error:
            return bad_request(error)
        try:
            self._manager.check_serving()
            read = await run_job(request, self._manager.text, GENERATE, body)
            self._manager.metrics.fields_ignored("/generate", read.unknown_fields)
            generation = await self._manager.submit_read(read, result_writer(request, read.request.stream))
        except MalformedBodyError as error:
            return bad_request(error)
        except VerlServerError as error:
            return _generate_error(error)
        if read.request.stream:
            return EventStream(self._frames(generation), generation.close)
        try:
            return result_response(request, await unless_disconnected(request, generation.result()))
        except VerlServerError as error:
            return _generate_error(error)
        finally:
            generation.close()

    async def _frames(self, generation: Generation) -> AsyncIterator[bytes]:
        try:
            async for i, state in generation.updates():
                frame = state.result()
                if len(generation.states) > 1:
                    frame["index"] = i
                yield sse(frame)
        except VerlServerError as error:
            code = error.status_code
            kind = "invalid_request_error" if code < 500 else "server_error"
            yield sse({"error": {"message": str(error), "type": kind, "code": code, "retryable": False}})
        yield SSE_DONE

    # -- health ---------------------------------------------------------------------------------------------

    async def health(self, request: Request) -> Response:
        """Return 200 with an empty body while the scheduler is alive, even during a pause or a weight update."""
        try:
            await self._check_live()
        except VerlServerError as error:
            return status_error(error)
        return Response()

    async def ready(self, request: Request) -> Response:
        """Return the response of `/health`, but 503 while generation is paused."""
        if (pause := self._manager.controls.pause) is not None:
            return status_error(ServerUnavailableError(f"Generation is {pause}."))
        return await self.health(request)

    async def health_generate(self, request: Request) -> Response:
        """Generate one token, then return 200. During a pause or a weight update, return the response of `/health`."""
        manager = self._manager
        if manager.controls.is_paused or manager.controls.updating_weights:
            return await self.health(request)
        try:
            self._check_ready()
            probe = GenerateReqInput(
                input_ids=[0], sampling_params={"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True}
            )
            generation = await manager.submit(probe)
            try:
                async with asyncio.timeout(_HEALTH_TIMEOUT):
                    await self._probe(generation)
            finally:
                generation.close()
        except TimeoutError:
            return status_error(ServerUnavailableError(f"No token within {_HEALTH_TIMEOUT:.0f} s."))
        except VerlServerError as error:
            return status_error(error)
        return Response()

    async def _probe(self, generation: Generation) -> None:
        """Wait for the token. If a pause or an update begins meanwhile, check only that the scheduler is alive."""
        result = asyncio.ensure_future(generation.result())
        try:
            while not (await asyncio.wait((result,), timeout=0.5))[0]:
                if self._manager.controls.is_paused or self._manager.controls.updating_weights:
                    return await self._check_live()
            result.result()
        finally:
            result.cancel()

    def _check_ready(self) -> None:
        self._manager.check_serving()
        if not self._manager.ready:
            raise ServerUnavailableError("The server is starting: its first request was not answered yet.")

    async def _check_live(self) -> None:
        """Raise unless the scheduler is alive.

        While a control call is in flight, the scheduler counts as alive, because an update may keep it from answering.
        """
        self._check_ready()
        manager = self._manager
        if time.monotonic() - manager.last_message < _LIVE_SECONDS or manager.controls.in_flight:
            return
        try:
            await manager.control(GetInternalStateReq(), timeout=_HEALTH_TIMEOUT)
        except ControlTimeoutError as error:
            raise ServerUnavailableError(f"The health check failed: {error}") from None

    # -- info -----------------------------------------------------------------------------------------------

    async def _internal_state(self) -> dict[str, Any]:
        """Return the scheduler's figures, or {} if it does not answer in time."""
        try:
            reply = await self._manager.control(GetInternalStateReq(), timeout=_STATE_TIMEOUT)
        except ServerDiedError:
            raise
        except VerlServerError:
            return {}
        return reply.payload if isinstance(reply.payload, dict) else {}

    async def model_info(self, request: Request) -> Response:
        """Return a `ModelInfo`."""
        return json_response(model_info(self._manager, self._args))

    async def weight_version(self, request: Request) -> Response:
        """Return {"weight_version"}."""
        return json_response({"weight_version": self._manager.controls.weight_version})

    async def server_info(self, request: Request) -> Response:
        """Return a `ServerInfo`."""
        return json_response(await self.server_info_dict())

    async def server_info_dict(self) -> dict[str, Any]:
        state = await self._internal_state()
        info = self._args.public_dict() | self._manager.scheduler_info
        pause = self._manager.controls.pause
        return info | {
            "scheduler_info": self._manager.scheduler_info,
            "internal_states": [state],
            "weight_version": self._manager.controls.weight_version,
            "instance_id": self._manager.instance_id,
            "weights_confirmed": self._manager.controls.weights_confirmed,
            "paused_since": None if pause is None else pause.since,
            "paused_seconds": None if pause is None else round(pause.seconds, 3),
            "startup_time": self._started,
            "version": __version__,
            "frontend": "python",
        }

    async def loads(self, request: Request) -> Response:
        """Return the load of the one data-parallel rank, in the format of SGLang's `/v1/loads?include=...`."""
        known = {"core", "memory", "spec", "lora", "disagg", "queues", "all"}
        included = [part for part in request.query_params.get("include", "all").split(",") if part]
        wrong = [part for part in included if part not in known]
        if wrong:
            raise BadRequestError(f"Unknown include {wrong}; known: {sorted(known)}.")
        state = await self._internal_state()
        now = time.time()
        running = state.get("num_running_reqs", 0)
        waiting = state.get("num_waiting_reqs", max(0, self._manager.num_requests - running))
        load = {"timestamp": now, "dp_rank": 0} | state | {"num_running_reqs": running, "num_waiting_reqs": waiting}
        load.setdefault("max_total_num_tokens", self._manager.scheduler_info.get("max_total_num_tokens"))
        load.setdefault("max_running_requests", self._manager.scheduler_info.get("max_running_requests"))
        return json_response(
            {
                "timestamp": now,
                "version": __version__,
                "accelerator": self._manager.scheduler_info.get("device"),
                "num_accelerators": self._args.tp_size,
                "loads": [load],
            }
        )

    async def metrics(self, request: Request) -> Response:
        """Return Prometheus metrics as text; 404 if `enable_metrics` is off."""
        if not self._args.enable_metrics:
            raise HTTPException(404, "Metrics are off (enable_metrics=False)")
        try:
            state = await self._internal_state()
        except VerlServerError:
            state = {}
        pause = self._manager.controls.pause
        text = self._manager.metrics.render(state, 0.0 if pause is None else pause.seconds)
        return Response(text, headers={"Content-Type": CONTENT_TYPE})


def _generate_error(error: VerlServerError) -> Response:
    return message_error(error) if error.status_code < 500 and error.status_code != 413 else status_error(error)


def model_info(manager: TokenizerManager, server_args: ServerArgs) -> dict[str, Any]:
    """Return the body of `/model_info`, which `Engine.get_model_info` returns too."""
    manager.check_serving()
    assert manager.model_text is not None
    config = manager.model_text.config
    return {
        "model_path": manager.controls.model_path,
        "served_model_name": server_args.served_model_name or manager.controls.model_path,
        "tokenizer_path": server_args.tokenizer_path or server_args.model_path,
        "is_generation": True,
        "preferred_sampling_params": None,
        "weight_version": manager.controls.weight_version,
        "load_format": server_args.load_format,
        "reasoning_parser": None,
        "tool_call_parser": None,
        "disaggregation_mode": "null",
        "has_image_understanding": False,
        "has_audio_understanding": False,
        "model_type": config.get("model_type"),
        "architectures": config.get("architectures"),
    }

"""The environment server: an `Environment` class over HTTP with OpenEnv's protocol.

`create_env_app(factory)` is the ASGI application. Each WebSocket connection at `/ws` owns one environment. `/health`,
`/metadata`, `/schema` and the one-shot `/reset`, `/step` and `/state` answer as OpenEnv's server does, so OpenEnv's own
clients can use it. `env_mcp` answers `/mcp`. `EnvServer` runs the server in a child process, `verl-server env serve`
in the foreground.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple

import orjson
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp
from starlette.websockets import WebSocket

from verl_server.errors import BadRequestError
from verl_server.files.json_values import dumps
from verl_server.ipc.child_process import ChildProcess
from verl_server.rollout.environment import MAX_MESSAGE_BYTES
from verl_server.rollout.environments.action_schema import ActionSchema
from verl_server.rollout.environments.env_door import EnvDoor, check_address
from verl_server.rollout.environments.env_factory import EnvFactory
from verl_server.rollout.environments.env_mcp import McpRoutes, McpSession
from verl_server.rollout.environments.env_pool import EnvPool
from verl_server.rollout.environments.env_socket import serve_socket
from verl_server.rollout.environments.hosted_env import EnvMessageError, HostedEnv
from verl_server.rollout.environments.tools import Toolbox
from verl_server.web.bodies import bounded_body
from verl_server.web.http_server import GuardedServer
from verl_server.web.json_errors import json_error_handlers

logger = logging.getLogger(__name__)


_STATUSES = {"VALIDATION_ERROR": 422, "CAPACITY_REACHED": 503}
"""Code of an error -> HTTP status. Other errors are errors of the environment, with status 500."""


class _Message(NamedTuple):
    """A client's message."""

    kind: Any
    data: dict[str, Any]


class _EnvApp:
    """The routes over one factory."""

    def __init__(self, name: str, pool: EnvPool, toolbox: Toolbox, mcp: McpRoutes, idle_timeout: float) -> None:
        self.name = name
        self.factory = pool.factory
        self.pool = pool
        self.toolbox = toolbox
        self.mcp = mcp
        self.idle_timeout = idle_timeout

    async def websocket(self, socket: WebSocket) -> None:
        await serve_socket(
            socket,
            self.pool,
            lambda hosted: self._serve(socket, hosted),
            lambda error: _send_error(socket, error.code, str(error)),
        )

    async def _serve(self, socket: WebSocket, hosted: HostedEnv) -> None:
        """Answer messages until the client leaves or has sent none for `idle_timeout` seconds.

        A client may leave in the middle of a step. Then the wait for the step is cancelled.
        """
        inbox: asyncio.Queue[_Message | EnvMessageError] = asyncio.Queue(1)
        reading = asyncio.ensure_future(_read(socket, inbox))
        answering = asyncio.ensure_future(self._answer_all(socket, inbox, hosted))
        try:
            done, _ = await asyncio.wait({reading, answering}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            reading.cancel()
            answering.cancel()
            await asyncio.gather(reading, answering, return_exceptions=True)

    async def _answer_all(
        self, socket: WebSocket, inbox: asyncio.Queue[_Message | EnvMessageError], hosted: HostedEnv
    ) -> None:
        session = McpSession(hosted)
        while True:
            try:
                message = await asyncio.wait_for(inbox.get(), self.idle_timeout)
            except TimeoutError:
                await _send_error(socket, "SESSION_ERROR", f"No message for {self.idle_timeout:.0f} s.")
                return
            try:
                if isinstance(message, EnvMessageError):
                    raise message
                answer = await self._answer(message, session)
                if answer is not None:
                    await socket.send_text(answer.decode())
            except EnvMessageError as error:
                await _send_error(socket, error.code, str(error))

    async def _answer(self, message: _Message, session: McpSession) -> bytes | None:
        match message.kind:
            case "state":
                return await _played(session.hosted.state(), "state")
            case "reset":
                return await _played(session.hosted.reset(message.data), "observation")
            case "step":
                return await _played(self._step(session.hosted, message.data), "observation")
            case "mcp":
                answer = await self.mcp.answer(message.data, own=session)
                return None if answer is None else b'{"type":"mcp","data":' + answer + b"}"
        raise EnvMessageError("UNKNOWN_TYPE", f"Unknown message type: {message.kind}")

    async def _step(self, hosted: HostedEnv, action: dict[str, Any]) -> dict[str, Any]:
        if isinstance(action, dict) and self.toolbox.takes(action):
            return await self.toolbox.play(hosted, action)
        return await hosted.step(action)

    # -- plain HTTP -----------------------------------------------------------------------------------------
    # As in OpenEnv's server, each request has an environment of its own, which ends with the request.

    async def reset(self, request: Request) -> Response:
        return await self._once(request, lambda hosted, body: hosted.reset(body))

    async def step(self, request: Request) -> Response:
        return await self._once(request, lambda hosted, body: self._step(hosted, body.get("action", {})))

    async def state(self, request: Request) -> Response:
        return await self._once(request, lambda hosted, body: _with_defaults(hosted.state()))

    async def health(self, _: Request) -> JSONResponse:
        return JSONResponse({"status": "healthy"})

    async def metadata(self, _: Request) -> JSONResponse:
        description = inspect.getdoc(self.factory) or f"{self.name} environment"
        return JSONResponse({"name": self.name, "description": description, "version": "1.0.0"})

    async def schema(self, _: Request) -> JSONResponse:
        anything = {"type": "object"}
        schemas = {kind: getattr(self.factory, f"{kind}_schema", anything) for kind in ("action", "observation")}
        return JSONResponse(schemas | {"state": anything})

    async def _once(self, request: Request, call: Callable[[HostedEnv, dict[str, Any]], Any]) -> Response:
        raw = await bounded_body(request, MAX_MESSAGE_BYTES)
        if raw is None:
            return JSONResponse({"detail": f"The body exceeds {MAX_MESSAGE_BYTES} bytes."}, 413)
        try:
            body = orjson.loads(raw) if raw else {}
            if not isinstance(body, dict):
                return JSONResponse({"detail": "The body must be an object."}, 422)
            hosted = self.pool.open()
            try:
                return Response(await _played(call(hosted, body)), media_type="application/json")
            finally:
                await self.pool.close(hosted)
        except orjson.JSONDecodeError as error:
            return JSONResponse({"detail": f"Invalid JSON: {error}"}, 422)
        except EnvMessageError as error:
            return JSONResponse({"detail": str(error)}, _STATUSES.get(error.code, 500))


def create_env_app(
    factory: EnvFactory,
    *,
    name: str | None = None,
    max_concurrent_envs: int = 1024,
    idle_timeout: float = 3600.0,
    tool_timeout: float = 30.0,
    host: str = "127.0.0.1",
    api_key: str | None = None,
) -> ASGIApp:
    """Return an application that serves environments of `factory()`, one for each WebSocket connection or MCP session.

    While `max_concurrent_envs` of them are open, a further client receives the error CAPACITY_REACHED. A connection
    that has carried no message for `idle_timeout` seconds is closed, and so is a session. A tool call that takes longer
    than `tool_timeout` seconds fails. `host` is the address on which the server will listen. With `api_key`, every
    route but `/health` needs it. Raise BadRequestError if the factory declares an `action_schema` that is not a
    JSON schema, or a tool whose arguments have none.
    """
    if not tool_timeout > 0:
        raise BadRequestError(f"tool_timeout must be more than 0 seconds, not {tool_timeout}.")
    name = name or str(getattr(factory, "__name__", type(factory).__name__))
    schema = getattr(factory, "action_schema", None)
    action_schema = None if schema is None else ActionSchema(name, schema)
    pool = EnvPool(factory, action_schema, max_concurrent_envs)
    toolbox = Toolbox(name, factory, action_schema, tool_timeout)
    mcp = McpRoutes(name, pool, toolbox, idle_timeout)
    app = _EnvApp(name, pool, toolbox, mcp, idle_timeout)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await mcp.close_all()

    routes = Starlette(
        routes=[
            WebSocketRoute("/ws", app.websocket),
            WebSocketRoute("/mcp", mcp.websocket),
            Route("/mcp", mcp.post, methods=["POST"]),
            Route("/mcp", mcp.delete, methods=["DELETE"]),
            Route("/reset", app.reset, methods=["POST"]),
            Route("/step", app.step, methods=["POST"]),
            *(Route(f"/{kind}", getattr(app, kind)) for kind in ("state", "health", "metadata", "schema")),
        ],
        lifespan=lifespan,
        exception_handlers=json_error_handlers("detail"),
    )
    routes.router.redirect_slashes = False
    return EnvDoor(routes, host, api_key)


async def _read(socket: WebSocket, inbox: asyncio.Queue[_Message | EnvMessageError]) -> None:
    """Put the client's messages into `inbox` until the client leaves. A malformed message is replaced by an error."""
    while (frame := await socket.receive())["type"] != "websocket.disconnect":
        try:
            message = _message(frame.get("text"))
        except EnvMessageError as error:
            await inbox.put(error)
            continue
        if message.kind == "close":
            return
        await inbox.put(message)


def _message(text: str | None) -> _Message:
    if text is None:
        raise EnvMessageError("INVALID_JSON", "Messages are text frames.")
    try:
        message = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise EnvMessageError("INVALID_JSON", f"Invalid JSON: {error}") from None
    fields = message if isinstance(message, dict) else {}
    data = fields.get("data", {})
    if not isinstance(data, dict):
        raise EnvMessageError("VALIDATION_ERROR", "`data` must be an object.")
    return _Message(fields.get("type"), data)


async def _with_defaults(call: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    """Return a state with the fields that every state of OpenEnv has."""
    return {"episode_id": None, "step_count": 0} | await call


async def _played(call: Awaitable[dict[str, Any]], kind: str | None = None) -> bytes:
    """Return the result of a call into the environment as JSON, inside a message of type `kind` if that is given.

    Raise an exception of the environment as an EnvMessageError.
    """
    try:
        data = await call
        answer = data if kind is None else {"type": kind, "data": data}
        return dumps(answer)
    except EnvMessageError as error:
        logger.warning("%s", error)
        raise
    except orjson.JSONEncodeError as error:
        text = f"What the environment returned cannot be written as JSON: {error}"
        logger.warning("%s", text)
        raise EnvMessageError("EXECUTION_ERROR", text) from error
    except Exception as error:
        logger.warning("The environment raised.", exc_info=True)
        raise EnvMessageError("EXECUTION_ERROR", f"{type(error).__name__}: {error}") from error


async def _send_error(socket: WebSocket, code: str, message: str) -> None:
    await socket.send_text(orjson.dumps({"type": "error", "data": {"message": message, "code": code}}).decode())


# -- in a child process ------------------------------------------------------------------------------------------


class EnvServer:
    """An environment server in a child process, which ends with its parent at the latest. A context manager."""

    def __init__(
        self,
        environment: str,
        *,
        kwargs: dict[str, Any] | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        max_concurrent_envs: int = 1024,
        idle_timeout: float = 3600.0,
        tool_timeout: float = 30.0,
        startup_timeout: float = 60.0,
        api_key: str | None = None,
        allow_unauthenticated: bool = False,
    ) -> None:
        """Start a server for "MODULE:CLASS" or "FILE.py:CLASS" and wait until it answers.

        `kwargs` are the keyword arguments of the class. Port 0 selects a free port. A `host` that is not loopback needs
        `api_key`, which clients send (VERL_ENV_API_KEY), or `allow_unauthenticated`. Raise BadRequestError if both are
        missing, and ServerLaunchError if the environment cannot be loaded or the server takes longer than
        `startup_timeout` seconds.
        """
        argument = {
            "environment": environment,
            "kwargs": kwargs or {},
            "host": host,
            "port": port,
            "max_concurrent_envs": max_concurrent_envs,
            "idle_timeout": idle_timeout,
            "tool_timeout": tool_timeout,
            "allow_unauthenticated": allow_unauthenticated,
        }
        check_address(host, api_key, allow_unauthenticated)
        self._child = ChildProcess(
            "env-server", "verl_server.rollout.environments.env_process", argument | {"api_key": api_key}
        )
        try:
            self.url: str = self._child.wait_ready(startup_timeout)["url"]
        except BaseException:
            self._child.terminate()
            raise

    @property
    def pid(self) -> int:
        return self._child.pid

    def shutdown(self) -> None:
        self._child.terminate(grace=5.0)

    def __enter__(self) -> EnvServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def make_server(app: ASGIApp, connection_limit: int) -> GuardedServer:
    """Return a server for large messages, long steps and many connections at once."""
    return GuardedServer(
        app,
        connection_limit,
        log_level="warning",
        access_log=False,
        lifespan="auto",
        ws="websockets-sansio",
        ws_max_size=MAX_MESSAGE_BYTES,
        ws_ping_interval=None,
        ws_per_message_deflate=False,
        timeout_graceful_shutdown=2,
        backlog=4096,
    )

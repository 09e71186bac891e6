"""`/mcp`: serve the tools of an environment as JSON-RPC, over HTTP and over a WebSocket.

`env_server` mounts the routes, and passes on the `mcp` messages of its own WebSocket. A request is answered with an
environment: the environment of the connection, of the session that the request names, or a new environment that ends
with the request. Clients of OpenEnv create sessions with `openenv/session/create`, and name them in
`params.session_id`. Clients of MCP get a session from `initialize`, and name it in the header `Mcp-Session-Id`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import Any, Literal

import msgspec
import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.websockets import WebSocket

from verl_server.files.json_values import dumps
from verl_server.rollout.environment import MAX_MESSAGE_BYTES
from verl_server.rollout.environments.env_pool import EnvPool
from verl_server.rollout.environments.env_socket import serve_socket
from verl_server.rollout.environments.hosted_env import EnvMessageError, HostedEnv
from verl_server.rollout.environments.tools import Toolbox, ToolError
from verl_server.web.bodies import bounded_body

logger = logging.getLogger(__name__)

SESSION_HEADER = "Mcp-Session-Id"

PROTOCOL_VERSIONS = ("2025-06-18", "2025-03-26", "2024-11-05")
"""Versions of MCP whose tools are served, newest first."""

PARSE_ERROR, INVALID_REQUEST, METHOD_NOT_FOUND, INVALID_PARAMS = -32700, -32600, -32601, -32602
INTERNAL_ERROR, SERVER_ERROR = -32603, -32000

_METHODS = "initialize, ping, tools/list, tools/call, openenv/session/create, openenv/session/close"
_CODES = {
    "tool_not_found": INVALID_PARAMS,
    "invalid_args": INVALID_PARAMS,
    "execution_error": INTERNAL_ERROR,
    "timeout": SERVER_ERROR,
}


class JsonRpcRequest(msgspec.Struct):
    """A request, or a notification, whose method begins with `notifications/`."""

    jsonrpc: Literal["2.0"]
    method: str
    params: dict[str, Any] = {}
    id: str | int | None = None


class JsonRpcError(Exception):
    """An error that the client receives."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class McpSession:
    """One environment of a client, on which one call runs at a time."""

    def __init__(self, hosted: HostedEnv) -> None:
        self.id = secrets.token_hex(16)
        self.hosted = hosted
        self.lock = asyncio.Lock()
        self.expiry: asyncio.TimerHandle | None = None
        self.is_closed = False


class McpRoutes:
    """The answers to JSON-RPC requests, and the sessions of HTTP clients.

    A session without a request for `idle_timeout` seconds is closed. A connection closes its own session.
    """

    def __init__(self, name: str, pool: EnvPool, toolbox: Toolbox, idle_timeout: float) -> None:
        self._name = name
        self._pool = pool
        self._toolbox = toolbox
        self._idle_timeout = idle_timeout
        self._sessions: dict[str, McpSession] = {}
        self._closing: set[asyncio.Task[None]] = set()

    # -- transports -----------------------------------------------------------------------------------------

    async def post(self, request: Request) -> Response:
        """Answer one JSON-RPC request. An error is answered with status 200, as in OpenEnv's server."""
        raw = await bounded_body(request, MAX_MESSAGE_BYTES)
        if raw is None:
            error = JsonRpcError(INVALID_REQUEST, f"The body exceeds {MAX_MESSAGE_BYTES} bytes.")
            return Response(_failed(None, error), 413, media_type="application/json")
        named = request.headers.get(SESSION_HEADER)
        if named is not None and named not in self._sessions:
            error = JsonRpcError(INVALID_REQUEST, f"Unknown {SESSION_HEADER}: {named[:80]}. Send `initialize` again.")
            return Response(_failed(None, error), 404, media_type="application/json")
        created: list[McpSession] = []
        answer = await self.answer(raw, named=named, created=created)
        if answer is None:
            return Response(status_code=202)
        headers = {SESSION_HEADER: created[0].id} if created else None
        return Response(answer, media_type="application/json", headers=headers)

    async def delete(self, request: Request) -> Response:
        """Close the session that the header names."""
        session = self._sessions.get(request.headers.get(SESSION_HEADER, ""))
        if session is None:
            error = JsonRpcError(INVALID_REQUEST, f"There is no session of this {SESSION_HEADER}.")
            return Response(_failed(None, error), 404, media_type="application/json")
        await self._close(session)
        return Response(status_code=204)

    async def websocket(self, socket: WebSocket) -> None:
        """Answer the requests of a connection, which has its own environment."""
        await serve_socket(
            socket,
            self._pool,
            lambda hosted: self._answer_all(socket, McpSession(hosted)),
            lambda error: socket.send_text(_failed(None, JsonRpcError(SERVER_ERROR, str(error))).decode()),
        )

    async def _answer_all(self, socket: WebSocket, session: McpSession) -> None:
        while True:
            try:
                frame = await asyncio.wait_for(socket.receive(), self._idle_timeout)
            except TimeoutError:
                error = JsonRpcError(SERVER_ERROR, f"No message for {self._idle_timeout:.0f} s.")
                await socket.send_text(_failed(None, error).decode())
                return
            if frame["type"] == "websocket.disconnect":
                return
            answer = await self.answer(frame.get("text") or frame.get("bytes") or b"", own=session)
            if answer is not None:
                await socket.send_text(answer.decode())

    async def close_all(self) -> None:
        """Close the sessions of HTTP clients, when the server ends."""
        await asyncio.gather(*(self._close(session) for session in list(self._sessions.values())), *self._closing)

    # -- requests -------------------------------------------------------------------------------------------

    async def answer(
        self,
        message: bytes | str | dict[str, Any],
        *,
        own: McpSession | None = None,
        named: str | None = None,
        created: list[McpSession] | None = None,
    ) -> bytes | None:
        """Return the response to a message as JSON, None to a notification.

        `own` is the session of the message's connection. `named` is the id in a header, which is used if the message's
        parameters name no session. A session that `initialize` creates is appended to `created`; without this list,
        `initialize` creates none.
        """
        identifier = None
        try:
            request = _parsed(message)
            identifier = request.id
            if request.method.startswith("notifications/"):
                return None
            result = await self._result(request, own, named, created)
            return dumps({"jsonrpc": "2.0", "id": identifier, "result": result})
        except JsonRpcError as error:
            return _failed(identifier, error)
        except ToolError as error:
            logger.warning("%s", error)
            return _failed(identifier, JsonRpcError(_CODES[error.fault], str(error)))
        except EnvMessageError as error:
            code = SERVER_ERROR if error.code == "CAPACITY_REACHED" else INTERNAL_ERROR
            return _failed(identifier, JsonRpcError(code, str(error)))
        except Exception as error:
            logger.warning("A request to /mcp failed.", exc_info=True)
            return _failed(identifier, JsonRpcError(INTERNAL_ERROR, f"{type(error).__name__}: {error}"))

    async def _result(
        self, request: JsonRpcRequest, own: McpSession | None, named: str | None, created: list[McpSession] | None
    ) -> dict[str, Any]:
        params = request.params
        match request.method:
            case "initialize":
                if own is None and created is not None and named is None:
                    created.append(self._create())
                return self._initialized(params)
            case "ping":
                return {}
            case "openenv/session/create":
                return {"session_id": (own or self._create()).id}
            case "openenv/session/close":
                return await self._closed(params, own)
        session = own or self._named(params.get("session_id") or named)
        match request.method:
            case "tools/list":
                tools = self._toolbox.tools.values()
                listed = [
                    {"name": tool.name, "description": tool.description, "inputSchema": tool.input_schema}
                    for tool in tools
                ]
                return {"tools": listed}
            case "tools/call":
                return await self._called(params, session)
        raise JsonRpcError(METHOD_NOT_FOUND, f"Unknown method {request.method[:80]!r}; the methods: {_METHODS}.")

    async def _called(self, params: dict[str, Any], session: McpSession | None) -> dict[str, Any]:
        if not params.get("name"):
            raise JsonRpcError(INVALID_PARAMS, "tools/call needs params.name, the name of a tool (see tools/list).")
        if session is None:
            hosted = self._pool.open()
            try:
                return await self._call(hosted, params)
            finally:
                await self._pool.close(hosted)
        async with session.lock:
            if session.is_closed:
                raise JsonRpcError(INVALID_PARAMS, "The session was closed while this call waited for an earlier one.")
            try:
                return await self._call(session.hosted, params)
            finally:
                self._touch(session)

    async def _call(self, hosted: HostedEnv, params: dict[str, Any]) -> dict[str, Any]:
        arguments = params.get("arguments")
        return (await self._toolbox.call(hosted, params["name"], {} if arguments is None else arguments)).mcp()

    def _initialized(self, params: dict[str, Any]) -> dict[str, Any]:
        asked = params.get("protocolVersion")
        return {
            "protocolVersion": asked if asked in PROTOCOL_VERSIONS else PROTOCOL_VERSIONS[0],
            "capabilities": {"tools": {"listChanged": False}},
            "serverInfo": {"name": self._name, "version": "1.0.0"},
        }

    # -- sessions -------------------------------------------------------------------------------------------

    def _create(self) -> McpSession:
        session = McpSession(self._pool.open())
        self._sessions[session.id] = session
        self._touch(session)
        return session

    def _named(self, session_id: Any) -> McpSession | None:
        if session_id is None:
            return None
        session = self._sessions.get(session_id) if isinstance(session_id, str) else None
        if session is None:
            text = f"Unknown session_id: {str(session_id)[:80]}. It was closed; send openenv/session/create again."
            raise JsonRpcError(INVALID_PARAMS, text)
        self._touch(session)
        return session

    async def _closed(self, params: dict[str, Any], own: McpSession | None) -> dict[str, Any]:
        session_id = params.get("session_id")
        if not session_id:
            raise JsonRpcError(INVALID_PARAMS, "openenv/session/close needs params.session_id.")
        if own is not None and session_id == own.id:
            raise JsonRpcError(INVALID_REQUEST, "This session ends with its WebSocket; close the connection.")
        session = self._named(session_id)
        if session is not None:
            await self._close(session)
        return {"session_id": session_id, "closed": True}

    def _touch(self, session: McpSession) -> None:
        """Restart a session's idle time."""
        if session.expiry is not None:
            session.expiry.cancel()
        if session.id in self._sessions:
            session.expiry = asyncio.get_running_loop().call_later(self._idle_timeout, self._expire, session)

    def _expire(self, session: McpSession) -> None:
        if session.lock.locked():
            self._touch(session)
            return
        task = asyncio.ensure_future(self._close(session))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _close(self, session: McpSession) -> None:
        if self._sessions.pop(session.id, None) is None:
            return  # another request closes it
        session.is_closed = True
        if session.expiry is not None:
            session.expiry.cancel()
        await self._pool.close(session.hosted)


def _parsed(message: bytes | str | dict[str, Any]) -> JsonRpcRequest:
    try:
        content = message if isinstance(message, dict) else orjson.loads(message)
        return msgspec.convert(content, JsonRpcRequest)
    except orjson.JSONDecodeError as error:
        raise JsonRpcError(PARSE_ERROR, f"Invalid JSON: {error}") from None
    except (msgspec.ValidationError, RecursionError) as error:
        raise JsonRpcError(INVALID_REQUEST, f"Not a JSON-RPC 2.0 request: {error}") from None


def _failed(identifier: str | int | None, error: JsonRpcError) -> bytes:
    return dumps({"jsonrpc": "2.0", "id": identifier, "error": {"code": error.code, "message": str(error)}})

"""Serve any `Environment` class over HTTP with OpenEnv's protocol, so that OpenEnv's clients can play it too.

`create_env_app(factory)` is the ASGI application: a WebSocket connection at `/ws` owns one environment;
`/health`, `/metadata`, `/schema` and the one-shot `/reset`, `/step`, `/state` answer as OpenEnv's server does.
`EnvServer` serves one in a child process, `python -m verl_server.rollout.env_process` in the foreground.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import logging
import math
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import orjson
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from verl_server.errors import BadRequestError
from verl_server.ipc.child_process import ChildProcess
from verl_server.rollout.environment import MAX_MESSAGE_BYTES

logger = logging.getLogger(__name__)

EnvFactory = Callable[[], Any]

_CLOSE_TIMEOUT = 10.0
"""Seconds for an environment's `close`, which may wait for a step that hangs."""


class _MessageError(Exception):
    """What a client gets as an `error` message."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class _Hosted:
    """One environment and how to call it: `async` methods on the loop, others in a thread of its own.

    A thread for each environment, since some libraries insist on the thread that they were created in.
    """

    def __init__(self, factory: EnvFactory) -> None:
        self._factory = factory
        self._environment: Any = None
        self._thread: ThreadPoolExecutor | None = None

    async def reset(self, data: dict[str, Any]) -> dict[str, Any]:
        if self._environment is None:
            self._environment = await self._in_thread(self._factory) if _is_slow(self._factory) else self._factory()
        reset = self._environment.reset
        observation = await self._call(reset, **_accepted(reset, data))
        return {"observation": _as_object(observation), "reward": None, "done": False}

    async def step(self, action: dict[str, Any]) -> dict[str, Any]:
        if self._environment is None:
            raise _MessageError("EXECUTION_ERROR", "step before reset: this connection has no episode yet.")
        observation, reward, done = await self._call(self._environment.step, action)
        if reward is not None and not math.isfinite(reward := float(reward)):
            raise ValueError(f"the reward is {reward}; JSON would turn it into no reward.")
        return {"observation": _as_object(observation), "reward": reward, "done": bool(done)}

    def state(self) -> dict[str, Any]:
        state = getattr(self._environment, "state", None)
        return dict(state) if state else {}

    async def close(self) -> None:
        close = getattr(self._environment, "close", None)
        if close is not None:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self._call(close), _CLOSE_TIMEOUT)
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    async def _call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if inspect.iscoroutinefunction(method):
            return await method(*args, **kwargs)
        return await self._in_thread(lambda: method(*args, **kwargs))

    async def _in_thread(self, call: Callable[[], Any]) -> Any:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "environment")
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)


class _EnvApp:
    """The routes over one factory."""

    def __init__(self, factory: EnvFactory, name: str, max_concurrent_envs: int, idle_timeout: float) -> None:
        self.factory = factory
        self.name = name
        self.max_concurrent_envs = max_concurrent_envs
        self.idle_timeout = idle_timeout
        self.concurrent_envs = 0

    async def websocket(self, socket: WebSocket) -> None:
        await socket.accept()
        if self.concurrent_envs >= self.max_concurrent_envs:
            await _send_error(socket, "CAPACITY_REACHED", f"All {self.max_concurrent_envs} environments are taken.")
            await socket.close()
            return
        self.concurrent_envs += 1
        hosted = _Hosted(self.factory)
        try:
            await self._serve(socket, hosted)
        except WebSocketDisconnect:
            pass
        finally:
            self.concurrent_envs -= 1
            await hosted.close()
            with contextlib.suppress(RuntimeError, WebSocketDisconnect):  # the client closed first
                await socket.close()

    async def _serve(self, socket: WebSocket, hosted: _Hosted) -> None:
        while True:
            try:
                raw = await asyncio.wait_for(socket.receive_text(), self.idle_timeout)
            except TimeoutError:
                await _send_error(socket, "SESSION_ERROR", f"No message for {self.idle_timeout:.0f} s.")
                return
            except KeyError:  # a binary frame
                await _send_error(socket, "INVALID_JSON", "Messages are text frames.")
                continue
            try:
                answer = await self._answer(raw, hosted)
            except _MessageError as error:
                await _send_error(socket, error.code, str(error))
                continue
            if answer is None:
                return
            await socket.send_text(orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY).decode())

    async def _answer(self, raw: str, hosted: _Hosted) -> dict[str, Any] | None:
        """The reply to one message, None for `close`."""
        try:
            message = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise _MessageError("INVALID_JSON", f"Invalid JSON: {error}") from None
        kind = message.get("type") if isinstance(message, dict) else None
        data = message.get("data", {}) if isinstance(message, dict) else {}
        if not isinstance(data, dict):
            raise _MessageError("VALIDATION_ERROR", "`data` must be an object.")
        if kind == "close":
            return None
        if kind == "state":
            return {"type": "state", "data": hosted.state()}
        if kind not in ("reset", "step"):
            raise _MessageError("UNKNOWN_TYPE", f"Unknown message type: {kind}")
        return {
            "type": "observation",
            "data": await _played(hosted.reset(data) if kind == "reset" else hosted.step(data)),
        }

    # -- plain HTTP -----------------------------------------------------------------------------------------
    # As in OpenEnv, these have no connection of their own: each request has an environment of its own.

    async def reset(self, request: Request) -> JSONResponse:
        return await self._once(request, lambda hosted, body: hosted.reset(body))

    async def step(self, request: Request) -> JSONResponse:
        return await self._once(request, lambda hosted, body: hosted.step(body.get("action", {})))

    async def state(self, _: Request) -> JSONResponse:
        return JSONResponse({"episode_id": None, "step_count": 0})

    async def health(self, _: Request) -> JSONResponse:
        return JSONResponse({"status": "healthy"})

    async def metadata(self, _: Request) -> JSONResponse:
        description = inspect.getdoc(self.factory) or f"{self.name} environment"
        return JSONResponse({"name": self.name, "description": description, "version": "1.0.0"})

    async def schema(self, _: Request) -> JSONResponse:
        anything = {"type": "object"}
        schemas = {kind: getattr(self.factory, f"{kind}_schema", anything) for kind in ("action", "observation")}
        return JSONResponse(schemas | {"state": anything})

    async def _once(self, request: Request, call: Callable[[_Hosted, dict[str, Any]], Any]) -> JSONResponse:
        raw = await request.body()
        hosted = _Hosted(self.factory)
        try:
            body = orjson.loads(raw) if raw else {}
            if not isinstance(body, dict):
                return JSONResponse({"detail": "The body must be an object."}, 422)
            return JSONResponse(await _played(call(hosted, body)))
        except orjson.JSONDecodeError as error:
            return JSONResponse({"detail": f"Invalid JSON: {error}"}, 422)
        except _MessageError as error:
            return JSONResponse({"detail": str(error)}, 500)
        finally:
            await hosted.close()


def create_env_app(
    factory: EnvFactory, *, name: str | None = None, max_concurrent_envs: int = 1024, idle_timeout: float = 3600.0
) -> Starlette:
    """The application that serves environments made by `factory()`, one for each WebSocket connection.

    Beyond `max_concurrent_envs` a client is told CAPACITY_REACHED; a connection without a message for
    `idle_timeout` seconds is ended.
    """
    name = name or str(getattr(factory, "__name__", type(factory).__name__))
    app = _EnvApp(factory, name, max_concurrent_envs, idle_timeout)
    return Starlette(
        routes=[
            WebSocketRoute("/ws", app.websocket),
            Route("/reset", app.reset, methods=["POST"]),
            Route("/step", app.step, methods=["POST"]),
            *(Route(f"/{kind}", getattr(app, kind)) for kind in ("state", "health", "metadata", "schema")),
        ]
    )


async def _played(call: Any) -> dict[str, Any]:
    """Await a call into the user's environment; whatever it raises becomes the client's error message."""
    try:
        result: dict[str, Any] = await call
    except _MessageError:
        raise
    except Exception as error:
        logger.warning("The environment raised.", exc_info=True)
        raise _MessageError("EXECUTION_ERROR", f"{type(error).__name__}: {error}") from error
    return result


async def _send_error(socket: WebSocket, code: str, message: str) -> None:
    await socket.send_text(orjson.dumps({"type": "error", "data": {"message": message, "code": code}}).decode())


def _accepted(method: Callable[..., Any], data: dict[str, Any]) -> dict[str, Any]:
    """Those of `data` that `method` takes: OpenEnv's reset options are hints."""
    parameters = inspect.signature(method).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return data
    return {key: value for key, value in data.items() if key in parameters}


def _is_slow(factory: EnvFactory) -> bool:
    """Whether making one may block: an environment of plain methods is made in the thread that runs it."""
    return not inspect.iscoroutinefunction(getattr(factory, "reset", None))


def _as_object(observation: Any) -> dict[str, Any]:
    if isinstance(observation, str):
        return {"text": observation}
    if not isinstance(observation, dict):
        raise TypeError(f"an observation must be a dict or a string, not {type(observation).__name__}.")
    return observation


# -- running one --------------------------------------------------------------------------------------------


class EnvServer:
    """An environment server in a child process; a context manager. It never outlives its parent."""

    def __init__(self, environment: str, *, startup_timeout: float = 60.0, **settings: Any) -> None:
        """`environment` is "module:Class"; `settings` are those of `EnvServerArgs`."""
        argument = {"environment": environment, "port": 0} | settings
        self._child = ChildProcess("env-server", "verl_server.rollout.env_process", argument)
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


def load_factory(environment: str, kwargs: dict[str, Any] | None = None) -> EnvFactory:
    """The factory named "module:Class", with its keyword arguments bound. Raises BadRequestError."""
    module, _, attribute = environment.partition(":")
    if not attribute:
        raise BadRequestError(f"Name the environment as MODULE:CLASS, not {environment!r}.")
    if "" not in sys.path:
        sys.path.insert(0, "")  # a module beside the user, as with `python -m`
    try:
        factory: EnvFactory = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise BadRequestError(f"Cannot load the environment {environment!r}: {error}") from error
    return _Bound(factory, kwargs) if kwargs else factory


class _Bound:
    """A factory with arguments that still shows the class's name, documentation and schemas."""

    def __init__(self, factory: EnvFactory, kwargs: dict[str, Any]) -> None:
        self._factory = factory
        self._kwargs = kwargs
        self.__doc__ = factory.__doc__

    def __call__(self) -> Any:
        return self._factory(**self._kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._factory, name)


def uvicorn_config(app: Starlette) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_config=None,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="websockets-sansio",
        ws_max_size=MAX_MESSAGE_BYTES,
        ws_ping_interval=None,
        ws_per_message_deflate=False,
        timeout_graceful_shutdown=2,
        server_header=False,
        backlog=4096,
    )

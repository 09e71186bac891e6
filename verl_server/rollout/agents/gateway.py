"""An agent's environment without its rewards: `GuardedEnvironment` for functions, `EnvironmentGateway` for programs.

The runner resets the environment once and sums the rewards. The agent receives observations only, and cannot start a
second episode. A program reaches its environment behind a random URL of the gateway:

    GET  URL/observation            → {"observation": text, "done": bool}
    POST URL/step {"text": text}    → {"observation": text, "done": bool}
    GET  URL/tools                  → {"tools": [...]}
    POST URL/call {"name": name, "arguments": {...}} → {"result": text}
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from jsonschema.exceptions import best_match
from jsonschema.validators import Draft202012Validator, validator_for
from referencing import Registry
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from verl_server.errors import BadRequestError
from verl_server.ipc.descriptors import DESCRIPTOR_SLACK, raise_descriptor_limit
from verl_server.ipc.sockets import bind_socket
from verl_server.rollout.environment import EnvError, EnvTimeoutError
from verl_server.rollout.environments.text import TextEnvironment
from verl_server.web.bodies import bounded_body
from verl_server.web.http_server import GuardedServer
from verl_server.web.json_errors import json_error_handlers

T = TypeVar("T")

MAX_BODY_BYTES = 16 * 2**20
_KEEP_ALIVE = 3600
"""Seconds that an idle connection stays open.

A program sends nothing to the gateway while it generates. If the gateway closed the connection during that time, the
program's next call could fail. The connection ends with the program.
"""


class GuardedEnvironment:
    """One episode of an environment without its rewards, for the agent. Only the runner has the rewards (`Referee`)."""

    def __init__(self, referee: Referee) -> None:
        self.__referee = referee

    @property
    def tools(self) -> list[dict[str, Any]]:
        """Tools in the shape of OpenAI's `tools`."""
        return self.__referee.tools

    @property
    def observation(self) -> str:
        """The newest observation."""
        return self.__referee.observation

    @property
    def done(self) -> bool:
        """True if the episode is over."""
        return self.__referee.done

    async def step(self, text: str) -> tuple[str, bool]:
        """Play the policy's text and return (observation, done). Raise BadRequestError after the episode's end."""
        return await self.__referee.step(text)

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Call a tool and return its result as text. Raise BadRequestError for an unknown tool or wrong arguments."""
        return await self.__referee.call(name, arguments)


class Referee:
    """The runner's side of one episode. It bounds calls, sums rewards, and keeps the fault that ended the episode."""

    def __init__(
        self, environment: TextEnvironment, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`seconds` bounds each call of the environment."""
        self._environment = environment
        self._seconds = seconds
        self._clock = clock
        self._lock = asyncio.Lock()
        self.tools: list[dict[str, Any]] = []
        self.observation = ""
        self.done = False
        self.reward = 0.0
        self.has_reward = False
        """True once a step has returned a reward."""
        self.calls = 0
        """Number of calls that have begun. Together with `waiting`, the number shows that the agent is active."""
        self.waiting = 0
        """Number of calls that run now."""
        self.fault: asyncio.Future[EnvError] = asyncio.get_running_loop().create_future()
        """Result: the first fault of the environment. The future is pending until a fault occurs."""
        self.events: list[tuple[str, float, float]] = []

    @property
    def folder(self) -> Path | None:
        """Folder of the task's files, in which a program works. None for environments without one."""
        folder = getattr(self._environment, "folder", None)
        return None if folder is None else Path(folder)

    async def reset(self, seed: int | None) -> None:
        """Start the episode. Raise EnvError."""
        self.observation = await self._bounded("reset", self._environment.reset(seed))
        self.tools = self._environment.tools

    async def step(self, text: str) -> tuple[str, bool]:
        async with self._lock:
            if self.done:
                raise BadRequestError("The episode is over: the environment accepts no other step.")
            own = getattr(self._environment, "step_seconds", None)  # an environment that runs tests says how long
            seconds = self._seconds if own is None else max(self._seconds, own)
            self.observation, reward, self.done = await self._bounded("step", self._environment.step(text), seconds)
            self.reward += reward or 0.0
            self.has_reward |= reward is not None
            return self.observation, self.done

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        names = [tool.get("function", {}).get("name") for tool in self.tools]
        if name not in names:
            raise BadRequestError(f"There is no tool {name!r}. The tools: {', '.join(map(str, names)) or 'none'}.")
        wrong = _violation(self.tools[names.index(name)]["function"].get("parameters") or {}, arguments)
        if wrong is not None:
            raise BadRequestError(f"The arguments of {name} are wrong: {wrong}")
        return await self._bounded("call", self._environment.call(name, arguments))

    async def close(self) -> None:
        """Close the environment within its time limit. Raise nothing."""
        with contextlib.suppress(Exception):
            async with asyncio.timeout(self._seconds):
                await self._environment.close()

    async def _bounded(self, what: str, work: Coroutine[Any, Any, T], seconds: float | None = None) -> T:
        seconds = seconds or self._seconds
        if self.fault.done():
            work.close()
            raise self.fault.result()
        self.calls += 1
        self.waiting += 1
        start = self._clock()
        try:
            async with asyncio.timeout(seconds):
                return await work
        except TimeoutError:
            raise self._failed(
                EnvTimeoutError(
                    f"The environment did not answer `{what}` within {seconds:.3g} s (AgentLimits.environment_seconds)."
                )
            ) from None
        except BadRequestError:
            raise  # the agent's fault: the episode goes on
        except EnvError as error:
            self._failed(error)
            raise  # with its cause, which says whether the environment was away
        except Exception as error:
            raise self._failed(
                EnvError(f"The environment's `{what}` raised {type(error).__name__}: {error}")
            ) from error
        finally:
            self.waiting -= 1
            self.events.append(("env", start, self._clock()))

    def _failed(self, error: EnvError) -> EnvError:
        if not self.fault.done():
            self.fault.set_result(error)
        return error


def _violation(schema: dict[str, Any], arguments: dict[str, Any]) -> str | None:
    """Return where and how arguments violate a tool's schema. None if they are valid, or if the schema is unusable."""
    try:
        validator = validator_for(schema, default=Draft202012Validator)(
            schema, registry=Registry()
        )  # downloads nothing
        error = best_match(validator.iter_errors(arguments))
    except Exception:
        return None  # an environment with a faulty schema checks its arguments itself
    return None if error is None else f"`arguments{error.json_path.removeprefix('$')}`: {error.message[:500]}"


class EnvironmentGateway:
    """Serves the environments of agent programs over HTTP on the loopback address. Start it with `running`."""

    def __init__(self) -> None:
        self._referees: dict[str, Referee] = {}
        self._url = ""

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[EnvironmentGateway]:
        """Serve on this event loop until the block ends."""
        routes = [
            Route("/{token}/observation", partial(self._answer, self._observation), methods=["GET"]),
            Route("/{token}/step", partial(self._answer, self._step), methods=["POST"]),
            Route("/{token}/tools", partial(self._answer, self._tools), methods=["GET"]),
            Route("/{token}/call", partial(self._answer, self._call), methods=["POST"]),
        ]
        app = Starlette(routes=routes, exception_handlers=json_error_handlers("error"))
        app.router.redirect_slashes = False
        limit = raise_descriptor_limit()
        server = _Server(
            app,
            max(limit - DESCRIPTOR_SLACK, limit // 2),
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_keep_alive=_KEEP_ALIVE,
            timeout_graceful_shutdown=1,
        )
        with bind_socket("127.0.0.1", 0) as sock:
            self._url = f"http://127.0.0.1:{sock.getsockname()[1]}"
            serving = asyncio.create_task(server.serve([sock]))
            try:
                yield self
            finally:
                server.should_exit = True
                await serving

    @contextlib.contextmanager
    def serving(self, referee: Referee) -> Iterator[str]:
        """Yield the URL of one episode's environment, which ends with the block."""
        token = secrets.token_urlsafe(24)
        self._referees[token] = referee
        try:
            yield f"{self._url}/{token}"
        finally:
            del self._referees[token]

    async def _observation(self, referee: Referee, body: dict[str, Any]) -> dict[str, Any]:
        return {"observation": referee.observation, "done": referee.done}

    async def _step(self, referee: Referee, body: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(body.get("text"), str):
            raise BadRequestError('The body must be {"text": TEXT}.')
        observation, done = await referee.step(body["text"])
        return {"observation": observation, "done": done}

    async def _tools(self, referee: Referee, body: dict[str, Any]) -> dict[str, Any]:
        return {"tools": referee.tools}

    async def _call(self, referee: Referee, body: dict[str, Any]) -> dict[str, Any]:
        arguments = body.get("arguments", {})
        if not isinstance(body.get("name"), str) or not isinstance(arguments, dict):
            raise BadRequestError('The body must be {"name": NAME, "arguments": {...}}.')
        return {"result": await referee.call(body["name"], arguments)}

    async def _answer(self, work: Callable[[Referee, dict[str, Any]], Any], request: Request) -> Response:
        referee = self._referees.get(request.path_params["token"])
        if referee is None:
            return JSONResponse({"error": "There is no such environment, or its episode is over."}, 404)
        try:
            return JSONResponse(await work(referee, await _body(request)))
        except BadRequestError as error:
            return JSONResponse({"error": str(error)}, 400)
        except EnvError as error:
            return JSONResponse({"error": str(error)}, 502)


class _Server(GuardedServer):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers, because they belong to the program in which this server runs."""
        yield


async def _body(request: Request) -> dict[str, Any]:
    if request.method == "GET":
        return {}
    data = await bounded_body(request, MAX_BODY_BYTES)
    if data is None:
        raise BadRequestError(f"The body is larger than {MAX_BODY_BYTES} bytes.")
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise BadRequestError(f"The body is not a JSON object: {error}") from None

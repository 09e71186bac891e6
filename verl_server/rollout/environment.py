"""Environments: the interface that a user implements, and the client of an environment server.

`Environment` is the interface; `env_server` serves it. `RemoteEnvironment` is one connection to any server that speaks
OpenEnv's protocol: a WebSocket at `/ws` that carries `reset`, `step`, `state` and `close`. An environment lives as long
as its connection, which belongs to one `Episode`. Every wait has a bound. Every fault of the environment or its server
is an `EnvError`, which ends one trajectory.

A server that is away is tried again until an episode has begun: as long as `reset` was not sent, nothing can have
happened. What was sent is never sent again. The server may have played it before the connection broke, and its answer,
the observation that the policy would have read, is lost with the environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import ssl
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import httpx
import orjson
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI, WebSocketException
from websockets.protocol import State

from verl_server.errors import BadRequestError, VerlServerError
from verl_server.rollout.away import Tries

T = TypeVar("T")

Observation = dict[str, Any]
Action = dict[str, Any]
Info = dict[str, Any]

ResetReturn = Observation | str | tuple[Observation | str, Info]
StepReturn = tuple[Observation | str, float | None, bool] | tuple[Observation | str, float | None, bool, bool, Info]

MAX_MESSAGE_BYTES = 100 * 2**20
"""Largest message in bytes: OpenEnv's limit. Observations may be screenshots."""


KEY_VARIABLE = "VERL_ENV_API_KEY"
"""Variable of the process environment with the key of environment servers."""


def key_headers() -> dict[str, str]:
    """Return the header with the key of VERL_ENV_API_KEY, {} if there is no key."""
    key = os.environ.get(KEY_VARIABLE)
    return {"Authorization": f"Bearer {key}"} if key else {}


class EnvError(VerlServerError):
    """The environment failed: it refused a call, answered with an error or with invalid data, or disconnected."""


class EnvTimeoutError(EnvError, TimeoutError):
    """The environment did not answer in time."""


class EnvAwayError(EnvError):
    """The server could not be reached within the time for connecting. Nothing was sent to it."""


class _UnsentError(EnvError):
    """The server closed the connection before a message was sent."""


class EnvBusyError(EnvError):
    """The server has no room for another environment now."""


class ActionRefusedError(EnvError):
    """The environment refused an action: it violates the schema of actions."""


class Environment(Protocol):
    """The interface that a user implements. An environment plays one episode at a time. Both methods may be `async`.

    An observation is a dict, or a string, which is sent as {"text": string}. Optional members of the class:

    - `action_schema`, a JSON schema. An action that violates it is refused with VALIDATION_ERROR and the name of the
      field. `step` is not called, and the episode goes on: the client may send another action. An `AgentLoop` sends
      none and ends the episode as ACTION_REFUSED. So the schema should describe how a renderer packs the
      policy's text, and `step` should judge what the text says.
    - `observation_schema`, a JSON schema that clients can ask for. Observations are not checked.
    - Methods with the decorator `verl_server.rollout.environments.tools.tool`, which clients call by name at `/mcp`, or
      with the actions of OpenEnv's tool client. An environment without such methods offers its `step` as the tool `act`
      if it has an `action_schema`.
    - `state`, a property that is a dict.
    - `close()`, called when the client leaves.
    """

    def reset(self, seed: int | None = None) -> ResetReturn | Awaitable[ResetReturn]:
        """Start an episode that depends on `seed` only, and return its first observation, or (observation, info).

        `reset` may also take `episode_id` and other keyword arguments.
        """

    def step(self, action: Action) -> StepReturn | Awaitable[StepReturn]:
        """Play an action and return (observation, reward, done). The reward is None if the step has none.

        Gymnasium's (observation, reward, terminated, truncated, info) is accepted: `done` is then `terminated or
        truncated`, and `info` is not sent to the client.
        """


@dataclass(frozen=True, slots=True)
class StepResult:
    """An environment's answer to `reset` (reward None) or `step`."""

    observation: Observation
    """Observation after the action."""
    reward: float | None
    """Reward of the action, None if the environment returned none."""
    done: bool
    """True if the episode is over."""


@dataclass(frozen=True, slots=True)
class EnvTimeouts:
    """Times for one environment, in seconds. An episode that exceeds one of them ends without a reward."""

    connect: float = 10.0
    """Time for opening the connection. A server that is away (it refuses or drops the connection, or a proxy answers
    502, 503 or 504) is tried again, with growing pauses, until this time is over."""
    capacity: float = 60.0
    """Time for which the connection to a full server is tried again."""
    reset: float = 60.0
    """Time for `reset`, which may have to start a sandbox."""
    step: float = 30.0
    """Time for one `step`."""
    close: float = 2.0
    """Time for closing the connection. After this time the connection is dropped."""

    def __post_init__(self) -> None:
        check_seconds("EnvTimeouts", self, [field.name for field in fields(self)])


def check_seconds(owner: str, values: object, names: Iterable[str]) -> None:
    """Raise BadRequestError unless each named attribute is a positive number of seconds or None."""
    for name in names:
        value = getattr(values, name)
        if value is not None and not value > 0:
            raise BadRequestError(f"{owner}.{name} must be more than 0 seconds, not {value}.")


class RemoteEnvironment:
    """One connection to an OpenEnv server, for one asyncio task. Use it with `async with`."""

    def __init__(
        self,
        url: str,
        timeouts: EnvTimeouts | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        is_patient: bool = True,
    ) -> None:
        """`headers` are sent beside the key. If it is not patient, a server that is away is an error at once."""
        self.url = websocket_url(url)
        self._timeouts = timeouts or EnvTimeouts()
        self._is_patient = is_patient
        self._headers = key_headers() | dict(headers or {})
        self._socket: ClientConnection | None = None

    async def reset(self, seed: int | None = None, **options: Any) -> StepResult:
        """Connect if there is no open connection, and start an episode.

        Raise EnvAwayError if the server is away for longer than `timeouts.connect`, and EnvBusyError if it is full for
        longer than `timeouts.capacity`.
        """
        data = {"seed": seed} | options if seed is not None else options
        tries = Tries(self._timeouts.connect)
        deadline = time.monotonic() + self._timeouts.capacity
        pause = 0.02
        if self._socket is not None and self._socket.state is not State.OPEN:
            await self.close()  # lost since the last episode
        while True:
            try:
                await self._connect()
                return await self._ask({"type": "reset", "data": data}, "reset")
            except _UnsentError as error:
                await self.close()
                if not await tries.again(error):
                    raise self._away(tries) from error
            except EnvBusyError as error:
                await self.close()
                if time.monotonic() + pause > deadline:
                    waited = f"waited {self._timeouts.capacity:.3g} s for room; the bound is EnvTimeouts.capacity"
                    raise EnvBusyError(f"{error} ({waited})") from None
                await asyncio.sleep(pause)
                pause = min(1.0, pause * 2)

    async def step(self, action: Action) -> StepResult:
        """Play an action and return the environment's answer. Raise EnvError or EnvTimeoutError."""
        return await self._ask({"type": "step", "data": action}, "step")

    async def state(self) -> dict[str, Any]:
        """Return the environment's `state`, a dict."""
        return await self._exchange({"type": "state"}, "state", "step")

    async def close(self) -> None:
        """Close the connection within `timeouts.close`. Raise nothing. It may be called twice."""
        socket, self._socket = self._socket, None
        if socket is None:
            return
        try:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(self._timeouts.close):
                    await socket.send(orjson.dumps({"type": "close"}).decode())
                    await socket.close()
        finally:
            if socket.transport is not None:
                socket.transport.abort()

    async def __aenter__(self) -> RemoteEnvironment:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # -- the wire -------------------------------------------------------------------------------------------

    async def _connect(self) -> None:
        if self._socket is not None:
            return
        tries = Tries(self._timeouts.connect)

        async def open_socket() -> ClientConnection:
            while True:
                try:
                    return await connect(
                        self.url,
                        additional_headers=self._headers,
                        open_timeout=None,
                        close_timeout=self._timeouts.close,
                        max_size=MAX_MESSAGE_BYTES,
                        compression=None,
                        ping_interval=None,  # an environment that computes for minutes may not answer pings
                        proxy=None if _is_local(self.url) else True,
                    )
                except Exception as error:
                    if not (self._is_patient and _is_away(error)):
                        raise
                    if not await tries.again(error):
                        raise self._away(tries) from error

        try:
            self._socket = await self._bounded(open_socket, "connect", "accept a connection")
        except EnvTimeoutError:
            if tries.error is None:
                raise
            raise self._away(tries) from tries.error  # the bound was over during another try

    def _away(self, tries: Tries) -> EnvAwayError:
        return EnvAwayError(
            f"{self.url} did not accept a connection within {self._timeouts.connect:.3g} s (EnvTimeouts.connect), "
            f"tried {tries.failed} times: {tries.error!r}"
        )

    async def _ask(self, message: dict[str, Any], bound: str) -> StepResult:
        return _step_result(await self._exchange(message, "observation", bound), self.url)

    async def _exchange(self, message: dict[str, Any], answer: str, bound: str) -> dict[str, Any]:
        """Send a message and return the `data` of its answer. `bound` names the field of `EnvTimeouts` that applies.

        After an error the connection cannot be used any more.
        """
        socket = self._socket
        if socket is None:
            raise EnvError(f"{self.url}: the connection is not open; call reset() first.")

        async def exchange() -> str | bytes:
            is_closed = socket.state is not State.OPEN  # then `send` raises, and sends nothing
            with contextlib.suppress(ConnectionClosed):  # recv returns what was sent before, or raises
                await socket.send(orjson.dumps(message).decode())
            try:
                return await socket.recv()
            except ConnectionClosed as error:
                if not is_closed:
                    raise
                raise _UnsentError(f"{self.url} closed the connection before `{message['type']}`: {error!r}") from error

        raw = await self._bounded(exchange, bound, f"answer `{message['type']}`")
        return _payload(raw, answer, self.url, message["type"])

    async def _bounded(self, work: Callable[[], Awaitable[T]], bound: str, what: str) -> T:
        timeout = getattr(self._timeouts, bound)
        try:
            async with asyncio.timeout(timeout):
                return await work()
        except TimeoutError:
            raise EnvTimeoutError(f"{self.url} did not {what} within {timeout:.3g} s (EnvTimeouts.{bound}).") from None
        except InvalidStatus as error:
            status = error.response.status_code
            remedy = f" Set {KEY_VARIABLE} to its key." if status == 401 else ""
            raise EnvError(f"{self.url} answered HTTP {status}, not a WebSocket.{remedy}") from None
        except (OSError, WebSocketException, InvalidHandshake, InvalidURI, EOFError, ValueError) as error:
            # ValueError: the server redirects to an address that is no URL.
            raise EnvError(f"{self.url} did not {what}: {error!r}") from error


def _is_away(error: Exception) -> bool:
    """Return True if `error`, of an attempt to open a WebSocket, means that the server may be back in a moment."""
    if isinstance(error, InvalidStatus):
        return error.response.status_code in (502, 503, 504)  # a proxy, whose server is away
    if isinstance(error, InvalidHandshake):
        return isinstance(error.__cause__, EOFError | OSError)  # the connection ended before the answer
    if isinstance(error, ssl.SSLCertVerificationError):
        return False
    return isinstance(error, OSError | EOFError | ConnectionClosed)  # uvloop: ConnectionClosed before the request


def websocket_url(url: str) -> str:
    """Return the `/ws` address of a server, from an http://, https://, ws:// or wss:// URL or from host:port."""
    base = (url if "://" in url else f"http://{url}").rstrip("/")
    scheme, _, rest = base.partition("://")
    schemes = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
    if scheme not in schemes or not rest:
        raise BadRequestError(f"{url!r} is not the URL of an environment server; write it as http://HOST:PORT.")
    path = rest if rest.endswith("/ws") else f"{rest}/ws"
    return f"{schemes[scheme]}://{path}"


def environment_schema(url: str, timeout: float) -> dict[str, Any] | None:
    """Return the JSON schema of actions that an environment server answers at `/schema`, or None.

    `timeout` is in seconds. Return None if the answer holds no schema, or if the server cannot be reached within
    `timeout`. The episodes then report that the server cannot be reached.
    """
    scheme, _, rest = websocket_url(url).partition("://")
    address = f"{scheme.replace('ws', 'http')}://{rest.removesuffix('/ws')}/schema"
    try:
        with httpx.Client(timeout=timeout, trust_env=not _is_local(address)) as client:
            answer = client.get(address, headers=key_headers())
        content = orjson.loads(answer.content) if answer.status_code == 200 else None
    except (httpx.HTTPError, orjson.JSONDecodeError):
        return None
    schema = content.get("action") if isinstance(content, dict) else None
    return schema if isinstance(schema, dict) else None


def _is_local(url: str) -> bool:
    return urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")


def _payload(raw: str | bytes, answer: str, url: str, request: str) -> dict[str, Any]:
    """Return the `data` of a message of type `answer`, which answers one of type `request`.

    Raise EnvError for any other message: ActionRefusedError if a `step` was refused.
    """
    try:
        message = orjson.loads(raw)
    except orjson.JSONDecodeError:
        raise EnvError(f"{url} sent something that is not JSON: {raw[:200]!r}") from None
    data = message.get("data") if isinstance(message, dict) else None
    if not isinstance(data, dict):
        raise EnvError(f"{url} sent a message without an object `data`: {raw[:200]!r}")
    if message.get("type") == "error":
        code = str(data.get("code", "UNKNOWN"))
        text = f"{url} reports {code}: {str(data.get('message', 'no message'))[:1000]}"
        if code == "VALIDATION_ERROR" and request == "step":
            raise ActionRefusedError(text)
        raise EnvBusyError(text) if code == "CAPACITY_REACHED" else EnvError(text)
    if message.get("type") != answer:
        raise EnvError(f"{url} answered with type {message.get('type')!r} instead of {answer!r}.")
    return data


def _step_result(data: dict[str, Any], url: str) -> StepResult:
    observation, reward, done = data.get("observation"), data.get("reward"), data.get("done", False)
    if not isinstance(observation, dict):
        raise EnvError(f"{url} sent an observation that is not an object: {str(observation)[:200]}")
    if reward is not None and (not isinstance(reward, int | float) or not math.isfinite(reward)):
        raise EnvError(f"{url} sent a reward that is not a finite number: {reward!r}")
    if not isinstance(done, bool):
        raise EnvError(f"{url} sent `done` that is not true or false: {done!r}")
    return StepResult(observation, None if reward is None else float(reward), done)

"""`SessionsClient`: the owner's side of sessions on one server, over HTTP.

`run_agents` and `verl-server trajectories` use it. It has an owner's key, which no agent receives.
"""

from __future__ import annotations

import contextlib
from types import TracebackType
from typing import Any, TypeVar

import httpx
import msgspec

from verl_server.engine.http_clients import aiohttp_transport
from verl_server.engine.server_address import server_address
from verl_server.errors import (
    BadRequestError,
    ServerDiedError,
    ServerUnavailableError,
    SessionEndedError,
    SessionError,
    SessionNotFoundError,
    VerlServerError,
    error_for_status,
)
from verl_server.files.json_values import jsonable
from verl_server.messages.io_struct import INSTANCE_HEADER
from verl_server.messages.session_types import (
    CreatedSession,
    CreateSession,
    FinishBody,
    RewardBody,
    SessionInfo,
    SessionList,
    SessionTrajectory,
)
from verl_server.rollout.agents.types import Served

T = TypeVar("T")

_TIMEOUT = httpx.Timeout(60.0, connect=10.0)
_CONNECTIONS = 32
"""Most connections to one server."""
_PAGE = 1000
"""Sessions of one page of `GET /sessions`."""


class _Model(msgspec.Struct):
    """The keys of `/model_info` that name the model and the version of its weights."""

    model_path: str | None = None
    weight_version: str | None = None


class _Card(msgspec.Struct):
    """A model of `/v1/models`."""

    id: str
    max_model_len: int | None = None


class _Cards(msgspec.Struct):
    data: list[_Card] = []


class _Scheduler(msgspec.Struct):
    max_req_input_len: int | None = None


class _ServerInfo(msgspec.Struct):
    """The keys of `/server_info` about the size of the KV cache."""

    scheduler_info: _Scheduler = msgspec.field(default_factory=_Scheduler)


class SessionsClient:
    """A client for one event loop, used with `async with`. Its methods raise ServerDiedError if there is no answer."""

    def __init__(self, url: str, api_key: str, transport: httpx.AsyncBaseTransport | None = None) -> None:
        """`api_key` is the server's API key or admin key. `transport` replaces the network in tests."""
        self.url = server_address(url)
        self.run: str | None = None
        """Id of the server's run that answered last. A server that is started again has another id."""
        self._client = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {api_key}"},
            timeout=_TIMEOUT,
            transport=transport or aiohttp_transport(_CONNECTIONS),
        )

    async def create(self, request: CreateSession) -> CreatedSession:
        """Open a session. Raise BadRequestError if the server has no key, hence no sessions."""
        return await self._sent("POST", "/sessions", CreatedSession, request)

    async def reward(self, session_id: str, reward: float, name: str = "reward") -> None:
        """Record a reward. The same name replaces an earlier value."""
        await self._sent("POST", f"/sessions/{session_id}/reward", Any, RewardBody(reward=reward, name=name))

    async def finish(self, session_id: str, reason: str) -> SessionInfo:
        """End the session. Running generations are aborted and recorded, and the session key becomes invalid."""
        return await self._sent("POST", f"/sessions/{session_id}/finish", SessionInfo, FinishBody(reason=reason))

    async def trajectory(self, session_id: str) -> SessionTrajectory:
        """Return the session's branches, with the texts of their turns."""
        path = f"/sessions/{session_id}/trajectory"
        return await self._sent("GET", path, SessionTrajectory, params={"text": "true"})

    async def get(self, session_id: str) -> SessionInfo:
        """Return a session with its children and its tree of turns."""
        return await self._sent("GET", f"/sessions/{session_id}", SessionInfo)

    async def has(self, session_id: str) -> bool:
        """Return False if the server that has the session is away, or has lost it."""
        try:
            await self.get(session_id)
        except (ServerDiedError, ServerUnavailableError, SessionNotFoundError):
            return False
        except VerlServerError:
            pass
        return True

    async def list(self, group: str | None = None) -> list[SessionInfo]:
        """Return all sessions, or those of a group."""
        found: list[SessionInfo] = []
        after: str | None = None
        while True:
            params = {"limit": str(_PAGE)} | ({"group": group} if group else {}) | ({"after": after} if after else {})
            page = await self._sent("GET", "/sessions", SessionList, params=params)
            found += page.sessions
            after = page.next
            if after is None:
                return found

    async def delete(self, session_id: str) -> None:
        """Delete the session. A session that does not exist is no error."""
        try:
            await self._sent("DELETE", f"/sessions/{session_id}", Any)
        except SessionNotFoundError:
            return

    async def model(self) -> str | None:
        """Return the served model, a folder or a hub id; None if the server does not name it, or is away."""
        return (await self._model()).model_path

    async def weight_version(self) -> str | None:
        """Return the version of the served weights; None if the server does not name it, or is away."""
        return (await self._model()).weight_version

    async def _model(self) -> _Model:
        try:
            return await self._sent("GET", "/model_info", _Model)
        except VerlServerError:
            return _Model()

    async def served(self) -> Served:
        """Return the name of the served model, and the longest sequence that context and KV cache allow.

        Raise BadRequestError if the server does not say so.
        """
        cards = (await self._sent("GET", "/v1/models", _Cards)).data
        if not cards or cards[0].max_model_len is None:
            raise BadRequestError(f"The server at {self.url} names no model with its context length at /v1/models.")
        context = cards[0].max_model_len
        try:
            longest = (await self._sent("GET", "/server_info", _ServerInfo)).scheduler_info.max_req_input_len
        except VerlServerError:  # a router before its first look
            longest = None
        # The last sampled token needs no place in the KV cache.
        return Served(cards[0].id, context if longest is None else min(context, longest + 1))

    async def is_open(self) -> bool:
        """Return True if the server generates for callers without a key.

        Raise ServerDiedError if it does not say so now: it is starting, or is a router without a healthy server.
        """
        try:
            request = self._client.build_request("POST", "/generate", json={})
            del request.headers["authorization"]
            answer = await self._client.send(request)
        except httpx.HTTPError as error:
            raise self._died(error) from None
        if answer.status_code in (502, 503, 504):
            raise ServerDiedError(str(self._refusal(answer)))
        return answer.status_code not in (401, 403)

    async def is_alive(self) -> bool:
        """Return True if the server answers."""
        try:
            answer = await self._client.get("/health", timeout=5.0)
        except httpx.HTTPError:
            return False
        self._note_run(answer)
        return answer.status_code == 200

    async def close(self) -> None:
        await self._client.aclose()

    async def __aenter__(self) -> SessionsClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def _sent(
        self, method: str, path: str, kind: type[T], body: Any = None, params: dict[str, str] | None = None
    ) -> T:
        content = None if body is None else msgspec.json.encode(body, enc_hook=jsonable)
        headers = {} if body is None else {"Content-Type": "application/json"}
        try:
            answer = await self._client.request(method, path, content=content, params=params, headers=headers)
        except httpx.HTTPError as error:
            raise self._died(error) from None
        self._note_run(answer)
        if answer.status_code >= 400:
            raise self._refusal(answer)
        try:
            return msgspec.json.decode(answer.content or b"null", type=kind)
        except msgspec.DecodeError as error:
            raise VerlServerError(f"{self.url} answered {method} {path} with other data: {error}") from None

    def _note_run(self, answer: httpx.Response) -> None:
        self.run = answer.headers.get(INSTANCE_HEADER, self.run)

    def _died(self, error: Exception) -> ServerDiedError:
        return ServerDiedError(f"The server at {self.url} does not answer: {error!r}.")

    def _refusal(self, answer: httpx.Response) -> VerlServerError:
        text = f"{self.url} answered HTTP {answer.status_code}: {_message(answer)}"
        kinds: dict[int, type[SessionError]] = {404: SessionNotFoundError, 410: SessionEndedError}
        if answer.status_code in kinds:
            return kinds[answer.status_code](text)
        return error_for_status(answer.status_code, text, BadRequestError, _code(answer))


def _code(answer: httpx.Response) -> object:
    """Return the code of an error, in the shape of OpenAI's and SGLang's dialects; None if there is none."""
    with contextlib.suppress(ValueError):
        content = answer.json()
        error = content.get("error") if isinstance(content, dict) else None
        return error.get("code") if isinstance(error, dict) else None
    return None


def _message(answer: httpx.Response) -> str:
    """Return the text of an error in any dialect's shape."""
    try:
        content = answer.json()
    except ValueError:
        return answer.text[:500]
    for key in ("error", "message", "detail"):
        value = content.get(key) if isinstance(content, dict) else None
        if isinstance(value, dict):
            value = value.get("message")
        if value:
            return str(value)[:500]
    return str(content)[:500]

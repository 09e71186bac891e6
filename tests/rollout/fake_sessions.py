"""A rollout server with sessions, as far as `rollout.agents` sees one: its wire without a model.

The policy is a script: a function from the chat's messages to the text of the answer. Ids are code points.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from verl_server.messages.session_types import (
    Branch,
    BranchTurn,
    CreateSession,
    FinishBody,
    Message,
    RewardBody,
    SessionInfo,
    SessionTrajectory,
    VersionSpan,
)

OWNER_KEY = "owner-key-that-no-agent-may-see"
Policy = Callable[[list[dict[str, Any]]], Any]


@dataclass
class FakeSession:
    request: CreateSession
    id: str
    key: str
    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    turns: list[BranchTurn] = field(default_factory=list)
    state: str = "open"
    reason: str = ""
    limit: str | None = None
    in_flight: int = 0
    active: float = field(default_factory=time.time)
    rewards: list[RewardBody] = field(default_factory=list)
    tasks: set[Any] = field(default_factory=set)

    def info(self) -> SessionInfo:
        return SessionInfo(
            id=self.id,
            group=self.request.group,
            state=self.state,  # type: ignore[arg-type]
            reason=self.reason,
            turns=len(self.turns),
            tokens=sum(self.mask),
            reward=self.rewards[-1].reward if self.rewards else None,
            created=self.active,
            active=self.active,
            metadata=self.request.metadata,
            in_flight=self.in_flight,
            limit=self.limit,
        )

    def record(self, prompt: str, answer: str) -> None:
        start = len(self.ids)
        self.ids += [ord(letter) for letter in prompt + answer]
        self.mask += [0] * len(prompt) + [1] * len(answer)
        end = len(self.ids)
        now = time.time()
        messages, reply = [Message("user", prompt)], Message("assistant", answer)
        self.turns.append(
            BranchTurn(
                *(len(self.turns), start, end - len(answer), end, "stop"),
                times=(now, now, now),
                messages=messages,
                reply=reply,
            )
        )

    def trajectory(self) -> SessionTrajectory:
        spans = [VersionSpan("7", turn.prompt_end, turn.end) for turn in self.turns]
        logprobs = [-0.5 if sampled else 0.0 for sampled in self.mask]
        branch = Branch(0, "main", self.id, self.turns, 0, self.ids, self.mask, logprobs, spans)
        return SessionTrajectory(
            session=self.id,
            state=self.state,  # type: ignore[arg-type]
            reason=self.reason,
            reward=self.info().reward,
            group=self.request.group,
            metadata=self.request.metadata,
            now=time.time(),
            branches=[branch] if self.turns else [],
        )


class FakeServer:
    """The state of one fake server. `log` has (method, path) of every request that an owner sent."""

    def __init__(self, policy: Policy, *, generates_openly: bool = False) -> None:
        self.policy = policy
        self.generates_openly = generates_openly
        self.sessions: dict[str, FakeSession] = {}
        self.ended: dict[str, FakeSession] = {}
        self.log: list[str] = []
        self.url = ""
        self.model: str | None = None
        """What `/model_info` names. None: the route is not there."""
        self.version = "7"
        self.context: int | None = 32768
        """What `/v1/models` names. None: the route has no model."""
        self.is_available = True
        """False: a request for a new session is answered with 503."""

    def app(self) -> Starlette:
        routes = [
            Route("/health", self._health),
            Route("/model_info", self._model_info),
            Route("/v1/models", self._models),
            Route("/generate", self._generate, methods=["POST"]),
            Route("/sessions", self._create, methods=["POST"]),
            Route("/sessions", self._list, methods=["GET"]),
            Route("/sessions/{id}", self._get, methods=["GET"]),
            Route("/sessions/{id}", self._delete, methods=["DELETE"]),
            Route("/sessions/{id}/trajectory", self._trajectory, methods=["GET"]),
            Route("/sessions/{id}/reward", self._reward, methods=["POST"]),
            Route("/sessions/{id}/finish", self._finish, methods=["POST"]),
            Route("/s/{key}/v1/chat/completions", self._chat, methods=["POST"]),
        ]
        return Starlette(routes=routes)

    async def _health(self, request: Request) -> Response:
        return JSONResponse({})

    async def _model_info(self, request: Request) -> Response:
        return JSONResponse({"model_path": self.model, "weight_version": self.version}, 200 if self.model else 404)

    async def _models(self, request: Request) -> Response:
        cards = [] if self.context is None else [{"id": "served", "max_model_len": self.context}]
        return JSONResponse({"object": "list", "data": cards})

    async def _generate(self, request: Request) -> Response:
        return JSONResponse({"error": "no prompt"}, 400 if self.generates_openly else 401)

    def _owned(self, request: Request) -> FakeSession | None:
        if request.headers.get("authorization") != f"Bearer {OWNER_KEY}":
            return None
        self.log.append(f"{request.method} {request.url.path}")
        return self.sessions.get(request.path_params.get("id", ""))

    def _refused(self, request: Request) -> Response:
        known = request.headers.get("authorization") == f"Bearer {OWNER_KEY}"
        return JSONResponse({"error": {"message": "no such session"}}, 404 if known else 403)

    async def _create(self, request: Request) -> Response:
        self._owned(request)
        if request.headers.get("authorization") != f"Bearer {OWNER_KEY}":
            return self._refused(request)
        if not self.is_available:
            return JSONResponse({"error": {"message": "not now"}}, 503)
        body = msgspec.json.decode(await request.body(), type=CreateSession)
        session = FakeSession(body, f"ses_{secrets.token_hex(8)}", f"vs-{secrets.token_urlsafe(32)}")
        self.sessions[session.id] = session
        created = {"id": session.id, "key": session.key, "base_url": f"/s/{session.key}/v1", "expires": None}
        return JSONResponse(created | {"anthropic_base_url": f"/s/{session.key}", "weight_version": self.version}, 201)

    async def _list(self, request: Request) -> Response:
        self._owned(request)
        return _json({"sessions": [s.info() for s in self.sessions.values()], "next": None})

    async def _get(self, request: Request) -> Response:
        session = self._owned(request)
        return _json(session.info()) if session else self._refused(request)

    async def _trajectory(self, request: Request) -> Response:
        session = self._owned(request)
        return _json(session.trajectory()) if session else self._refused(request)

    async def _reward(self, request: Request) -> Response:
        session = self._owned(request)
        if session is None:
            return self._refused(request)
        session.rewards.append(msgspec.json.decode(await request.body(), type=RewardBody))
        return _json(session.rewards[-1])

    async def _finish(self, request: Request) -> Response:
        session = self._owned(request)
        if session is None:
            return self._refused(request)
        if session.state == "open":
            session.state = "finished"
            session.reason = msgspec.json.decode(await request.body(), type=FinishBody).reason
        for task in list(session.tasks):
            task.cancel()
        return _json(session.info())

    async def _delete(self, request: Request) -> Response:
        session = self._owned(request)
        if session is None:
            return self._refused(request)
        self.ended[session.id] = self.sessions.pop(session.id)
        return JSONResponse({})

    async def _chat(self, request: Request) -> Response:
        key = request.path_params["key"]
        session = next((s for s in self.sessions.values() if s.key == key and s.state == "open"), None)
        if session is None:
            return JSONResponse({"error": {"message": "unknown key"}}, 401)
        limits = session.request.limits
        for name, used in (("max_turns", len(session.turns)), ("max_tokens", sum(session.mask))):
            if (bound := getattr(limits, name)) is not None and used >= bound:
                session.limit = name
                text = f"SessionLimitError: session {session.id} has used its {name}={bound}."
                return JSONResponse({"error": {"message": text}}, 403, headers={"x-should-retry": "false"})
        messages = (await request.json())["messages"]
        session.in_flight += 1
        try:
            answer = self.policy(messages)
            if inspect.isawaitable(answer):
                answer = await answer
        finally:
            session.in_flight -= 1
            session.active = time.time()
        if isinstance(answer, Response):
            return answer
        session.record(str(messages[-1]["content"]), answer)
        choice = {"index": 0, "message": {"role": "assistant", "content": answer}, "finish_reason": "stop"}
        return JSONResponse({"id": "c", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]})


def _json(content: Any) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


@contextlib.asynccontextmanager
async def fake_server(policy: Policy, port: int = 0, **options: Any) -> AsyncIterator[FakeServer]:
    """Run a fake server on this event loop, on a free port if `port` is 0."""
    fake = FakeServer(policy, **options)
    config = uvicorn.Config(fake.app(), port=port, log_config=None, lifespan="off", timeout_graceful_shutdown=1)
    server = _Uvicorn(config)
    task = asyncio.create_task(server.serve())
    try:
        async with asyncio.timeout(10):
            while not server.started:
                await asyncio.sleep(0.005)
        fake.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        yield fake
    finally:
        server.should_exit = True
        await asyncio.wait_for(task, 10)


@contextlib.contextmanager
def served(policy: Policy) -> Iterator[FakeServer]:
    """Run a fake server in a thread, for clients with event loops or processes of their own."""
    fake = FakeServer(policy)
    server = _Uvicorn(uvicorn.Config(fake.app(), port=0, log_config=None, lifespan="off", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    for _ in range(1000):
        if server.started:
            break
        thread.join(0.01)
    fake.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    try:
        yield fake
    finally:
        server.should_exit = True
        thread.join(10)

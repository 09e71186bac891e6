"""`running` serves a router and servers that only pretend, all on the event loop of a test.

A `FakeServer` answers what the router asks of a server, by the rules of a server: keys, sessions, versions, and the run
that a request expects. It generates nothing, and notes every request that is no look of the router.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx

from verl_server.fleet.keys import RouterKeys
from verl_server.fleet.members import Fleet, State
from verl_server.fleet.operations import server_operations
from verl_server.fleet.options import RouterArgs
from verl_server.fleet.router import Router
from verl_server.web.http_server import GuardedServer
from verl_server.web.keys import sent_keys
from verl_server.web.session_keys import take_session_key

T = TypeVar("T")

OWN_ADDRESS = "http://127.0.0.1:30080"
LOOKS = ("/weight_version", "/server_info")
"""Paths that the router asks for by itself."""
Answer = tuple[int, dict[str, str], bytes]


def run(work: Coroutine[Any, Any, T]) -> T:
    async def bounded() -> T:
        async with asyncio.timeout(60):
            return await work

    return asyncio.run(bounded())


@dataclass
class Received:
    """A request that a server got."""

    method: str
    path: str
    headers: dict[str, str]
    keys: list[str]
    body: bytes


@dataclass
class FakeServer:
    version: str = "1@00000001"
    instance: str = "run1"
    confirmed: bool = True
    accepts: bool = True
    api_key: str | None = None
    admin_key: str | None = None
    paused: bool = False
    capacity: int = 100_000
    tokens: int = 0
    sessions: dict[str, str] = field(default_factory=dict)
    """Id -> key."""
    answers: dict[str, Answer | Callable[[Received], Answer] | Callable[[Received], Awaitable[Answer]]] = field(
        default_factory=dict
    )
    """Path -> what is answered instead."""
    received: list[Received] = field(default_factory=list)
    url: str = ""
    _port: int = 0
    _server: GuardedServer | None = None
    _serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        sock = socket.create_server(("127.0.0.1", self._port))
        self._port = sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{self._port}"
        self._server = GuardedServer(self, 1000, lifespan="off", ws="none", log_level="critical", access_log=False)
        self._serving = asyncio.ensure_future(self._server.serve([sock]))
        while not self._server.started:
            await asyncio.sleep(0)

    async def stop(self) -> None:
        """End the server. It begins again at the same address with `start`."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = self._server.force_exit = True
            await self._serving
            self._server = None

    @property
    def paths(self) -> list[str]:
        return [each.path for each in self.received]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message["body"], message.get("more_body", False)
        path_key = take_session_key(scope)
        keys = [*sent_keys(scope), *([path_key] if path_key else [])]
        headers = {name.decode(): value.decode("latin-1") for name, value in scope["headers"]}
        query = f"?{scope['query_string'].decode()}" if scope["query_string"] else ""
        got = Received(scope["method"], scope["path"], headers, [key.decode("latin-1") for key in keys], body)
        if got.path not in LOOKS:
            got.path += query
            self.received.append(got)
        status, more_headers, content = await self._answer(got, got.path.partition("?")[0], scope)
        named = {"content-type": "application/json", "x-verl-instance": self.instance} | more_headers
        named["content-length"] = str(len(content))
        sent = [(name.encode(), value.encode()) for name, value in named.items()]
        await send({"type": "http.response.start", "status": status, "headers": sent})
        await send({"type": "http.response.body", "body": content})

    async def _answer(self, got: Received, path: str, scope: Any) -> Answer:
        expected = got.headers.get("x-verl-expected-instance")
        if expected not in (None, self.instance):
            return refused(412, "another run", "ServerRestartedError")
        if (refusal := self._refusal(got, path)) is not None:
            return refusal
        given = self.answers.get(path)
        if given is not None:
            found = given(got) if callable(given) else given
            return await found if isinstance(found, Awaitable) else found
        if path.startswith("/sessions") or path in ("/open_session", "/close_session"):
            return self._of_sessions(got, path, scope)
        match path:
            case "/weight_version":
                told = {
                    "weight_version": self.version,
                    "instance_id": self.instance,
                    "weights_confirmed": self.confirmed,
                    "accepts": self.accepts,
                }
                return answered(told)
            case "/server_info":
                told = {
                    "model_path": "/models/tiny",
                    "scheduler_info": {"context_length": 4096, "max_total_num_tokens": self.capacity},
                    "internal_states": [{"num_total_tokens": self.tokens}],
                    "paused_since": 1.0 if self.paused else None,
                }
                return answered(told)
        return answered({"server": self.url, "path": path})

    def _refusal(self, got: Received, path: str) -> Answer | None:
        """Check the keys, roughly as a server does. GET /weight_version is open here."""
        own = [key for key in (self.api_key, self.admin_key) if key is not None]
        of_session = [key for key in got.keys if key.startswith("vs-")]
        if of_session and own:
            known = of_session[0] in self.sessions.values()
            return None if known else refused(401, "no such session key", "UnauthorizedError")
        operation = next((each for each in server_operations() if path in each.paths), None)
        access = "owner" if path.startswith("/sessions") else "key" if operation is None else operation.access
        needed: Sequence[str | None] = own
        if access == "control":
            needed = [self.admin_key or self.api_key]
        elif access == "open" or (access in ("key", "local_owner") and self.api_key is None):
            return None
        if access in ("owner",) and not own:
            return refused(403, "sessions need a key", "ForbiddenError")
        if needed == [None] or any(key in got.keys for key in needed):
            return None
        return refused(401, f"{path} needs this server's key", "UnauthorizedError")

    def _of_sessions(self, got: Received, path: str, scope: Any) -> Answer:
        given = json.loads(got.body) if got.body else {}
        name = path.removeprefix("/sessions").strip("/").partition("/")[0]
        if path == "/open_session":
            name = given.get("session_id") or f"ses{len(self.sessions)}-{self._port}"
            if name in self.sessions:
                return refused(400, "another session has this id", "BadRequestError")
            self.sessions[name] = ""
            return answered(name)
        if path == "/close_session":
            self.sessions.pop(given["session_id"], None)
            return 200, {}, b""
        if not name and got.method == "POST":
            name = given.get("id") or f"ses{len(self.sessions)}-{self._port}"
            if name in self.sessions:
                return refused(409, "another session has this id", "SessionExistsError")
            self.sessions[name] = f"vs-{name:x<43}"[:46]
            return answered({"id": name, "key": self.sessions[name]}, 201)
        if not name:
            query = dict(part.split("=") for part in scope["query_string"].decode().split("&") if part)
            if not (query.get("limit", "1").isdecimal() and int(query.get("limit", 1)) > 0):
                return refused(400, f"limit must be 1 to 1000, not {query['limit']}", "BadRequestError")
            limit, names = int(query.get("limit", 100)), list(self.sessions)
            start = names.index(query["after"]) + 1 if query.get("after") in names else 0
            page = names[start : start + limit]
            more = start + limit < len(names)
            return answered({"sessions": [{"id": each} for each in page], "next": page[-1] if more else None})
        if name not in self.sessions:
            return refused(404, f"There is no session {name}.", "SessionNotFoundError")
        if got.method == "DELETE":
            del self.sessions[name]
            return answered({})
        return answered({"id": name, "server": self.url})


def answered(content: Any, status: int = 200) -> Answer:
    return status, {}, json.dumps(content).encode()


def refused(status: int, message: str, name: str, **headers: str) -> Answer:
    """Return an error as a server answers it. `name` is the class in X-Verl-Error."""
    named = {"x-verl-error": name} | {key.replace("_", "-"): value for key, value in headers.items()}
    return status, named, json.dumps({"error": {"message": message}}).encode()


@dataclass
class Running:
    router: Router
    fleet: Fleet
    servers: list[FakeServer]
    client: httpx.AsyncClient

    async def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps({} if body is None else body).encode()
        headers = {"content-type": "application/json"} | options.pop("headers", {})
        return await self.client.post(path, content=content, headers=headers, **options)

    async def get(self, path: str, **options: Any) -> httpx.Response:
        return await self.client.get(path, **options)

    async def until_states(self, *states: str) -> None:
        """Look at the servers until they have these states, in their order."""
        while [member.state.value for member in self.fleet.members] != list(states):
            await self.fleet.look_now()

    def at(self, response: httpx.Response) -> int:
        """Return the index of the server that answered."""
        return [server.url for server in self.servers].index(response.headers["x-verl-server"])


@contextlib.asynccontextmanager
async def running(*servers: FakeServer, wait: bool = True, **options: Any) -> AsyncIterator[Running]:
    """Start servers, and a router in front of them. `options` are those of `RouterArgs`."""
    given = {"probe_interval": 0.05, "hold_seconds": 5.0} | options
    async with contextlib.AsyncExitStack() as stack:
        for server in servers:
            await server.start()
            stack.push_async_callback(server.stop)
        yield await stack.enter_async_context(router_of(list(servers), wait=wait, **given))


@contextlib.asynccontextmanager
async def router_of(servers: list[FakeServer], wait: bool = True, **options: Any) -> AsyncIterator[Running]:
    """Start a router in front of servers that run. It looks at them with their key, if they have one."""
    given: dict[str, Any] = {"probe_interval": 0.05, "hold_seconds": 5.0} | options
    with tempfile.NamedTemporaryFile("w") as file:
        if servers[0].api_key is not None:
            file.write(servers[0].api_key)
            file.flush()
            given = {"server_api_key_file": Path(file.name)} | given
        args = RouterArgs(server=tuple(server.url for server in servers), **given)
        keys = RouterKeys(args)
    fleet = Fleet(args, keys.of_router)
    router = Router(fleet, keys, server_operations())
    fleet.start()
    try:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(router), base_url=OWN_ADDRESS) as client:
            found = Running(router, fleet, servers, client)
            if wait:
                while any(m.state == State.HEALTHY and not m.info for m in fleet.members) or not all(
                    member.looks for member in fleet.members
                ):
                    await fleet.changed(1)
                    await asyncio.sleep(0)
            yield found
    finally:
        await fleet.stop()

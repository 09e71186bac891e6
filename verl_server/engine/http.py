"""`HttpServerEngineAdapter`: the engine interface over HTTP, to a server it launched or one it attaches to.

Made for rollouts: generation has no read timeout unless asked, connections are not capped and kept alive, and
nothing is retried (a retried `/generate` would sample twice). Faults raise the classes of `errors`, the same
as in process; when the server process is gone, its exit cause and the end of its log are in the error.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import http.client
import secrets
import socket
import time
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Any

import aiohttp
import httpx
import msgspec
import orjson
from httpx_aiohttp import AiohttpTransport

from verl_server.columns import MSGPACK
from verl_server.engine.base import EngineBase, Result
from verl_server.engine.http_answers import (
    ask_for_columns,
    control_reply,
    encode,
    raise_for,
    read_frame,
    read_result,
)
from verl_server.engine.http_connection import Answer, ControlConnections
from verl_server.errors import (
    BadRequestError,
    ControlTimeoutError,
    ServerDiedError,
    ServerUnavailableError,
    UnansweredError,
    VerlServerError,
)
from verl_server.io_struct import (
    BeginWeightUpdateReq,
    ContinueGenerationReq,
    ControlReply,
    ControlReq,
    DestroyWeightsUpdateGroupReq,
    EndWeightUpdateReq,
    FlushCacheReq,
    GetInternalStateReq,
    GetWeightsByNameReq,
    InitWeightsUpdateGroupReq,
    PauseGenerationReq,
    RegisterWeightsReq,
    ReleaseMemoryOccupationReq,
    ResumeMemoryOccupationReq,
    UnregisterWeightsReq,
    UpdateWeightsFromDiskReq,
    UpdateWeightsFromDistributedReq,
    UpdateWeightsFromTensorReq,
    UpdateWeightVersionReq,
    WeightsCheckerReq,
)
from verl_server.ipc.child_process import ChildProcess, describe_exit
from verl_server.ipc.descriptors import raise_descriptor_limit
from verl_server.server_args import ServerArgs

_PATHS: dict[type[msgspec.Struct], str] = {
    FlushCacheReq: "/flush_cache",
    PauseGenerationReq: "/pause_generation",
    ContinueGenerationReq: "/continue_generation",
    UpdateWeightsFromTensorReq: "/update_weights_from_tensor",
    UpdateWeightsFromDiskReq: "/update_weights_from_disk",
    UpdateWeightsFromDistributedReq: "/update_weights_from_distributed",
    RegisterWeightsReq: "/register_weights",
    UnregisterWeightsReq: "/unregister_weights",
    BeginWeightUpdateReq: "/begin_weight_update",
    EndWeightUpdateReq: "/end_weight_update",
    InitWeightsUpdateGroupReq: "/init_weights_update_group",
    DestroyWeightsUpdateGroupReq: "/destroy_weights_update_group",
    UpdateWeightVersionReq: "/update_weight_version",
    GetWeightsByNameReq: "/get_weights_by_name",
    WeightsCheckerReq: "/weights_checker",
    ReleaseMemoryOccupationReq: "/release_memory_occupation",
    ResumeMemoryOccupationReq: "/resume_memory_occupation",
    GetInternalStateReq: "/server_info",
}
_CONNECT_TIMEOUT = 30.0
_INFO_TIMEOUT = 30.0
_LET_GO_TIMEOUT = 5.0
_CONTROL_GRACE = 30.0
"""Over the server's own bound, so that its error, which knows more, arrives first."""
_DEATH_WAIT = 5.0
"""How long a broken connection is given to turn out as the end of our child."""
_BROKEN = (httpx.TransportError, httpx.StreamError, http.client.HTTPException, OSError)
_KEEP_ALIVE_EXPIRY = 60.0
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_KEEP_ALIVE_EXPIRY)
_KEEP_ALIVE_OPTIONS = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
if hasattr(socket, "TCP_KEEPIDLE"):  # a host that vanished ends the wait after about two minutes
    _KEEP_ALIVE_OPTIONS += [
        (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
    ]


class HttpServerEngineAdapter(EngineBase):
    """`HttpServerEngineAdapter(model_path=..., port=0)` launches; `HttpServerEngineAdapter.attach(url)` does not.

    Nobody else controls a launched server: it gets a random admin key, through a pipe, unless one is given.
    """

    def __init__(self, *, server_args: ServerArgs | None = None, **kwargs: Any) -> None:
        if server_args is not None and kwargs:
            raise BadRequestError(f"Give server_args or keyword arguments, not both (also got {list(kwargs)}).")
        args = server_args or ServerArgs.from_kwargs(**kwargs)
        if args.admin_api_key is None:
            args = args.replace(admin_api_key=secrets.token_urlsafe(32))
        child = ChildProcess("server", "verl_server.server.launch", {"server_args": args.to_json()})
        self._finalizer = weakref.finalize(self, _terminate, child)
        try:
            info = child.wait_ready(args.startup_timeout + 30)
            self._connect(info["url"], args.api_key, args.admin_api_key, child)
            self.server_args = args.replace(port=info["port"])
            self.scheduler_info = self.get_server_info()["scheduler_info"] if args.node_rank == 0 else {}
        except BaseException:
            self._finalizer()
            raise

    @classmethod
    def attach(cls, url: str, api_key: str | None = None, admin_api_key: str | None = None) -> HttpServerEngineAdapter:
        """An adapter for a server that runs already. `shutdown` closes connections only.

        A server that was launched by another process has an admin key: that process's `engine.admin_api_key`.
        """
        adapter = cls.__new__(cls)
        adapter._finalizer = weakref.finalize(adapter, _terminate, None)
        adapter._connect(url.rstrip("/"), api_key, admin_api_key, None)
        info = adapter.get_server_info()
        known = {field.name for field in dataclasses.fields(ServerArgs)}
        fields = {key: value for key, value in info.items() if key in known and value is not None}
        fields |= {"api_key": api_key, "admin_api_key": admin_api_key, "gpu_uuids": tuple(info.get("gpu_uuids") or ())}
        adapter.server_args = ServerArgs(**fields | {"allow_unauthenticated": True})
        adapter.scheduler_info = info.get("scheduler_info") or {}
        return adapter

    def _connect(self, url: str, api_key: str | None, admin_api_key: str | None, child: ChildProcess | None) -> None:
        super().__init__()
        raise_descriptor_limit()  # each request in flight takes a connection
        self.url = url
        self.admin_api_key = admin_api_key
        self._api_key = api_key or admin_api_key
        self._control_key = admin_api_key or api_key
        self._child = child
        self._closed = False
        self._client = httpx.Client(
            base_url=url,
            timeout=httpx.Timeout(None, connect=_CONNECT_TIMEOUT),
            transport=httpx.HTTPTransport(limits=_LIMITS, socket_options=_KEEP_ALIVE_OPTIONS),
        )
        self._controls = ControlConnections(url, _CONNECT_TIMEOUT, _KEEP_ALIVE_OPTIONS)
        self._async_clients: weakref.WeakKeyDictionary[
            asyncio.AbstractEventLoop, tuple[AsyncGenerator[httpx.AsyncClient, None], httpx.AsyncClient]
        ] = weakref.WeakKeyDictionary()

    @property
    def pid(self) -> int | None:
        """Process id of a launched server."""
        return self._child.pid if self._child is not None else None

    # -- generation -----------------------------------------------------------------------------------------

    def _generate(self, body: dict[str, Any], timeout: float | None) -> Result:
        with self._translated(timeout):
            response = self._client.post("/generate", **self._generate_request(body, timeout))
        raise_for(response)
        return read_result(response)

    async def _async_generate(self, body: dict[str, Any], timeout: float | None) -> Result:
        async with self._translated_async(timeout):
            client = await self._async_client()
            response = await client.post("/generate", **self._generate_request(body, timeout))
        raise_for(response)
        return read_result(response)

    def _stream(self, body: dict[str, Any], timeout: float | None) -> Iterator[dict[str, Any]]:
        request = self._generate_request(body, timeout)
        with self._translated(timeout), self._client.stream("POST", "/generate", **request) as response:
            if response.status_code != 200:
                response.read()
                raise_for(response)
            for line in response.iter_lines():
                if (frame := read_frame(line)) is not None:
                    yield frame

    async def _async_stream(self, body: dict[str, Any], timeout: float | None) -> AsyncIterator[dict[str, Any]]:
        request = self._generate_request(body, timeout)
        client = await self._async_client()
        async with self._translated_async(timeout), client.stream("POST", "/generate", **request) as response:
            if response.status_code != 200:
                await response.aread()
                raise_for(response)
            async for line in response.aiter_lines():
                if (frame := read_frame(line)) is not None:
                    yield frame

    def _generate_request(self, body: dict[str, Any], timeout: float | None) -> dict[str, Any]:
        request = self._request("/generate", ask_for_columns(body), timeout)
        request["headers"]["Accept"] = MSGPACK
        return request

    async def _async_client(self) -> httpx.AsyncClient:
        """This loop's client: connections belong to the loop that opened them, and end with it."""
        loop = asyncio.get_running_loop()
        if loop not in self._async_clients:
            client = httpx.AsyncClient(
                base_url=self._client.base_url,
                timeout=httpx.Timeout(None, connect=_CONNECT_TIMEOUT),
                transport=AiohttpTransport(client=_aiohttp_session),
            )
            # asyncio.run closes the async generators of its loop at the end: that is when the client closes.
            lifetime = _open_until_closed(client)
            self._async_clients[loop] = lifetime, await anext(lifetime)
        return self._async_clients[loop][1]

    # -- control and info -----------------------------------------------------------------------------------

    def _control(self, req: ControlReq) -> ControlReply:
        path = _PATHS[type(req)]
        waits = req.timeout if isinstance(req, FlushCacheReq) else 0.0
        if isinstance(req, GetInternalStateReq):
            return ControlReply(id=0, success=True, payload=self.get_server_info()["internal_states"][0])
        if isinstance(req, FlushCacheReq):
            path += f"?timeout={req.timeout}"
        timeout = 2 * self.server_args.control_timeout + waits + _CONTROL_GRACE
        given = {name: value for name, value in msgspec.to_builtins(req).items() if value is not None}
        return control_reply(self._send("POST", path, given, timeout))

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        raise_for(self._send("POST", "/abort_request", {"rid": rid, "abort_all": abort_all}, _INFO_TIMEOUT))

    def get_server_info(self) -> dict[str, Any]:
        return self._call("GET", "/server_info")

    def get_model_info(self) -> dict[str, Any]:
        return self._call("GET", "/model_info")

    def get_internal_state(self) -> dict[str, Any]:
        """The scheduler's load and memory figures."""
        payload = self._ask(GetInternalStateReq())
        return payload if isinstance(payload, dict) else {}

    def shutdown(self) -> None:
        if self._closed:
            return
        self._let_go()
        self._closed = True
        self._client.close()
        self._controls.close()
        for loop, (lifetime, _) in list(self._async_clients.items()):
            if loop.is_running():
                asyncio.run_coroutine_threadsafe(_close(lifetime), loop)
        self._finalizer()

    def _let_go(self) -> None:
        """Hold none of our memory any more. A server that we only attached to lives on, and must close it first."""
        registrations = self._end_pushes()
        if registrations and self._child is None:
            req = UnregisterWeightsReq(registrations=registrations)
            with contextlib.suppress(VerlServerError):  # it is gone, or slow: then it notices the end of this process
                self._send("POST", _PATHS[UnregisterWeightsReq], msgspec.to_builtins(req), _LET_GO_TIMEOUT)

    # -- shared ---------------------------------------------------------------------------------------------

    def _call(self, method: str, path: str) -> dict[str, Any]:
        answer = self._send(method, path, None, _INFO_TIMEOUT)
        raise_for(answer)
        info: dict[str, Any] = orjson.loads(answer.content)
        return info

    def _send(self, method: str, path: str, body: dict[str, Any] | None, timeout: float) -> Answer:
        """One control call. Whatever ends it early closes its connection: then the server withdraws what can be."""
        request = self._request(path, body, timeout)
        with self._translated(timeout, UnansweredError):
            return self._controls.request(method, path, request.get("content"), request["headers"], timeout)

    def _request(self, path: str, body: dict[str, Any] | None, timeout: float | None) -> dict[str, Any]:
        control = path.split("?")[0] in (*_PATHS.values(), "/abort_request") and path != "/server_info"
        key = self._control_key if control else self._api_key
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        request: dict[str, Any] = {"headers": headers, "timeout": httpx.Timeout(timeout, connect=_CONNECT_TIMEOUT)}
        if body is not None:
            headers["Content-Type"] = "application/json"
            request["content"] = encode(body)
        return request

    @contextlib.contextmanager
    def _translated(
        self, timeout: float | None, silence: type[VerlServerError] = ControlTimeoutError
    ) -> Iterator[None]:
        """Transport faults as our errors; a broken connection is traced to the server process where we own it."""
        self._check_open()
        try:
            yield
        except VerlServerError:
            raise
        except _BROKEN as error:
            deadline = time.monotonic() + _DEATH_WAIT
            while self._may_be_dying(error) and time.monotonic() < deadline:
                time.sleep(0.02)
            raise self._explained(error, timeout, silence) from error

    @contextlib.asynccontextmanager
    async def _translated_async(self, timeout: float | None) -> AsyncIterator[None]:
        """`_translated` that leaves the event loop to the other requests while it waits."""
        self._check_open()
        try:
            yield
        except VerlServerError:
            raise
        except _BROKEN as error:
            deadline = time.monotonic() + _DEATH_WAIT
            while self._may_be_dying(error) and time.monotonic() < deadline:
                await asyncio.sleep(0.02)
            raise self._explained(error, timeout) from error

    def _check_open(self) -> None:
        if self._closed:
            raise ServerUnavailableError("The adapter has been shut down.")

    def _may_be_dying(self, error: Exception) -> bool:
        """Whether a broken connection may turn out to be the end of our child, which is not reaped yet."""
        if _is_timeout(error) or _is_out_of_descriptors(error):
            return False
        return self._child is not None and self._child.poll() is None

    def _explained(
        self, error: Exception, timeout: float | None, silence: type[VerlServerError] = ControlTimeoutError
    ) -> VerlServerError:
        if self._closed:
            return ServerUnavailableError("The adapter was shut down during the call.")
        if _is_timeout(error):
            return silence(f"{self.url} did not answer within {timeout} s.")
        if _is_out_of_descriptors(error):
            return ServerUnavailableError(
                f"No connection to {self.url} could be opened: this process has as many files and connections open "
                "as it may (`ulimit -n`). Run fewer requests at a time, or raise the hard limit (`ulimit -Hn`)."
            )
        if self._child is None:
            return ServerDiedError(f"The connection to {self.url} failed: {error!r}. Is the server still running?")
        code = self._child.poll()
        if code is None:
            return ServerDiedError(f"The connection to {self.url} broke: {error!r}; its process {self.pid} still runs.")
        return ServerDiedError(
            f"The server at {self.url} (process {self.pid}) ended with {describe_exit(code)}.{self._child.log_tail()}"
        )


async def _open_until_closed(client: httpx.AsyncClient) -> AsyncGenerator[httpx.AsyncClient, None]:
    async with client:
        yield client


async def _close(lifetime: AsyncGenerator[httpx.AsyncClient, None]) -> None:
    await lifetime.aclose()


def _aiohttp_session() -> aiohttp.ClientSession:
    """httpx on aiohttp's connections: httpx's own pool looks at every connection for every request, which at 256
    requests in flight leaves a few hundred a second of 4,000. No cap, and POST is never retried."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_EXPIRY, socket_factory=_socket)
    return aiohttp.ClientSession(connector=connector)


def _socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """A socket that notices, by keep-alive probes, that the server's host vanished during a long generation."""
    family, kind, protocol, *_ = address
    sock = socket.socket(family, kind, protocol)
    for option in _KEEP_ALIVE_OPTIONS:
        sock.setsockopt(*option)
    return sock


def _is_timeout(error: Exception) -> bool:
    """Whether the server was silent. (A connection that breaks or cannot be had may come as a ConnectTimeout.)"""
    silent = isinstance(error, httpx.TimeoutException) and not isinstance(error, httpx.ConnectTimeout)
    return silent or isinstance(error, TimeoutError)


def _is_out_of_descriptors(error: BaseException | None) -> bool:
    """Whether this process, not the server, kept the connection from being opened."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            return True
        error = error.__cause__ or error.__context__
    return False


def _terminate(child: ChildProcess | None) -> None:
    """End a launched server; one that was attached to is not ours to end."""
    if child is not None:
        child.terminate(grace=20.0)

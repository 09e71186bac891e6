"""`HttpTransport`: sends requests to one server, and converts answers and faults into results and errors.

`engine.http` calls it. No request is retried, because a second `/generate` would sample again. A fault raises the same
class of `errors` as the in-process engine. If a launched server has ended, the message contains the exit status and the
end of the server's log.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import http.client
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, cast

import httpx
import orjson

from verl_server.engine.base import Result
from verl_server.engine.http_answers import (
    FrameReader,
    Request,
    ask_for_columns,
    generate_content,
    json_request,
    raise_for,
    read_result,
)
from verl_server.engine.http_clients import CONNECT_TIMEOUT, KEEP_ALIVE_OPTIONS, LoopClients
from verl_server.engine.http_connection import Answer, HttpConnections
from verl_server.engine.server_instance import ServerInstance
from verl_server.errors import (
    BadRequestError,
    ControlTimeoutError,
    ServerDiedError,
    ServerUnavailableError,
    UnansweredError,
    VerlServerError,
)
from verl_server.ipc.child_process import ChildProcess, describe_exit
from verl_server.messages.columns import MSGPACK, unpack
from verl_server.messages.io_struct import INSTANCE_HEADER
from verl_server.messages.results import GenerateResult, ServerInfo
from verl_server.version_demand import EXACT_FIELD, EXACT_HEADER, MIN_FIELD, MIN_HEADER

_GENERATE = "/generate"
CLOSE_SESSION = "/close_session"
ROUTING_KEY_HEADER = "X-SMG-Routing-Key"
"""Header with the session of a request. Routers, SGLang's too, keep the requests of one session on one server."""
INFO_TIMEOUT = 30.0
"""Seconds to wait for the answer to a short request: information or an abort."""
CLOSE_TIMEOUT = 5.0
"""Seconds that a shutdown waits until the server has closed this process's memory."""
_EXIT_WAIT = 5.0
"""Seconds to wait, after a connection broke, until the exit status of the launched server is known."""
_EXIT_POLL = 0.02
_NO_CONTENT: Request = (None, {})
_TRANSPORT_FAULTS = (httpx.TransportError, httpx.StreamError, http.client.HTTPException, OSError)


class HttpTransport:
    """Sends all requests of one adapter, from any thread and event loop.

    `child` is the server's process if the adapter launched it, else None. Every answer must come from the server run in
    `instance`.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None,
        admin_api_key: str | None,
        child: ChildProcess | None,
        instance: ServerInstance,
    ) -> None:
        self._url = url
        self._api_key = api_key or admin_api_key
        self._control_key = admin_api_key or api_key
        self._child = child
        self._instance = instance
        self._clients = LoopClients(url)
        self._connections = HttpConnections(url, CONNECT_TIMEOUT, KEEP_ALIVE_OPTIONS)
        self.is_closed = False

    def close(self) -> None:
        """Close all connections. Running calls raise ServerUnavailableError."""
        self.is_closed = True
        self._clients.close()
        self._connections.close()

    # -- generation -----------------------------------------------------------------------------------------

    def generate(self, body: dict[str, Any], timeout: float | None) -> Result:
        """Send a `/generate` request and return the result.

        Wait at most `timeout` seconds for an answer. None is unbounded.
        """
        return read_result(self.exchange(_GENERATE, self._generate_request(body), timeout))

    async def async_generate(self, body: dict[str, Any], timeout: float | None) -> Result:
        return read_result(await self.async_exchange(_GENERATE, self._generate_request(body), timeout))

    def stream(self, body: dict[str, Any], timeout: float | None) -> Iterator[GenerateResult]:
        for frame in self.events(_GENERATE, self._generate_request(body), timeout):
            yield cast(GenerateResult, unpack(frame))

    async def async_stream(self, body: dict[str, Any], timeout: float | None) -> AsyncIterator[GenerateResult]:
        async for frame in self.async_events(_GENERATE, self._generate_request(body), timeout):
            yield cast(GenerateResult, unpack(frame))

    def exchange(self, path: str, request: Request, timeout: float | None) -> Answer:
        """Send a POST request that generates. Return the answer, or raise its error."""
        answer = self._send("POST", path, self._api_key, request, timeout, ControlTimeoutError)
        raise_for(answer)
        return answer

    async def async_exchange(self, path: str, request: Request, timeout: float | None) -> httpx.Response:
        return await self._async_send(path, self._api_key, request, timeout)

    def events(self, path: str, request: Request, timeout: float | None) -> Iterator[Any]:
        """Do the same as `exchange` for a stream: return the objects of its events."""
        content, headers = self._with_headers(self._api_key, request)
        with (
            self._translated(timeout, ControlTimeoutError),
            self._connections.stream(path, content, headers, timeout) as (answer, parts),
        ):
            self._check(answer)
            reader = FrameReader()
            for data in parts:
                yield from reader.feed(data)

    async def async_events(self, path: str, request: Request, timeout: float | None) -> AsyncIterator[Any]:
        client = await self._clients.for_this_loop()
        options = self._httpx_options(self._api_key, request, timeout)
        async with self._async_translated(timeout), client.stream("POST", path, **options) as response:
            if response.status_code != 200:
                await response.aread()
            self._check(response)
            reader = FrameReader()
            async for data in response.aiter_bytes():
                for event in reader.feed(data):
                    yield event

    def _generate_request(self, body: dict[str, Any]) -> Request:
        body = ask_for_columns(body)
        if self._instance.id is None:  # a server of another project may understand something else by a session
            body.pop("session_id", None)
            for name in (MIN_FIELD, EXACT_FIELD):
                if name in body:
                    raise BadRequestError(
                        f"{name} needs a verl-server: the server at {self._url} would ignore the demand. Leave the "
                        "option unset."
                    )
            content, headers = json_request(body)
        else:
            content, headers = generate_content(body)
            headers = headers | _routing_headers(body)
        return content, headers | {"Accept": MSGPACK}

    def use_child(self, child: ChildProcess) -> None:
        """Take the process of a server that was launched again."""
        self._child = child

    # -- control and info -----------------------------------------------------------------------------------

    def get(self, path: str) -> Any:
        """Send a GET request and return the JSON body of the answer."""
        answer = self._send("GET", path, self._api_key, _NO_CONTENT, INFO_TIMEOUT)
        raise_for(answer)
        return orjson.loads(answer.content)

    def probe(self, path: str) -> Answer:
        """Send a GET request and return the answer, with any status and from any run of the server."""
        with self._instance.addressing(None):
            return self._send("GET", path, self._api_key, _NO_CONTENT, INFO_TIMEOUT)

    def post(self, path: str, body: dict[str, Any] | None, timeout: float) -> Answer:
        """Send a POST request to a control route, with the admin key.

        If the call ends early, its connection closes; the server then withdraws the request if it has not begun.
        """
        return self._send("POST", path, self._control_key, json_request(body), timeout)

    async def async_post(self, path: str, body: dict[str, Any], timeout: float) -> None:
        """Send a POST request to a control route on the running event loop. Raise the error of an error answer."""
        await self._async_send(path, self._control_key, json_request(body), timeout)

    def info_of_any_run(self) -> tuple[str | None, ServerInfo]:
        """Return the id of the server's current run (None if it sends no id) and its `/server_info`."""
        answer = self.probe("/server_info")
        raise_for(answer)
        return answer.headers.get(INSTANCE_HEADER), orjson.loads(answer.content)

    # -- shared ---------------------------------------------------------------------------------------------

    def _send(
        self,
        method: str,
        path: str,
        key: str | None,
        request: Request,
        timeout: float | None,
        silence: type[VerlServerError] = UnansweredError,
    ) -> Answer:
        """Send a request and return the answer of the expected run.

        If there is no answer, raise an error of class `silence`.
        """
        content, headers = self._with_headers(key, request)
        with self._translated(timeout, silence):
            answer = self._connections.request(method, path, content, headers, timeout)
        self._instance.check(answer.status_code, answer.headers.get(INSTANCE_HEADER))
        return answer

    async def _async_send(self, path: str, key: str | None, request: Request, timeout: float | None) -> httpx.Response:
        """Send a POST request. Return the answer of the expected run, or raise its error."""
        async with self._async_translated(timeout):
            client = await self._clients.for_this_loop()
            response = await client.post(path, **self._httpx_options(key, request, timeout))
        self._check(response)
        return response

    def _check(self, response: httpx.Response | Answer) -> None:
        """Raise the error of an answer that is from another run of the server or has an error status."""
        self._instance.check(response.status_code, response.headers.get(INSTANCE_HEADER))
        raise_for(response)

    def _httpx_options(self, key: str | None, request: Request, timeout: float | None) -> dict[str, Any]:
        content, headers = self._with_headers(key, request)
        return {
            "content": content,
            "headers": headers,
            "timeout": httpx.Timeout(timeout, connect=CONNECT_TIMEOUT),
        }

    def _with_headers(self, key: str | None, request: Request) -> Request:
        """Return `request` with the headers that name the expected run, the key and the type of the content."""
        content, headers = request
        headers = self._instance.headers() | headers
        if key:
            headers["Authorization"] = f"Bearer {key}"
        if content is not None:
            headers["Content-Type"] = "application/json"
        return content, headers

    @contextlib.contextmanager
    def _translated(self, timeout: float | None, silence: type[VerlServerError]) -> Iterator[None]:
        """Convert a transport fault in the block into an error of this package.

        If there is no answer, its class is `silence`.

        After a broken connection, wait for the exit status of a launched server. The error message contains this
        status.
        """
        self._check_open()
        try:
            yield
        except VerlServerError:
            raise
        except _TRANSPORT_FAULTS as error:
            for _ in self._until_exit(error):
                time.sleep(_EXIT_POLL)
            raise self._explained(error, timeout, silence) from error

    @contextlib.asynccontextmanager
    async def _async_translated(self, timeout: float | None) -> AsyncIterator[None]:
        """Do the same as `_translated` without blocking the event loop."""
        self._check_open()
        try:
            yield
        except VerlServerError:
            raise
        except _TRANSPORT_FAULTS as error:
            for _ in self._until_exit(error):
                await asyncio.sleep(_EXIT_POLL)
            raise self._explained(error, timeout, ControlTimeoutError) from error

    def _check_open(self) -> None:
        if self.is_closed:
            raise ServerUnavailableError("The adapter has been shut down.")

    def _until_exit(self, error: Exception) -> Iterator[None]:
        """Yield as long as a launched server has no exit status.

        The end of the server may have broken the connection.
        """
        deadline = time.monotonic() + _EXIT_WAIT
        child = None if _is_timeout(error) or _is_out_of_descriptors(error) else self._child
        while child is not None and child.poll() is None and time.monotonic() < deadline:
            yield

    def _explained(self, error: Exception, timeout: float | None, silence: type[VerlServerError]) -> VerlServerError:
        if self.is_closed:
            return ServerUnavailableError("The adapter was shut down during the call.")
        if _is_timeout(error):
            return silence(f"{self._url} did not answer within {timeout} s.")
        if _is_out_of_descriptors(error):
            return ServerUnavailableError(
                f"No connection to {self._url} could be opened: this process has reached its limit of open files and "
                "connections (`ulimit -n`). Run fewer requests at a time, or raise the hard limit (`ulimit -Hn`)."
            )
        if self._child is None:
            return ServerDiedError(f"The connection to {self._url} failed: {error!r}. Is the server still running?")
        pid, code = self._child.pid, self._child.poll()
        if code is None:
            return ServerDiedError(
                f"The connection to {self._url} broke: {error!r}; the server's process {pid} still runs."
            )
        return ServerDiedError(self.exit_report(code))

    def exit_report(self, code: int) -> str:
        """Return how the launched server ended, with the end of its log. `code` is its exit status."""
        assert self._child is not None
        pid, log = self._child.pid, self._child.log_tail()
        return f"The server at {self._url} (process {pid}) ended with {describe_exit(code)}.{log}"


def _routing_headers(body: dict[str, Any]) -> dict[str, str]:
    """Return what a router places a request by as headers, so that it need not read a large body."""
    fields = {ROUTING_KEY_HEADER: body.get("session_id")}
    fields |= {MIN_HEADER: body.get(MIN_FIELD), EXACT_HEADER: body.get(EXACT_FIELD)}
    return {
        name: value
        for name, value in fields.items()
        if isinstance(value, str) and value.isascii() and value.isprintable()
    }


def _is_timeout(error: Exception) -> bool:
    """Return True if the server sent no answer in time.

    A ConnectTimeout does not count, because httpx also raises it for a connection that breaks or cannot be opened.
    """
    silent = isinstance(error, httpx.TimeoutException) and not isinstance(error, httpx.ConnectTimeout)
    return silent or isinstance(error, TimeoutError)


def _is_out_of_descriptors(error: BaseException | None) -> bool:
    """Return True if no connection could be opened because of this process's limit of open files."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            return True
        error = error.__cause__ or error.__context__
    return False

"""`HttpTransport`: sends requests to one server and turns answers and faults into results and errors.

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
    ask_for_columns,
    encode,
    generate_content,
    raise_for,
    read_result,
)
from verl_server.engine.http_clients import CONNECT_TIMEOUT, KEEP_ALIVE_OPTIONS, HttpClients
from verl_server.engine.http_connection import Answer, ControlConnections
from verl_server.engine.server_instance import ServerInstance
from verl_server.errors import (
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

_GENERATE = "/generate"
CLOSE_SESSION = "/close_session"
INFO_TIMEOUT = 30.0
"""Seconds to wait for the answer to a short request: information or an abort."""
_EXIT_WAIT = 5.0
"""Seconds to wait, after a connection broke, until the exit status of the launched server is known."""
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
        self._clients = HttpClients(url)
        self._controls = ControlConnections(url, CONNECT_TIMEOUT, KEEP_ALIVE_OPTIONS)
        self.is_closed = False

    def close(self) -> None:
        """Close all connections. Running calls raise ServerUnavailableError."""
        self.is_closed = True
        self._clients.close()
        self._controls.close()

    # -- generation -----------------------------------------------------------------------------------------

    def generate(self, body: dict[str, Any], timeout: float | None) -> Result:
        """Send a `/generate` request and return the result. `timeout`: seconds without an answer; None is unbounded."""
        return read_result(self._exchange(_GENERATE, self._generate_request(body, timeout), timeout))

    async def async_generate(self, body: dict[str, Any], timeout: float | None) -> Result:
        return read_result(await self._async_exchange(_GENERATE, self._generate_request(body, timeout), timeout))

    def stream(self, body: dict[str, Any], timeout: float | None) -> Iterator[GenerateResult]:
        for frame in self._events(_GENERATE, self._generate_request(body, timeout), timeout):
            yield cast(GenerateResult, unpack(frame))

    async def async_stream(self, body: dict[str, Any], timeout: float | None) -> AsyncIterator[GenerateResult]:
        async for frame in self._async_events(_GENERATE, self._generate_request(body, timeout), timeout):
            yield cast(GenerateResult, unpack(frame))

    def exchange(self, path: str, body: dict[str, Any], timeout: float | None) -> Any:
        """Send a request that generates to a route of another project's server. Return the JSON of the answer."""
        return orjson.loads(self._exchange(path, self._request(self._api_key, body, timeout), timeout).content)

    async def async_exchange(self, path: str, body: dict[str, Any], timeout: float | None) -> Any:
        response = await self._async_exchange(path, self._request(self._api_key, body, timeout), timeout)
        return orjson.loads(response.content)

    def events(self, path: str, body: dict[str, Any], timeout: float | None) -> Iterator[Any]:
        """Do the same as `exchange` for a stream: return the objects of its events."""
        return self._events(path, self._request(self._api_key, body, timeout), timeout)

    def async_events(self, path: str, body: dict[str, Any], timeout: float | None) -> AsyncIterator[Any]:
        return self._async_events(path, self._request(self._api_key, body, timeout), timeout)

    def _exchange(self, path: str, request: dict[str, Any], timeout: float | None) -> httpx.Response:
        with self._translated(timeout):
            response = self._clients.for_threads.post(path, **request)
        self._check(response)
        return response

    async def _async_exchange(self, path: str, request: dict[str, Any], timeout: float | None) -> httpx.Response:
        async with self._translated_async(timeout):
            client = await self._clients.for_this_loop()
            response = await client.post(path, **request)
        self._check(response)
        return response

    def _events(self, path: str, request: dict[str, Any], timeout: float | None) -> Iterator[Any]:
        with self._translated(timeout), self._clients.for_threads.stream("POST", path, **request) as response:
            if response.status_code != 200:
                response.read()
            self._check(response)
            reader = FrameReader()
            for data in response.iter_bytes():
                yield from reader.feed(data)

    async def _async_events(self, path: str, request: dict[str, Any], timeout: float | None) -> AsyncIterator[Any]:
        client = await self._clients.for_this_loop()
        async with self._translated_async(timeout), client.stream("POST", path, **request) as response:
            if response.status_code != 200:
                await response.aread()
            self._check(response)
            reader = FrameReader()
            async for data in response.aiter_bytes():
                for event in reader.feed(data):
                    yield event

    def _check(self, response: httpx.Response) -> None:
        """Raise the error of an answer that is from another run of the server or has an error status."""
        self._instance.check(response.status_code, response.headers.get(INSTANCE_HEADER))
        raise_for(response)

    def _generate_request(self, body: dict[str, Any], timeout: float | None) -> dict[str, Any]:
        body = ask_for_columns(body)
        if self._instance.id is not None:
            content, headers = generate_content(body)
        else:  # a server of another project takes JSON only, and may understand something else by a session
            body.pop("session_id", None)
            content, headers = encode(body), {}
        request = self._request(self._api_key, content, timeout)
        request["headers"] |= headers | {"Accept": MSGPACK}
        return request

    # -- control and info -----------------------------------------------------------------------------------

    def get(self, path: str) -> Any:
        """Send a GET request and return the JSON body of the answer."""
        answer = self._send("GET", path, self._api_key, None, INFO_TIMEOUT)
        raise_for(answer)
        return orjson.loads(answer.content)

    def probe(self, path: str) -> Answer:
        """Send a GET request and return the answer, whatever its status and whichever run answers."""
        with self._instance.addressing(None):
            return self._send("GET", path, self._api_key, None, INFO_TIMEOUT)

    def post(self, path: str, body: dict[str, Any] | None, timeout: float) -> Answer:
        """Send a POST request to a control route, with the admin key."""
        return self._send("POST", path, self._control_key, body, timeout)

    async def async_post(self, path: str, body: dict[str, Any], timeout: float) -> None:
        """Send a POST request to a control route on the running event loop. Raise the error of an error answer."""
        await self._async_exchange(path, self._request(self._control_key, body, timeout), timeout)

    def info_of_any_run(self) -> tuple[str | None, ServerInfo]:
        """Return the id of the server's current run (None if it sends no id) and its `/server_info`."""
        answer = self.probe("/server_info")
        raise_for(answer)
        return answer.headers.get(INSTANCE_HEADER), orjson.loads(answer.content)

    # -- shared ---------------------------------------------------------------------------------------------

    def _send(self, method: str, path: str, key: str | None, body: dict[str, Any] | None, timeout: float) -> Answer:
        """Send a control request and return the answer.

        If the call ends early, its connection closes; the server then withdraws the request if it has not begun.
        """
        headers, content = self._headers_and_content(key, body)
        with self._translated(timeout, UnansweredError):
            answer = self._controls.request(method, path, content, headers, timeout)
        self._instance.check(answer.status_code, answer.headers.get(INSTANCE_HEADER))
        return answer

    def _request(self, key: str | None, body: dict[str, Any] | bytes | None, timeout: float | None) -> dict[str, Any]:
        """Return the keyword arguments of an httpx request: headers, timeout, and `body` as JSON unless it is bytes."""
        headers, content = self._headers_and_content(key, body)
        request: dict[str, Any] = {"headers": headers, "timeout": httpx.Timeout(timeout, connect=CONNECT_TIMEOUT)}
        if content is not None:
            request["content"] = content
        return request

    def _headers_and_content(
        self, key: str | None, body: dict[str, Any] | bytes | None
    ) -> tuple[dict[str, str], bytes | None]:
        """Return the headers of a request, and `body` as JSON unless it is bytes."""
        headers = self._instance.headers()
        if key:
            headers["Authorization"] = f"Bearer {key}"
        if body is None:
            return headers, None
        headers["Content-Type"] = "application/json"
        return headers, body if isinstance(body, bytes) else encode(body)

    @contextlib.contextmanager
    def _translated(
        self, timeout: float | None, silence: type[VerlServerError] = ControlTimeoutError
    ) -> Iterator[None]:
        """Raise a transport fault in the block as an error of this package. `silence` is the class for no answer.

        After a broken connection it waits for the exit status of a launched server, which goes into the message.
        """
        self._check_open()
        try:
            yield
        except VerlServerError:
            raise
        except _TRANSPORT_FAULTS as error:
            deadline = time.monotonic() + _EXIT_WAIT
            while self._may_be_dying(error) and time.monotonic() < deadline:
                time.sleep(0.02)
            raise self._explained(error, timeout, silence) from error

    @contextlib.asynccontextmanager
    async def _translated_async(self, timeout: float | None) -> AsyncIterator[None]:
        """Do the same as `_translated` without blocking the event loop."""
        self._check_open()
        try:
            yield
        except VerlServerError:
            raise
        except _TRANSPORT_FAULTS as error:
            deadline = time.monotonic() + _EXIT_WAIT
            while self._may_be_dying(error) and time.monotonic() < deadline:
                await asyncio.sleep(0.02)
            raise self._explained(error, timeout) from error

    def _check_open(self) -> None:
        if self.is_closed:
            raise ServerUnavailableError("The adapter has been shut down.")

    def _may_be_dying(self, error: Exception) -> bool:
        """Return True if the launched server may have broken the connection by ending but has no exit status yet."""
        if _is_timeout(error) or _is_out_of_descriptors(error):
            return False
        return self._child is not None and self._child.poll() is None

    def _explained(
        self, error: Exception, timeout: float | None, silence: type[VerlServerError] = ControlTimeoutError
    ) -> VerlServerError:
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

"""`HttpServerEngineAdapter`: the engine interface over HTTP.

The adapter launches a server or attaches to a running one. `http_transport` sends the requests. After a restart of the
server every call raises ServerRestartedError, until the weights are pushed again or accepted (`server_instance`).
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import weakref
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import TYPE_CHECKING, Any, cast

import msgspec

from verl_server.engine.attached.identify import identify
from verl_server.engine.attached.server import AttachedServer, GenerateTransport
from verl_server.engine.base import Result
from verl_server.engine.http_answers import control_reply, raise_for
from verl_server.engine.http_transport import CLOSE_SESSION, CLOSE_TIMEOUT, INFO_TIMEOUT, HttpTransport
from verl_server.engine.restarts import RestartableServer, terminate_server
from verl_server.engine.routed import RoutedCalls
from verl_server.engine.router_client import FLEET_HEADER, FLEET_PATH
from verl_server.engine.server_address import server_address
from verl_server.engine.server_instance import ServerInstance
from verl_server.errors import (
    BadRequestError,
    VerlServerError,
)
from verl_server.ipc.child_process import ChildProcess
from verl_server.ipc.descriptors import raise_descriptor_limit
from verl_server.messages.io_struct import (
    AbortReq,
    ControlReply,
    ControlReq,
    FlushCacheReq,
    GetInternalStateReq,
    StartProfileReq,
    StopProfileReq,
)
from verl_server.messages.results import GenerateResult, ModelInfo, SchedulerInfo, ServerInfo
from verl_server.messages.weight_requests import (
    UnregisterWeightsReq,
    UpdateReq,
    UpdateWeightsFromDiskReq,
    UpdateWeightsFromTensorReq,
    UpdateWeightVersionReq,
)
from verl_server.server_args import ServerArgs, settings_of_engine

if TYPE_CHECKING:
    from verl_server.engine.push import WeightPusher
    from verl_server.weight_sync.trainer.sender import Mapping

logger = logging.getLogger(__name__)

_CONTROL_GRACE = 30.0
"""Seconds that are added to the server's own time limit, so that the server's more precise error arrives first."""


class HttpServerEngineAdapter(RestartableServer):
    """An engine over HTTP.

    `HttpServerEngineAdapter(model_path=..., port=0)` launches a server. `HttpServerEngineAdapter.attach(url)` uses a
    running server. A launched server gets a random admin key through a pipe unless the settings have a key, so that no
    other process can control the server.
    """

    def __init__(self, *, server_args: ServerArgs | None = None, **kwargs: Any) -> None:
        """Launch a server and return when it is ready. Settings are `server_args` or keyword arguments."""
        if server_args is not None and kwargs:
            raise BadRequestError(f"Give server_args or keyword arguments, not both (also got {list(kwargs)}).")
        args = server_args or ServerArgs.from_kwargs(**kwargs)
        if args.admin_api_key is None:
            args = args.replace(admin_api_key=secrets.token_urlsafe(32))
        child = ChildProcess("server", "verl_server.server.launch", {"server_args": args.to_json()})
        self._finalizer = weakref.finalize(self, terminate_server, child)
        try:
            info = child.wait_ready(args.startup_timeout + 30)
            self._connect(info["url"], args.api_key, args.admin_api_key, child)
            self.server_args = args.replace(port=info["port"])
            self._given_seed = args.random_seed
            if args.node_rank == 0:
                server_info = self._expect_current_run()
                self.scheduler_info = server_info["scheduler_info"]
                self.server_args = self.server_args.replace(random_seed=server_info["random_seed"])
        except BaseException:
            self._finalizer()
            raise

    @classmethod
    def attach(cls, url: str, api_key: str | None = None, admin_api_key: str | None = None) -> HttpServerEngineAdapter:
        """Return an adapter for a running server. `shutdown` only closes the connections.

        Control calls need the server's admin key. If another process launched the server with this class, the key is
        `engine.admin_api_key` in that process.

        A genuine SGLang or vLLM server is recognized. Generation, pauses and weight updates then use the wire of that
        server. A call that this wire cannot express raises BadRequestError; docs/engines.md lists these calls.

        So is a router (`verl-server router`): the engine is then a `RoutedEngine`. `api_key` is a key of the router,
        and `admin_api_key` one of its servers, to which weights are pushed directly.
        """
        url = server_address(url)
        adapter = cls.__new__(cls)
        adapter._finalizer = weakref.finalize(adapter, terminate_server, None)
        adapter._connect(url, api_key, admin_api_key, None)
        first = adapter._transport.probe(FLEET_PATH)
        if first.headers.get(FLEET_HEADER) is not None:
            adapter.shutdown()
            return RoutedEngine.over_router(url, api_key, admin_api_key)
        adapter._attached = identify(adapter._transport, url, first)
        if adapter._attached is not None:
            adapter._generation = adapter._attached.generation
            info = adapter.get_server_info()
            fields: dict[str, Any] = {"model_path": info.get("model_path") or url}  # theirs have other meanings
        else:
            info = adapter._expect_current_run()
            fields = _known_settings(info)
            if adapter._instance.id is None:
                logger.warning(
                    "The server at %s sends no instance id. The adapter cannot detect a restart of this server.", url
                )
        adapter._know(info, fields, api_key)
        return adapter

    def _know(self, info: ServerInfo, fields: dict[str, Any], api_key: str | None) -> None:
        """Take the settings `fields` of a running server, with the keys of this adapter."""
        keys = {"api_key": api_key, "admin_api_key": self.admin_api_key, "allow_unauthenticated": True}
        self.server_args = ServerArgs(**(fields | keys))
        # Servers of other projects do not report it.
        self.scheduler_info = info.get("scheduler_info") or cast(SchedulerInfo, {})

    def _connect(self, url: str, api_key: str | None, admin_api_key: str | None, child: ChildProcess | None) -> None:
        super().__init__()
        raise_descriptor_limit()  # each running request uses a connection
        self.url = url
        self.admin_api_key = admin_api_key
        self._child = child
        self._instance = ServerInstance(url)
        self._transport = HttpTransport(url, api_key, admin_api_key, child, self._instance)
        self._generation: GenerateTransport = self._transport
        self._attached: AttachedServer | None = None
        """The server if it is a server of another project, else None."""
        self._said_unchecked = False
        """True if a warning was logged that pushes to this server are not checked."""
        self._last_disk: UpdateWeightsFromDiskReq | None = None
        """The newest update if its source was a disk, else None."""

    @property
    def instance_id(self) -> str | None:
        """Id of the server run that this engine works with; None if the server sends no id."""
        return self._instance.id

    @property
    def pid(self) -> int | None:
        """Process id of a launched server; None if the adapter attached to the server."""
        return self._child.pid if self._child is not None else None

    # -- generation -----------------------------------------------------------------------------------------

    def _generate(self, body: dict[str, Any], timeout: float | None) -> Result:
        return self._generation.generate(body, timeout)

    async def _async_generate(self, body: dict[str, Any], timeout: float | None) -> Result:
        return await self._generation.async_generate(body, timeout)

    def _stream(self, body: dict[str, Any], timeout: float | None) -> Iterator[GenerateResult]:
        return self._generation.stream(body, timeout)

    def _async_stream(self, body: dict[str, Any], timeout: float | None) -> AsyncIterator[GenerateResult]:
        return self._generation.async_stream(body, timeout)

    # -- control and info -----------------------------------------------------------------------------------

    def _control(self, req: ControlReq) -> ControlReply:
        if isinstance(req, GetInternalStateReq):
            return ControlReply(id=0, success=True, payload=self.get_server_info()["internal_states"][0])
        path, waits = req.route, 0.0
        if isinstance(req, FlushCacheReq):
            path, waits = f"{req.route}?timeout={req.timeout}", req.timeout
        timeout = self._control_timeout + waits
        if self._attached is not None:
            return self._attached.control(req, timeout)
        given = {name: value for name, value in msgspec.to_builtins(req).items() if value is not None}
        reply = control_reply(self._transport.post(path, given, timeout))
        if reply.success:
            self._record_version(req, reply.payload)
        return reply

    @property
    def _control_timeout(self) -> float:
        return 2 * self.server_args.control_timeout + _CONTROL_GRACE

    def _record_version(self, req: ControlReq, payload: Any) -> None:
        if isinstance(req, UpdateReq):
            self._last_disk = req if isinstance(req, UpdateWeightsFromDiskReq) else None
        if isinstance(payload, dict) and "weight_version" in payload:
            self._instance.weight_version = str(payload["weight_version"])
        elif isinstance(req, UpdateWeightVersionReq):
            self._instance.weight_version = req.new_version

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        if self._attached is not None:
            self._attached.abort(rid, abort_all, INFO_TIMEOUT)
            return
        raise_for(self._transport.post(AbortReq.route, {"rid": rid, "abort_all": abort_all}, INFO_TIMEOUT))

    def close_session(self, session_id: str) -> None:
        if self._attached is None:
            raise_for(self._transport.post(CLOSE_SESSION, {"session_id": session_id}, INFO_TIMEOUT))

    async def async_close_session(self, session_id: str) -> None:
        if self._attached is None:
            await self._transport.async_post(CLOSE_SESSION, {"session_id": session_id}, INFO_TIMEOUT)

    def get_server_info(self) -> ServerInfo:
        if self._attached is not None:
            return self._attached.server_info()
        info: ServerInfo = self._transport.get("/server_info")
        return info

    def get_model_info(self) -> ModelInfo:
        if self._attached is not None:
            return self._attached.model_info()
        info: ModelInfo = self._transport.get("/model_info")
        return info

    def exit_report(self) -> str | None:
        """Return how the launched server ended, with the end of its log. Return None while the server runs."""
        code = self._child.poll() if self._child is not None else None
        return None if code is None else self._transport.exit_report(code)

    def _push_named(
        self, named_tensors: Iterable[tuple[str, Any]], mapping: Mapping | None, req: UpdateWeightsFromTensorReq
    ) -> tuple[bool, str]:
        if self._attached is None:
            return super()._push_named(named_tensors, mapping, req)
        if req.partial is None and not self._said_unchecked:
            self._said_unchecked = True
            logger.warning(
                "%s at %s does not say which parameters it has: nothing checks that pushes to it are whole. (With "
                "partial=True there is no warning.)",
                self._attached.name,
                self.url,
            )
        pairs = named_tensors if mapping is None else (pair for given in named_tensors for pair in mapping(*given))
        reply = self._attached.push(pairs, req, self._control_timeout)
        if reply.success:
            self._record_version(req, reply.payload)
        return self._updated(req, reply)

    def _weight_pusher(self) -> WeightPusher:
        if self._attached is not None:
            raise BadRequestError(
                f"{self._attached.name} keeps no registered weights: call update_weights_from_tensor with all tensors."
            )
        return super()._weight_pusher()

    # -- profiler -------------------------------------------------------------------------------------------

    def start_profile(self, output_dir: str, *, with_stack: bool = False, record_shapes: bool = False) -> None:
        """Record the steps of rank 0 with torch's profiler, until `stop_profile`; at most 1000 steps or 60 s.

        `output_dir` is the folder of the trace: `ServerArgs.profile_folder`, or a folder in it.
        """
        req = StartProfileReq(output_dir=output_dir, with_stack=with_stack, record_shapes=record_shapes)
        body = {name: value for name, value in msgspec.to_builtins(req).items() if value is not None and name != "type"}
        raise_for(self._transport.post(req.route, body, INFO_TIMEOUT))

    def stop_profile(self) -> None:
        """End the recording. Return when the trace is written."""
        timeout = self.server_args.control_timeout + _CONTROL_GRACE
        raise_for(self._transport.post(StopProfileReq.route, {}, timeout))

    # -- shutdown -------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        if self._transport.is_closed:
            return
        self._close_registrations()
        self._transport.close()
        self._finalizer()

    def _close_registrations(self) -> None:
        """Release the pushed memory.

        A server that the adapter attached to continues to run, and must close the memory.
        """
        registrations = self._end_pushes()
        if registrations and self._child is None:
            req = UnregisterWeightsReq(registrations=registrations)
            # If the server does not answer, it closes the memory when it notices the end of this process.
            with contextlib.suppress(VerlServerError):
                self._transport.post(req.route, msgspec.to_builtins(req), CLOSE_TIMEOUT)


class RoutedEngine(RoutedCalls, HttpServerEngineAdapter):
    """An engine over a router: it generates through the router, and pushes to each server directly (`RoutedCalls`).

    `HttpServerEngineAdapter.attach(URL of the router)` returns one. For the router's clients a server that is started
    again changes nothing, so calls raise no ServerRestartedError.
    """

    @classmethod
    def over_router(cls, url: str, api_key: str | None, admin_api_key: str | None) -> RoutedEngine:
        """Return an engine for the router at `url`; see `attach`."""
        engine = cls.__new__(cls)
        engine._finalizer = weakref.finalize(engine, terminate_server, None)
        engine._connect(url, api_key, admin_api_key, None)
        key = api_key if admin_api_key is None else None
        engine._route(lambda server: HttpServerEngineAdapter.attach(server, key, admin_api_key))
        info = engine._info_of_a_server()
        engine._know(info, _known_settings(info), api_key)
        return engine


def _known_settings(info: ServerInfo) -> dict[str, Any]:
    """Return the settings of a running server, without those that its engine does not have: the report of another
    engine has its own page size, which is no setting."""
    known = settings_of_engine(str(info.get("engine", "embedded")))
    settings: dict[str, Any] = {key: value for key, value in info.items() if key in known and value is not None}
    return settings | {"gpu_uuids": tuple(settings.get("gpu_uuids", ()))}

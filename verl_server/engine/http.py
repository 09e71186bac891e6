"""`HttpServerEngineAdapter`: the engine interface over HTTP.

The adapter launches a server or attaches to a running one. `http_transport` sends the requests. After a restart of the
server every call raises ServerRestartedError, until the weights are pushed again or accepted (`server_instance`).
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import secrets
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, cast

import msgspec

from verl_server.engine.attached.identify import identify
from verl_server.engine.attached.server import AttachedServer, GenerateTransport
from verl_server.engine.base import EngineBase, Result
from verl_server.engine.http_answers import control_reply, raise_for
from verl_server.engine.http_transport import CLOSE_SESSION, INFO_TIMEOUT, HttpTransport
from verl_server.engine.options import PushOptions
from verl_server.engine.server_address import server_address
from verl_server.engine.server_instance import ServerInstance
from verl_server.engine.weights import push_request
from verl_server.errors import (
    BadRequestError,
    ControlTimeoutError,
    ServerDiedError,
    ServerLaunchError,
    ServerRestartedError,
    ServerUnavailableError,
    VerlServerError,
)
from verl_server.ipc.child_process import ChildProcess
from verl_server.ipc.descriptors import raise_descriptor_limit
from verl_server.messages.io_struct import (
    AbortReq,
    AcceptRestartReq,
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
    UpdateMode,
    UpdateReq,
    UpdateWeightsFromDiskReq,
    UpdateWeightsFromTensorReq,
    UpdateWeightVersionReq,
)
from verl_server.server_args import ServerArgs
from verl_server.weight_version import AnyVersion, label_of

if TYPE_CHECKING:
    import torch

    from verl_server.engine.push import Push, WeightPusher
    from verl_server.weight_sync.trainer.sender import Mapping
    from verl_server.weight_sync.trainer.shards import TensorShard

logger = logging.getLogger(__name__)

NOTHING_TO_HEAL = (
    "heal() does not know what to push: no weights are registered, and the newest update was not from disk. Pass the "
    "weights, heal(model.named_parameters()), or call accept_restart() to use the weights that the server serves."
)
_CLOSE_TIMEOUT = 5.0
"""Seconds that a shutdown waits until the server has closed this process's memory."""
_CONTROL_GRACE = 30.0
"""Seconds that are added to the server's own time limit, so that the server's more precise error arrives first."""
_RESTART_POLL = 0.5
"""Seconds between two requests to a server that is being started again."""


class HttpServerEngineAdapter(EngineBase):
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
        self._finalizer = weakref.finalize(self, _terminate, child)
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
        """
        url = server_address(url)
        adapter = cls.__new__(cls)
        adapter._finalizer = weakref.finalize(adapter, _terminate, None)
        adapter._connect(url, api_key, admin_api_key, None)
        adapter._attached = identify(adapter._transport, url)
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
        fields |= {"api_key": api_key, "admin_api_key": admin_api_key, "allow_unauthenticated": True}
        adapter.server_args = ServerArgs(**fields)
        # Servers of other projects do not report it.
        adapter.scheduler_info = info.get("scheduler_info") or cast(SchedulerInfo, {})
        return adapter

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

    # -- restarts of the server -----------------------------------------------------------------------------

    def heal(
        self,
        named_tensors: Iterable[tuple[str, torch.Tensor | TensorShard]] | None = None,
        mapping: Mapping | None = None,
        *,
        version: AnyVersion | None = None,
        partial: bool = False,
        mode: UpdateMode = "wait",
        timeout: float | None = None,
    ) -> tuple[bool, str]:
        """Push the weights to a server that was started again, and accept its new run. Return (True, message).

        The weights are `named_tensors`. Without `named_tensors` they are the current values of the registered weights
        or, if none are registered, the folder that the newest update loaded. `version` is their label; by default the
        server makes a new one, because the weights may have changed since the last push. `partial` permits a push in
        which parameters are missing; the server keeps the values that it loaded for these. `mode` is the treatment of
        running requests, as in every update.

        If the server is still starting, the call waits, at most `timeout` seconds (default:
        `ServerArgs.startup_timeout`). All other calls raise ServerRestartedError until this call has succeeded. The new
        run has no process groups: create them again.
        """

        def send(push: Push) -> tuple[bool, str]:
            return self.send_healing(push, version, options, timeout)

        options, pusher = PushOptions(partial=partial, mode=mode), self._weight_pusher()
        if named_tensors is None and not pusher.has_source:
            return self.heal_from_disk(version, timeout)
        sent = pusher.push(send) if named_tensors is None else pusher.update(named_tensors, mapping, send)
        return sent[0], sent[1]

    def accept_restart(self) -> None:
        """Accept a server that was started again, with the weights that it serves now.

        If no engine has healed the server yet, this call confirms the weights for all engines, and needs the admin key.
        Engines that wait in `async_wait_until_healed` (`AgentLoop`) then continue, too. If an engine has healed the
        server, the call needs no admin key.
        """
        instance, info = self._wait_for_server()
        if not info["weights_confirmed"]:
            self._confirm(instance)
        self._use_run(instance, info["weight_version"])

    def lost(self, version: str | None = None) -> str | None:
        """Return why the server cannot generate for this engine before somebody acts, or None if it can.

        It cannot if it does not run, if it is still starting, or if it was started again and its weights are not
        confirmed. With `version`, its weights must also have this version. A server that is slow to answer is not lost,
        and neither is one of another project, whose restarts do not show. Any thread may call it.
        """
        if self._instance.id is None:
            return None
        try:
            instance, info = self._transport.info_of_any_run()
        except ControlTimeoutError:
            return None
        except (ServerDiedError, ServerUnavailableError) as error:
            return str(error)
        return self._unserved(instance, info, version)

    def is_unreachable(self) -> bool:
        """Return True if no connection to the server gets an answer. A slow server is reachable."""
        try:
            self._transport.probe("/health")
        except ServerDiedError:
            return True
        except VerlServerError:
            return False
        return False

    def _unserved(self, instance: str | None, info: ServerInfo, version: str | None) -> str | None:
        """Return why a run of the server does not have the weights that this engine wants, or None if it has them."""
        if instance != self._instance.id and not info["weights_confirmed"]:
            served = info["weight_version"]
            return (
                f"Run {instance} of the server at {self.url} serves version {served!r}, which no engine has confirmed."
            )
        if version is not None and info["weight_version"] != version:
            return f"The server at {self.url} serves version {info['weight_version']!r}, not {version!r}."
        return None

    def relaunch(self, also: Callable[[], None] | None = None) -> None:
        """Start a launched server again, with the same settings, at the same URL. One that still runs is ended first.

        The new run serves the weights that it loads, so call `heal` next; until then, calls raise ServerRestartedError.
        `also` is called several times a second during the start, and may raise to give it up. Raise BadRequestError if
        the adapter did not launch the server, and ServerLaunchError if it does not start, or has less room than before.
        """
        if self._child is None:
            raise BadRequestError(
                f"The server at {self.url} was not launched by this engine: whoever started it must start it again."
            )
        self._finalizer()
        args = self.server_args.replace(random_seed=self._given_seed)
        self._child = ChildProcess("server", "verl_server.server.launch", {"server_args": args.to_json()})
        self._finalizer = weakref.finalize(self, _terminate, self._child)
        self._transport.use_child(self._child)
        try:
            self._child.wait_ready(args.startup_timeout + 30, also)
            _, info = self._transport.info_of_any_run()
            before, now = (
                scheduler.get("max_req_input_len") for scheduler in (self.scheduler_info, info["scheduler_info"])
            )
            if before is not None and now is not None and now < before:
                raise ServerLaunchError(
                    f"The server at {self.url} was launched again, and has memory for sequences of {now} tokens only, "
                    f"not {before} as before. Set a smaller mem_fraction_static, or max_total_tokens, from the start."
                )
        except BaseException:
            self._finalizer()
            raise

    async def async_wait_until_healed(self, timeout: float, version: str | None = None) -> None:
        """Wait until the server answers and its weights are confirmed, and accept its current run.

        With `version`, wait until the weights have this version. The weights of a new run are confirmed when the engine
        that pushes calls `heal` or `accept_restart`, or pushes every parameter. Raise ServerRestartedError after
        `timeout` seconds, and ServerDiedError if the server was launched by this adapter and has ended.
        """
        deadline = time.monotonic() + timeout
        while True:
            try:
                instance, info = await asyncio.to_thread(self._transport.info_of_any_run)
                unserved = self._unserved(instance, info, version)
                if unserved is None:
                    if instance != self._instance.id:
                        self._use_run(instance, info["weight_version"])
                    return
                state = unserved.rstrip(".")
            except (ServerUnavailableError, ServerDiedError, ControlTimeoutError) as error:
                self._raise_if_gone(error)
                state = str(error)
            if time.monotonic() > deadline:
                raise ServerRestartedError(
                    f"The server at {self.url} was started again and was not healed within {timeout:g} s ({state}). "
                    "The engine that pushes must call heal() or accept_restart()."
                )
            await asyncio.sleep(_RESTART_POLL)

    def send_healing(
        self, push: Push, version: AnyVersion | None, options: PushOptions, timeout: float | None
    ) -> tuple[bool, str]:
        """Send the update of `heal` with the source of `push`. `VerlEngine.heal` calls it on rank 0."""
        return self._healed(
            version, timeout, lambda label: self.send_update(push, push_request(None, True, label, options))
        )

    def heal_from_disk(self, version: AnyVersion | None, timeout: float | None) -> tuple[bool, str]:
        """Run `heal` with the folder that the newest update loaded. `VerlEngine.heal` calls it on rank 0."""
        req = self._last_disk
        if req is None:
            raise BadRequestError(NOTHING_TO_HEAL)
        return self._healed(
            version,
            timeout,
            lambda label: self._update(msgspec.structs.replace(req, weight_version=label, transaction_id=None)),
        )

    def _healed(
        self, version: AnyVersion | None, timeout: float | None, push: Callable[[str | None], tuple[bool, str]]
    ) -> tuple[bool, str]:
        """Call `push` with the label of the new version, for the server's current run, and accept this run."""
        instance, _ = self._wait_for_server(timeout)
        label = label_of(version)
        if instance != self._instance.id:
            self._transaction = None  # the transaction ended with the previous run
        with self._instance.addressing(instance):
            result = push(label)
        self._confirm(instance)
        self._use_run(instance, self._instance.weight_version)
        return result

    def _confirm(self, instance: str | None) -> None:
        with self._instance.addressing(instance):
            raise_for(self._transport.post(AcceptRestartReq.route, {}, INFO_TIMEOUT))

    def _expect_current_run(self) -> ServerInfo:
        """Read the server's information, and expect its current run from now on."""
        instance, info = self._transport.info_of_any_run()
        self._use_run(instance, info.get("weight_version"))
        return info

    def _use_run(self, instance: str | None, weight_version: str | None) -> None:
        if instance != self._instance.id:
            self._transaction = None
        self._instance.weight_version, self._instance.id = weight_version, instance

    def _wait_for_server(self, timeout: float | None = None) -> tuple[str | None, ServerInfo]:
        """Return `HttpTransport.info_of_any_run`. If the server is still starting, wait for it.

        `timeout` is in seconds; by default it is the time that a server may take to start.
        """
        deadline = time.monotonic() + (self.server_args.startup_timeout if timeout is None else timeout)
        while True:
            try:
                return self._transport.info_of_any_run()
            except (ServerUnavailableError, ServerDiedError) as error:
                self._raise_if_gone(error)
                if time.monotonic() > deadline:
                    raise
            time.sleep(_RESTART_POLL)

    def _raise_if_gone(self, error: VerlServerError) -> None:
        """Raise `error` if the adapter is shut down, or if the server that it launched has ended."""
        if self._transport.is_closed or (self._child is not None and self._child.poll() is not None):
            raise error

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
                self._transport.post(req.route, msgspec.to_builtins(req), _CLOSE_TIMEOUT)


def _known_settings(info: ServerInfo) -> dict[str, Any]:
    known = {field.name for field in dataclasses.fields(ServerArgs)}
    settings: dict[str, Any] = {key: value for key, value in info.items() if key in known and value is not None}
    return settings | {"gpu_uuids": tuple(settings.get("gpu_uuids", ()))}


def _terminate(child: ChildProcess | None) -> None:
    """End a launched server. `child` is None for a server that the adapter attached to."""
    if child is not None:
        child.terminate(grace=20.0)

"""`HttpServerEngineAdapter`: the engine interface over HTTP, to a server it launched or one it attaches to.

The requests themselves are `http_transport`'s. A server that was started again is refused until its weights were
pushed again or accepted (`server_instance`).
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

from verl_server.engine.base import EngineBase, Result
from verl_server.engine.http_answers import control_reply, raise_for
from verl_server.engine.http_transport import INFO_TIMEOUT, HttpTransport
from verl_server.engine.options import PushOptions
from verl_server.engine.server_instance import ServerInstance
from verl_server.engine.weights import push_request
from verl_server.errors import (
    BadRequestError,
    ControlTimeoutError,
    ServerDiedError,
    ServerRestartedError,
    ServerUnavailableError,
    VerlServerError,
)
from verl_server.io_struct import (
    AbortReq,
    AcceptRestartReq,
    ControlReply,
    ControlReq,
    FlushCacheReq,
    GetInternalStateReq,
    UnregisterWeightsReq,
    UpdateMode,
    UpdateReq,
    UpdateWeightsFromDiskReq,
    UpdateWeightVersionReq,
)
from verl_server.ipc.child_process import ChildProcess
from verl_server.ipc.descriptors import raise_descriptor_limit
from verl_server.results import GenerateResult, ModelInfo, SchedulerInfo, ServerInfo
from verl_server.server_args import ServerArgs

if TYPE_CHECKING:
    import torch

    from verl_server.weight_sync.trainer.pusher import Push
    from verl_server.weight_sync.trainer.sender import Mapping
    from verl_server.weight_sync.trainer.shards import TensorShard

logger = logging.getLogger(__name__)

NOTHING_TO_HEAL = (
    "heal() does not know what to push: nothing is registered, and the newest update was not from disk. Pass the "
    "weights, heal(model.named_parameters()), or call accept_restart() to go on with what the server serves."
)
_LET_GO_TIMEOUT = 5.0
_CONTROL_GRACE = 30.0
"""Over the server's own bound, so that its error, which knows more, arrives first."""
_RESTART_POLL = 0.5
"""Seconds between two looks at a server that is started again."""


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
            if args.node_rank == 0:
                server_info = self._meet()
                self.scheduler_info = server_info["scheduler_info"]
                self.server_args = self.server_args.replace(random_seed=server_info["random_seed"])
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
        info = adapter._meet()
        if adapter._instance.id is None:
            logger.warning("The server at %s names no run: a restart of it will not be noticed.", url)
        known = {field.name for field in dataclasses.fields(ServerArgs)}
        fields: dict[str, Any] = {key: value for key, value in info.items() if key in known and value is not None}
        fields |= {"api_key": api_key, "admin_api_key": admin_api_key, "gpu_uuids": tuple(fields.get("gpu_uuids", ()))}
        adapter.server_args = ServerArgs(**fields | {"allow_unauthenticated": True})
        adapter.scheduler_info = info.get("scheduler_info") or cast(SchedulerInfo, {})  # another make's has none
        return adapter

    def _connect(self, url: str, api_key: str | None, admin_api_key: str | None, child: ChildProcess | None) -> None:
        super().__init__()
        raise_descriptor_limit()  # each request in flight takes a connection
        self.url = url
        self.admin_api_key = admin_api_key
        self._child = child
        self._instance = ServerInstance(url)
        self._transport = HttpTransport(url, api_key, admin_api_key, child, self._instance)
        self._last_disk: UpdateWeightsFromDiskReq | None = None
        """The newest update, if it came from disk."""

    @property
    def instance_id(self) -> str | None:
        """The run of the server that this engine works with; None if the server names none."""
        return self._instance.id

    @property
    def pid(self) -> int | None:
        """Process id of a launched server."""
        return self._child.pid if self._child is not None else None

    # -- generation -----------------------------------------------------------------------------------------

    def _generate(self, body: dict[str, Any], timeout: float | None) -> Result:
        return self._transport.generate(body, timeout)

    async def _async_generate(self, body: dict[str, Any], timeout: float | None) -> Result:
        return await self._transport.async_generate(body, timeout)

    def _stream(self, body: dict[str, Any], timeout: float | None) -> Iterator[GenerateResult]:
        return self._transport.stream(body, timeout)

    def _async_stream(self, body: dict[str, Any], timeout: float | None) -> AsyncIterator[GenerateResult]:
        return self._transport.async_stream(body, timeout)

    # -- control and info -----------------------------------------------------------------------------------

    def _control(self, req: ControlReq) -> ControlReply:
        if isinstance(req, GetInternalStateReq):
            return ControlReply(id=0, success=True, payload=self.get_server_info()["internal_states"][0])
        path, waits = req.route, 0.0
        if isinstance(req, FlushCacheReq):
            path, waits = f"{req.route}?timeout={req.timeout}", req.timeout
        timeout = 2 * self.server_args.control_timeout + waits + _CONTROL_GRACE
        given = {name: value for name, value in msgspec.to_builtins(req).items() if value is not None}
        reply = control_reply(self._transport.post(path, given, timeout))
        if reply.success:
            self._note_version(req, reply.payload)
        return reply

    def _note_version(self, req: ControlReq, payload: Any) -> None:
        if isinstance(req, UpdateReq):
            self._last_disk = req if isinstance(req, UpdateWeightsFromDiskReq) else None
        if isinstance(payload, dict) and "weight_version" in payload:
            self._instance.weight_version = str(payload["weight_version"])
        elif isinstance(req, UpdateWeightVersionReq):
            self._instance.weight_version = req.new_version

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        raise_for(self._transport.post(AbortReq.route, {"rid": rid, "abort_all": abort_all}, INFO_TIMEOUT))

    def get_server_info(self) -> ServerInfo:
        info: ServerInfo = self._transport.get("/server_info")
        return info

    def get_model_info(self) -> ModelInfo:
        info: ModelInfo = self._transport.get("/model_info")
        return info

    # -- after a restart of the server ----------------------------------------------------------------------

    def heal(
        self,
        named_tensors: Iterable[tuple[str, torch.Tensor | TensorShard]] | None = None,
        mapping: Mapping | None = None,
        *,
        version: str | int | None = None,
        partial: bool = False,
        mode: UpdateMode = "wait",
    ) -> tuple[bool, str]:
        """Push the weights to a server that was started again, and go on with it.

        The weights are `named_tensors`; else what was registered, as it is now; else the folder that the newest update
        loaded. Their `version` is the one that the server had, unless given: give it if the weights have changed since.
        A server that is still starting is waited for, at most `startup_timeout`. All other calls raise
        ServerRestartedError until this one has succeeded.
        `partial=True` permits a push that lacks parameters, for a trainer that leaves them as the server loads them.
        Process groups are gone with the run before: make them anew.
        """

        def send(push: Push) -> tuple[bool, str]:
            return self.send_healing(push, version, options)

        options, pusher = PushOptions(partial=partial, mode=mode), self._weight_pusher()
        if named_tensors is None and not pusher.has_source:
            return self.heal_from_disk(version)
        sent = pusher.push(send) if named_tensors is None else pusher.update(named_tensors, mapping, send)
        return sent[0], sent[1]

    def accept_restart(self) -> None:
        """Go on with a server that was started again, and with the weights that it serves now.

        On behalf of all: engines that wait for it to be healed (`AgentLoop`) go on, too. It needs the admin key then;
        a server that was healed already is accepted without.
        """
        instance, info = self._wait_for_server()
        if not info["weights_confirmed"]:
            self._confirm(instance)
        self._adopt(instance, info["weight_version"])

    async def async_wait_until_healed(self, timeout: float) -> None:
        """Wait until the server answers, and, if it was started again, until its weights were confirmed by the engine
        that pushes (`heal`, `accept_restart`, or a full update). Then go on with it.

        Raises ServerRestartedError after `timeout` seconds, or ServerDiedError if the server cannot come back.
        """
        deadline = time.monotonic() + timeout
        while True:
            try:
                instance, info = await asyncio.to_thread(self._transport.ask_any_run)
                if instance == self._instance.id:
                    return
                if info["weights_confirmed"]:
                    self._adopt(instance, info["weight_version"])
                    return
                state = f"run {instance} serves version {info['weight_version']!r}, which nobody has confirmed"
            except (ServerUnavailableError, ServerDiedError, ControlTimeoutError) as error:
                self._raise_if_gone(error)
                state = str(error)
            if time.monotonic() > deadline:
                raise ServerRestartedError(
                    f"The server at {self.url} was started again, and was not healed within {timeout:g} s ({state}). "
                    "The engine that pushes must call heal() or accept_restart()."
                )
            await asyncio.sleep(_RESTART_POLL)

    def send_healing(self, push: Push, version: str | int | None, options: PushOptions) -> tuple[bool, str]:
        """`send_update` of `heal`, also for `VerlEngine`."""
        return self._healed(version, lambda label: self.send_update(push, push_request(None, True, label, options)))

    def heal_from_disk(self, version: str | int | None) -> tuple[bool, str]:
        """`heal` with the folder that the newest update loaded, also for `VerlEngine`."""
        req = self._last_disk
        if req is None:
            raise BadRequestError(NOTHING_TO_HEAL)
        return self._healed(
            version,
            lambda label: self._update(msgspec.structs.replace(req, weight_version=label, transaction_id=None)),
        )

    def _healed(self, version: str | int | None, push: Callable[[str | None], tuple[bool, str]]) -> tuple[bool, str]:
        instance, _ = self._wait_for_server()
        label = self._instance.weight_version if version is None else str(version)
        if instance != self._instance.id:
            self._transaction = None  # it ended with the run before
        with self._instance.addressing(instance):
            result = push(label)
        self._confirm(instance)
        self._adopt(instance, self._instance.weight_version)
        return result

    def _confirm(self, instance: str | None) -> None:
        with self._instance.addressing(instance):
            raise_for(self._transport.post(AcceptRestartReq.route, {}, INFO_TIMEOUT))

    def _meet(self) -> ServerInfo:
        """The first look at the server: from now on this run of it is expected."""
        instance, info = self._transport.ask_any_run()
        self._adopt(instance, info.get("weight_version"))
        return info

    def _adopt(self, instance: str | None, weight_version: str | None) -> None:
        if instance != self._instance.id:
            self._transaction = None
        self._instance.weight_version, self._instance.id = weight_version, instance

    def _wait_for_server(self) -> tuple[str | None, ServerInfo]:
        """`ask_any_run` of a server that may still be starting."""
        deadline = time.monotonic() + self.server_args.startup_timeout
        while True:
            try:
                return self._transport.ask_any_run()
            except (ServerUnavailableError, ServerDiedError) as error:
                self._raise_if_gone(error)
                if time.monotonic() > deadline:
                    raise
            time.sleep(_RESTART_POLL)

    def _raise_if_gone(self, error: VerlServerError) -> None:
        """A server that this engine launched does not come back."""
        if self._transport.is_closed or (self._child is not None and self._child.poll() is not None):
            raise error

    # -- the end --------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        if self._transport.is_closed:
            return
        self._let_go()
        self._transport.close()
        self._finalizer()

    def _let_go(self) -> None:
        """Hold none of our memory any more. A server that we only attached to lives on, and must close it first."""
        registrations = self._end_pushes()
        if registrations and self._child is None:
            req = UnregisterWeightsReq(registrations=registrations)
            with contextlib.suppress(VerlServerError):  # it is gone, or slow: then it notices the end of this process
                self._transport.post(req.route, msgspec.to_builtins(req), _LET_GO_TIMEOUT)


def _terminate(child: ChildProcess | None) -> None:
    """End a launched server; one that was attached to is not ours to end."""
    if child is not None:
        child.terminate(grace=20.0)

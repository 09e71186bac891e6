"""`RestartableServer`: what an engine over HTTP does when its server ends or is started again.

`HttpServerEngineAdapter` adds the connection and the calls. After a restart every call raises ServerRestartedError
(`server_instance` detects it), until the engine that pushes weights has called `heal`, or the owner `accept_restart`.
`AgentLoop` waits with `async_wait_until_healed`. A trainer looks with `lost`, and launches its server again with
`relaunch`.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from verl_server.engine.base import EngineBase
from verl_server.engine.http_answers import raise_for
from verl_server.engine.http_transport import INFO_TIMEOUT, HttpTransport
from verl_server.engine.options import PushOptions
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
from verl_server.messages.io_struct import AcceptRestartReq
from verl_server.messages.results import ServerInfo
from verl_server.messages.weight_requests import UpdateMode, UpdateWeightsFromDiskReq
from verl_server.weight_version import AnyVersion, label_of, satisfies

if TYPE_CHECKING:
    import torch

    from verl_server.engine.push import Push
    from verl_server.weight_sync.trainer.sender import Mapping
    from verl_server.weight_sync.trainer.shards import TensorShard

NOTHING_TO_HEAL = (
    "heal() does not know what to push: no weights are registered, and the newest update was not from disk. Pass the "
    "weights, heal(model.named_parameters()), or call accept_restart() to use the weights that the server serves."
)
RESTART_POLL = 0.5
"""Seconds between two requests to a server that is being started again."""


class RestartableServer(EngineBase):
    """The part of an engine over HTTP that knows the runs of its server. The subclass sets the attributes."""

    _transport: HttpTransport
    _instance: ServerInstance
    _child: ChildProcess | None
    """Process of the server if this engine launched it."""
    _finalizer: weakref.finalize[..., Any]
    """Ends the process."""
    _given_seed: int | None
    """`random_seed` as the caller set it: a server that is launched again without one draws another."""
    _last_disk: UpdateWeightsFromDiskReq | None
    """The newest update if it was from disk, else None."""

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
        self._accept()

    def _accept(self, timeout: float | None = None) -> None:
        """Run `accept_restart`. If the server is still starting, wait for it, at most `timeout` seconds."""
        instance, info = self._wait_for_server(timeout)
        if not info["weights_confirmed"]:
            self._confirm(instance)
        self._use_run(instance, info["weight_version"])

    def lost(self, version: str | None = None) -> str | None:
        """Return why the server cannot generate for this engine before somebody acts, or None if it can.

        It cannot if it does not run, if it is still starting, or if it was started again and its weights are not
        confirmed. With `version`, a label or `at_least` a version, its weights must also satisfy it. A server that is
        slow to answer is not lost, and neither is one of another project, whose restarts do not show. Any thread may
        call it.
        """
        if self._instance.id is None:
            return None
        try:
            instance, info = self._transport.info_of_any_run()
        except (ServerDiedError, ServerUnavailableError) as error:
            return str(error)
        except VerlServerError:  # it is slow, or a proxy before it has a fault of its own
            return None
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
        if version is not None and not satisfies(info["weight_version"], version):
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
        self._finalizer = weakref.finalize(self, terminate_server, self._child)
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

        With `version`, wait until the weights satisfy it, as in `lost`. The weights of a new run are confirmed when the
        engine that pushes calls `heal` or `accept_restart`, or pushes every parameter. Raise ServerRestartedError after
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
            await asyncio.sleep(RESTART_POLL)

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

    def _serves_confirmed(self, version: str) -> bool:
        """Return True if the server's weights are confirmed and have this label. Its current run is then accepted."""
        instance, info = self._transport.info_of_any_run()
        if not (info["weights_confirmed"] and info["weight_version"] == version):
            return False
        self._use_run(instance, version)
        return True

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
            time.sleep(RESTART_POLL)

    def _raise_if_gone(self, error: VerlServerError) -> None:
        """Raise `error` if the adapter is shut down, or if the server that it launched has ended."""
        if self._transport.is_closed or (self._child is not None and self._child.poll() is not None):
            raise error


def terminate_server(child: ChildProcess | None) -> None:
    """End a launched server. `child` is None for a server that the adapter attached to."""
    if child is not None:
        child.terminate(grace=20.0)

"""`RoutedCalls`: how an engine over a router differs from an engine over one server.

`http.RoutedEngine` is an `HttpServerEngineAdapter` with these methods. It generates through the router, and pushes to
each server directly, because a server reads the caller's memory where it is. `RoutedCalls.WAYS` has the way of each
control request. The list of servers is read from the router when a call begins, so servers that joined take part.

A server that is dead, starting or was started again is left out, and the router keeps it out until it has the version.
The next push of all parameters, and `heal`, try it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

import msgspec

from verl_server.engine.http_transport import CLOSE_TIMEOUT
from verl_server.engine.options import PushOptions
from verl_server.engine.restarts import NOTHING_TO_HEAL, RESTART_POLL, RestartableServer
from verl_server.engine.router_client import FleetReport, RouterClient
from verl_server.engine.server_group import AWAY, ServerGroup
from verl_server.engine.weights import push_request
from verl_server.errors import (
    BadRequestError,
    ControlTimeoutError,
    ServerDiedError,
    ServerRestartedError,
    ServerUnavailableError,
    UpdateConflictError,
    VerlServerError,
    WeightUpdateError,
    error_for_status,
)
from verl_server.messages.io_struct import (
    ContinueGenerationReq,
    ControlReply,
    ControlReq,
    FlushCacheReq,
    GetInternalStateReq,
    PauseGenerationReq,
)
from verl_server.messages.results import ServerInfo
from verl_server.messages.weight_requests import (
    BeginWeightUpdateReq,
    DestroyWeightsUpdateGroupReq,
    EndWeightUpdateReq,
    GetWeightsByNameReq,
    InitWeightsUpdateGroupReq,
    RegisterWeightsReq,
    ReleaseMemoryOccupationReq,
    ResumeMemoryOccupationReq,
    UnregisterWeightsReq,
    UpdateReq,
    UpdateWeightsFromDiskReq,
    UpdateWeightsFromDistributedReq,
    UpdateWeightsFromTensorReq,
    UpdateWeightVersionReq,
    WeightsCheckerReq,
)
from verl_server.weight_version import AnyVersion, OwnVersions, label_of

if TYPE_CHECKING:
    from verl_server.engine.push import Push

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R", bound=ControlReq)
_UPDATES = UpdateReq | RegisterWeightsReq | BeginWeightUpdateReq | EndWeightUpdateReq | UpdateWeightVersionReq
Way = Literal["all", "one", "router", "refused"]
_REPORT_SECONDS = 3.0
"""Seconds after which a router's report must show what its servers were a moment ago: it looks once a second."""


class RoutedCalls(RestartableServer):
    """The calls of an engine over a router that one server would answer otherwise."""

    WAYS: ClassVar[dict[type[ControlReq], Way]] = {
        # Weights and memory: each server, directly and at one time.
        UpdateWeightsFromTensorReq: "all",
        UpdateWeightsFromDiskReq: "all",
        RegisterWeightsReq: "all",
        UnregisterWeightsReq: "all",
        UpdateWeightVersionReq: "all",
        ReleaseMemoryOccupationReq: "all",
        ResumeMemoryOccupationReq: "all",
        # Transactions: the servers that have begun it. If some take a call and another one does not, all discard it.
        BeginWeightUpdateReq: "all",
        EndWeightUpdateReq: "all",
        # Generation: a pause must reach each server that a push reaches.
        PauseGenerationReq: "all",
        ContinueGenerationReq: "all",
        FlushCacheReq: "all",
        # Checks: of all servers, whose checksums must be equal; or of the first that answers.
        WeightsCheckerReq: "all",
        GetWeightsByNameReq: "one",
        # Through the router, as generation, aborts, hints of sessions, `get_server_info` and `get_model_info`.
        GetInternalStateReq: "router",
        # No call over a router: each server would need other arguments. So are `start_profile` and `relaunch`.
        InitWeightsUpdateGroupReq: "refused",
        DestroyWeightsUpdateGroupReq: "refused",
        UpdateWeightsFromDistributedReq: "refused",
    }
    """Control request -> the servers that get it."""

    _router: RouterClient
    _servers: ServerGroup[RestartableServer]
    _versions: OwnVersions
    """Makes the labels of pushes without one, because each server would make another."""
    _urls: list[str]
    """URLs of the servers, from the newest report of the router."""
    _taking_part: list[str]
    """URLs of the servers that have the open transaction."""

    def _route(self, connect: Callable[[str], RestartableServer]) -> None:
        """Ask the router for its servers. `connect(url)` returns an engine for one, with the servers' admin key."""
        self._router = RouterClient(self._transport, str(self.url))
        self._servers, self._versions = ServerGroup(connect), OwnVersions()
        self._taking_part = []
        self._instance.id = self.fleet().fleet

    def fleet(self) -> FleetReport:
        """Return what the router reports about its servers."""
        report = self._router.fleet()
        self._urls = report.urls
        return report

    def server_urls(self) -> list[str]:
        """Return the URLs of the servers that calls reach. While the router is away, they are the last known ones."""
        try:
            return self.fleet().urls
        except (ServerDiedError, ServerUnavailableError) as error:
            logger.warning("The router does not answer, and the call goes to the servers that it had: %s", error)
            return list(self._urls)

    # -- control requests ------------------------------------------------------------------------------------------

    def _control(self, req: ControlReq) -> ControlReply:
        match self.WAYS[type(req)]:
            case "router":
                return ControlReply(id=0, success=True, payload=self.get_server_info()["internal_states"][0])
            case "one":
                return self._from_one(req)
            case "refused":
                raise self._refused(req.route)
        req = self._labelled(req)
        send = _sending(req)
        if isinstance(req, BeginWeightUpdateReq):
            replies = self._begin(req, send)
        elif (transaction := getattr(req, "transaction_id", None)) is not None:
            replies = self._in_part(transaction, req.route, send)
        else:
            replies = self._on_all(req.route, send)
        if isinstance(req, WeightsCheckerReq) and req.action == "checksum":
            _check_equal({url: reply.payload for url, reply in replies.items()})
        self._commit(req)
        return next(iter(replies.values()))

    def flush_cache(self, timeout: float = 0.0) -> bool:
        return all(self._on_all("flush_cache", lambda server: server.flush_cache(timeout)).values())

    def start_profile(self, output_dir: str, *, with_stack: bool = False, record_shapes: bool = False) -> None:
        raise self._refused("start_profile")

    def stop_profile(self) -> None:
        raise self._refused("stop_profile")

    def _on_all(
        self, what: str, act: Callable[[RestartableServer], T], urls: Sequence[str] | None = None
    ) -> dict[str, T]:
        """Call `act` with the engine of each server, at one time, and return the results by URL.

        Raise the error of a server that refuses, with what the others did, and an error if all are left out.
        """
        outcomes = self._servers.each(self.server_urls() if urls is None else urls, what, act)
        if (error := outcomes.error(what, self._served)) is not None:
            raise error
        return outcomes.done

    def _from_one(self, req: ControlReq) -> ControlReply:
        """Return the reply of the first server that is not left out."""
        urls = self.server_urls()
        for url in urls[:-1]:
            with contextlib.suppress(*AWAY):
                return self._on_all(req.route, _sending(req), [url])[url]
        return next(iter(self._on_all(req.route, _sending(req), urls[-1:]).values()))

    def _refused(self, call: str) -> BadRequestError:
        urls = ", ".join(self.server_urls())
        return BadRequestError(
            f"{call} cannot be called over a router, because each server needs arguments of its own. Call it on "
            f"HttpServerEngineAdapter.attach(URL) of a server: {urls}."
        )

    def _served(self, url: str) -> str:
        member = self._servers.members().get(url)
        return "" if member is None else f" (version {member._instance.weight_version!r})"

    # -- pushes ----------------------------------------------------------------------------------------------------

    def send_update(self, push: Push, req: UpdateWeightsFromTensorReq) -> tuple[bool, str]:
        """Send the update to all servers at one time, by id to those that know the registration.

        An update of all parameters heals a server that was started again.
        """
        req = self._labelled(self._in_transaction(req))
        send = self._sending_push(push, req)
        is_whole = not req.partial if req.partial is not None else push.describe is not None

        def send_or_heal(server: RestartableServer) -> tuple[bool, str]:
            try:
                return send(server)
            except ServerRestartedError:
                if not is_whole:
                    raise
                return server._healed(req.weight_version, 0.0, lambda _: send(server))

        if req.transaction_id is not None:
            results = self._in_part(req.transaction_id, "The push", send)
        else:
            results = self._on_all("The push", send_or_heal)
        self._commit(req)
        return next(iter(results.values()))

    def _sending_push(
        self, push: Push, req: UpdateWeightsFromTensorReq
    ) -> Callable[[RestartableServer], tuple[bool, str]]:
        """Return a function that sends a push to one server. Memory is described once, for all servers."""
        if push.describe is not None:
            push = dataclasses.replace(push, describe=_once(push.describe))

        def send(server: RestartableServer) -> tuple[bool, str]:
            if push.handles is not None and server.server_args.tp_size != self.server_args.tp_size:
                raise BadRequestError(
                    f"The servers at {self.url} have different tp_size, and each handle (LocalSerializedTensor) has "
                    "one value for each rank of a server: push tensors, or to one server at a time."
                )
            return server.send_update(push, req)

        return send

    def _labelled(self, req: R) -> R:
        """Return a request that makes a version with the label of this version, which is the same on all servers."""
        if isinstance(req, UpdateReq):
            makes_version = req.transaction_id is None
        else:
            makes_version = isinstance(req, EndWeightUpdateReq) and not req.discard
        if not makes_version:
            return req
        return msgspec.structs.replace(req, weight_version=self._label(getattr(req, "weight_version", None)))

    def _label(self, given: AnyVersion | None) -> str:
        label = label_of(given)
        if label is None:
            return self._versions.next_label()
        self._versions.note(label)
        return label

    def _commit(self, req: ControlReq) -> None:
        """Record a request that the servers have carried out. If it made a version, tell the router."""
        if isinstance(req, UpdateReq):
            self._last_disk = req if isinstance(req, UpdateWeightsFromDiskReq) else None
        label = req.new_version if isinstance(req, UpdateWeightVersionReq) else getattr(req, "weight_version", None)
        if label is not None:
            self._instance.weight_version = label
            self._router.commit(label)

    # -- transactions ----------------------------------------------------------------------------------------------

    def _begin(
        self, req: BeginWeightUpdateReq, send: Callable[[RestartableServer], ControlReply]
    ) -> dict[str, ControlReply]:
        outcomes = self._servers.each(self.server_urls(), req.route, send)
        self._taking_part = list(outcomes.done)
        if (error := outcomes.error(req.route, self._served)) is not None:
            self._discard(req.transaction_id)
            raise error
        return outcomes.done

    def _in_part(self, transaction: str, what: str, act: Callable[[RestartableServer], T]) -> dict[str, T]:
        """Do the same as `_on_all` on the servers that have the transaction. One that is left out loses it.

        If some servers carry out a call that another one does not, the transaction is discarded on all of them.
        """
        if not self._taking_part:  # another engine has begun it
            return self._on_all(what, act)
        outcomes = self._servers.each(self._taking_part, what, act)
        self._taking_part = [url for url in self._taking_part if url not in outcomes.left_out]
        if not self._taking_part:
            self._transaction = None  # no server has it any more
        error = outcomes.error(what, self._served)
        if error is None:
            return outcomes.done
        if outcomes.done or isinstance(error, ControlTimeoutError):
            self._discard(transaction)
            error.add_note("The transaction was discarded on all servers.")
            error.status_code = UpdateConflictError.status_code
        raise error

    def _discard(self, transaction: str | None) -> None:
        """Discard the transaction on the servers that have it, and forget it. Raise nothing."""
        req = EndWeightUpdateReq(transaction_id=transaction, discard=True)
        self._servers.each(self._taking_part, req.route, _sending(req))
        self._taking_part, self._transaction = [], None

    # -- restarts --------------------------------------------------------------------------------------------------

    def send_healing(
        self, push: Push, version: AnyVersion | None, options: PushOptions, timeout: float | None
    ) -> tuple[bool, str]:
        req = push_request(None, True, self._label(version), options)
        return self._healed_all(self._sending_push(push, req), req, version is not None, timeout)

    def heal_from_disk(self, version: AnyVersion | None, timeout: float | None) -> tuple[bool, str]:
        if self._last_disk is None:
            raise BadRequestError(NOTHING_TO_HEAL)
        req = msgspec.structs.replace(self._last_disk, weight_version=self._label(version), transaction_id=None)
        return self._healed_all(lambda server: server._update(req), req, version is not None, timeout)

    def _healed_all(
        self,
        send: Callable[[RestartableServer], tuple[bool, str]],
        req: UpdateWeightsFromTensorReq | UpdateWeightsFromDiskReq,
        is_named: bool,
        timeout: float | None,
    ) -> tuple[bool, str]:
        """Heal all servers with one version. If all are away, wait for one, at most `timeout` seconds.

        With `is_named`, the caller named the version, and a server that has it confirmed is not pushed to again.
        """

        def heal(server: RestartableServer) -> tuple[bool, str]:
            if is_named and server._serves_confirmed(str(req.weight_version)):
                return True, f"It serves version {req.weight_version!r}."
            return server._healed(req.weight_version, 0.0, lambda _: send(server))

        deadline = time.monotonic() + (self.server_args.startup_timeout if timeout is None else timeout)
        while True:
            try:
                results = self._on_all("heal", heal)
                break
            except AWAY as error:
                self._raise_if_gone(error)
                if time.monotonic() > deadline:
                    raise
            time.sleep(RESTART_POLL)
        self._commit(req)
        return next(iter(results.values()))

    def accept_restart(self) -> None:
        self._on_all("accept_restart", lambda server: server._accept(timeout=0.0))

    def lost(self, version: str | None = None) -> str | None:
        """Return why the router cannot generate before somebody acts, or None if it can.

        It cannot if no server is healthy, with weights that satisfy `version`. The report of the router may be a second
        old, so it is read again until it is certain.
        """
        deadline = time.monotonic() + _REPORT_SECONDS
        while (reason := self._router.lost(version)) is not None and time.monotonic() < deadline:
            time.sleep(RESTART_POLL)
        return reason

    async def async_wait_until_healed(self, timeout: float, version: str | None = None) -> None:
        """Wait until a server is healthy whose weights satisfy `version`.

        Raise ServerRestartedError after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while (reason := await asyncio.to_thread(self.lost, version)) is not None:
            if time.monotonic() > deadline:
                raise ServerRestartedError(f"No server was healed within {timeout:g} s. {reason}")
            await asyncio.sleep(RESTART_POLL)

    def _info_of_a_server(self) -> ServerInfo:
        """Return the information of a server, through the router. If it has none that may answer, ask one directly."""
        try:
            return self.get_server_info()
        except (ServerDiedError, ServerUnavailableError):
            return next(iter(self._on_all("attach", lambda server: server.get_server_info()).values()))

    def _close_registrations(self) -> None:
        registrations = self._end_pushes()
        for server in self._servers.members().values() if registrations else ():
            with contextlib.suppress(VerlServerError):
                body = msgspec.to_builtins(UnregisterWeightsReq(registrations=registrations))
                server._transport.post(UnregisterWeightsReq.route, body, CLOSE_TIMEOUT)
        self._servers.close()


def _sending(req: ControlReq) -> Callable[[RestartableServer], ControlReply]:
    """Return a function that sends `req` to one server. It raises an error if the server refuses the request."""
    refused = WeightUpdateError if isinstance(req, _UPDATES) else BadRequestError

    def send(server: RestartableServer) -> ControlReply:
        reply = server._control(req)
        if not reply.success:
            raise error_for_status(reply.status_code, reply.message, refused)
        return reply

    return send


def _once(describe: Callable[[], T]) -> Callable[[], T]:
    """Return a function that calls `describe` once for all threads."""
    lock, kept = threading.Lock(), list[T]()

    def call() -> T:
        with lock:
            if not kept:
                kept.append(describe())
        return kept[0]

    return call


def _check_equal(checksums: dict[str, Any]) -> None:
    """Raise WeightUpdateError if servers hold different weights."""
    first, *others = checksums
    different = [url for url in others if checksums[url] != checksums[first]]
    if different:
        raise WeightUpdateError(
            f"The servers hold different weights: the checksums of {', '.join(different)} are not those of {first}. "
            "Push all parameters again."
        )

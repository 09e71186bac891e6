"""`ControlCalls` sends control requests to the scheduler, returns the replies, and records the state that they report.

The TokenizerManager owns it and uses it on its event loop only. When a caller gives up, `ControlCalls` asks the
scheduler to withdraw the request. The call then counts as in flight until its reply arrives.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec

from verl_server.errors import BadRequestError, UnansweredError, VerlServerError
from verl_server.messages.io_struct import (
    ContinueGenerationReq,
    ControlReply,
    ControlReq,
    FlushCacheReq,
    GetInternalStateReq,
    PauseGenerationReq,
    ProfileReq,
    SchedulerInput,
    WithdrawReq,
)
from verl_server.messages.weight_requests import (
    ENDING_REQS,
    BeginWeightUpdateReq,
    EndWeightUpdateReq,
    UpdateReq,
    UpdateWeightsFromDiskReq,
)
from verl_server.server.pause_watch import Pause
from verl_server.server.weight_pushes import WeightPushes
from verl_server.server_args import ServerArgs
from verl_server.version_demand import ServedVersions

logger = logging.getLogger(__name__)

_CONTROL_GRACE = 15.0
"""Seconds that are added to the scheduler's own time limit, so that the scheduler's more precise error arrives first.
"""


@dataclass(frozen=True)
class _Call:
    """A call without a reply. If the future is done, the caller has given up."""

    req: ControlReq
    future: asyncio.Future[ControlReply]
    in_transaction: bool
    """True if a transaction was open when the call was sent."""
    sent: float = field(default_factory=time.monotonic)
    """Time on the monotonic clock."""


class ControlCalls:
    def __init__(
        self,
        server_args: ServerArgs,
        serial: Iterator[int],
        encode: Callable[[SchedulerInput], bytes],
        send: Callable[[bytes], None],
        pushes: WeightPushes,
    ) -> None:
        """Take `serial`, which yields ids, and `encode`. `pushes` is told each reply.

        For a value that cannot be encoded, `encode` raises BadRequestError.
        """
        self.pause: Pause | None = None
        """The current pause of generation."""
        self.versions = ServedVersions(server_args.loaded_version)
        """The label of the weights that the server serves, as far as its replies say, and the earlier labels."""
        self.weights_refusal: str | None = None
        """The reason why the weights cannot serve, by the last reply. None if they can."""
        self.weights_confirmed = False
        """True after an update has written every parameter, or after the owner has accepted the weights that the server
        loaded at its start (`accept_restart`).

        Clients of an earlier run of this server wait until this is True.
        """
        self.model_path = server_args.model_path
        """Folder of the weights that were loaded last."""
        self._control_timeout = server_args.control_timeout
        self._serial, self._encode, self._send, self._pushes = serial, encode, send, pushes
        self._decoder = msgspec.msgpack.Decoder(SchedulerInput)
        self._transaction_end = 0.0
        """End of the open transaction's lease on the monotonic clock. A transaction may hold generation until then."""
        self._calls: dict[int, _Call] = {}
        """Calls without a reply, by id."""

    async def call(self, req: ControlReq, timeout: float | None = None) -> ControlReply:
        """Send a control request, and return the reply with the same id.

        Raise UnansweredError after `timeout` seconds, ServerDiedError if the scheduler dies, and BadRequestError for a
        field of a wrong type. After a timeout or a cancellation, ask the scheduler to withdraw the request.
        """
        name = _name(req)
        req.id = next(self._serial)
        message = self._encode(req)
        try:
            self._decoder.decode(message)
        except msgspec.ValidationError as error:  # the scheduler would drop wrong types, which Python callers may send
            raise BadRequestError(f"{name}: {error}") from None
        if timeout is None:
            idle_timeout = req.timeout if isinstance(req, FlushCacheReq) else 0.0
            # One `control_timeout` in the scheduler's queue, and one to be carried out.
            timeout = 2 * self._control_timeout + idle_timeout + _CONTROL_GRACE
        future: asyncio.Future[ControlReply] = asyncio.get_running_loop().create_future()
        self._add(req, future)
        self._send(message)
        try:
            async with asyncio.timeout(timeout):
                return await future
        except TimeoutError:
            self._give_up(req, future)
            raise UnansweredError(f"The scheduler did not answer {name} within {timeout:.0f} s.") from None
        except asyncio.CancelledError:
            self._give_up(req, future)
            raise

    def on_reply(self, reply: ControlReply) -> None:
        """Record what a reply reports, and return the reply to the caller."""
        if reply.id not in self._calls:
            logger.error("The scheduler replied to control call %d, which is not waiting for a reply.", reply.id)
            return
        call = self._calls.pop(reply.id)
        req, future = call.req, call.future
        if not isinstance(req, ProfileReq):  # these replies know nothing of the weights
            self.weights_refusal = reply.weights_refusal
        self._pushes.note(req, reply, call.sent, call.in_transaction)
        if reply.success:
            self._note_success(req, reply)
        if not future.done():
            future.set_result(reply)
        elif reply.success:
            self._on_unwanted_success(req)

    def fail(self, error: Callable[[], VerlServerError]) -> None:
        """Raise `error()` in every waiting call, because no reply will arrive any more."""
        calls, self._calls = self._calls, {}
        for call in calls.values():
            if not call.future.done():
                call.future.set_exception(error())

    @property
    def weight_version(self) -> str:
        """The label of the weights that the server serves."""
        return self.versions.current

    @property
    def is_paused(self) -> bool:
        return self.pause is not None

    @property
    def are_waiting(self) -> bool:
        """True if any call waits for a reply."""
        return bool(self._calls)

    @property
    def in_flight(self) -> list[str]:
        """Names of the calls that wait for a reply, except GetInternalState, which changes nothing."""
        return [_name(call.req) for call in self._calls.values() if not isinstance(call.req, GetInternalStateReq)]

    @property
    def updating_weights(self) -> bool:
        """True if an update, or a transaction of updates, may keep generation waiting."""
        updates = UpdateReq | BeginWeightUpdateReq | EndWeightUpdateReq
        return self._in_transaction or any(isinstance(call.req, updates) for call in self._calls.values())

    @property
    def _in_transaction(self) -> bool:
        """True if a transaction may be open: it was opened, and neither its end nor its lease's end has come."""
        return time.monotonic() < self._transaction_end

    def _add(self, req: ControlReq, future: asyncio.Future[ControlReply]) -> None:
        self._calls[req.id] = _Call(req, future, self._in_transaction)

    def _give_up(self, req: ControlReq, future: asyncio.Future[ControlReply]) -> None:
        if req.id in self._calls:
            self._send(self._encode(WithdrawReq(id=req.id)))
        elif not future.cancelled() and future.exception() is None and future.result().success:
            self._on_unwanted_success(req)  # the reply arrived just before the caller gave up

    def _note_success(self, req: ControlReq, reply: ControlReply) -> None:
        if isinstance(req, PauseGenerationReq):
            self._note_pause(req.mode)
        elif isinstance(req, ContinueGenerationReq):
            self._note_continuation()
        elif isinstance(req, EndWeightUpdateReq):
            self._transaction_end = 0.0
        elif isinstance(req, UpdateWeightsFromDiskReq):
            self.model_path = req.model_path
            if req.keep_pause:
                self._note_pause("in_place")
        payload = reply.payload if isinstance(reply.payload, dict) else {}
        if "lease_seconds" in payload:
            self._transaction_end = time.monotonic() + float(payload["lease_seconds"])
        if "weight_version" in payload:
            self.versions.note(str(payload["weight_version"]))
            self.weights_confirmed |= payload.get("not_covered", {}).get("count") == 0

    def _note_pause(self, mode: str) -> None:
        if self.pause is None:
            self.pause = Pause(mode)
            logger.info("Generation is %s. Requests wait for continue_generation.", self.pause)

    def _note_continuation(self) -> None:
        if self.pause is not None:
            logger.info("Generation continues after a pause of %.1f s.", self.pause.seconds)
        self.pause = None

    def _on_unwanted_success(self, req: ControlReq) -> None:
        """Log the success of a call whose caller has given up. If the call opened a transaction, end the transaction.

        Otherwise the transaction would hold generation, and no caller would know of it.
        """
        if not isinstance(req, (GetInternalStateReq, FlushCacheReq, *ENDING_REQS)):
            logger.warning("%s had already begun when its caller gave up, and was carried out.", _name(req))
        if isinstance(req, BeginWeightUpdateReq):
            end = EndWeightUpdateReq(id=next(self._serial), transaction_id=req.transaction_id, discard=True)
            unawaited: asyncio.Future[ControlReply] = asyncio.get_running_loop().create_future()
            unawaited.cancel()
            self._add(end, unawaited)
            self._send(self._encode(end))


def _name(req: ControlReq) -> str:
    return type(req).__name__.removesuffix("Req")

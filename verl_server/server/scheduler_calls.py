"""`ControlCalls`: sends control requests to the scheduler, returns its replies, and notes their news.

Owned by the TokenizerManager and used on its loop only. A caller may give up; then the scheduler is told to withdraw
the request, and until its reply comes the call counts as being in flight.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator

import msgspec

from verl_server.errors import BadRequestError, UnansweredError, VerlServerError
from verl_server.io_struct import (
    ENDING_REQS,
    BeginWeightUpdateReq,
    ContinueGenerationReq,
    ControlReply,
    ControlReq,
    EndWeightUpdateReq,
    FlushCacheReq,
    GetInternalStateReq,
    PauseGenerationReq,
    SchedulerInput,
    UpdateReq,
    UpdateWeightsFromDiskReq,
    WithdrawReq,
)
from verl_server.server.pause_watch import Pause
from verl_server.server_args import ServerArgs

logger = logging.getLogger(__name__)

_CONTROL_GRACE = 15.0
"""Extra seconds over the scheduler's own bound, so that its error, which knows more, arrives first."""


class ControlCalls:
    def __init__(
        self,
        server_args: ServerArgs,
        serial: Iterator[int],
        encode: Callable[[SchedulerInput], bytes],
        send: Callable[[bytes], None],
    ) -> None:
        """`serial` yields the ids of calls; `encode` raises BadRequestError for a request that cannot be sent."""
        self.pause: Pause | None = None
        """The pause that holds generation now."""
        self.weight_version = server_args.weight_version
        self.weights_confirmed = False
        """An update brought every parameter since the start, or the owner accepted what was loaded (`accept_restart`).
        Clients that knew an earlier run of this server wait for it."""
        self.num_parameters = 0
        """Of the model; known when the scheduler is ready."""
        self.model_path = server_args.model_path
        """Folder of the weights that were loaded last."""
        self._control_timeout = server_args.control_timeout
        self._serial, self._encode, self._send = serial, encode, send
        self._decoder = msgspec.msgpack.Decoder(SchedulerInput)
        self._transaction_end = 0.0
        """Until then an open weight-update transaction may hold generation (its lease, renewed by its calls)."""
        self._calls: dict[int, tuple[ControlReq, asyncio.Future[ControlReply]]] = {}
        """Calls without a reply. The caller of a future that is done gave up."""

    async def call(self, req: ControlReq, timeout: float | None = None) -> ControlReply:
        """Send a control request and wait for the reply with its id. Raises UnansweredError, ServerDiedError.

        When the caller gives up (a bound, a cancellation) the scheduler is told to withdraw it.
        """
        name = _name(req)
        req.id = next(self._serial)
        message = self._encode(req)
        try:
            self._decoder.decode(message)
        except msgspec.ValidationError as error:  # Python callers' arguments have any type; the scheduler would drop it
            raise BadRequestError(f"{name}: {error}") from None
        if timeout is None:
            waits = req.timeout if isinstance(req, FlushCacheReq) else 0.0
            # As long to wait for its turn, and as long to be carried out. (`SchedulerWatch` ends what takes longer.)
            timeout = 2 * self._control_timeout + waits + _CONTROL_GRACE
        future: asyncio.Future[ControlReply] = asyncio.get_running_loop().create_future()
        self._calls[req.id] = req, future
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
        """Hand a reply to its caller."""
        if reply.id not in self._calls:
            logger.error("A reply came to control call %d, which is none.", reply.id)
            return
        req, future = self._calls.pop(reply.id)
        if reply.success:
            self._note_success(req, reply)
        if not future.done():
            future.set_result(reply)
        elif reply.success:
            self._carried_out_for_nobody(req)

    def fail(self, error: Callable[[], VerlServerError]) -> None:
        """No reply will come any more: every caller gets an error of its own."""
        calls, self._calls = self._calls, {}
        for _, future in calls.values():
            if not future.done():
                future.set_exception(error())

    @property
    def is_paused(self) -> bool:
        return self.pause is not None

    @property
    def are_waiting(self) -> bool:
        """True if any call waits for the scheduler."""
        return bool(self._calls)

    @property
    def in_flight(self) -> list[str]:
        """Calls that wait for the scheduler, but for looks at its figures, which change nothing."""
        return [_name(req) for req, _ in self._calls.values() if not isinstance(req, GetInternalStateReq)]

    @property
    def updating_weights(self) -> bool:
        """True if an update, or a transaction of updates, may keep generation waiting."""
        updates = UpdateReq | BeginWeightUpdateReq | EndWeightUpdateReq
        return time.monotonic() < self._transaction_end or any(
            isinstance(req, updates) for req, _ in self._calls.values()
        )

    def _give_up(self, req: ControlReq, future: asyncio.Future[ControlReply]) -> None:
        if req.id in self._calls:
            self._send(self._encode(WithdrawReq(id=req.id)))
        elif not future.cancelled() and future.exception() is None and future.result().success:
            self._carried_out_for_nobody(req)  # the reply came in this very moment

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
            self.weight_version = str(payload["weight_version"])
            self.weights_confirmed |= payload.get("num_tensors", 0) >= self.num_parameters

    def _note_pause(self, mode: str) -> None:
        if self.pause is None:
            self.pause = Pause(mode)
            logger.info("Generation is %s. Requests wait for continue_generation.", self.pause)

    def _note_continuation(self) -> None:
        if self.pause is not None:
            logger.info("Generation continues after a pause of %.1f s.", self.pause.seconds)
        self.pause = None

    def _carried_out_for_nobody(self, req: ControlReq) -> None:
        """The caller gave up when `req` had begun. A transaction that nobody knows of would hold generation."""
        if not isinstance(req, (GetInternalStateReq, FlushCacheReq, *ENDING_REQS)):
            logger.warning("%s was carried out, though its caller had given up: it had begun already.", _name(req))
        if isinstance(req, BeginWeightUpdateReq):
            end = EndWeightUpdateReq(id=next(self._serial), transaction_id=req.transaction_id, discard=True)
            nobody: asyncio.Future[ControlReply] = asyncio.get_running_loop().create_future()
            nobody.cancel()
            self._calls[end.id] = end, nobody
            self._send(self._encode(end))


def _name(req: ControlReq) -> str:
    return type(req).__name__.removesuffix("Req")

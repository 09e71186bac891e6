"""`TokenizerManager`: the front end of one engine. It owns the event loop, its thread, the socket and all generations.

The manager creates the loop, which runs in its own thread until `shutdown`. Only that thread uses the socket, events
and states. HTTP handlers run on this loop; other threads call `run_sync` and `run_async`. One socket carries requests
to the scheduler, and results and control replies (`scheduler_calls`) back. The loop reads the socket directly, without
a separate task. When the scheduler dies or hangs, every waiting call fails with the cause and the end of the
scheduler's log.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar, cast

import msgspec

from verl_server.errors import (
    BadRequestError,
    ControlTimeoutError,
    ServerDiedError,
    ServerStoppingError,
    ServerUnavailableError,
    VerlServerError,
)
from verl_server.ipc.message_socket import MessageSocket
from verl_server.messages.io_struct import (
    AbortReq,
    BatchTokenIDOut,
    ControlReply,
    ControlReq,
    FinishReason,
    FinishReq,
    FinishSessionReq,
    GetInternalStateReq,
    GrammarTokenizer,
    PauseGenerationReq,
    SchedulerInput,
    SchedulerOutput,
)
from verl_server.messages.results import SchedulerInfo
from verl_server.server.arrivals import Arrivals
from verl_server.server.busy_time import BusyTime
from verl_server.server.generate_request import GenerateReqInput, ReadRequest
from verl_server.server.generation import Generation
from verl_server.server.loop_thread import LoopThread
from verl_server.server.metrics import Metrics, model_label
from verl_server.server.pause_watch import PauseWatch
from verl_server.server.request_state import ReqState, Write
from verl_server.server.scheduler_calls import ControlCalls
from verl_server.server.scheduler_watch import Child, SchedulerWatch
from verl_server.server.session_hints import hint_id
from verl_server.server.slices import Slices
from verl_server.server.submission import Submission
from verl_server.server.text.tokenizer import ModelText
from verl_server.server.text_service import TextService
from verl_server.server.weight_pushes import WeightPushes
from verl_server.server_args import ServerArgs

logger = logging.getLogger(__name__)
T = TypeVar("T")

_LONGEST_FRAME_GAP = 0.05
"""The most seconds by which `stream_frame_gap` delays a frame of a stream."""
_ABORT_GRACE = 2.0
"""Seconds that a shutdown waits for the partial output of running requests."""


class TokenizerManager:
    def __init__(
        self, server_args: ServerArgs, messages: MessageSocket, on_death: Callable[[Exception], None] | None = None
    ) -> None:
        """Start the loop. Call `start` when the scheduler, at the other end of `messages`, is ready.

        `on_death` is called on the loop if the scheduler dies or hangs.
        """
        self.server_args = server_args
        self.instance_id = secrets.token_hex(8)
        """Random id of this run of the engine. Pushed weights exist only as long as the run."""
        self.model_text: ModelText | None = None
        self._submission: Submission | None = None
        self.scheduler_info = cast(SchedulerInfo, {})
        self.metrics = Metrics(model_label(server_args))
        self.ready = False
        """True after the warm-up request was answered."""
        self.last_message = time.monotonic()
        self.last_tokens = -math.inf
        """Time on the monotonic clock at which the latest tokens of any request arrived."""
        self._messages = messages
        self._waits_for_room = False
        self._on_death = on_death
        self._states: dict[str, ReqState] = {}  # by `req.rid`, the name in scheduler messages
        self._by_rid: dict[str, ReqState] = {}  # by the caller's rid
        self._by_name: dict[str, dict[str, ReqState]] = {}  # samples of a request, by its rid and by `req.rid`
        self.busy = BusyTime()
        self.arrivals = Arrivals()
        self._serial = itertools.count(1)
        self.controls = ControlCalls(server_args, self._serial, self._encode, self._send, WeightPushes(self.metrics))
        self._children: Sequence[Child] = ()
        self._tasks: list[asyncio.Task[None]] = []
        self._http_stops: list[Callable[[], Coroutine[Any, Any, None]]] = []
        self._refusal: VerlServerError | None = ServerUnavailableError(
            "The server is starting: the model is not loaded."
        )
        """Error that answers all requests now; None if requests are accepted."""
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(SchedulerOutput)
        self._thread = LoopThread("tokenizer-manager")
        self.loop = self._thread.loop

    def start(self, model_text: ModelText, scheduler_info: SchedulerInfo, children: Sequence[Child] = ()) -> None:
        """Begin to accept requests. When one of `children` ends, every waiting call fails."""
        self.model_text = model_text
        self.scheduler_info = scheduler_info
        self._submission = Submission(self.server_args, model_text, scheduler_info, self._serial, self._encode)
        self.controls.versions.note(scheduler_info.get("weight_version", self.controls.weight_version))
        self._children = children
        self.run_sync(self._start_tasks(), timeout=30)

    async def _start_tasks(self) -> None:
        assert self.model_text is not None
        self._refusal = None
        tokenizer = self.model_text.tokenizer_json
        if tokenizer is not None and self.server_args.grammar_backend != "none":
            self._send(self._encode(GrammarTokenizer(tokenizer=tokenizer, eos_token_ids=self.model_text.eos_token_ids)))
        self.loop.add_reader(self._messages.fileno(), self._on_readable)
        pauses = PauseWatch(
            self.server_args.paused_request_timeout,
            pause=lambda: self.controls.pause,
            waiting=self._states.values,
            refuse=self._refuse,
        )
        self._tasks = [asyncio.ensure_future(self._watch()), asyncio.ensure_future(pauses.run())]

    def run_sync(self, coro: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """See `LoopThread.run_sync`."""
        return self._thread.run_sync(coro, timeout)

    async def run_async(self, coro: Coroutine[Any, Any, T]) -> T:
        """See `LoopThread.run_async`."""
        return await self._thread.run_async(coro)

    # -- generation -----------------------------------------------------------------------------------------

    async def generate_request(self, obj: GenerateReqInput) -> AsyncIterator[dict[str, Any] | list[dict[str, Any]]]:
        """Yield one result or, with `stream`, the frames of `Generation.frames`."""
        generation = await self.submit(obj)
        try:
            if not obj.stream:
                yield await generation.result()
                return
            async for frame in generation.frames(self.server_args.incremental_streaming_output):
                yield frame
        finally:
            generation.close()

    async def submit(self, obj: GenerateReqInput) -> Generation:
        """Tokenize the prompts of a request, and call `submit_read`."""
        self.check_serving()
        with self.arrivals.arrive():
            return await self.submit_read(await self.text.read(obj))

    async def submit_read(
        self,
        read: ReadRequest,
        write: Write | None = None,
        recorded: Mapping[int, Sequence[BatchTokenIDOut]] | None = None,
        session_id: str = "",
        demand: str = "",
    ) -> Generation:
        """Check a request, then send its samples to the scheduler. Either all samples are accepted, or none.

        With `write`, the results of the generation are encoded in pieces. Both this and a large batch are processed in
        slices, between which the loop does other work. `recorded` maps the index of a sample to its tokens, which the
        scheduler sent before. Such a sample is not sampled again. `session_id` is the scheduler's session id for
        prompts for which the request names no session, and `demand` its demand on the weight version
        (`version_demand`) if the body states none. Raise WeightVersionError if the served version does not satisfy the
        demand.
        """
        self.check_serving()
        assert self._submission is not None
        recorded, slices = recorded or {}, Slices()
        demand = read.request.weight_demand or demand
        samples = await self._submission.samples(read, write, session_id, demand, slices)
        states = [state for state, _ in samples]
        self.check_serving()
        new = [state for k, state in enumerate(states) if k not in recorded]
        if new:
            self._check_demand(demand)
        for state in new:
            if state.rid in self._by_rid:
                raise BadRequestError(f"Duplicate request ID detected: {state.rid}")
        for state in new:
            self._states[state.req.rid] = self._by_rid[state.rid] = state
        self.busy.note(len(self._states))
        generation = Generation(states, read.is_single, self.abandon, self._frame_gap)
        # The samples of one request have names of their own, if there are several.
        named = read.request.rid if isinstance(read.request.rid, str) else None
        shared = {named} if named is not None else set()
        aborted = self.arrivals.hand_over(shared | {state.rid for state in new})
        for state in new:
            if not aborted.isdisjoint(shared | {state.rid}):
                self._abort_unsent(state)
            elif named is not None and named != state.rid:
                self._by_name.setdefault(named, {})[state.req.rid] = state
                state.request_name = named
        try:
            for k, (state, message) in enumerate(samples):
                if k:
                    await slices.end()
                for out in recorded.get(k, ()):
                    if not state.done:
                        state.extend(out, 0)
                if not state.done:  # an abort or the scheduler's death may have ended it between two slices
                    state.is_sent = True
                    self._send(message)
        except BaseException:
            generation.close()
            raise
        self.metrics.requests_accepted(len(new), sum(state.num_prompt_tokens for state in states))
        return generation

    @property
    def text(self) -> TextService:
        """The text service. While the server starts, there is none, and this raises as `check_serving` does."""
        if self._submission is None:
            self.check_serving()
        assert self._submission is not None
        return self._submission.text

    def _frame_gap(self) -> float:
        """Return the least time in seconds between two frames of one stream. It grows with the requests in progress."""
        return min(self.server_args.stream_frame_gap * len(self._states), _LONGEST_FRAME_GAP)

    def abandon(self, state: ReqState) -> None:
        """Remove a request whose caller no longer waits, and make the scheduler stop it."""
        if self._forget(state) and not state.done:
            self._send(self._encode(AbortReq(rid=state.req.rid)))
            self.metrics.request_aborted()

    def _refuse(self, state: ReqState, error: VerlServerError) -> None:
        """Answer a request with an error, and make the scheduler stop it."""
        self.abandon(state)
        state.fail(error)

    def abort_request(self, rid: str = "", abort_all: bool = False) -> bool:
        """Ask the scheduler to end one request or all. Callers get partial output. An unknown `rid` is ignored.

        A request that has arrived, but that the scheduler does not know yet, ends at its hand-over, without a token.
        Return True if at least one of the aborted requests was running.
        """
        if abort_all:
            were_running = bool(self._states)
            self._abort_all_unsent()
            self._send(self._encode(AbortReq(abort_all=True)))
            return were_running
        self.arrivals.abort(rid)
        found = {**self._by_name.get(rid, {})}
        if (state := self._by_rid.get(rid)) is not None:
            found[state.req.rid] = state
        for state in found.values():
            if state.is_sent:
                self._send(self._encode(AbortReq(rid=state.req.rid)))
            else:
                self._abort_unsent(state)
        return bool(found)

    def _abort_all_unsent(self) -> None:
        """End all requests that have arrived, and that the scheduler does not know yet."""
        self.arrivals.abort_all()
        for state in [state for state in self._states.values() if not state.is_sent]:
            self._abort_unsent(state)

    def _abort_unsent(self, state: ReqState) -> None:
        """End a sample as the scheduler ends one that waits."""
        state.weight_version = self.controls.weight_version
        state.finish(FinishReason(type="abort", message="Aborted"))
        self._forget(state)
        self.metrics.request_finished(state)

    def finish_session(self, session_id: str) -> None:
        """Inform the scheduler that no request will continue the session. `session_id` is the scheduler's id."""
        self._send(self._encode(FinishSessionReq(session_id=session_id)))

    def finish_hint(self, named: str) -> None:
        """End the session hint `named`: no request will continue its conversation.

        Nothing is sent before the scheduler is ready, or after it has ended. Raise BadRequestError for invalid text.
        """
        if named and self._refusal is None:
            self.finish_session(hint_id(named))

    # -- control --------------------------------------------------------------------------------------------

    async def control(self, req: ControlReq, timeout: float | None = None) -> ControlReply:
        """See `ControlCalls.call` and `check_serving`.

        A pause that aborts also aborts requests that have arrived but are not in the scheduler yet.
        """
        self.check_serving()
        if isinstance(req, PauseGenerationReq) and req.mode == "abort":
            self._abort_all_unsent()
        return await self.controls.call(req, timeout)

    @property
    def num_requests(self) -> int:
        return len(self._states)

    def check_serving(self) -> None:
        """Raise the reason if the server refuses requests because it is starting, has died or is shutting down."""
        if self._refusal is not None:
            raise _again(self._refusal)

    def _check_demand(self, demand: str) -> None:
        """Raise WeightVersionError if the served version does not satisfy a request's demand.

        If the weights cannot serve, and no pause makes requests wait until they can, the scheduler says why (503).
        """
        refusal = self.controls.versions.refusal(demand)
        if refusal is not None and (self.controls.weights_refusal is None or self.controls.is_paused):
            raise refusal

    # -- the scheduler's socket -----------------------------------------------------------------------------

    def _encode(self, message: SchedulerInput) -> bytes:
        try:
            return self._encoder.encode(message)
        except (OverflowError, ValueError) as error:
            raise BadRequestError(f"The request has a number beyond 64 bits, or invalid text: {error}") from None

    def _send(self, message: bytes) -> None:
        self._messages.send(message)
        if self._messages.unsent and not self._waits_for_room:
            self._waits_for_room = True
            self.loop.add_writer(self._messages.fileno(), self._on_writable)

    def _on_writable(self) -> None:
        self._messages.flush()
        if not self._messages.unsent:
            self._waits_for_room = False
            self.loop.remove_writer(self._messages.fileno())

    def _on_readable(self) -> None:
        """Handle all received messages in order. After the scheduler closed its end, `_watch` reports why it ended."""
        for data in self._messages.receive():
            self.last_message = time.monotonic()
            try:
                message = self._decoder.decode(data)
                if isinstance(message, BatchTokenIDOut):
                    self._on_tokens(message)
                else:
                    self.controls.on_reply(message)
            except Exception:
                # A message that cannot be handled must not stop the other messages, for which callers wait.
                logger.exception("A message from the scheduler could not be handled.")
        if self._messages.is_closed:
            self._close_socket()

    def _close_socket(self) -> None:
        """Close the scheduler's socket. Idempotent."""
        if (fd := self._messages.fileno()) >= 0:
            self.loop.remove_reader(fd)
            self.loop.remove_writer(fd)
            self._messages.close()

    def _on_tokens(self, out: BatchTokenIDOut) -> None:
        self.controls.versions.note(out.weight_version)
        if any(out.output_ids):
            self.last_tokens = self.last_message
        for i, wire_rid in enumerate(out.rids):
            state = self._states.get(wire_rid)
            if state is None:  # it ended at a stop string or was abandoned, and the scheduler did not know yet
                continue
            try:
                state.extend(out, i)
            except Exception as error:
                logger.exception("Output of request %s could not be handled.", state.rid)
                state.fail(VerlServerError(f"Output of request {state.rid} could not be handled: {error!r}"))
            if state.done:
                if out.finish_reasons[i] is None:
                    self._send(self._encode(FinishReq(rid=wire_rid)))
                self._forget(state)
                self.metrics.request_finished(state)

    def _forget(self, state: ReqState) -> bool:
        """Remove a state. Return False if it was removed before."""
        if self._states.pop(state.req.rid, None) is None:
            return False
        self.busy.note(len(self._states))
        del self._by_rid[state.rid]
        if state.request_name is not None and (samples := self._by_name.get(state.request_name)) is not None:
            samples.pop(state.req.rid, None)
            if not samples:
                del self._by_name[state.request_name]
        return True

    # -- the end --------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        watch = SchedulerWatch(
            self._children,
            self.server_args.control_timeout,
            ask=lambda bound: self.control(GetInternalStateReq(), timeout=bound),
            is_waiting=lambda: bool(self._states or self.controls.are_waiting),
            last_message=lambda: self.last_message,
        )
        self._die(await watch.until_death())

    def _die(self, error: VerlServerError) -> None:
        """Refuse all requests from now on, and fail all waiting calls with `error`."""
        self._refusal = error
        for state in list(self._states.values()):
            self._forget(state)
            state.fail(_again(error))
        self.controls.fail(lambda: _again(error))
        if isinstance(error, ServerDiedError):
            logger.error("%s", error)
            if self._on_death is not None:
                self._on_death(error)

    def add_http_server(self, stop: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Register the function that ends an HTTP server on this loop. `stop_http` and `shutdown` call it."""
        self._http_stops.append(stop)

    def stop_http(self, timeout: float = 15.0) -> None:
        """End the HTTP servers, so that `launch_server_from_verl_engine` returns. The engine continues to run."""
        self.run_sync(self._stop_http(), timeout=timeout)

    async def _stop_http(self) -> None:
        while self._http_stops:
            await self._http_stops.pop()()

    def shutdown(self, timeout: float = 15.0) -> None:
        """End all requests, then HTTP servers, sockets, loop and thread. Idempotent.

        Call it in any thread except the loop's.
        """
        if not self._thread.is_alive:
            return
        try:
            self.run_sync(self._shutdown(), timeout=timeout)
        except (ControlTimeoutError, RuntimeError) as error:
            logger.warning("Shutdown was not clean: %s", error)
        self._thread.stop()

    async def _abort_running(self) -> None:
        """Abort all requests, and wait briefly until the scheduler has returned their partial output."""
        if self._states:
            self.abort_request(abort_all=True)
        deadline = time.monotonic() + _ABORT_GRACE
        while self._states and time.monotonic() < deadline and not isinstance(self._refusal, ServerDiedError):
            await asyncio.sleep(0.01)

    async def _shutdown(self) -> None:
        if not isinstance(self._refusal, ServerDiedError):
            self._refusal = ServerStoppingError("The server is shutting down.")
            await self._abort_running()
            self._die(self._refusal)
        await self._stop_http()
        if self._submission is not None:
            await self._submission.text.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._close_socket()


def _again(error: VerlServerError) -> VerlServerError:
    """Return a copy of `error` to raise: one exception object would collect the tracebacks of all its callers."""
    return type(error)(*error.args)

"""`TokenizerManager`: the front of one engine. Owns the event loop, its thread, the socket and every generation.

The loop is created with the manager, in its own thread, for life; socket, events and states are touched by that
thread only. HTTP handlers run on this loop; other threads come in through `run_sync` and `run_async`.
Requests go to the scheduler over one socket, results and control replies (`scheduler_calls`) come back on it, without a
task in between. When the scheduler dies or hangs, every waiting call fails with the cause and the end of its log.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import msgspec

from verl_server.errors import (
    BadRequestError,
    ControlTimeoutError,
    ServerDiedError,
    ServerStoppingError,
    ServerUnavailableError,
    VerlServerError,
)
from verl_server.io_struct import (
    AbortReq,
    BatchTokenIDOut,
    ControlReply,
    ControlReq,
    FinishReq,
    GetInternalStateReq,
    SchedulerInput,
    SchedulerOutput,
    TokenizedGenerateReq,
)
from verl_server.ipc.message_socket import MessageSocket
from verl_server.server.generate_request import GenerateReqInput, ReadRequest, Samples, check_samples
from verl_server.server.generation import Generation
from verl_server.server.loop_thread import LoopThread
from verl_server.server.metrics import Metrics
from verl_server.server.pause_watch import PauseWatch
from verl_server.server.request_state import ReqState, Write
from verl_server.server.scheduler_calls import ControlCalls
from verl_server.server.scheduler_watch import Child, SchedulerWatch
from verl_server.server.slices import Slices
from verl_server.server.text_service import TextService
from verl_server.server.text_tools import unpack
from verl_server.server.tokenizer import ModelText
from verl_server.server_args import ServerArgs

logger = logging.getLogger(__name__)
T = TypeVar("T")

_ABORT_GRACE = 2.0
"""Seconds that running requests get at shutdown to return what they have."""


class TokenizerManager:
    def __init__(
        self, server_args: ServerArgs, messages: MessageSocket, on_death: Callable[[Exception], None] | None = None
    ) -> None:
        """Start the loop; `start` follows when the scheduler, at the other end of `messages`, is ready."""
        self.server_args = server_args
        self.instance_id = secrets.token_hex(8)
        """Tells this run of the engine, whose weights live as long, from one that is started later."""
        self.model_text: ModelText | None = None
        self._text: TextService | None = None
        self.scheduler_info: dict[str, Any] = {}
        self.metrics = Metrics(server_args.served_model_name or server_args.model_path)
        self.ready = False
        """The warm-up was answered."""
        self.last_message = time.monotonic()
        self._messages = messages
        self._waits_for_room = False
        self._on_death = on_death
        self._states: dict[str, ReqState] = {}  # by wire rid
        self._by_rid: dict[str, ReqState] = {}
        self._serial = itertools.count(1)
        self.controls = ControlCalls(server_args, self._serial, self._encode, self._send)
        self._children: Sequence[Child] = ()
        self._tasks: list[asyncio.Task[None]] = []
        self._http_stops: list[Callable[[], Coroutine[Any, Any, None]]] = []
        self._gone: VerlServerError | None = ServerUnavailableError("The server is starting: the model is not loaded.")
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(SchedulerOutput)
        self._thread = LoopThread("tokenizer-manager")
        self.loop = self._thread.loop

    def start(self, model_text: ModelText, scheduler_info: dict[str, Any], children: Sequence[Child] = ()) -> None:
        """Begin to accept requests. `children` are watched: when one ends, everything waiting fails."""
        self.model_text = model_text
        self.scheduler_info = scheduler_info
        self._text = TextService(self.server_args, model_text, scheduler_info)
        self.controls.weight_version = scheduler_info.get("weight_version", self.controls.weight_version)
        self.controls.num_parameters = int(scheduler_info["num_parameters"])
        self._children = children
        self.run_sync(self._start_tasks(), timeout=30)

    async def _start_tasks(self) -> None:
        self._gone = None
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
        """One result, or with `stream` cumulative frames (with `index` if there are several samples)."""
        generation = await self.submit(obj)
        try:
            if not obj.stream:
                yield await generation.result()
                return
            async for i, state in generation.updates():
                frame = state.result()
                if len(generation.states) > 1:
                    frame["index"] = i
                yield frame
        finally:
            generation.close()

    async def submit(self, obj: GenerateReqInput) -> Generation:
        """`submit_read` of a request whose prompts are not tokenized yet."""
        self.check_serving()
        return await self.submit_read(await self.text.read(obj))

    async def submit_read(self, read: ReadRequest, write: Write | None = None) -> Generation:
        """Check everything, then send all samples to the scheduler; either all are accepted or none is.

        With `write`, the results of the generation are encoded, piece by piece while others have their turn.

        A large batch is worked on in slices, between which the loop does what else there is to do.
        """
        self.check_serving()
        prompts, slices = read.prompts, Slices()
        states: list[ReqState] = []
        messages: list[bytes] = []
        tokens = candidates = 0
        for ids, samples in zip(
            prompts, read.request.expand(len(prompts), read.is_single, self.text.limits), strict=True
        ):
            prompt = unpack(ids)
            self._check(samples, len(prompt))
            assert samples.sampling.max_new_tokens is not None
            tokens += len(prompt) * len(samples.rids)
            candidates += samples.candidates(len(prompt), samples.sampling.max_new_tokens)
            self.text.limits.check_prompt_tokens(tokens)
            self.text.limits.check_reply(candidates)
            for k in range(len(samples.rids)):
                if states:  # a request of one sample is one slice
                    await slices.end()
                states.append(self._make_state(read.request, samples, k, prompt, write))
                messages.append(self._encode(states[-1].req))
        self.check_serving()
        for state in states:
            if state.rid in self._by_rid:
                raise BadRequestError(f"Duplicate request ID detected: {state.rid}")
        for state in states:
            self._states[state.req.rid] = self._by_rid[state.rid] = state
        generation = Generation(states, read.is_single, self.abandon)
        try:
            for k, (state, message) in enumerate(zip(states, messages, strict=True)):
                if k:
                    await slices.end()
                if not state.done:  # by a shutdown, or a scheduler that died, between two slices
                    self._send(message)
        except BaseException:
            generation.close()
            raise
        self.metrics.requests_accepted(len(states), tokens)
        return generation

    def _check(self, samples: Samples, prompt_tokens: int) -> None:
        """Samples of one prompt against the model; an open `max_new_tokens` becomes what there is room for."""
        assert self.model_text is not None
        check_samples(samples, prompt_tokens, self.text.bounds, has_tokenizer=self.model_text.tokenizer is not None)
        if samples.sampling.max_new_tokens is None:
            # As much as context, KV cache and reply hold; the last token sampled needs no place in the cache.
            room = min(self.context_length, int(self.scheduler_info["max_total_num_tokens"]) + 1) - prompt_tokens
            if each := samples.candidates(prompt_tokens, 1) - (prompt := samples.candidates(prompt_tokens, 0)):
                room = min(room, (self.text.limits.max_logprobs_per_request - prompt) // each)
            samples.sampling = msgspec.structs.replace(samples.sampling, max_new_tokens=max(1, room))

    def _make_state(
        self, obj: GenerateReqInput, samples: Samples, k: int, input_ids: list[int], write: Write | None
    ) -> ReqState:
        """Of sample k of a prompt."""
        assert self.model_text is not None
        sampling = samples.sampling_of(k)
        stop_ids = [] if sampling.ignore_eos else [*self.model_text.eos_token_ids, *(sampling.stop_token_ids or [])]
        decode = None
        if self.model_text.tokenizer is not None:
            decode = self.model_text.decoder(sampling.skip_special_tokens, sampling.spaces_between_special_tokens)
        # The wire name is ours and never comes back: late tokens of an ended request cannot reach a new one
        # that was given the same rid.
        req = TokenizedGenerateReq(
            rid=f"{next(self._serial)}:{samples.rids[k]}",
            input_ids=input_ids,
            sampling=sampling,
            stop_ids=stop_ids,
            return_logprob=samples.return_logprob,
            logprob_start_len=samples.logprob_start_len if samples.return_logprob else -1,
            top_logprobs_num=samples.top_logprobs_num if samples.return_logprob else 0,
            token_ids_logprob=samples.token_ids_logprob if samples.return_logprob else None,
        )
        return ReqState(
            samples.rids[k],
            req,
            decode,
            stream=obj.stream,
            logprob_text=obj.return_text_in_logprobs,
            return_prompt_token_ids=obj.return_prompt_token_ids,
            columnar=obj.columnar,
            write=write,
        )

    @property
    def text(self) -> TextService:
        """Raises why there is none as long as the server is starting."""
        if self._text is None:
            self.check_serving()
        assert self._text is not None
        return self._text

    @property
    def context_length(self) -> int:
        return int(self.scheduler_info["context_length"])

    def abandon(self, state: ReqState) -> None:
        """The caller is gone: forget the request and make the scheduler stop it."""
        if self._forget(state) and not state.done:
            self._send(self._encode(AbortReq(rid=state.req.rid)))
            self.metrics.request_aborted()

    def _refuse(self, state: ReqState, error: VerlServerError) -> None:
        """Answer with an error, and make the scheduler stop it."""
        self.abandon(state)
        state.fail(error)

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        """Ask the scheduler to end one request or all; their callers get partial output. Unknown rids pass."""
        if abort_all:
            self._send(self._encode(AbortReq(abort_all=True)))
        elif rid in self._by_rid:
            self._send(self._encode(AbortReq(rid=self._by_rid[rid].req.rid)))

    # -- control --------------------------------------------------------------------------------------------

    async def control(self, req: ControlReq, timeout: float | None = None) -> ControlReply:
        """See `ControlCalls.call`. Also raises why the scheduler cannot be asked."""
        self.check_serving()
        return await self.controls.call(req, timeout)

    @property
    def num_requests(self) -> int:
        return len(self._states)

    def check_serving(self) -> None:
        """Raise why requests are refused: starting, died, shutting down."""
        if self._gone is not None:
            raise _again(self._gone)

    # -- the scheduler's socket -----------------------------------------------------------------------------

    def _encode(self, message: SchedulerInput) -> bytes:
        try:
            return self._encoder.encode(message)
        except (OverflowError, ValueError) as error:
            raise BadRequestError(f"The request holds a number beyond 64 bits, or no valid text: {error}") from None

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
        """Everything that has come, in order. That the scheduler hung up is no news: `_watch` says why it ended."""
        for data in self._messages.receive():
            self.last_message = time.monotonic()
            try:
                message = self._decoder.decode(data)
                if isinstance(message, BatchTokenIDOut):
                    self._on_tokens(message)
                else:
                    self.controls.on_reply(message)
            except Exception:
                # One bad message must not stop the others, on which every caller depends.
                logger.exception("A message from the scheduler could not be handled.")
        if self._messages.is_closed:
            self._hang_up()

    def _hang_up(self) -> None:
        """Safe to repeat."""
        if (fd := self._messages.fileno()) >= 0:
            self.loop.remove_reader(fd)
            self.loop.remove_writer(fd)
            self._messages.close()

    def _on_tokens(self, out: BatchTokenIDOut) -> None:
        self.controls.weight_version = out.weight_version
        for i, wire_rid in enumerate(out.rids):
            state = self._states.get(wire_rid)
            if state is None:  # ended by a stop string or abandoned; the scheduler did not know yet
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
        if self._states.pop(state.req.rid, None) is None:
            return False
        del self._by_rid[state.rid]
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
        """Refuse everything from now on, and fail everything that waits."""
        self._gone = error
        for state in list(self._states.values()):
            self._forget(state)
            state.fail(_again(error))
        self.controls.fail(lambda: _again(error))
        if isinstance(error, ServerDiedError):
            logger.error("%s", error)
            if self._on_death is not None:
                self._on_death(error)

    def add_http_server(self, stop: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Register how to end an HTTP server on this loop; called by `stop_http` and at shutdown."""
        self._http_stops.append(stop)

    def stop_http(self, timeout: float = 15.0) -> None:
        """End the HTTP servers over this manager (`launch_server_from_verl_engine` returns); the engine stays."""
        self.run_sync(self._stop_http(), timeout=timeout)

    async def _stop_http(self) -> None:
        while self._http_stops:
            await self._http_stops.pop()()

    def shutdown(self, timeout: float = 15.0) -> None:
        """End all requests, then HTTP servers, sockets, loop and thread. From any thread but the loop's; idempotent."""
        if not self._thread.is_alive:
            return
        try:
            self.run_sync(self._shutdown(), timeout=timeout)
        except (ControlTimeoutError, RuntimeError) as error:
            logger.warning("Shutdown was not clean: %s", error)
        self._thread.stop()

    async def _abort_running(self) -> None:
        """Let callers have their partial output, as long as the scheduler answers soon."""
        if self._states:
            self.abort_request(abort_all=True)
        deadline = time.monotonic() + _ABORT_GRACE
        while self._states and time.monotonic() < deadline and not isinstance(self._gone, ServerDiedError):
            await asyncio.sleep(0.01)

    async def _shutdown(self) -> None:
        if not isinstance(self._gone, ServerDiedError):
            self._gone = ServerStoppingError("The server is shutting down.")
            await self._abort_running()
            self._die(self._gone)
        await self._stop_http()
        if self._text is not None:
            await self._text.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._hang_up()


def _again(error: VerlServerError) -> VerlServerError:
    """A copy to raise: one exception object raised by many callers would collect all their tracebacks."""
    return type(error)(*error.args)

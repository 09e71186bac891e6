"""`SessionTurns`: what the dialects call so that a request in a session becomes a turn of the ledger.

Outside a session, `read` and `submit` are `run_job` and `TokenizerManager.submit_read`. Inside, `read` hands the text
worker the session's view, and `submit` reserves the turns, puts their prompts together, and lets the generation store
each turn before the end of its reply is sent.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import Response

from verl_server import columns
from verl_server.chat.next_turn import plan_ids
from verl_server.chat.session_view import NextTurn
from verl_server.errors import BadRequestError, VerlServerError
from verl_server.io_struct import FinishReason
from verl_server.server.chat_prompt import ChatOutput
from verl_server.server.generate_request import ReadRequest
from verl_server.server.generation import Generation, failure
from verl_server.server.replay.middleware import ReplayInfo
from verl_server.server.request_state import ReqState, Write
from verl_server.server.responses import EventStream, run_job, unless_disconnected
from verl_server.server.sessions.reading import in_session, session_body
from verl_server.server.sessions.replies import end_token, read_reply
from verl_server.server.sessions.session import SessionCaller
from verl_server.server.sessions.turn import FinishedTurn, OpenTurn
from verl_server.server.sessions.turn_ledger import TurnLedger
from verl_server.server.text_tools import Job, unpack
from verl_server.server.tokenizer_manager import TokenizerManager

R = TypeVar("R")

logger = logging.getLogger(__name__)

_OF_OWNERS = ("extra_key", "cache_salt", "priority")
"""Fields that reach beyond the session: an agent must not set them."""


def session_of(request: Request) -> SessionCaller | None:
    """Return the session that a request names, or None outside a session."""
    caller: SessionCaller | None = request.scope.get("state", {}).get("session")
    return caller


def refuse_session(request: Request, what: str, instead: str) -> None:
    """Raise BadRequestError for a route that keeps no ledger, if the request is in a session."""
    if session_of(request) is not None:
        raise BadRequestError(f"{what} is not available in a session. Use {instead}.")


@dataclass(frozen=True)
class ReplyShape:
    """How a dialect shows a reply: the next request sends it back in this shape."""

    dialect: str
    output: ChatOutput | None = None
    one_call: bool = False
    """The client is shown the first tool call only."""
    clamps: bool = False
    """`max_new_tokens` is reduced to what the context has room for, instead of refused."""
    prompt_text: tuple[int, bytes] | None = None
    """Completions: `NextTurn.text`."""


class SessionTurns:
    def __init__(self, manager: TokenizerManager, ledger: TurnLedger) -> None:
        self._manager, self._ledger = manager, ledger
        self._storing: set[asyncio.Task[None]] = set()  # the loop itself keeps no reference to a task

    async def read(
        self, request: Request, job: Job[R], body: bytes, previous: Callable[[bytes], str | None] = lambda body: None
    ) -> R:
        """Return the result of `job`, as `run_job` does. In a session, the result's `next` plans the prompt.

        `previous` returns the `previous_response_id` of a body.
        """
        caller = session_of(request)
        if caller is None:
            return await run_job(request, self._manager.text, job, body)
        view = self._ledger.view(caller, previous(body))
        return await unless_disconnected(
            request, self._manager.text.in_worker(in_session(job), session_body(view, body))
        )

    async def submit(
        self, request: Request, read: ReadRequest, next: NextTurn | None, shape: ReplyShape, write: Write | None = None
    ) -> Generation:
        """Send the samples of a request to the scheduler, as `submit_read` does.

        In a session, each sample is a turn. Its tokens are stored before `wait`, `result` or the last update of the
        generation returns. `next` is None for a prompt of token ids.
        """
        caller = session_of(request)
        if caller is None:
            return await self._manager.submit_read(read, write)
        self._check(read, caller)
        if next is None:
            next = msgspec.structs.replace(self._plan_ids(caller, read), text=shape.prompt_text)
        params = _params(read)
        count = params.get("n") or 1
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise BadRequestError(f"sampling_params: n must be a positive integer, not {count!r:.40}.")
        self._manager.text.limits.check_samples(1, count)
        self._ledger.check_samples(caller, count)
        replay: ReplayInfo | None = request.scope.get("state", {}).get("replay")
        turns = _Turns(self._manager, self._ledger, next, shape, read.request.stream, replay, self._storing)
        try:
            for k in range(count):
                turns.begin(caller, None if read.request.rid is None else str(read.request.rid), k)
            generation = await self._manager.submit_read(self._with_turns(read, turns, params, shape), write)
        except BaseException:
            turns.cancel()
            raise
        turns.follow(generation, bool(read.request.return_logprob))
        return generation

    @staticmethod
    def mark(response: Response, generation: Generation) -> Response:
        """Name the session and the turn in the headers, and note when the whole reply was sent."""
        turns = generation.turns
        if isinstance(turns, _Turns):
            turn = turns.opened[0]
            response.headers["X-Session-ID"] = turn.session_id.partition(".")[0]
            response.headers["X-Session-Turn"] = ",".join(str(each.turn) for each in turns.opened)
            turns.tell_delivered(response)
        return response

    # -- inside ------------------------------------------------------------------------------------------------

    @staticmethod
    def _check(read: ReadRequest, caller: SessionCaller) -> None:
        request = read.request
        if len(read.prompts) != 1:
            raise BadRequestError("A request in a session has one prompt. Send one request for each prompt.")
        if isinstance(request.rid, list) or isinstance(request.sampling_params, list):
            raise BadRequestError("A request in a session has one prompt: rid and sampling_params cannot be lists.")
        if request.truncate_prompt_tokens is not None or request.logprob_start_len not in (-1, None):
            raise BadRequestError(
                "truncate_prompt_tokens and log-probabilities of the prompt are not available in a session, whose "
                "prompts are built from stored tokens."
            )
        named = [name for name in _OF_OWNERS if getattr(request, name) is not None]
        if named and not caller.is_owner:
            raise BadRequestError(f"{', '.join(named)}: only the owner of a session may set what concerns others.")

    def _plan_ids(self, caller: SessionCaller, read: ReadRequest) -> NextTurn:
        view = self._ledger.view(caller)
        session_id = caller.session_id if caller.child is None else f"{caller.session_id}.{caller.child}"
        ids = columns.ids(unpack(read.prompts[0]))
        return plan_ids(view, ids, lambda turn: self._ledger.sequence(session_id, turn))

    def _with_turns(self, read: ReadRequest, turns: _Turns, given: dict[str, Any], shape: ReplyShape) -> ReadRequest:
        """Return the request with the prompts, seeds and limits of its turns."""
        params = [turns.sampling(turn, given) for turn in turns.opened]
        if shape.clamps:
            room = self._manager.context_length - len(turns.opened[0].prompt) // 4
            for each in params:
                each["max_new_tokens"] = min(each["max_new_tokens"], max(room, 0))
        prompt = unpack(turns.opened[0].prompt)
        if len(params) == 1:
            request = msgspec.structs.replace(
                read.request, sampling_params=params[0], rid=turns.rids[0], return_logprob=True
            )
            return msgspec.structs.replace(read, request=request, prompts=[prompt])
        request = msgspec.structs.replace(read.request, sampling_params=params, rid=turns.rids, return_logprob=True)
        return msgspec.structs.replace(read, request=request, prompts=[prompt] * len(params), is_single=False)


class _Turns:
    """The turns of one request. The generation calls `commit` and `close`."""

    def __init__(
        self,
        manager: TokenizerManager,
        ledger: TurnLedger,
        next: NextTurn,
        shape: ReplyShape,
        streamed: bool,
        replay: ReplayInfo | None,
        storing: set[asyncio.Task[None]],
    ) -> None:
        self._manager, self._ledger, self._next, self._shape, self._streamed = manager, ledger, next, shape, streamed
        self._storing, self._replay = storing, replay
        self.opened: list[OpenTurn] = []
        self.rids: list[str] = []
        self._waiting: dict[str, OpenTurn] = {}
        """Turns that are not stored yet, by the name of the sample in scheduler messages."""
        self._stores: dict[str, asyncio.Task[None]] = {}
        self._stored: list[OpenTurn] = []
        self._states: list[ReqState] = []

    def begin(self, caller: SessionCaller, rid: str | None, index: int) -> None:
        """Reserve the turn of sample `index`."""
        names = self.rids
        abort = partial(self._abort, index)
        key, body = (None, b"") if self._replay is None else (self._replay.key, self._replay.body)
        turn = self._ledger.begin(caller, self._next, key, body, abort)
        self.opened.append(turn)
        name = f"{turn.session_id}/{turn.turn}" if rid is None else f"{turn.session_id}/{rid}"
        names.append(name if index == 0 or rid is None else f"{name}-{index}")

    def _abort(self, index: int) -> None:
        self._manager.abort_request(self.rids[index])

    def sampling(self, turn: OpenTurn, given: dict[str, Any]) -> dict[str, Any]:
        """Return the sampling parameters of one turn."""
        # A request that leaves a parameter open may name it with None, as chat does with max_new_tokens.
        defaults = {name: value for name, value in turn.sampling.items() if given.get(name) is None}
        params = {**given, **defaults, **turn.forced, "n": 1}
        if params.get("logprobs_mode") not in (None, "default"):
            raise BadRequestError(
                "logprobs_mode is fixed in a session: its log-probabilities are those of the distribution that the "
                "tokens were drawn from (logprobs_mode=default)."
            )
        if turn.seed is not None and turn.forced.get("sampling_seed") is None:
            params["sampling_seed"] = turn.seed
        elif turn.sibling and params.get("sampling_seed") is not None:
            params["sampling_seed"] += turn.sibling  # the same request again must not draw the same tokens
        room, wanted = turn.max_new_tokens, params.get("max_new_tokens", 128)
        if room is not None:
            params["max_new_tokens"] = room if wanted is None else min(wanted, room)
        return params

    def follow(self, generation: Generation, shows_logprobs: bool) -> None:
        """Let the generation store the turns."""
        self._states = generation.states
        for turn, state in zip(self.opened, generation.states, strict=True):
            state.session = self._ledger.described(turn, self._next)
            state.call_seed = f"{turn.session_id}/{turn.turn}"
            state.shows_logprobs = shows_logprobs
            self._waiting[state.req.rid] = turn
        generation.turns = self

    def cancel(self) -> None:
        """Drop turns that were never sent to the scheduler."""
        for turn in self.opened:
            self._ledger.cancel(turn)

    async def commit(self, state: ReqState) -> None:
        """Store the turn of a sample that is done. Return when it is durable by the policy of the store."""
        task = self._stores.get(state.req.rid)
        if task is None:
            task = self._store(state, self._waiting.pop(state.req.rid), state.finish_reason)
        await asyncio.shield(task)  # a client that disconnects must not lose the turn

    def close(self) -> None:
        """Store what was sampled of turns whose client no longer waits, and drop turns without tokens."""
        waiting, self._waiting = self._waiting, {}
        for state in self._states:
            turn = waiting.get(state.req.rid)
            if turn is None:
                continue
            if failure(state) is None and state.output_ids:
                self._store(state, turn, state.finish_reason or FinishReason(type="abort"))
            else:
                self._ledger.cancel(turn)

    def tell_delivered(self, response: Response) -> None:
        """Let the ledger note when the client's connection took the whole reply."""
        if self._replay is None:
            response.background = BackgroundTask(self._delivered, response)
        else:
            self._replay.on_delivered = partial(self._delivered, response)

    def _delivered(self, response: Response) -> None:
        if isinstance(response, EventStream) and not response.is_complete:
            return  # Starlette runs the background task also for a client that left in the middle
        for turn in self._stored:
            self._ledger.delivered(turn.session_id, turn.turn)

    def _store(self, state: ReqState, turn: OpenTurn, reason: FinishReason | None) -> asyncio.Task[None]:
        task = asyncio.ensure_future(self._stored_turn(state, turn, reason))
        self._stores[state.req.rid] = task
        self._storing.add(task)
        task.add_done_callback(self._finished_storing)
        return task

    def _finished_storing(self, task: asyncio.Task[None]) -> None:
        self._storing.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            level = logging.WARNING if isinstance(error, VerlServerError) else logging.ERROR
            logger.log(level, "A turn of session %s was not stored: %s", self.opened[0].session_id, error)

    async def _stored_turn(self, state: ReqState, turn: OpenTurn, reason: FinishReason | None) -> None:
        assert reason is not None
        try:
            reply = await read_reply(
                state,
                self._shape.output,
                one_call=self._shape.one_call,
                streamed=self._streamed,
                call_seed=state.call_seed,
                continued=self._next.continued,
            )
        except BaseException:
            self._ledger.cancel(turn)
            raise
        model = self._manager.model_text
        now, wall = time.monotonic(), time.time()
        moments = (state.created, state.first_token or state.finished or now, state.finished or now)
        finished = FinishedTurn(
            next=self._next,
            output=columns.ids(state.output_ids),
            logprobs=columns.logprobs(state.output_logprobs),
            spans=[(span["version"], span["start"]) for span in state.weight_versions],
            finish=(reason.type, reason.matched),
            reply=reply,
            times=(wall - (now - moments[0]), wall - (now - moments[1]), wall - (now - moments[2])),
            dialect=self._shape.dialect,
            rid=state.rid,
            end_token=-1 if model is None else end_token(state, tuple(model.eos_token_ids)),
            aborted=reason.type == "abort",
            key=None if self._replay is None else self._replay.key,
            body=None if self._replay is None else self._replay.body,
        )
        await self._ledger.commit(turn, finished)
        self._stored.append(turn)


def _params(read: ReadRequest) -> dict[str, Any]:
    given = read.request.sampling_params
    if given is not None and not isinstance(given, dict):
        raise BadRequestError("sampling_params must be an object in a session.")
    return {name: value for name, value in (given or {}).items() if value is not None or name == "max_new_tokens"}

"""`SessionTurns`: the functions through which the dialects record a request in a session as turns of the ledger.

Outside a session, `read` runs the dialect's job, and `submit` calls `TokenizerManager.submit_read`. In a session,
`read` sends the session's view and the body to the text worker. `submit` reserves the turns, joins their prompts, and
makes the generation store each turn before the end of its reply is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from verl_server.chat.session_view import NextTurn
from verl_server.errors import BadRequestError, ContextLengthError, IdempotencyConflictError
from verl_server.messages.packed import pack_ids
from verl_server.server.generate_request import ReadRequest, SessionParams
from verl_server.server.generation import Generation
from verl_server.server.http.responses import read_body, run_job, unless_disconnected
from verl_server.server.http.unknown_fields import ReadBody, judge_unknown
from verl_server.server.http.version_headers import demand_of
from verl_server.server.replay.entries import Entry
from verl_server.server.request_state import Write
from verl_server.server.session_hints import header_hint
from verl_server.server.sessions.access import owner_of
from verl_server.server.sessions.ids_plan import plan_behind, plan_ids
from verl_server.server.sessions.reading import in_session, session_body
from verl_server.server.sessions.request_turns import ReplyShape, RequestTurns
from verl_server.server.sessions.session import Session, SessionCaller
from verl_server.server.sessions.stored_turn import StoredTurn
from verl_server.server.sessions.turn_ledger import TurnLedger
from verl_server.server.slices import Slices
from verl_server.server.text.text_tools import Job, pack, unpack
from verl_server.server.tokenizer_manager import TokenizerManager

R = TypeVar("R", bound=ReadBody)

_OF_OWNERS = ("extra_key", "cache_salt", "priority")
"""Fields that affect more than the session. An agent must not set them."""


def session_of(request: Request) -> SessionCaller | None:
    """Return the session that a request names, or None outside a session."""
    caller: SessionCaller | None = request.scope.get("state", {}).get("session")
    return caller


def refuse_session(request: Request, what: str, instead: str) -> None:
    """Raise BadRequestError for a route that keeps no ledger, if the request is in a session."""
    if session_of(request) is not None:
        raise BadRequestError(f"{what} is not available in a session. Use {instead}.")


class SessionTurns:
    def __init__(self, manager: TokenizerManager, ledger: TurnLedger) -> None:
        self._manager, self._ledger = manager, ledger
        self._storing: set[asyncio.Task[None]] = set()  # the loop itself keeps no reference to a task

    async def read(
        self, request: Request, job: Job[R], previous: Callable[[bytes], str | None] = lambda body: None
    ) -> R:
        """Read the body of a request with `job`, and return the result.

        In a session, its `next` is the plan of the prompt.

        `previous` returns the `previous_response_id` of a body.
        """
        body = await read_body(request, self._manager.server_args.max_request_bytes)
        self._manager.check_serving()
        caller, text = session_of(request), self._manager.text
        if caller is None:
            read = await run_job(request, text, job, body)
        else:
            view = self._ledger.view(caller, previous(body), repeats=bool(self._answered(request, caller)))
            with self.notes_overflow(caller):
                read = await unless_disconnected(request, text.in_worker(in_session(job), session_body(view, body)))
        judge_unknown(request, read.unknown_fields)
        return read

    async def submit(
        self, request: Request, read: ReadRequest, next: NextTurn | None, shape: ReplyShape, write: Write | None = None
    ) -> Generation:
        """Send the samples of a request to the scheduler, as `submit_read` does.

        In a session, each sample is a turn. Its tokens are stored before `wait`, `result` or the last update of the
        generation returns. `next` is None for a prompt of token ids.
        """
        continued = read.request.session_params
        caller = session_of(request) if continued is None else _named(request, continued)
        if caller is None:
            hint, demand = header_hint(request.headers), demand_of(request.scope)
            return await self._manager.submit_read(read, write, session_id=hint, demand=demand)
        with self.notes_overflow(caller):
            return await self._submit(request, caller, read, next, shape, write)

    @contextlib.contextmanager
    def notes_overflow(self, caller: SessionCaller | None) -> Iterator[None]:
        """If the block raises ContextLengthError, record in the session of `caller` that its context is full."""
        try:
            yield
        except ContextLengthError:
            if caller is not None:
                self._ledger.note_full(caller.session_id)
            raise

    async def _submit(
        self,
        request: Request,
        caller: SessionCaller,
        read: ReadRequest,
        next: NextTurn | None,
        shape: ReplyShape,
        write: Write | None,
    ) -> Generation:
        """Do the same as `submit`, for a request in a session."""
        continued = read.request.session_params
        self._check(read, caller)
        replay = _replay_of(request)
        answered = self._answered(request, caller)
        if next is None or continued is not None:
            session = self._ledger.opened(caller, repeats=bool(answered))
            behind = None if continued is None else self._continued(session, caller, continued, answered)
            if continued is not None and behind is not None:
                next = self._plan_behind(session, behind, read, continued)
            else:
                planned = await plan_ids(session, pack(read.prompts[0]))
                next = msgspec.structs.replace(planned, text=shape.prompt_text)
        params = _params(read)
        count = params.get("n") or 1
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise BadRequestError(f"sampling_params: n must be a positive integer, not {count!r:.40}.")
        self._manager.text.limits.check_samples(1, count)
        if not answered:
            self._ledger.check_samples(caller, count)
        elif read.request.top_logprobs_num or read.request.token_ids_logprob or read.request.return_sampling_mask:
            raise IdempotencyConflictError(
                "The request of this idempotency key was answered, and its answer is no longer kept. The session has "
                "its tokens and their log-probabilities, but no candidates. Use a new key to sample again."
            )
        turns = RequestTurns(self._manager, self._ledger, next, shape, read.request.stream, replay, self._storing)
        try:
            for turn in answered[:count]:
                turns.repeat(turn)
            slices = Slices()
            for k in range(len(turns.samples), count):
                turns.begin(caller, None if read.request.rid is None else str(read.request.rid), k)
                await slices.end()
            recorded_in = turns.samples[0].session
            generation = await self._manager.submit_read(
                await self._with_turns(read, turns, params, shape),
                write,
                turns.recorded,
                recorded_in.id,
                demand_of(request.scope) or recorded_in.root.record.weight_demand,
            )
        except BaseException:
            turns.cancel()
            raise
        turns.follow(generation, bool(read.request.return_logprob))
        return generation

    @staticmethod
    def mark(response: Response, generation: Generation) -> Response:
        """Add the session and the turn to the headers. Record when the whole reply was sent."""
        turns = generation.turns
        if isinstance(turns, RequestTurns):
            turn = turns.samples[0]
            response.headers["X-Session-ID"] = turn.session.root.id
            response.headers["X-Session-Turn"] = ",".join(str(each.turn) for each in turns.samples)
            turns.tell_delivered(response)
        return response

    def _answered(self, request: Request, caller: SessionCaller) -> list[StoredTurn]:
        """Return the turns that were sampled for the request's idempotency key, by sample."""
        replay = _replay_of(request)
        if replay is None or replay.key is None:
            return []
        return self._ledger.answered(caller, replay.key, replay.digest)

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

    def _continued(
        self, session: Session | None, caller: SessionCaller, given: SessionParams, answered: list[StoredTurn]
    ) -> int | None:
        """Return the turn that a request with SGLang's `session_params` continues, or None if it begins a conversation.

        `answered` are the turns that an earlier attempt of the request sampled. Raise BadRequestError if the turn has
        not finished.
        """
        if given.rid is not None:
            return self._ledger.turn_of(caller, given.rid)
        if session is None or not session.record.streaming:
            return None
        if session.pending and not answered:
            raise BadRequestError(
                f"session_params: the last request of session {session.id}, which is streaming, has not finished."
            )
        before = min((turn.turn for turn in answered), default=len(session.turns))
        return next((i for i in reversed(range(before)) if session.turns[i] is not None), None)

    def _plan_behind(self, session: Session | None, turn: int, read: ReadRequest, given: SessionParams) -> NextTurn:
        """Plan the turn that continues another, with SGLang's meaning of `offset`."""
        stored = None if session is None else session.turns[turn]
        assert session is not None and stored is not None
        kept = stored.prompt_tokens if given.drop_previous_output else stored.tokens
        if given.offset:
            kept = min(given.offset, kept) if given.offset > 0 else max(kept + given.offset, 0)
        ids = unpack(read.prompts[0])
        model = self._manager.model_text
        if kept and ids and model is not None and ids[0] == model.config.get("bos_token_id"):
            ids = ids[1:]  # a tokenizer adds it to each text, and it begins the sequence already
        return plan_behind(session, turn, kept, pack_ids(ids))

    async def _with_turns(
        self, read: ReadRequest, turns: RequestTurns, given: dict[str, Any], shape: ReplyShape
    ) -> ReadRequest:
        """Return the request with the prompts, seeds and limits of its turns, and without hints at another session."""
        params: list[dict[str, Any]] = []
        prompts: list[list[int]] = []
        slices = Slices()
        for turn in turns.samples:
            params.append(turns.sampling(turn, given))
            prompts.append(turn.prompt_ids() if isinstance(turn, StoredTurn) else unpack(turn.prompt))
            await slices.end()
        if shape.clamps:
            room = self._manager.text.bounds.longest - len(prompts[0])
            for each in params:
                each["max_new_tokens"] = min(each["max_new_tokens"], max(room, 0))
        request = msgspec.structs.replace(read.request, return_logprob=True, session_id=None, conversation_id=None)
        is_one = len(params) == 1
        request.sampling_params, request.rid = (params[0], turns.rids[0]) if is_one else (params, turns.rids)
        return msgspec.structs.replace(read, request=request, prompts=prompts, is_single=read.is_single and is_one)


def _replay_of(request: Request) -> Entry | None:
    replay: Entry | None = request.scope.get("state", {}).get("replay")
    return replay


def _named(request: Request, given: SessionParams) -> SessionCaller:
    """Return the session of SGLang's `session_params`. Raise BadRequestError if the caller's key has no right to it."""
    caller, owner = session_of(request), owner_of(request.scope)
    if caller is not None and caller.session_id == given.id:
        return caller
    if caller is not None or owner is None:
        raise BadRequestError(
            "session_params.id names a session of another key: it needs the owner's key, or a server without keys "
            "that listens on loopback."
        )
    return SessionCaller(given.id, None, True, owner)


def _params(read: ReadRequest) -> dict[str, Any]:
    given = read.request.sampling_params
    if given is not None and not isinstance(given, dict):
        raise BadRequestError("sampling_params must be an object in a session.")
    return {name: value for name, value in (given or {}).items() if value is not None or name == "max_new_tokens"}

"""`RequestTurns`: the turns of one request, from their reservation until they are stored.

`SessionTurns` creates it, and the request's generation calls `commit` and `close`. A turn is stored even if its client
has disconnected, so no sampled token is lost.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from starlette.background import BackgroundTask
from starlette.responses import Response

from verl_server.chat.session_view import NextTurn
from verl_server.errors import BadRequestError, ContextLengthError, VerlServerError
from verl_server.messages.io_struct import BatchTokenIDOut, FinishReason, TokenizedGenerateReq
from verl_server.messages.packed import pack_ids, pack_logprobs
from verl_server.sampling_params import EDITS, FILTERS, SamplingParams
from verl_server.server.generation import Generation, failure
from verl_server.server.http.responses import EventStream
from verl_server.server.replay.entries import Entry
from verl_server.server.request_state import ReqState
from verl_server.server.sessions.replies import end_token, read_reply
from verl_server.server.sessions.session import OpenTurn, SessionCaller
from verl_server.server.sessions.stored_turn import StoredTurn
from verl_server.server.sessions.turn import FinishedTurn
from verl_server.server.sessions.turn_ledger import TurnLedger
from verl_server.server.text.chat_prompt import ChatOutput
from verl_server.server.tokenizer_manager import TokenizerManager

logger = logging.getLogger(__name__)

_CONDITIONS = (*FILTERS, *EDITS, "ignore_eos")
_DEFAULTS = SamplingParams()


@dataclass(frozen=True)
class ReplyShape:
    """The form in which a dialect sends a reply to its client.

    The client's next request contains the reply in this form.
    """

    dialect: str
    output: ChatOutput | None = None
    one_call: bool = False
    """True if the client receives the first tool call only."""
    clamps: bool = False
    """True if a `max_new_tokens` that exceeds the context is reduced. Otherwise the request is refused."""
    prompt_text: tuple[int, bytes] | None = None
    """Completions: `NextTurn.text`."""


class RequestTurns:
    def __init__(
        self,
        manager: TokenizerManager,
        ledger: TurnLedger,
        next: NextTurn,
        shape: ReplyShape,
        streamed: bool,
        replay: Entry | None,
        storing: set[asyncio.Task[None]],
    ) -> None:
        self._manager, self._ledger, self._next, self._shape, self._streamed = manager, ledger, next, shape, streamed
        self._storing, self._replay = storing, replay
        self.samples: list[OpenTurn | StoredTurn] = []
        """A `StoredTurn` was sampled before, for the same idempotency key."""
        self.rids: list[str] = []
        self._waiting: dict[str, OpenTurn] = {}
        """Turns that are not stored yet, by the name of the sample in scheduler messages."""
        self._stores: dict[str, asyncio.Task[None]] = {}
        self._stored: list[tuple[str, int]] = []
        """(session, turn) of the stored turns.

        A kept answer has a reference to this list, so the list has no tokens.
        """
        self._states: list[ReqState] = []
        self._overridden: dict[int, dict[str, Any]] = {}  # turn -> what its request asked for in vain

    def begin(self, caller: SessionCaller, rid: str | None, index: int) -> None:
        """Reserve the turn of sample `index`."""
        key, body = (None, b"") if self._replay is None else (self._replay.key, self._replay.digest)
        turn = self._ledger.begin(caller, self._next, key, body, lambda: self._manager.abort_request(self.rids[index]))
        self.samples.append(turn)
        name = f"{turn.session.id}/{turn.turn if rid is None else rid}"
        self.rids.append(name if index == 0 or rid is None else f"{name}-{index}")

    def repeat(self, turn: StoredTurn) -> None:
        """Use a turn that was sampled before as the next sample."""
        self.samples.append(turn)
        self.rids.append(turn.stored.rid)

    @property
    def recorded(self) -> dict[int, list[BatchTokenIDOut]]:
        """Samples that were sampled before: index -> messages with the tokens, as the scheduler sent them."""
        return {k: recorded_tokens(turn) for k, turn in enumerate(self.samples) if isinstance(turn, StoredTurn)}

    def sampling(self, turn: OpenTurn | StoredTurn, given: dict[str, Any]) -> dict[str, Any]:
        """Return the sampling parameters of one turn."""
        settings = turn.session.root.record
        # A request that leaves a parameter open may name it with None, as chat does with max_new_tokens.
        defaults = {name: value for name, value in settings.sampling.items() if given.get(name) is None}
        params = {**given, **defaults, **settings.forced, "n": 1}
        overridden = _overridden(given, settings.forced)
        if overridden and settings.forced_mode == "refuse":
            name, value = next(iter(overridden.items()))
            raise BadRequestError(
                f"{name} is fixed in this session: it is {settings.forced[name]}, and the request asks for "
                f"{value!r:.100}. Leave it out."
            )
        self._overridden[turn.turn] = overridden
        if params.get("logprobs_mode") not in (None, "default"):
            raise BadRequestError(
                "logprobs_mode is fixed in a session, which records the default log-probabilities and, where a mask, "
                "a penalty or a bias makes them others, those of the policy (logprobs_mode=default)."
            )
        if isinstance(turn, StoredTurn):
            return params
        if turn.seed is not None and settings.forced.get("sampling_seed") is None:
            params["sampling_seed"] = turn.seed
        elif turn.sibling and params.get("sampling_seed") is not None:
            params["sampling_seed"] += turn.sibling  # the same request again must not draw the same tokens
        room, wanted = turn.max_new_tokens, params.get("max_new_tokens", 128)
        if room is not None:
            params["max_new_tokens"] = room if wanted is None else min(wanted, room)
        return params

    def follow(self, generation: Generation, shows_logprobs: bool) -> None:
        """Take over the samples of the generation, so that their turns are stored.

        With `shows_logprobs`, the reply contains log-probabilities.
        """
        self._states = generation.states
        for turn, state in zip(self.samples, generation.states, strict=True):
            state.call_seed = f"{turn.session.id}/{turn.turn}"
            state.shows_logprobs = shows_logprobs
            if isinstance(turn, StoredTurn):
                state.session = self._ledger.described_again(turn)
                self._stored.append((turn.session.id, turn.turn))
            else:
                state.session = self._ledger.described(turn, self._next)
                self._waiting[state.req.rid] = turn
        generation.turns = self

    def cancel(self) -> None:
        """Drop turns that were never sent to the scheduler."""
        for turn in self.samples:
            if isinstance(turn, OpenTurn):
                self._ledger.cancel(turn)

    async def commit(self, state: ReqState) -> None:
        """Store the turn of a sample that is done. Return when it is durable by the policy of the store."""
        task, turn = self._stores.get(state.req.rid), self._waiting.pop(state.req.rid, None)
        if task is None:
            if turn is None:
                return  # the turn was stored before
            task = self._store(state, turn, state.finish_reason)
        await asyncio.shield(task)  # a client that disconnects must not lose the turn

    def close(self) -> None:
        """Store the sampled tokens of turns whose client no longer waits. Drop turns without tokens."""
        waiting, self._waiting = self._waiting, {}
        for state in self._states:
            turn = waiting.get(state.req.rid)
            if turn is None:
                continue
            error = failure(state)
            if error is None and state.output_ids:
                self._store(state, turn, state.finish_reason or FinishReason(type="abort"))
            else:
                self._ledger.cancel(turn)
            if isinstance(error, ContextLengthError):  # the scheduler's refusal
                self._ledger.note_full(turn.session.id)

    def tell_delivered(self, response: Response) -> None:
        """Make the ledger record when the client's connection has received the whole reply."""
        if self._replay is None:
            response.background = BackgroundTask(self._delivered, response)
        else:  # called for an answer with an end only
            self._replay.on_delivered = partial(_delivered, self._ledger, self._stored)

    def _delivered(self, response: Response) -> None:
        if isinstance(response, EventStream) and not response.is_complete:
            return  # Starlette runs the background task also for a client that left in the middle
        _delivered(self._ledger, self._stored)

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
            logger.log(level, "A turn of session %s was not stored: %s", self.samples[0].session.id, error)

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
            output=pack_ids(state.output_ids),
            logprobs=pack_logprobs(state.output_logprobs),
            spans=[(span["version"], span["start"]) for span in state.weight_versions],
            finish=(reason.type, reason.matched),
            reply=reply,
            times=(wall - (now - moments[0]), wall - (now - moments[1]), wall - (now - moments[2])),
            dialect=self._shape.dialect,
            rid=state.rid,
            sampling=conditions(state.req),
            policy_logprobs=state.policy_logprobs,
            policy=pack_logprobs(state.output_policy),
            has_choice=bytes(state.output_choices),
            overridden=msgspec.json.encode(asked) if (asked := self._overridden.get(turn.turn)) else b"",
            seed=state.req.sampling.sampling_seed,
            end_token=-1 if model is None else end_token(state, tuple(model.eos_token_ids)),
            aborted=reason.type == "abort",
            key=None if self._replay is None else self._replay.key,
            body=None if self._replay is None else self._replay.digest,
        )
        await self._ledger.commit(turn, finished)
        self._stored.append((turn.session.id, turn.turn))


def _delivered(ledger: TurnLedger, turns: list[tuple[str, int]]) -> None:
    """Record that the replies of turns (session, turn) reached the client."""
    for session_id, turn in turns:
        ledger.delivered(session_id, turn)


def conditions(req: TokenizedGenerateReq) -> bytes:
    """Return the parameters that shaped the distribution of a turn, as JSON: `BranchTurn.sampling` without the seed."""
    sampling = req.sampling
    found: dict[str, Any] = {"temperature": sampling.temperature}
    for name in _CONDITIONS:
        value = getattr(sampling, name)
        if value != getattr(_DEFAULTS, name):
            found[name] = value
    if req.grammar:
        found["grammar"] = f"blake2b:{hashlib.blake2b(req.grammar.encode(), digest_size=16).hexdigest()}"
    return msgspec.json.encode(found)


def _overridden(given: dict[str, Any], forced: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of a request that differ from those that its session forces."""
    named = {name: given[name] for name in forced if given.get(name) is not None}
    if not named:
        return {}
    asked = SamplingParams.parse(named)
    fixed = SamplingParams.parse({name: forced[name] for name in named})
    return {name: value for name, value in named.items() if _set(asked, name) != _set(fixed, name)}


def _set(params: SamplingParams, name: str) -> Any:
    """Return the value of a field, None for an empty one."""
    return getattr(params, name, None) or None


def recorded_tokens(turn: StoredTurn) -> list[BatchTokenIDOut]:
    """Return the tokens of a finished turn as messages of the scheduler, one for each weight version."""
    ids, logprobs = turn.output_ids(), turn.output_logprobs()
    policy, choices = turn.output_policy(), turn.output_choices()
    spans = turn.stored.spans or [("", 0)]
    ends = [*(start for _, start in spans[1:]), len(ids)]
    kind, matched = turn.stored.finish
    reason = FinishReason(type=kind, matched=matched)  # type: ignore[arg-type]
    return [
        BatchTokenIDOut(
            rids=[turn.stored.rid],
            output_ids=[ids[start:end]],
            output_logprobs=[logprobs[start:end]],
            policy_logprobs={0: policy[start:end]} if policy else {},
            has_choice={0: list(map(bool, choices[start:end]))} if choices else {},
            finish_reasons=[reason if end == len(ids) else None],
            weight_version=version,
            cached_tokens=[0],
            num_retractions=[0],
        )
        for (version, start), end in zip(spans, ends, strict=True)
    ]

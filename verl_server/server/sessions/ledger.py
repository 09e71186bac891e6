"""`SessionLedger`: all sessions of one server, in memory.

It runs on the TokenizerManager's event loop, and no method blocks it. Every change is a record: the ledger applies the
record and hands it to the store, which may write it to disk. `restore` applies the records of an earlier run. Routes
create, read and end sessions; turns are read (`view`), reserved (`begin`) and stored (`commit`).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import re
import secrets
import struct
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from verl_server.chat.history import ASSISTANT, NODE
from verl_server.errors import (
    BadRequestError,
    IdempotencyConflictError,
    SessionEndedError,
    SessionExistsError,
    SessionLimitError,
    SessionNotFoundError,
    SessionUnavailableError,
)
from verl_server.server.sessions import turn as turns_of
from verl_server.server.sessions.contract import (
    FinishedTurn,
    NextTurn,
    OpenTurn,
    ReplyFacts,
    SessionCaller,
    SessionView,
)
from verl_server.server.sessions.records import (
    BeginRecord,
    DeleteRecord,
    DeliveredRecord,
    FinishRecord,
    Record,
    RewardRecord,
    SessionRecord,
    TurnRecord,
)
from verl_server.server.sessions.replies import completion_text
from verl_server.server.sessions.session import PendingTurn, Session
from verl_server.server.sessions.turn import ABORTED, DELIVERED, IN_REASONING, RESAMPLED, Turn
from verl_server.session_types import CreateSession, RewardBody, SessionInfo, SessionState, TurnInfo

logger = logging.getLogger(__name__)

KEY_PREFIX = "vs-"
_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")
_CHILD = re.compile(r"[A-Za-z0-9_-]{1,64}")
_AUTOMATIC = "auto-"
"""Names of child sessions that nobody named begin so."""
_METADATA_BYTES = 16 * 1024
_UNREAD_RETENTION = 24 * 3600.0
"""Seconds that a finished session is kept whose trajectory nobody read."""


@dataclass(frozen=True)
class Bounds:
    """Bounds of all sessions together."""

    memory_bytes: int = 2 * 2**30
    ttl: float = 3600.0
    """Seconds without a request after which an open session expires."""
    retention: float = 600.0
    """Seconds that a finished session is kept after its trajectory was read. One that nobody read is kept for a day."""
    max_sessions: int = 65536
    max_turn_tokens: int | None = None
    """Tokens of the longest sequence; None: the model's context."""
    max_nodes: int = 16384
    session_bytes: int = 64 * 2**20
    """Memory of one session with its children, so that one agent cannot fill the memory of all."""
    max_children: int = 64


class Store(Protocol):
    """Where records go. `MemoryStore` drops them; `Journal` writes them."""

    @property
    def failure(self) -> str | None:
        """Why nothing can be written now; None if the store works."""
        ...

    def put(self, record: Record) -> None:
        """Take a record, without waiting."""
        ...

    async def flushed(self) -> None:
        """Return when all records so far are durable by policy. Raise SessionUnavailableError if they are not."""
        ...


class MemoryStore:
    """The store of a server without `session_store`."""

    failure: str | None = None

    def put(self, record: Record) -> None:
        pass

    async def flushed(self) -> None:
        pass


class Counters(Protocol):
    """What the ledger counts. `Metrics` implements it."""

    def session_created(self) -> None: ...

    def session_ended(self, reason: str) -> None: ...

    def turn_finished(self, began: str | None) -> None: ...


@dataclass(frozen=True, slots=True)
class SessionTurn:
    """A finished turn with its id: the contract's `StoredTurn`."""

    session: Session
    turn: int

    @property
    def stored(self) -> Turn:
        turn = self.session.turns[self.turn]
        assert turn is not None
        return turn

    @property
    def session_id(self) -> str:
        return self.session.id

    @property
    def parent(self) -> int:
        return self.stored.parent

    @property
    def shared(self) -> int:
        return self.stored.shared

    @property
    def prompt_tokens(self) -> int:
        return self.stored.prompt_tokens

    @property
    def output_tokens(self) -> int:
        return self.stored.output_tokens

    @property
    def sibling(self) -> int:
        return self.stored.sibling

    @property
    def spans(self) -> list[tuple[str, int]]:
        return list(self.stored.spans)

    @property
    def finish(self) -> tuple[str, str | int | None]:
        return self.stored.finish

    @property
    def calls(self) -> bytes | None:
        return self.stored.calls

    @property
    def rid(self) -> str:
        return self.stored.rid

    @property
    def delivered(self) -> bool:
        return bool(self.stored.flags & DELIVERED)

    @property
    def aborted(self) -> bool:
        return bool(self.stored.flags & ABORTED)

    @property
    def child(self) -> str | None:
        return self.stored.child

    def prompt_ids(self) -> list[int]:
        prompt = turns_of.sequence(self.session.turns, self.turn, self.stored.prompt_tokens)
        return list(struct.unpack(f"<{len(prompt) // 4}i", prompt))

    def output_ids(self) -> list[int]:
        return list(struct.unpack(f"<{len(self.stored.output) // 4}i", self.stored.output))

    def output_logprobs(self) -> list[float]:
        return list(struct.unpack(f"<{len(self.stored.logprobs) // 4}f", self.stored.logprobs))


def hash_of_key(key: str) -> bytes:
    """Return the hash under which a session key is known. The key itself is kept nowhere."""
    return hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=32).digest()


class SessionLedger:
    def __init__(
        self,
        bounds: Bounds | None = None,
        *,
        end_tokens: Callable[[], list[int]] = list,
        gate: Callable[[], str | None] = lambda: None,
        store: Store | None = None,
        counters: Counters | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`end_tokens` returns the model's. `gate` returns why sessions cannot continue now, or None."""
        self.bounds = bounds or Bounds()
        self.store: Store = store or MemoryStore()
        self._end_tokens, self._gate, self._counters, self._clock = end_tokens, gate, counters, clock
        self._sessions: dict[str, Session] = {}
        self._by_key: dict[bytes, str] = {}
        self._once: dict[object, object] = {}
        self._bytes = 0
        self.last_version: str | None = None
        """Weight version of the last stored turn."""
        self.is_complete = True
        """False while the sessions of an earlier run are read from the store: any session may exist then."""

    # -- the owner's calls ----------------------------------------------------------------------------------

    def create(self, body: CreateSession) -> tuple[Session, str]:
        """Return a new session and its key. Raise BadRequestError, SessionExistsError or SessionUnavailableError."""
        self._check_gate()
        self._check_store()
        if len(self._sessions) >= self.bounds.max_sessions:
            self._free()
        if len(self._sessions) >= self.bounds.max_sessions:
            raise SessionUnavailableError(
                f"The server has its {self.bounds.max_sessions} sessions (max_sessions). Finish or delete some."
            )
        self._check_memory()
        _check(body)
        session_id = f"ses_{secrets.token_hex(8)}" if body.id is None else body.id
        if session_id in self._sessions:
            raise SessionExistsError(f"Session {session_id} exists already. Delete it, or choose another id.")
        key = KEY_PREFIX + secrets.token_urlsafe(32)
        self._record(
            SessionRecord(
                id=session_id,
                key_hash=hash_of_key(key),
                created=self._clock(),
                group=body.group,
                metadata=body.metadata,
                limits=body.limits,
                history=body.history,
                sampling=body.sampling_params,
                forced=body.forced_sampling_params,
                seed=body.seed,
            )
        )
        if self._counters is not None:
            self._counters.session_created()
        return self._sessions[session_id], key

    def find(self, session_id: str) -> Session:
        """Return a session. Raise SessionNotFoundError."""
        session = self._sessions.get(session_id)
        if session is None:
            raise SessionNotFoundError(f"There is no session {session_id[:140]}. It may have been deleted.")
        return session

    def knows(self, session_id: str) -> bool:
        return session_id in self._sessions

    def of_key(self, key: str) -> str | None:
        """Return the id of the session that a session key names, or None for an unknown key."""
        return self._by_key.get(hash_of_key(key))

    def sessions(self) -> Iterable[Session]:
        """Return all sessions without a parent, oldest first."""
        return (session for session in self._sessions.values() if session.owner is None)

    def family(self, session: Session) -> list[Session]:
        """Return a session and its child sessions."""
        return [session, *(self._sessions[child] for child in session.children.values())]

    def stored_turns(self, session: Session) -> list[SessionTurn]:
        """Return the finished turns of a session, by id."""
        return [SessionTurn(session, i) for i, turn in enumerate(session.turns) if turn is not None]

    def reward(self, session_id: str, body: RewardBody) -> float | None:
        """Record a reward, and return the session's. Raise SessionNotFoundError or BadRequestError."""
        session = self.find(session_id)
        if body.turn is not None and (not 0 <= body.turn < len(session.turns) or session.turns[body.turn] is None):
            raise BadRequestError(f"reward.turn: session {session_id} has no finished turn {body.turn}.")
        self._record(RewardRecord(session_id, body.reward, body.turn, body.name))
        return session.reward

    def finish(self, session_id: str, reason: str = "done", state: SessionState = "finished") -> Session:
        """End a session: its key ends, and its running turns are aborted and recorded. Idempotent."""
        session = self.find(session_id).root
        if session.state == "open":
            self._record(FinishRecord(session.id, state, reason, self._clock()))
            if self._counters is not None:
                self._counters.session_ended(state)
            self._abort(session)
        return session

    def delete(self, session_id: str) -> None:
        """Forget a session and its children. Raise SessionNotFoundError."""
        session = self.find(session_id)
        if session.owner is not None:
            raise BadRequestError(f"Session {session_id} is a child. Delete its parent {session.owner.id}.")
        if session.state == "open" and self._counters is not None:
            self._counters.session_ended("deleted")
        self._abort(session)
        self._record(DeleteRecord(session_id))

    def _abort(self, session: Session) -> None:
        for each in self.family(session):
            for pending in list(each.pending.values()):
                if pending.abort is not None:
                    pending.abort()

    async def settled(self, session: Session, timeout: float = 5.0) -> None:
        """Return when no turn of an ended session runs any more, or after `timeout` seconds."""
        deadline = asyncio.get_running_loop().time() + timeout
        while session.in_flight and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)

    # -- turns: the contract's Ledger -----------------------------------------------------------------------

    def view(self, caller: SessionCaller, previous: str | None = None) -> SessionView:
        """Return the snapshot from which a text worker plans the next prompt. See the contract."""
        session = self._open_session(caller)
        self._check_limits(session)
        child = self._child(session, caller.child)
        nodes, replies = b"", []
        if child is not None:
            nodes = bytes(child.nodes)
            replies = [_facts(i, turn) for i, turn in enumerate(child.turns) if turn is not None]
        named = None if previous is None else self._previous(session, child, previous)
        return SessionView(session.record.history, nodes, replies, self._end_tokens(), named)

    def _previous(self, session: Session, child: Session | None, response_id: str) -> int:
        """Return the turn of a response id, `resp_{session}_{turn}`."""
        owner, _, number = response_id.removeprefix("resp_").rpartition("_")
        if child is not None and owner == child.id and number.isdigit() and len(number) < 10:
            turn = int(number)
            if turn < len(child.turns) and child.turns[turn] is not None:
                return turn
        raise SessionNotFoundError(f"previous_response_id: session {session.id} has no response {response_id[:200]}.")

    def sequence(self, session_id: str, turn: int, kept: int | None = None) -> bytes:
        """Return the int32 ids of prompt and output of a turn, or the first `kept` of them."""
        return turns_of.sequence(self.find(session_id).turns, turn, kept)

    def check_samples(self, caller: SessionCaller, count: int) -> None:
        """Raise SessionLimitError if `count` turns that begin together can never begin in the session."""
        session = self.find(caller.session_id).root
        limits = session.limits
        if count > limits.max_concurrent:
            raise SessionLimitError(
                f"n={count} samples run at once, and session {session.id} has max_concurrent={limits.max_concurrent}."
            )
        if limits.max_turns is not None and session.started < limits.max_turns < session.started + count:
            session.limit = "max_turns"
            raise SessionLimitError(
                f"n={count} samples are {count} turns, and session {session.id} has used {session.started} of its "
                f"max_turns={limits.max_turns}."
            )

    def begin(
        self,
        caller: SessionCaller,
        next: NextTurn,
        key: bytes | None,
        body: bytes,
        abort: Callable[[], None] | None = None,
    ) -> OpenTurn:
        """Reserve a turn. Each call needs a `commit` or a `cancel`. `abort` is called if the session ends meanwhile."""
        root = self._open_session(caller)
        self._check_limits(root)
        session = self._child(root, caller.child) or self._new_child(root, caller.child)
        prompt, parent, shared = self._joined(session, next)
        tokens = len(prompt) // 4
        max_new_tokens = self._room(root, tokens)
        if len(session.nodes) + len(next.new_nodes) > self.bounds.max_nodes * NODE.size:
            raise SessionLimitError(f"Session {root.id} has {self.bounds.max_nodes} messages, this server's most.")
        prompt_node = session.add_nodes(next.new_nodes, next.after_node)
        own = prompt[4 * shared :]
        sibling = session.siblings(parent, shared, own)
        turn = len(session.turns)
        pending = PendingTurn(
            next=next,
            parent=parent,
            shared=shared,
            sibling=sibling,
            branch=self._branch(session, parent, shared),
            prompt=own,
            prompt_node=prompt_node,
            child=self._conversation(session, next, own),
            accepted=self._clock(),
            room=max_new_tokens,
            resampled=key is not None and session.was_interrupted(key),
            abort=abort,
        )
        self._record(BeginRecord(session.id, turn, key, body if key is not None else None))
        session.pending[turn] = pending
        root.in_flight += 1
        return OpenTurn(
            session_id=session.id,
            turn=turn,
            parent=parent,
            shared=shared,
            prompt=prompt,
            sibling=sibling,
            seed=None if session.record.seed is None else _derived(session.record.seed, prompt, sibling),
            sampling=root.record.sampling,
            forced=root.record.forced,
            max_new_tokens=max_new_tokens,
        )

    async def commit(self, turn: OpenTurn, finished: FinishedTurn) -> None:
        """Append the turn, and return when it is durable by policy. Raise SessionUnavailableError otherwise."""
        session = self._sessions.get(turn.session_id)
        pending = None if session is None else session.pending.pop(turn.turn, None)
        if session is None or pending is None:
            raise SessionNotFoundError(f"Session {turn.session_id} was deleted while its turn {turn.turn} ran.")
        session.root.in_flight -= 1
        reply = finished.reply
        flags = IN_REASONING * reply.in_reasoning | ABORTED * finished.aborted | RESAMPLED * pending.resampled
        calls = [{"id": i, "name": name, "arguments": arguments} for i, name, arguments in reply.calls]
        reply_node = self._reply_node(session, pending, turn.turn, finished)
        record = TurnRecord(
            session=session.id,
            turn=turn.turn,
            parent=pending.parent,
            shared=pending.shared,
            prompt=pending.prompt,
            output=finished.output,
            logprobs=finished.logprobs,
            spans=tuple((version, start) for version, start in finished.spans),
            finish=finished.finish,
            times=finished.times,
            generation_prompt=finished.next.generation_prompt,
            end_token=finished.end_token,
            flags=flags,
            prompt_node=pending.prompt_node,
            reply_node=reply_node,
            sibling=pending.sibling,
            branch=pending.branch,
            options=finished.next.options,
            calls=msgspec.json.encode(calls) if calls else None,
            key=finished.key,
            body=finished.body,
            dialect=finished.dialect,
            rid=finished.rid,
            child=pending.child,
            first_node=session.stored_nodes,
            nodes=bytes(session.nodes[session.stored_nodes * NODE.size :]),
            completion=completion_text(finished.next, reply),
            messages=finished.next.messages,
            reply=reply.text,
        )
        self._record(record)
        root = session.root
        if finished.finish[0] == "length" and pending.room is not None and len(finished.output) // 4 >= pending.room:
            limits = root.limits
            is_used = limits.max_tokens is not None and root.sampled >= limits.max_tokens
            root.limit = "max_tokens" if is_used else "max_context"
        if self._counters is not None:
            self._counters.turn_finished(self.described(turn, finished.next)["began"])
        await self.store.flushed()

    def cancel(self, turn: OpenTurn) -> None:
        """Drop a turn that sampled nothing."""
        session = self._sessions.get(turn.session_id)
        if session is not None and session.pending.pop(turn.turn, None) is not None:
            session.root.in_flight -= 1
            session.root.started -= 1
            for key, turns in list(session.keys.items()):
                if turn.turn in turns:
                    turns.remove(turn.turn)
                    if not turns:
                        del session.keys[key]

    def delivered(self, session_id: str, turn: int) -> None:
        """Note that the whole reply reached the client's socket."""
        session = self._sessions.get(session_id)
        if session is not None and turn < len(session.turns) and session.turns[turn] is not None:
            self._record(DeliveredRecord(session_id, turn))

    def replay(self, caller: SessionCaller, key: bytes, body: bytes) -> SessionTurn | None:
        """Return the finished turn of this idempotency key; with several samples, the first. See `replay_all`."""
        found = self.replay_all(caller, key, body)
        return found[0] if found else None

    def replay_all(self, caller: SessionCaller, key: bytes, body: bytes) -> list[SessionTurn]:
        """Return the finished turns of this idempotency key. Raise IdempotencyConflictError for another body."""
        session = self._child(self.find(caller.session_id), caller.child)
        if session is None:
            return []
        found = [SessionTurn(session, i) for i in session.keys.get(key, []) if session.turns[i] is not None]
        found = [each for each in found if not each.aborted]  # the key's request was not answered: sample anew
        if any(each.stored.body != body for each in found):
            raise IdempotencyConflictError(
                f"The idempotency key came before in session {session.id} with another body. Use a new key."
            )
        return found

    def described(self, turn: OpenTurn, next: NextTurn) -> dict[str, Any]:
        """Return `meta_info.session`."""
        session = self.find(turn.session_id)
        done = session.pending.get(turn.turn) or session.turns[turn.turn]
        assert done is not None
        began = "child" if next.began == "root" and done.child is not None else next.began
        if next.kept < 0 <= turn.parent:
            parent = session.turns[turn.parent]
            began = None if parent is not None and parent.tokens == turn.shared else began
        child = done.child or (session.id.rpartition(".")[2] if session.owner is not None else None)
        return {
            "id": session.root.id,
            "turn": turn.turn,
            "parent": turn.parent,
            "branch": done.branch,
            "began": began,
            "shared_tokens": turn.shared,
            "new_tokens": len(turn.prompt) // 4 - turn.shared,
            "matched_messages": next.matched_messages,
            "child": child,
            "replayed": False,
        }

    # -- how a turn begins ----------------------------------------------------------------------------------

    def _open_session(self, caller: SessionCaller) -> Session:
        """Return the caller's session, if it can generate now."""
        session = self.find(caller.session_id).root
        if session.state != "open":
            raise SessionEndedError(f"Session {session.id} has {session.state} ({session.reason}).")
        self._check_gate()
        self._check_store()
        session.active = self._clock()
        return session

    def _check_limits(self, session: Session) -> None:
        limits = session.limits
        if limits.seconds is not None and self._clock() > session.record.created + limits.seconds:
            self.finish(session.id, "seconds", "expired")
            raise SessionEndedError(f"Session {session.id} has expired: it was open for seconds={limits.seconds:g}.")
        if limits.max_turns is not None and session.started >= limits.max_turns:
            session.limit = "max_turns"
            raise SessionLimitError(f"Session {session.id} has used its max_turns={limits.max_turns}.")
        if limits.max_tokens is not None and session.sampled >= limits.max_tokens:
            session.limit = "max_tokens"
            raise SessionLimitError(f"Session {session.id} has used its max_tokens={limits.max_tokens}.")
        if session.in_flight >= limits.max_concurrent:
            raise SessionUnavailableError(
                f"Session {session.id} has max_concurrent={limits.max_concurrent} generations running. Retry later."
            )
        size = sum(each.size for each in self.family(session))
        if size >= self.bounds.session_bytes:
            raise SessionLimitError(
                f"Session {session.id} uses {size} bytes; this server permits {self.bounds.session_bytes}."
            )
        self._check_memory()

    def _check_gate(self) -> None:
        if (reason := self._gate()) is not None:
            raise SessionUnavailableError(reason)

    def _check_store(self) -> None:
        if self.store.failure is not None:
            raise SessionUnavailableError(f"The session store cannot be written: {self.store.failure}. Retry later.")

    def _check_memory(self) -> None:
        if self._bytes >= self.bounds.memory_bytes:
            self._free()
        if self._bytes >= self.bounds.memory_bytes:
            raise SessionUnavailableError(
                f"The sessions of this server use {self._bytes} bytes (session_memory_bytes={self.bounds.memory_bytes}"
                "). Finish and delete some."
            )

    def _child(self, session: Session, name: str | None) -> Session | None:
        """Return the named child session, the session itself without a name, or None if there is no such child yet."""
        if name is None:
            return session
        if _CHILD.fullmatch(name) is None or name.startswith(_AUTOMATIC):
            raise BadRequestError(
                "X-Session-Child must be 1 to 64 letters, digits, '_' or '-', and must not begin with 'auto-'."
            )
        child = session.children.get(name)
        return None if child is None else self._sessions[child]

    def _new_child(self, session: Session, name: str | None) -> Session:
        if len(session.children) >= self.bounds.max_children:
            raise SessionLimitError(f"Session {session.id} has {self.bounds.max_children} child sessions, the most.")
        child_id = f"{session.id}.{name}"
        seed = session.record.seed
        if seed is not None:
            seed = _derived(seed, b"child %s" % (name or "").encode())
        self._record(
            SessionRecord(child_id, b"", self._clock(), parent=session.id, history=session.record.history, seed=seed)
        )
        return self._sessions[child_id]

    def _joined(self, session: Session, next: NextTurn) -> tuple[bytes, int, int]:
        """Return the ids of the whole prompt, its parent, and how many of its first ids the parent's sequence has.

        A prompt that keeps no more than the prompt of a turn is a sibling of the turn, not its child.
        """
        if next.parent < 0:
            return next.added, -1, 0
        if not (next.parent < len(session.turns) and session.turns[next.parent] is not None):
            raise SessionNotFoundError(f"Session {session.id} has no finished turn {next.parent}.")
        if next.kept >= 0:
            kept = turns_of.sequence(session.turns, next.parent, next.kept)
            prompt, shared = kept + next.added, len(kept) // 4
        else:
            prompt = next.added
            shared = turns_of.common_prefix(prompt, turns_of.sequence(session.turns, next.parent))
        parent = next.parent
        while parent >= 0:
            turn = session.turns[parent]
            assert turn is not None
            if shared > turn.prompt_tokens:
                break
            parent, shared = turn.parent, min(shared, turn.shared)
        return prompt, parent, shared

    def _room(self, session: Session, tokens: int) -> int | None:
        """Return the number of tokens that may be sampled behind a prompt. Turns that run at once share no count."""
        limits, rooms = session.limits, []
        if self.bounds.max_turn_tokens is not None and tokens >= self.bounds.max_turn_tokens:
            raise TurnTooLargeError(
                f"The prompt has {tokens} tokens; a turn may have {self.bounds.max_turn_tokens} "
                "(max_session_turn_tokens)."
            )
        if self.bounds.max_turn_tokens is not None:
            rooms.append(self.bounds.max_turn_tokens - tokens)
        if limits.max_context is not None:
            if tokens >= limits.max_context:
                session.limit = "max_context"
                raise SessionLimitError(
                    f"Session {session.id}: the prompt of {tokens} tokens leaves no room in "
                    f"max_context={limits.max_context}."
                )
            rooms.append(limits.max_context - tokens)
        if limits.max_tokens is not None:
            rooms.append(limits.max_tokens - session.sampled)
        return min(rooms) if rooms else None

    def _branch(self, session: Session, parent: int, shared: int) -> int:
        """Return the branch of a new turn: the parent's if the turn is the first to continue it, else a new one."""
        if parent >= 0:
            before = session.turns[parent]
            assert before is not None
            if shared == before.tokens and not session.is_extended(parent):
                return before.branch
        session.branches += 1
        return session.branches - 1

    def _conversation(self, session: Session, plan: NextTurn, prompt: bytes) -> str | None:
        """Return the name of the child conversation that a turn belongs to; None: the session's own."""
        if plan.parent >= 0:
            named = session.turns[plan.parent]
            assert named is not None
            return named.child
        others = [turn for turn in (*session.turns, *session.pending.values()) if turn is not None]
        for turn in others:
            if turn.parent < 0 and turn.prompt == prompt:
                return turn.child
        if plan.began not in ("root", "child") or plan.matched_messages or not others:
            return None
        session.conversations += 1
        return f"{_AUTOMATIC}{session.conversations}"

    def _reply_node(self, session: Session, pending: PendingTurn, turn: int, finished: FinishedTurn) -> int:
        """Append the reply to the message tree, and return its node; -1 for a turn without messages."""
        if pending.prompt_node < 0:
            return -1
        reply = finished.reply
        return session.append_node(pending.prompt_node, turn, ASSISTANT, reply.digest, reply.reasoning)

    # -- records --------------------------------------------------------------------------------------------

    def _record(self, record: Record) -> None:
        self.apply(record)
        self.store.put(record)

    def apply(self, record: Record) -> None:
        """Change the memory as a record says. Raise KeyError or IndexError if it does not fit to the records before."""
        match record:
            case SessionRecord():
                owner = None if record.parent is None else self._sessions[record.parent]
                session = Session(record, owner, active=record.created)
                self._sessions[record.id] = session
                if record.key_hash:
                    self._by_key[record.key_hash] = record.id
                if owner is not None:
                    owner.children[record.id.removeprefix(f"{owner.id}.")] = record.id
                self._bytes += session.size
            case BeginRecord():
                session = self._sessions[record.session]
                session.turns += [None] * (record.turn + 1 - len(session.turns))
                session.root.started += 1
                if record.key is not None:
                    session.keys.setdefault(record.key, []).append(record.turn)
            case TurnRecord():
                self._apply_turn(self._sessions[record.session], record)
            case DeliveredRecord():
                delivered = self._sessions[record.session].turns[record.turn]
                if delivered is not None:
                    delivered.flags |= DELIVERED
            case RewardRecord():
                self._sessions[record.session].rewards[record.turn, record.name] = record
            case FinishRecord():
                session = self._sessions[record.session]
                if record.state == "expired" and record.reason in ("seconds", "idle_seconds"):
                    session.limit = record.reason
                session.state = "expired" if record.state == "expired" else "finished"
                session.reason, session.ended = record.reason, record.time
                self._by_key.pop(session.record.key_hash, None)
            case DeleteRecord():
                for each in self.family(self._sessions[record.session]):
                    del self._sessions[each.id]
                    self._by_key.pop(each.record.key_hash, None)
                    self._bytes -= each.size

    def _apply_turn(self, session: Session, record: TurnRecord) -> None:
        if record.parent >= 0 and session.turns[record.parent] is None:
            raise KeyError(f"turn {record.parent} of session {session.id}")
        turn = Turn.of(record, self._once)
        session.turns[record.turn] = turn
        have = len(session.nodes) - record.first_node * NODE.size
        session.nodes += record.nodes[have:]
        session.stored_nodes = len(session.nodes) // NODE.size
        size = turn.size + len(record.nodes)
        session.size += size
        self._bytes += size
        session.branches = max(session.branches, turn.branch + 1)
        if turn.child is not None and turn.child.startswith(_AUTOMATIC):
            session.conversations = max(session.conversations, int(turn.child.removeprefix(_AUTOMATIC)))
        session.active = session.root.active = max(session.root.active, record.times[2])
        session.root.sampled += turn.output_tokens
        if session.owner is not None:
            session.sampled += turn.output_tokens
        if turn.spans:
            self.last_version = turn.spans[-1][0]

    def restored(self) -> None:
        """Note that all records of an earlier run were applied: the turns without an end were interrupted."""
        for session in self.sessions():
            session.started = sum(turn is not None for each in self.family(session) for turn in each.turns)
            session.active = self._clock() if session.state == "open" else session.active

    # -- bounds ---------------------------------------------------------------------------------------------

    @property
    def num_sessions(self) -> int:
        """Number of sessions, children included."""
        return len(self._sessions)

    @property
    def memory(self) -> int:
        """Bytes of all sessions, about."""
        return self._bytes

    def sweep(self) -> None:
        """Expire the sessions that are open too long, and delete those that ended long ago."""
        now = self._clock()
        for session in [*self.sessions()]:
            limits = session.limits
            idle = now - session.active
            if session.state != "open":
                kept = self.bounds.retention if session.fetched else max(self.bounds.retention, _UNREAD_RETENTION)
                if now - session.ended > kept and not session.in_flight:
                    self.delete(session.id)
            elif limits.seconds is not None and now - session.record.created > limits.seconds:
                self.finish(session.id, "seconds", "expired")
            elif not session.in_flight and limits.idle_seconds is not None and idle > limits.idle_seconds:
                self.finish(session.id, "idle_seconds", "expired")
            elif not session.in_flight and idle > self.bounds.ttl:
                self.finish(session.id, "session_ttl", "expired")

    async def run(self) -> None:
        """Sweep every second, until cancelled."""
        while True:
            await asyncio.sleep(1.0)
            try:
                self.sweep()
            except Exception:
                logger.exception("Sessions could not be swept.")

    def _free(self) -> None:
        """Delete finished sessions whose trajectory was read, until one tenth of the memory is free."""
        target = self.bounds.memory_bytes * 9 // 10
        for session in sorted(self.sessions(), key=lambda each: each.ended):
            if self._bytes <= target and len(self._sessions) < self.bounds.max_sessions:
                return
            if session.state != "open" and session.fetched and not session.in_flight:
                self.delete(session.id)


class TurnTooLargeError(BadRequestError):
    """The prompt of a turn is longer than `max_session_turn_tokens`."""

    status_code = 413


def _check(body: CreateSession) -> None:
    """Raise BadRequestError for a value that no session can have."""
    if body.id is not None and _ID.fullmatch(body.id) is None:
        raise BadRequestError("id must be 1 to 128 letters, digits, '_' or '-'.")
    if len(msgspec.json.encode(body.metadata)) > _METADATA_BYTES:
        raise BadRequestError(f"metadata has more than {_METADATA_BYTES} bytes of JSON.")
    if len(body.group) > 1024:
        raise BadRequestError("group has more than 1024 characters.")
    for name in body.limits.__struct_fields__:
        value = getattr(body.limits, name)
        if value is not None and not value > 0:
            raise BadRequestError(f"limits.{name} must be greater than 0, not {value}.")


def _derived(seed: int, what: bytes, ordinal: int = 0) -> int:
    """Return a seed of 63 bits: it depends on the session's seed, the prompt, and the number of its earlier samples."""
    digest = hashlib.blake2b(b"%d %d " % (seed, ordinal), digest_size=8)
    digest.update(what)
    return int.from_bytes(digest.digest(), "little") >> 1


def _facts(index: int, turn: Turn) -> ReplyFacts:
    calls = [] if turn.calls is None else msgspec.json.decode(turn.calls)
    return ReplyFacts(
        turn=index,
        parent=turn.parent,
        prompt_tokens=turn.prompt_tokens,
        output_tokens=turn.output_tokens,
        generation_prompt=turn.generation_prompt,
        end_token=turn.end_token,
        in_reasoning=bool(turn.flags & IN_REASONING),
        aborted=bool(turn.flags & ABORTED),
        delivered=bool(turn.flags & DELIVERED),
        calls=[(call["id"], call["name"]) for call in calls],
        options=turn.options,
        text=turn.completion,
    )


def describe(session: Session, family: list[Session]) -> SessionInfo:
    """Return the session with its children and its tree of turns."""
    tree = [
        TurnInfo(
            turn=i,
            parent=turn.parent,
            shared=turn.shared,
            prompt_tokens=turn.prompt_tokens,
            output_tokens=turn.output_tokens,
            finish_reason=turn.finish[0],
            sibling=turn.sibling,
            spans=list(turn.spans),
            calls=[] if turn.calls is None else msgspec.json.decode(turn.calls),
            times=turn.accepted_first_finished,
            delivered=bool(turn.flags & DELIVERED),
            aborted=bool(turn.flags & ABORTED),
            resampled=bool(turn.flags & RESAMPLED),
        )
        for i, turn in enumerate(session.turns)
        if turn is not None
    ]
    return msgspec.structs.replace(session.info(), tree=tree, children=[each.id for each in family[1:]])

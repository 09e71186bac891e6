"""`TurnLedger`: the turns of all sessions. A turn is read (`view`), reserved (`begin`) and stored (`commit`).

`SessionTurns` calls it for each request in a session, on the TokenizerManager's event loop. No method blocks the loop.
The prompt of a turn has the leading ids of its parent's sequence (prompt and output), followed by new ids. Sampled ids
are never rendered again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import msgspec

from verl_server.chat.history import ASSISTANT, NODE
from verl_server.chat.session_view import NextTurn, ReplyMessage
from verl_server.errors import (
    BadRequestError,
    IdempotencyConflictError,
    SessionEndedError,
    SessionLimitError,
    SessionNotFoundError,
)
from verl_server.server.sessions import limits as limits_of
from verl_server.server.sessions import turn as turns_of
from verl_server.server.sessions.ledger import SessionLedger
from verl_server.server.sessions.reading import StoredView, stored_view
from verl_server.server.sessions.records import BeginRecord, DeliveredRecord, SampledFields, SessionRecord, TurnRecord
from verl_server.server.sessions.replies import completion_text
from verl_server.server.sessions.session import CHILD_NAME, OpenTurn, Session, SessionCaller
from verl_server.server.sessions.stored_turn import StoredTurn
from verl_server.server.sessions.table import AUTOMATIC
from verl_server.server.sessions.turn import ABORTED, IN_REASONING, RESAMPLED, FinishedTurn
from verl_server.web.numbers import whole_number


class TurnLedger:
    def __init__(
        self,
        ledger: SessionLedger,
        *,
        end_tokens: Callable[[], list[int]] = list,
        longest: Callable[[], int | None] = lambda: None,
    ) -> None:
        """`end_tokens` returns the model's end tokens.

        `longest` returns the most tokens of a prompt together with its output.
        """
        self._ledger, self._table, self._bounds = ledger, ledger.table, ledger.bounds
        self._end_tokens, self._longest = end_tokens, longest

    def opened(self, caller: SessionCaller, *, repeats: bool = False) -> Session | None:
        """Return the session or child session that a request generates in. None: a child that does not exist yet.

        Raise SessionEndedError, SessionLimitError, SessionUnavailableError or SessionNotFoundError. With `repeats`, the
        request was answered before, and the limits do not count.
        """
        session = self._open_session(caller)
        if not repeats:
            self._check_limits(session)
        return self._child(session, caller.child)

    def view(self, caller: SessionCaller, previous: str | None = None, *, repeats: bool = False) -> StoredView:
        """Return the snapshot from which a text worker plans the next prompt. Raise the errors of `opened`.

        `previous` is the response id of the turn that the request continues. Raise SessionNotFoundError if it is
        unknown. `repeats` is as in `opened`.
        """
        child = self.opened(caller, repeats=repeats)
        session = self._table.find(caller.session_id).root
        named = None if previous is None else self._previous(session, child, previous)
        return stored_view(child, session.record.history, self._end_tokens(), named)

    def _previous(self, session: Session, child: Session | None, response_id: str) -> int:
        """Return the turn of a response id, `resp_{session}_{turn}`."""
        owner, _, number = response_id.removeprefix("resp_").rpartition("_")
        turn = whole_number(number)
        turns = child.turns if child is not None and owner == child.id else []
        if turn is not None and turn < len(turns) and turns[turn] is not None:
            return turn
        raise SessionNotFoundError(f"previous_response_id: session {session.id} has no response {response_id[:200]}.")

    def turn_of(self, caller: SessionCaller, rid: str) -> int:
        """Return the number of the last finished turn with request id `rid`. Raise BadRequestError without one."""
        session_id = caller.session_id
        session = self._child(self._table.find(session_id), caller.child)
        found = None if session is None else session.rids.get(rid)
        if found is None:
            raise BadRequestError(f"session_params.rid: session {session_id} has no finished request {rid[:200]}.")
        return found

    def note_full(self, session_id: str) -> None:
        """Record that a turn of a session was refused because its context is full."""
        session = self._table.get(session_id)
        if session is not None:
            session.root.limit = "max_context"

    def check_samples(self, caller: SessionCaller, count: int) -> None:
        """Raise SessionLimitError if `count` turns that begin together can never begin in the session."""
        limits_of.check_samples(self._table.find(caller.session_id).root, count)

    def begin(
        self,
        caller: SessionCaller,
        next: NextTurn,
        key: bytes | None,
        body: bytes,
        abort: Callable[[], object] | None = None,
    ) -> OpenTurn:
        """Reserve a turn. Each call needs a later `commit` or `cancel`.

        `abort` is called if the session ends before.
        """
        root = self._open_session(caller)
        self._check_limits(root)
        session = self._child(root, caller.child) or self._new_child(root, caller.child)
        prompt, parent, shared = self._joined(session, next)
        room = limits_of.room(root, self._bounds, len(prompt) // 4)
        if len(session.nodes) + session.nodes.missing(next.new_nodes, next.after_node) > self._bounds.max_nodes:
            raise SessionLimitError(f"Session {root.id} has {self._bounds.max_nodes} messages, this server's most.")
        own = prompt[4 * shared :]
        sibling = session.siblings(parent, shared, own)
        turn = OpenTurn(
            session=session,
            turn=len(session.turns),
            next=next,
            parent=parent,
            shared=shared,
            prompt=prompt,
            own=own,
            prompt_node=session.nodes.append(next.new_nodes, next.after_node),
            sibling=sibling,
            branch=self._branch(session, parent, shared),
            child=self._conversation(session, next, own),
            seed=None if session.record.seed is None else _derived(session.record.seed, prompt, sibling),
            max_new_tokens=room,
            key=key,
            resampled=key is not None and session.was_interrupted(key),
            abort=abort,
        )
        self._ledger.record(BeginRecord(session.id, turn.turn, key, body if key is not None else None))
        session.hold(turn)
        self._table.measure(session)
        return turn

    async def commit(self, turn: OpenTurn, finished: FinishedTurn) -> None:
        """Append the turn, and return when it is durable by policy. Raise SessionUnavailableError otherwise."""
        session = turn.session
        if self._table.get(session.id) is not session or not session.release(turn.turn):
            raise SessionNotFoundError(f"Session {session.id} was deleted while its turn {turn.turn} ran.")
        reply = finished.reply
        flags = IN_REASONING * reply.in_reasoning | ABORTED * finished.aborted | RESAMPLED * turn.resampled
        calls = [{"id": i, "name": name, "arguments": arguments} for i, name, arguments in reply.calls]
        self._append_reply(turn, reply)
        began = self.described(turn, finished.next)["began"]
        record = TurnRecord(
            session=session.id,
            turn=turn.turn,
            parent=turn.parent,
            shared=turn.shared,
            prompt=turn.own,
            generation_prompt=finished.next.generation_prompt,
            flags=flags,
            prompt_node=turn.prompt_node,
            sibling=turn.sibling,
            branch=turn.branch,
            began=began,
            options=finished.next.options,
            calls=msgspec.json.encode(calls) if calls else None,
            child=turn.child,
            first_node=session.stored_nodes,
            nodes=bytes(session.nodes.data[session.stored_nodes * NODE.size :]),
            completion=completion_text(finished.next, reply),
            messages=finished.next.messages,
            reply=reply.text,
            parsed=None if (reply.content, reply.thoughts) == (reply.text, "") else (reply.content, reply.thoughts),
            **{name: getattr(finished, name) for name in SampledFields.__struct_fields__},
        )
        self._ledger.record(record)
        if finished.finish[0] == "length":
            self._note_cut(turn, len(finished.output) // 4)
        if self._ledger.counters is not None:
            self._ledger.counters.turn_finished(began)
        await self._ledger.store.flushed()

    def _note_cut(self, turn: OpenTurn, sampled: int) -> None:
        """Record the limit that cut a turn of `sampled` tokens, unless the request's own limit cut it."""
        root, longest = turn.session.root, self._longest()
        is_full = longest is not None and len(turn.prompt) // 4 + sampled >= longest
        if is_full or (turn.max_new_tokens is not None and sampled >= turn.max_new_tokens):
            most = root.limits.max_tokens
            is_used = most is not None and root.sampled >= most
            root.limit = "max_tokens" if is_used else "max_context"

    def cancel(self, turn: OpenTurn) -> None:
        """Drop a turn without sampled tokens."""
        session = turn.session
        if self._table.get(session.id) is not session or not session.release(turn.turn):
            return
        session.root.started -= 1
        if turn.key is not None:
            session.forget_key(turn.key, turn.turn)
        self._table.measure(session)

    def delivered(self, session_id: str, turn: int) -> None:
        """Record that the whole reply reached the client's socket."""
        session = self._table.get(session_id)
        if session is not None and turn < len(session.turns) and session.turns[turn] is not None:
            self._ledger.record(DeliveredRecord(session_id, turn))

    def answered(self, caller: SessionCaller, key: bytes, body: bytes) -> list[StoredTurn]:
        """Return the finished turns of this idempotency key. Raise IdempotencyConflictError for another body."""
        session = self._child(self._table.find(caller.session_id), caller.child)
        if session is None:
            return []
        found = [StoredTurn(session, i) for i in session.keys.get(key, []) if session.turns[i] is not None]
        if any(each.stored.body != body for each in found):
            raise IdempotencyConflictError(
                f"The idempotency key came before in session {session.id} with another body. Use a new key."
            )
        return found

    def described(self, turn: OpenTurn, next: NextTurn) -> dict[str, Any]:
        """Return `meta_info.session`."""
        session = self._table.find(turn.session.id)
        began = "child" if next.began == "root" and turn.child is not None else next.began
        if next.kept < 0 <= turn.parent and session.turn(turn.parent).tokens == turn.shared:
            began = None
        return {
            "id": session.root.id,
            "turn": turn.turn,
            "parent": turn.parent,
            "branch": turn.branch,
            "began": began,
            "shared_tokens": turn.shared,
            "new_tokens": len(turn.prompt) // 4 - turn.shared,
            "matched_messages": next.matched_messages,
            "child": turn.child or session.child_name,
            "replayed": False,
        }

    def described_again(self, turn: StoredTurn) -> dict[str, Any]:
        """Return `meta_info.session` of a turn whose answer is sent again."""
        session, stored = self._table.find(turn.session.id), turn.stored
        return {
            "id": session.root.id,
            "turn": turn.turn,
            "parent": stored.parent,
            "branch": stored.branch,
            "began": None,
            "shared_tokens": stored.shared,
            "new_tokens": stored.prompt_tokens - stored.shared,
            "matched_messages": 0,
            "child": stored.child or session.child_name,
            "replayed": True,
        }

    # -- how a turn begins ----------------------------------------------------------------------------------

    def _open_session(self, caller: SessionCaller) -> Session:
        """Return the caller's session. Raise an error if the session cannot generate now."""
        session = self._table.find(caller.session_id).root
        if session.state != "open":
            raise SessionEndedError(f"Session {session.id} has {session.state} ({session.reason}).")
        self._ledger.check_open()
        session.active = self._ledger.clock()
        return session

    def _check_limits(self, session: Session) -> None:
        """Raise SessionEndedError, SessionLimitError or SessionUnavailableError if no turn may begin now."""
        seconds = session.limits.seconds
        if seconds is not None and self._ledger.clock() > session.record.created + seconds:
            self._ledger.finish(session.id, "seconds", "expired")
            raise SessionEndedError(f"Session {session.id} has expired: it was open for seconds={seconds:g}.")
        limits_of.check_turn(session)
        size, most = sum(each.size for each in self._table.family(session)), self._bounds.session_bytes
        if size >= most:
            raise SessionLimitError(f"Session {session.id} uses {size} bytes; this server permits {most}.")
        self._ledger.check_memory()

    def _child(self, session: Session, name: str | None) -> Session | None:
        """Return the named child session, the session itself without a name, or None if there is no such child yet."""
        if name is None:
            return session
        if CHILD_NAME.fullmatch(name) is None or name.startswith(AUTOMATIC):
            raise BadRequestError(
                "X-Session-Child must be 1 to 64 letters, digits, '_' or '-', and must not begin with 'auto-'."
            )
        child = session.children.get(name)
        return None if child is None else self._table.find(child)

    def _new_child(self, session: Session, name: str | None) -> Session:
        if len(session.children) >= self._bounds.max_children:
            raise SessionLimitError(f"Session {session.id} has {self._bounds.max_children} child sessions, the most.")
        child_id = f"{session.id}.{name}"
        seed = session.record.seed
        if seed is not None:
            seed = _derived(seed, b"child %s" % (name or "").encode())
        created, history = self._ledger.clock(), session.record.history
        self._ledger.record(SessionRecord(child_id, b"", created, parent=session.id, history=history, seed=seed))
        return self._table.find(child_id)

    def _joined(self, session: Session, next: NextTurn) -> tuple[bytes, int, int]:
        """Return (int32 ids of the whole prompt, parent turn or -1, number of leading ids shared with the parent).

        If a prompt shares only ids of the prompt of a turn, and none of its output, the new turn is a sibling of this
        turn.
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
            turn = session.turn(parent)
            if shared > turn.prompt_tokens:
                break
            parent, shared = turn.parent, min(shared, turn.shared)
        return prompt, parent, shared

    def _branch(self, session: Session, parent: int, shared: int) -> int:
        """Return the branch of a new turn: the parent's if the turn is the first to continue it, else a new one."""
        if parent >= 0:
            before = session.turn(parent)
            if shared == before.tokens and not before.extensions:
                return before.branch
        session.branches += 1
        return session.branches - 1

    def _conversation(self, session: Session, plan: NextTurn, prompt: bytes) -> str | None:
        """Return the name of the child conversation to which a turn belongs. None: the session's own conversation."""
        if plan.parent >= 0:
            return session.turn(plan.parent).child
        is_known, name = session.conversation(prompt)
        if is_known:
            return name
        others = session.finished + len(session.pending)
        if plan.began not in ("root", "child") or plan.matched_messages or not others:
            return None
        session.conversations += 1
        return f"{AUTOMATIC}{session.conversations}"

    def _append_reply(self, turn: OpenTurn, reply: ReplyMessage) -> None:
        """Append the reply to the message tree, if the turn has messages."""
        if turn.prompt_node >= 0:
            nodes = turn.session.nodes
            nodes.append_reply(turn.prompt_node, turn.turn, ASSISTANT, reply.digest, reply.reasoning)


def _derived(seed: int, what: bytes, ordinal: int = 0) -> int:
    """Return a seed of 63 bits, derived from the session's seed, the prompt, and the prompt's earlier samples."""
    digest = hashlib.blake2b(b"%d %d " % (seed, ordinal), digest_size=8)
    digest.update(what)
    return int.from_bytes(digest.digest(), "little") >> 1

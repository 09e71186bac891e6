"""The routes of a session's owner: create, list, read, reward, finish and delete sessions, and read trajectories.

`app.operations` mounts them. `AuthMiddleware` has checked that the caller has an owner's key: a session key reaches
none of these routes.
"""

from __future__ import annotations

import base64
import math
import struct
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import msgspec
import orjson
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from verl_server.errors import BadRequestError
from verl_server.messages.columns import MSGPACK
from verl_server.messages.session_types import (
    Branch,
    CreatedSession,
    CreateSession,
    FinishBody,
    RewardBody,
    SessionInfo,
    SessionList,
    SessionTrajectory,
)
from verl_server.server.http.operation import JSON, POST, Operation
from verl_server.server.http.responses import encoded_response, json_response
from verl_server.server.http.unknown_fields import read_object, refuse_unknown
from verl_server.server.sessions.ledger import SessionLedger
from verl_server.server.sessions.session import Session
from verl_server.server.sessions.stored_turn import stored_turns
from verl_server.server.sessions.trajectory import branches, left_out
from verl_server.server.sessions.turn_texts import TurnTexts
from verl_server.server.slices import Slices
from verl_server.web.numbers import whole_number

T = TypeVar("T", bound=msgspec.Struct)

_PAGE, _LARGEST_PAGE = 100, 1000
_COLUMNS = (("ids", "i"), ("loss_mask", "B"), ("logprobs", "f"), ("policy_logprobs", "f"), ("has_choice", "B"))
_STATES = ("open", "finished", "expired")
_LIST_QUERY = {
    "group": "only sessions of this group",
    "state": "only sessions in this state: open, finished or expired",
    "limit": f"sessions on a page; default {_PAGE}, at most {_LARGEST_PAGE}",
    "after": "`next` of the page before",
}
_TRAJECTORY_QUERY = {
    "mask": "`once` (default): a sampled token has mask 1 in the first branch that holds it; `every`: in each",
    "retries": "`true`: also branches that a retry of the client replaced before it received them",
    "children": "`false`: without child sessions",
    "text": "`true`: turns have their new messages and replies as texts; each text has at most 1,048,576 characters",
    "format": "`columns`: ids, masks and log-probabilities as columns, which `Accept: application/msgpack` has, too",
}


class Reward(msgspec.Struct, frozen=True):
    """Answer of `POST /sessions/{id}/reward`: the sum of the rewards of the whole session."""

    reward: float | None


class SessionApi:
    def __init__(self, ledger: SessionLedger, weight_version: Callable[[], str], max_request_bytes: int) -> None:
        self._ledger, self._weight_version, self._limit = ledger, weight_version, max_request_bytes

    def operations(self) -> list[Operation]:
        one = "/sessions/{session_id}"
        owner: dict[str, Any] = {"access": "owner"}
        return [
            Operation("/sessions", self.create, POST, body=CreateSession, answer=CreatedSession, **owner),
            Operation("/sessions", self.list_sessions, query=_LIST_QUERY, answer=SessionList, **owner),
            Operation(one, self.read, answer=SessionInfo, **owner),
            Operation(one, self.delete, ("DELETE",), **owner),
            Operation(f"{one}/reward", self.reward, POST, body=RewardBody, answer=Reward, **owner),
            Operation(f"{one}/finish", self.finish, POST, body=FinishBody, answer=SessionInfo, **owner),
            Operation(
                f"{one}/trajectory",
                self.trajectory,
                query=_TRAJECTORY_QUERY,
                answer=SessionTrajectory,
                media_types=(JSON, MSGPACK),
                **owner,
            ),
        ]

    async def create(self, request: Request) -> Response:
        """Return 201 and the new session with its key. No other answer contains the key. 409 if the id exists."""
        session, key = self._ledger.create(await self._body(request, CreateSession))
        await self._ledger.store.flushed()
        seconds = session.limits.seconds
        created = CreatedSession(
            id=session.id,
            key=key,
            base_url=f"/s/{key}/v1",
            anthropic_base_url=f"/s/{key}",
            expires=None if seconds is None else session.record.created + seconds,
            weight_version=self._weight_version(),
        )
        return _answer(created, 201)

    async def list_sessions(self, request: Request) -> Response:
        """Return the sessions, oldest first, without children and turns."""
        query = request.query_params
        limit = _number(query.get("limit", str(_PAGE)))
        state, group, after = query.get("state"), query.get("group"), query.get("after")
        if state is not None and state not in _STATES:
            raise BadRequestError(f"state must be one of {', '.join(_STATES)}, not {state[:40]!r}.")
        slices, page = Slices(), []
        begun = after is None or after not in self._ledger.table
        for session in self._ledger.table.all():
            await slices.end()
            if session.owner is not None:
                continue
            if not begun:
                begun = session.id == after
            elif (state in (None, session.state)) and (group in (None, session.record.group)):
                page.append(session)
                if len(page) > limit:
                    break
        listed: list[SessionInfo] = []
        for session in page[:limit]:
            await slices.end()
            listed.append(session.info())
        return _answer(SessionList(listed, listed[-1].id if len(page) > limit else None))

    async def read(self, request: Request) -> Response:
        """Return a session with its children and the tree of its turns, without their tokens."""
        session = self._find(request)
        return await self._described(session)

    async def delete(self, request: Request) -> Response:
        """Delete the session, its children and its key, and return {}. 404 if there is no such session."""
        self._ledger.delete(self._find(request).id)
        await self._ledger.store.flushed()
        return json_response({})

    async def reward(self, request: Request) -> Response:
        """Record a reward of the session or of one turn. The same name and turn replace an earlier value."""
        total = self._ledger.reward(self._find(request).id, await self._body(request, RewardBody))
        await self._ledger.store.flushed()
        return _answer(Reward(total))

    async def finish(self, request: Request) -> Response:
        """End a session: running turns are aborted and recorded, and its key ends. Return the session."""
        body = await self._body(request, FinishBody)
        session = self._ledger.finish(self._find(request).id, body.reason)
        await self._ledger.settled(session)
        await self._ledger.store.flushed()
        return await self._described(session)

    async def trajectory(self, request: Request) -> Response:
        """Return all branches of a session and its children, ready to train on."""
        query = request.query_params
        session = self._find(request)
        mask = query.get("mask", "once")
        if mask not in ("once", "every"):
            raise BadRequestError(f"mask must be once or every, not {mask[:40]!r}.")
        retries, children = _truth(query, "retries", False), _truth(query, "children", True)
        with_text = _truth(query, "text", False)
        family = self._ledger.table.family(session) if children else [session]
        found: list[Branch] = []
        retry_tokens = 0
        slices = Slices()
        for each in family:
            found += await self._branches(each, mask, retries, with_text, len(found))
            retry_tokens += left_out(stored_turns(each))
            await slices.end()
        root = session.root
        self._ledger.read(session)
        head = SessionTrajectory(
            session=session.id,
            state=root.state,
            reason=root.reason,
            reward=session.reward,
            group=root.record.group,
            metadata=root.record.metadata,
            now=time.time(),
            sampled_tokens=sum(each.output_tokens for each in family),
            retry_tokens=retry_tokens,
            unrecorded_turns=sum(each.unrecorded_turns for each in family),
            branches=[],
        )
        if MSGPACK in request.headers.get("accept", ""):
            return StreamingResponse(_as_msgpack(head, found), media_type=MSGPACK)
        return StreamingResponse(_as_json(head, found, query.get("format") == "columns"), media_type=JSON)

    async def _branches(self, session: Session, mask: Any, retries: bool, with_text: bool, first: int) -> list[Branch]:
        turns, texts = stored_turns(session), TurnTexts(session)
        rewards: dict[int, list[RewardBody]] = {}
        for (turn, name), each in session.rewards.items():
            if turn is not None:
                rewards.setdefault(turn, []).append(RewardBody(each.reward, turn, name))
        children = {each.turn: each.stored.child for each in turns}
        named: list[Branch] = []
        slices = Slices()
        for stored in turns if with_text else ():
            texts.read(stored)
            await slices.end()
        for branch in branches(turns, mask, retries):
            await slices.end()
            child = children[branch.turns[-1].turn]
            own = [reward for turn in branch.turns for reward in rewards.get(turn.turn, ())]
            named.append(
                msgspec.structs.replace(
                    texts.placed(branch) if with_text else branch,
                    branch=first + len(named),
                    fork_of=None if branch.fork_of is None else first + branch.fork_of,
                    session=session.id if child is None else f"{session.id}.{child}",
                    rewards=own,
                )
            )
        return named

    def _find(self, request: Request) -> Session:
        return self._ledger.table.find(request.path_params["session_id"])

    async def _described(self, session: Session) -> Response:
        children = [each.id for each in self._ledger.table.family(session)[1:]]
        tree = [turn async for turn in session.tree()]
        return _answer(msgspec.structs.replace(session.info(), tree=tree, children=children))

    async def _body(self, request: Request, kind: type[T]) -> T:
        return await read_object(request, kind, self._limit, refuse_unknown)


def _answer(content: msgspec.Struct, status_code: int = 200) -> Response:
    return encoded_response(msgspec.json.encode(content), JSON, status_code)


def _number(text: str) -> int:
    number = whole_number(text)
    if number is None or not 1 <= number <= _LARGEST_PAGE:
        raise BadRequestError(f"limit must be 1 to {_LARGEST_PAGE}, not {text[:40]!r}.")
    return number


def _truth(query: Any, name: str, default: bool) -> bool:
    value = query.get(name, str(default).lower())
    if value not in ("true", "false"):
        raise BadRequestError(f"{name} must be true or false, not {value[:40]!r}.")
    return bool(value == "true")


async def _as_json(head: SessionTrajectory, found: list[Branch], columns: bool) -> AsyncIterator[bytes]:
    """Yield a trajectory as JSON, one branch at a time, so that the loop can do other work."""
    yield msgspec.json.encode(head).removesuffix(b"]}")
    for i, branch in enumerate(found):
        yield (b"," if i else b"") + _json(_fields(branch, columns))
    yield b"]}"


async def _as_msgpack(head: SessionTrajectory, found: list[Branch]) -> AsyncIterator[bytes]:
    """Yield a trajectory as msgpack, one branch at a time."""
    # The branches are an array of a 32-bit length, in place of the empty one of the head.
    yield msgspec.msgpack.encode(head)[:-1] + b"\xdd" + struct.pack(">I", len(found))
    for branch in found:
        yield msgspec.msgpack.encode(_fields(branch, True))


def _json(fields: dict[str, Any]) -> bytes:
    return orjson.dumps(fields, default=lambda column: base64.b64encode(column).decode("ascii"))


def _fields(branch: Branch, columns: bool) -> dict[str, Any]:
    fields = {name: getattr(branch, name) for name in branch.__struct_fields__}
    fields |= {name: msgspec.to_builtins(fields[name]) for name in ("turns", "weight_versions", "rewards")}
    if columns:
        if fields["policy_logprobs"] is not None:
            fields["policy_logprobs"] = [math.nan if value is None else value for value in fields["policy_logprobs"]]
        for name, code in _COLUMNS:
            if fields[name] is not None:
                fields[name] = struct.pack(f"<{len(fields[name])}{code}", *fields[name])
    return fields

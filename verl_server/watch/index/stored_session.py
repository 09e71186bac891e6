"""`StoredSession`: one session as its store has it, with the branches of its tree as trajectories.

`SessionStore` fills it with the records of the session, and hands its trajectories on. The branches are those that the
server exports (`server.sessions.trajectory`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from verl_server.chat.history import NODE
from verl_server.errors import BadRequestError
from verl_server.messages.session_types import Branch
from verl_server.rollout.branch_trajectory import branch_trajectory
from verl_server.rollout.trajectory import Event, StopReason, Task, Trajectory
from verl_server.server.sessions.records import DamagedRecordError, SessionRecord, TurnRecord, decoded
from verl_server.server.sessions.stored_turn import stored_turns
from verl_server.server.sessions.trajectory import branches
from verl_server.server.sessions.turn import DELIVERED, Turn
from verl_server.server.sessions.turn_texts import TurnTexts
from verl_server.watch.index.store_frames import FrameTail

T = TypeVar("T")

_ENDS = {"seconds": StopReason.TIME_LIMIT, "idle_seconds": StopReason.IDLE}
"""Reason of an expired session -> stop reason."""


@dataclass
class _Nodes:
    """The message tree, records of `chat.history.NODE`."""

    data: bytes = b""

    def extend(self, first: int, records: bytes) -> bool:
        """Append the records from node `first` on, without known ones. Return False if some before them are lost."""
        have = len(self.data) // NODE.size - first
        self.data += records[max(0, have) * NODE.size :] if have >= 0 else b""
        return have >= 0

    def fit(self, turns: Sequence[Turn | None]) -> bool:
        """Return True if each node follows an earlier one, and each reply is that of a turn which is there."""
        for number, (parent, turn, *_) in enumerate(NODE.iter_unpack(self.data)):
            if parent >= number or (turn >= 0 and (turn >= len(turns) or turns[turn] is None)):
                return False
        count = len(self.data) // NODE.size
        return all(turn is None or turn.prompt_node < count for turn in turns)


class StoredSession:
    """The turns of one session (`stored_turn.TurnsOfSession`)."""

    def __init__(self, record: SessionRecord, turns: Iterable[TurnRecord], delivered: int) -> None:
        """Take the `turns` in the order of their ends. One whose parent is lost is left out.

        Bit N of `delivered` is set if the reply of turn N reached the client.
        """
        self.record = record
        self.turns: list[Turn | None] = []
        self.nodes = _Nodes()
        is_whole = True
        shared: dict[object, object] = {}
        for each in turns:
            if each.parent >= 0 and (each.parent >= len(self.turns) or self.turns[each.parent] is None):
                is_whole = False
                continue
            self.turns += [None] * (each.turn + 1 - len(self.turns))
            self.turns[each.turn] = turn = Turn.of(each, shared)
            if delivered >> each.turn & 1:
                turn.flags |= DELIVERED
            is_whole &= self.nodes.extend(each.first_node, each.nodes)
        self._texts = self._read_texts() if is_whole and self.nodes.fit(self.turns) else None
        """None: records of the session are lost, and nobody knows which message belongs to which turn."""

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def root(self) -> StoredSession:
        return self

    def turn(self, number: int) -> Turn:
        """Return a turn that has finished."""
        turn = self.turns[number]
        assert turn is not None
        return turn

    def branches(self) -> Iterator[Branch]:
        """Yield the branches, one at a time: each holds all tokens of its path. Retries are the last ones."""
        return branches(stored_turns(self), "once", retries=True)

    def trajectory(self, branch: Branch, known: set[int]) -> Trajectory:
        """Return a branch as an agents' run records it, without the figures that only the run knows.

        `known` are the turns whose times earlier branches have; those of this branch are added.
        """
        new = [turn.turn for turn in branch.turns if turn.turn not in known]
        known.update(new)
        branch = msgspec.structs.replace(branch, session=self.id)
        placed = branch if self._texts is None else self._texts.placed(branch)
        trajectory = branch_trajectory(placed, Task(seed=self.record.seed or 0))
        began = trajectory.began = self.record.created
        times = sorted(self.turn(number).times for number in new)
        trajectory.events = [Event("generate", accepted - began, ended - began) for accepted, _, ended in times]
        return trajectory

    def _read_texts(self) -> TurnTexts | None:
        texts = TurnTexts(self)
        try:
            for turn in stored_turns(self):
                texts.read(turn)
        except msgspec.MsgspecError:  # messages of a shape that this version does not know
            return None
        return texts


def read_stored(
    frames: FrameTail, place: tuple[int, int], turns: Sequence[int] | None, delivered: int
) -> StoredSession:
    """Read a session from the places of its records, as `SessionEntry` has them; None reads no turns.

    Raise BadRequestError if the records are gone.
    """
    record = _record(frames, *place, SessionRecord)
    places = zip(turns[1::3], turns[2::3], strict=True) if turns is not None else ()
    return StoredSession(record, (_record(frames, file, offset, TurnRecord) for file, offset in places), delivered)


def _record(frames: FrameTail, file: int, offset: int, kind: type[T]) -> T:
    try:
        record = decoded(frames.body_at(file, offset))
    except DamagedRecordError as error:
        raise BadRequestError(f"The session store is damaged: {error}.") from None
    if not isinstance(record, kind):
        raise BadRequestError("The session store has changed. Ask again.")
    return record


def stop_reason(state: str, reason: str) -> StopReason | None:
    """Return the stop reason of a session; None while it is open."""
    if state == "open":
        return None
    if state == "expired":
        return _ENDS.get(reason, StopReason.SESSION_LOST)
    return StopReason(reason) if reason in set(StopReason) else StopReason.DONE

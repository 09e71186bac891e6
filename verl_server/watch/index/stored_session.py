"""`StoredSession`: one session as its store has it, with the branches of its tree as trajectories.

`SessionStore` fills it with the records of the session, and hands its trajectories on. The branches are those that the
server exports (`server.sessions.trajectory`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from verl_server.errors import BadRequestError
from verl_server.messages.session_types import Branch
from verl_server.rollout.trajectory import Event, StopReason, Task, Trajectory
from verl_server.rollout.trajectory import Turn as TrajectoryTurn
from verl_server.server.sessions.records import DamagedRecordError, SessionRecord, TurnRecord, decoded
from verl_server.server.sessions.stored_turn import stored_turns
from verl_server.server.sessions.trajectory import branches
from verl_server.server.sessions.turn import DELIVERED, Turn
from verl_server.watch.index.store_frames import FrameTail

T = TypeVar("T")

_ENDS = {"seconds": StopReason.TIME_LIMIT, "idle_seconds": StopReason.IDLE}
"""Reason of an expired session -> stop reason."""


class StoredSession:
    """The turns of one session (`stored_turn.TurnsOfSession`)."""

    def __init__(self, record: SessionRecord, turns: Iterable[TurnRecord], delivered: int) -> None:
        """Take the `turns` in the order of their ends. One whose parent is lost is left out.

        Bit N of `delivered` is set if the reply of turn N reached the client.
        """
        self.record = record
        self.turns: list[Turn | None] = []
        shared: dict[object, object] = {}
        for each in turns:
            if each.parent >= 0 and (each.parent >= len(self.turns) or self.turns[each.parent] is None):
                continue
            self.turns += [None] * (each.turn + 1 - len(self.turns))
            self.turns[each.turn] = Turn.of(each, shared)
        for number, turn in enumerate(self.turns):
            if turn is not None and delivered >> number & 1:
                turn.flags |= DELIVERED

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
        versions = [""] * len(branch.ids)
        for span in branch.weight_versions:
            versions[span.start : span.end] = [span.version] * (span.end - span.start)
        new = [turn.turn for turn in branch.turns if turn.turn not in known]
        known.update(new)
        began = self.record.created
        times = [self.turn(number).times for number in new]
        return Trajectory(
            task=Task(seed=self.record.seed or 0),
            tokens=list(branch.ids),
            loss_mask=list(branch.loss_mask),
            logprobs=list(branch.logprobs),
            policy_logprobs=list(branch.policy_logprobs or ()),
            has_choice=list(branch.has_choice or ()),
            weight_versions=versions,
            turns=[
                TrajectoryTurn(
                    observation={},
                    observation_span=(turn.start, turn.prompt_end),
                    action_span=(turn.prompt_end, turn.end),
                    action={"calls": turn.calls} if turn.calls else {},
                    finish_reason=turn.finish_reason,
                    policy_logprobs=turn.policy_logprobs,
                    sampling=turn.sampling,
                    overridden=turn.overridden,
                )
                for turn in branch.turns
            ],
            events=[Event("generate", accepted - began, ended - began) for accepted, _, ended in sorted(times)],
            began=began,
            session=self.id,
            parent=self.record.parent or "",
            branch=branch.branch,
            fork_of=branch.fork_of,
            shared=branch.shared_tokens,
        )


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

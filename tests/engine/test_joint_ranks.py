"""Calls of joint ranks in which an engine refuses or fails. `test_verl_engine.py` tests whole meshes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import msgspec
import pytest

from verl_server.engine.joint_ranks import JointRanks, _Outcome
from verl_server.engine.rank_group import RankGroup
from verl_server.errors import BadRequestError, ServerDiedError, UnansweredError


class Group:
    """A group of ranks whose first peer may report another outcome than this rank's."""

    def __init__(self, rank: int, size: int, peer: _Outcome | None = None, lost: bool = False) -> None:
        self.rank, self.size, self.is_lost = rank, size, lost
        self._peer = peer or _Outcome()
        self.brought: list[_Outcome] = []

    def gather(self, what: str, prepare: Callable[[], bytes]) -> list[bytes]:
        if self.is_lost:
            raise UnansweredError("lost in an earlier call")
        mine = prepare()
        if not what.endswith("outcome"):
            return [mine] * self.size
        self.brought.append(msgspec.msgpack.decode(mine, type=_Outcome))
        return [msgspec.msgpack.encode(self._peer), *[mine] * (self.size - 1)]

    def act(self, what: str, act: Callable[[], Any]) -> Any:
        return act()

    def close(self) -> None:
        self.is_lost = True


def joint(everyone: Group, ours: Group | None = None) -> JointRanks:
    return JointRanks(cast(RankGroup, ours or Group(0, 2)), cast(RankGroup, everyone), [2, 3])


def fail(error: BaseException) -> Callable[[], Any]:
    def act() -> Any:
        raise error

    return act


REFUSED = _Outcome(("BadRequestError", "busy"))
OPEN = _Outcome(("ControlTimeoutError", "late"), is_certain=False)


def test_all_meet_after_the_engines_acted() -> None:
    everyone = Group(2, 4)
    ranks = joint(everyone)
    assert (ranks.rank, ranks.size) == (0, 2), "rank and size must be those within the engine"
    assert ranks.of_engine(["a", "b", "c", "d"]) == ["c", "d"]
    assert ranks.act("push", lambda: "done") == "done"
    assert everyone.brought == [_Outcome()]


@pytest.mark.parametrize("peer", [None, REFUSED])
def test_the_own_engines_error_comes_before_others_refusals(peer: _Outcome | None) -> None:
    everyone, error = Group(2, 4, peer), BadRequestError("no")
    with pytest.raises(BadRequestError) as raised:
        joint(everyone).act("push", fail(error))
    assert raised.value is error
    assert everyone.brought == [_Outcome(("BadRequestError", "no"))]


def test_what_is_open_elsewhere_comes_before_the_own_refusal() -> None:
    """A caller that receives a refusal may free the memory, while another engine may still be reading it."""
    with pytest.raises(UnansweredError, match="rank 0: ControlTimeoutError: late") as raised:
        joint(Group(2, 4, OPEN)).act("push", fail(BadRequestError("no")))
    assert isinstance(raised.value.__cause__, BadRequestError)
    with pytest.raises(UnansweredError, match="late"):
        joint(Group(2, 4, OPEN)).act("push", lambda: "done")
    with pytest.raises(ServerDiedError):
        joint(Group(2, 4, OPEN)).act("push", fail(ServerDiedError("mine")))


def test_an_interrupted_rank_meets_the_others_first() -> None:
    everyone = Group(2, 4)
    with pytest.raises(KeyboardInterrupt):
        joint(everyone).act("push", fail(KeyboardInterrupt()))
    assert everyone.brought == [_Outcome(("KeyboardInterrupt", ""), is_certain=False)]


def test_another_engines_refusal_says_that_this_one_did_it() -> None:
    with pytest.raises(BadRequestError, match="busy") as raised:
        joint(Group(2, 4, REFUSED)).act("push", lambda: "done")
    assert any("different weights" in note for note in raised.value.__notes__)


def test_a_rank_that_is_missed_is_not_waited_for_again() -> None:
    everyone, ours = Group(2, 4), Group(0, 2, lost=True)
    with pytest.raises(UnansweredError, match="silent"):
        joint(everyone, ours).act("push", fail(UnansweredError("silent")))
    assert everyone.is_lost, "the other ranks must get the error at once"


def test_a_call_that_an_engines_ranks_do_not_share_fails_everywhere_at_once() -> None:
    everyone, ours = Group(2, 4), Group(0, 2)
    ranks = joint(everyone, ours)
    assert ranks.gather("push", lambda: b"mine") == [b"mine"] * 4

    def mismatch(what: str, prepare: Callable[[], bytes]) -> list[bytes]:
        raise BadRequestError("The ranks called different methods")

    ours.gather = mismatch  # type: ignore[method-assign]
    with pytest.raises(BadRequestError, match="different methods"):
        ranks.gather("push", lambda: b"mine")
    assert everyone.is_lost, "the other ranks must not wait"

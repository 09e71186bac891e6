"""`JointRanks`: the trainer ranks of several engines, which push together what they shard among them.

`VerlEngine` makes one for `read_all_ranks`, where every engine of a mesh reads the memory of every rank. All ranks
meet, the first rank of each engine acts for it, and all meet again: nobody returns before every engine has answered,
and no rank takes for a success, or a refusal, what may still be going on elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import msgspec

from verl_server.engine.rank_group import RankGroup, describe_error, rebuild_error
from verl_server.errors import ControlTimeoutError, ServerDiedError, UnansweredError, VerlServerError

T = TypeVar("T")


class _Outcome(msgspec.Struct, array_like=True):
    """What became of a call on a rank's engine."""

    error: tuple[str, str] | None = None
    is_certain: bool = True
    """The engine answered: it does not read any more."""


class JointRanks:
    def __init__(self, ours: RankGroup, everyone: RankGroup, own_places: list[int]) -> None:
        """`ours`: the ranks of this rank's engine, which stand at `own_places` among `everyone`."""
        self._ours, self._everyone, self._own_places = ours, everyone, own_places
        self.rank, self.size = ours.rank, ours.size

    def gather(self, what: str, prepare: Callable[[], bytes]) -> list[bytes]:
        """See `RankGroup.gather`; of all ranks."""
        try:
            self._ours.gather(what, bytes)  # a rank of this engine that called something else is noticed here
        except BaseException:
            self.close()  # the others would wait for this rank
            raise
        return self._everyone.gather(what, prepare)

    def own(self, parts: list[T]) -> list[T]:
        """Of what all ranks brought, that of this engine's ranks."""
        return [parts[place] for place in self._own_places]

    def act(self, what: str, act: Callable[[], Any]) -> Any:
        """See `RankGroup.act`; for this engine. Raises if any engine's failed, its own error if it is as grave."""
        result, failure = None, None
        try:
            result = self._ours.act(what, act)
        except BaseException as error:  # also Ctrl-C: the others must not wait for this rank
            failure = error
        if self._ours.is_lost:
            self.close()  # the rank that is missed would be waited for again
        try:
            data = self._everyone.gather(f"{what}, outcome", lambda: msgspec.msgpack.encode(_outcome(failure)))
        except UnansweredError as error:
            _raise_graver(failure, error)
        _raise_gravest(failure, [msgspec.msgpack.decode(each, type=_Outcome) for each in data])
        return result

    def close(self) -> None:
        """The joint calls of all other ranks fail from now on."""
        self._everyone.close()


def _outcome(failure: BaseException | None) -> _Outcome:
    return _Outcome() if failure is None else _Outcome(describe_error(failure), _is_certain(failure))


def _is_certain(failure: BaseException) -> bool:
    return isinstance(failure, VerlServerError) and not isinstance(failure, (ControlTimeoutError, ServerDiedError))


def _raise_graver(failure: BaseException | None, error: UnansweredError) -> NoReturn:
    """`error` came from elsewhere and leaves the outcome open; so may this rank's own failure."""
    if failure is not None and not _is_certain(failure):
        raise failure
    raise error from failure


def _raise_gravest(failure: BaseException | None, outcomes: list[_Outcome]) -> None:
    for rank, outcome in enumerate(outcomes):
        if not outcome.is_certain and outcome.error is not None:
            name, message = outcome.error
            _raise_graver(failure, UnansweredError(f"The engine of rank {rank}: {name}: {message}"))
    if failure is not None:
        raise failure
    for rank, outcome in enumerate(outcomes):
        if outcome.error is not None:
            error = rebuild_error(outcome.error, rank)
            error.add_note(
                "This rank's engine has done it. Until the next push that succeeds the engines may serve different "
                "weights."
            )
            raise error

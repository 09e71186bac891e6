"""`JointRanks`: collective calls of all ranks of a mesh with several engines.

`VerlEngine` uses it with `read_all_ranks`, when every engine of the mesh reads the memory of every rank. All ranks
synchronize, the first rank of each engine acts, and all ranks synchronize again. So no rank returns before every engine
has answered. A rank reports success or a refusal only if no engine can still be reading.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import msgspec

from verl_server.engine.rank_group import RankGroup, describe_error, rebuild_error
from verl_server.errors import ControlTimeoutError, ServerDiedError, UnansweredError, VerlServerError

T = TypeVar("T")


class _Outcome(msgspec.Struct, array_like=True):
    """The outcome of a call on one rank's engine."""

    error: tuple[str, str] | None = None
    """(type, message) of the error, or None for success."""
    is_certain: bool = True
    """True if the engine has answered, so that it no longer reads."""


class JointRanks:
    """The ranks of all engines of a mesh, with the methods of `RankGroup`."""

    def __init__(self, engine: RankGroup, everyone: RankGroup, engine_places: list[int]) -> None:
        """`engine` has the ranks of this rank's engine, and `everyone` has all ranks.

        `engine_places` are the positions of the ranks of `engine` in `everyone`.
        """
        self._engine, self._everyone, self._engine_places = engine, everyone, engine_places
        self.rank, self.size = engine.rank, engine.size

    def gather(self, what: str, prepare: Callable[[], bytes]) -> list[bytes]:
        """Return the results of all ranks' `prepare()` on every rank of the mesh; see `RankGroup.gather`."""
        try:
            self._engine.gather(what, bytes)  # raises if a rank of this engine makes another call
        except BaseException:
            self.close()  # the other engines' ranks would wait for this rank
            raise
        return self._everyone.gather(what, prepare)

    def of_engine(self, parts: list[T]) -> list[T]:
        """Return the parts of this engine's ranks from `parts`, which has one part for each rank of the mesh."""
        return [parts[place] for place in self._engine_places]

    def act(self, what: str, act: Callable[[], Any]) -> Any:
        """Run `act()` on the first rank of each engine. Return the result of this rank's engine.

        Every rank raises an error if an engine failed. An error that leaves the outcome open has priority over a
        refusal; among equal errors, a rank raises the error of its own engine.
        """
        result, failure = None, None
        try:
            result = self._engine.act(what, act)
        except BaseException as error:  # also Ctrl-C: the other ranks wait for this rank
            failure = error
        if self._engine.is_lost:
            self.close()  # otherwise all ranks would wait again for the rank that is gone
        try:
            data = self._everyone.gather(f"{what}, outcome", lambda: msgspec.msgpack.encode(_outcome(failure)))
        except UnansweredError as error:
            _raise_uncertain(failure, error)
        _raise_most_serious(failure, [msgspec.msgpack.decode(each, type=_Outcome) for each in data])
        return result

    def close(self) -> None:
        """Make the joint calls of all other ranks fail from now on."""
        self._everyone.close()


def _outcome(failure: BaseException | None) -> _Outcome:
    return _Outcome() if failure is None else _Outcome(describe_error(failure), _is_certain(failure))


def _is_certain(failure: BaseException) -> bool:
    return isinstance(failure, VerlServerError) and not isinstance(failure, (ControlTimeoutError, ServerDiedError))


def _raise_uncertain(failure: BaseException | None, error: UnansweredError) -> NoReturn:
    """Raise this rank's own failure if it leaves the outcome open, else `error`, which came from another rank."""
    if failure is not None and not _is_certain(failure):
        raise failure
    raise error from failure


def _raise_most_serious(failure: BaseException | None, outcomes: list[_Outcome]) -> None:
    """Raise the error of a failed call, as `JointRanks.act` describes. Return if every engine succeeded."""
    for rank, outcome in enumerate(outcomes):
        if not outcome.is_certain and outcome.error is not None:
            name, message = outcome.error
            _raise_uncertain(failure, UnansweredError(f"The engine of rank {rank}: {name}: {message}"))
    if failure is not None:
        raise failure
    for rank, outcome in enumerate(outcomes):
        if outcome.error is not None:
            error = rebuild_error(outcome.error, rank)
            error.add_note(
                "This rank's engine has carried out the call. The engines may serve different weights until the next "
                "successful push."
            )
            raise error

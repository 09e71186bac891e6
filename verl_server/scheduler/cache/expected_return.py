"""`ExpectedReturn`: how long the prefix cache should keep the history of a turn that ended.

An agent's next request continues the history of its last request, after its environment has answered. The
`BatchPlanner` reports each turn that is continued. The `RadixCache` reports each turn whose pages were evicted before a
request continued it. `ExpectedReturn` learns two things from these reports: the share of turns that are continued, by
the number of the turn (an episode of eight turns is not continued after the eighth turn), and the lengths of the latest
waits. If no request continues a turn, the pages are not kept, and the least recently used pages are evicted first.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

_UNLIKELY = 0.1
"""A history is kept until the probability of its continuation falls below this."""
_DECAY = 0.99
"""Factor by which the weight of an observed turn falls when the next turn of the same number is observed."""
_PRIOR = 4.0
"""Weight of the share over all turns in the share of one number, in turns."""
_MAX_TURN = 64
"""Turns of a larger number count as this one."""
_WAITS = 512
"""Number of the latest waits that are remembered."""


@dataclass(frozen=True, slots=True)
class EndedTurn:
    """A turn that ended and may be continued."""

    turn: int
    """Number of the turn in its episode, from 1."""
    time: float
    """Time of its end, by the planner's clock."""
    prompt_len: int = 0
    """Number of tokens of its prompt."""
    session_id: str = ""
    """Session of its request; "" if none is known."""


class _Share:
    """The decayed counts of turns that were continued and of turns that were not."""

    __slots__ = ("continued", "lost")

    def __init__(self) -> None:
        self.continued = self.lost = 0.0

    def count(self, continued: bool) -> None:
        self.continued *= _DECAY
        self.lost *= _DECAY
        if continued:
            self.continued += 1.0
        else:
            self.lost += 1.0


class ExpectedReturn:
    """Shares of turns that were continued, and the waits until their continuation."""

    def __init__(self) -> None:
        self._all = _Share()
        self._by_turn = [_Share() for _ in range(_MAX_TURN + 1)]
        self._waits: deque[float] = deque(maxlen=_WAITS)
        self._sorted: list[float] = []
        self._unsorted = 0

    def continued(self, ended: EndedTurn, now: float) -> None:
        """Record that a request continues the history of `ended`."""
        self._count(ended, True)
        self._waits.append(max(0.0, now - ended.time))
        self._unsorted += 1

    def lost(self, ended: EndedTurn) -> None:
        """Record that the pages of `ended` were evicted before any request continued its history."""
        self._count(ended, False)

    def keep_seconds(self, turn: int) -> float:
        """Return the seconds after which a continuation of turn number `turn` has become unlikely."""
        share, everything = self._by_turn[min(turn, _MAX_TURN)], self._all
        if not everything.continued:
            return 0.0
        prior = everything.continued / (everything.continued + everything.lost)
        chance = (share.continued + _PRIOR * prior) / (share.continued + share.lost + _PRIOR)
        if chance <= _UNLIKELY:
            return 0.0
        # Bayes: after a wait that only this share of all waits exceeds, the chance has fallen to `_UNLIKELY`.
        longer = _UNLIKELY * (1.0 - chance) / (chance * (1.0 - _UNLIKELY))
        if self._unsorted > len(self._sorted) // 8:
            self._sorted, self._unsorted = sorted(self._waits), 0
        return self._sorted[max(0, min(len(self._sorted) - 1, int((1.0 - longer) * len(self._sorted))))]

    def _count(self, ended: EndedTurn, continued: bool) -> None:
        self._all.count(continued)
        self._by_turn[min(ended.turn, _MAX_TURN)].count(continued)

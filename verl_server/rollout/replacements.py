"""Another episode in the place of one that the infrastructure ended: within a bound, with a seed of its own.

The replacement has the group, the member and the environment's seed of the lost episode, the next number of attempts
and another sampling seed. With the same sampling seed, the same draws would be tried until they survive.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping

_PAUSE, _AWAY_PAUSE = 0.05, 1.0
"""Seconds before the first replacement of an episode; each further one waits twice as long. The second is for episodes
that could not reach their environment: a group must not spend its replacements while a server is started again."""
_LONGEST_PAUSE = 5.0


class Replacements:
    """The replacements that the groups of one run, or of one step, have left."""

    def __init__(self, per_group: int | None, spent: Mapping[tuple[int, int], int] | None = None) -> None:
        """`per_group` bounds the replacements of each group. None is no bound.

        `spent` has the replacements of an earlier part of the run, by group and member.
        """
        self._per_group = per_group
        self._taken: Counter[int] = Counter()
        for (group, _), count in (spent or {}).items():
            self._taken[group] += count

    def has_left(self, group: int) -> bool:
        """Return True if an episode of `group` may be replaced."""
        return self._per_group is None or self._taken[group] < self._per_group

    def take(self, group: int) -> bool:
        """Count a replacement in `group`, and return True; return False if none is left."""
        if not self.has_left(group):
            return False
        self._taken[group] += 1
        return True


def pause_before(attempt: int, environment_away: bool) -> float:
    """Return the seconds to wait before an attempt, whose number is at least 1.

    `environment_away`: the attempt before could not reach its environment.
    """
    return min(_LONGEST_PAUSE, (_AWAY_PAUSE if environment_away else _PAUSE) * 2.0 ** (attempt - 1))


def attempt_seed(seed: int, attempt: int) -> int:
    """Return the sampling seed of an attempt: `seed` for the first one (0), a number below 2**62 for the others."""
    if attempt == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}/{attempt}".encode(), digest_size=8).digest()) >> 2

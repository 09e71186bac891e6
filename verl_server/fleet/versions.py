"""`FleetVersions`: which weights the fleet serves, and which servers do not have them.

`members` notes what the probes saw. Versions of one incarnation are ordered by their numbers (`weight_version`).
Nothing orders two incarnations or two free labels: clocks of hosts differ, and a server that somebody healed by hand
shows a label that is new but wrong. So the fleet has one *line*, an incarnation or a free label. It moves to another
one when the trainer says so (`commit`), or when more than half of the servers serve it.

Within the line, a version is committed when every server has it that is not behind for too long. So no request can
demand a version that one server has alone, and no server with old weights gets a request that demands newer ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from verl_server.weight_version import WeightVersion


class FleetVersions:
    """The versions of servers by name. Only servers whose weights are confirmed are noted."""

    def __init__(self, stale_after: float) -> None:
        """Leave a server out when it was behind for `stale_after` seconds."""
        self._stale_after = stale_after
        self._served: dict[str, str] = {}
        self._line: str | None = None
        self._lags: dict[str, float] = {}
        """Name -> time since which the server is behind. -inf: the trainer has declared a newer version."""
        self._begun: tuple[str, float] | None = None
        """The newest version while not all servers have it, and when the first server had it."""
        self.committed: str | None = None
        """The version of the fleet. None until a server with confirmed weights was seen."""
        self.last_spread: tuple[str, float] | None = None
        """The version that all servers got last, and the seconds from the first server to the last one."""

    @property
    def newest(self) -> str | None:
        """The newest version of the line that a server has."""
        ours = self._of_line()
        return max(ours, key=lambda label: _number(label), default=None) if ours else None

    def note(self, served: Mapping[str, str], now: float) -> None:
        """Take the labels of all servers that answer and whose weights are confirmed, by name."""
        self._served = dict(served)
        self._choose_line()
        newest = self.newest
        if newest is None:
            return
        behind = {name for name, label in self._served.items() if self._is_behind(label, newest)}
        self._lags = {name: self._lags.get(name, now) for name in behind}
        counted = [
            label
            for name, label in self._served.items()
            if _line(label) == self._line and not self._is_left_out(name, now)
        ]
        self.committed = min(counted, key=_number, default=newest)
        self._note_spread(newest, now)

    def commit(self, label: str, now: float) -> bool:
        """Take the label of a push that is over: a server without it is left out. Return False if no server has it."""
        if label not in self._served.values():
            return False
        self._line = _line(label)
        self._lags = {
            name: -float("inf")
            for name, served in self._served.items()
            if _line(served) == self._line and _number(served) < _number(label)
        }
        self.note(self._served, now)
        return True

    def fault(self, name: str, now: float) -> str | None:
        """Return why a server must not get new work, or None if it may."""
        label = self._served.get(name)
        if label is None or self._line is None:
            return None
        if _line(label) != self._line:
            return f"it serves version {label!r}, and the fleet serves {self.committed!r}, of another line"
        if self._is_left_out(name, now):
            return f"it serves version {label!r}, and the fleet serves {self.committed!r}"
        return None

    def lag(self, name: str) -> int:
        """Return by how many versions a server is behind the newest one. 0 for free labels."""
        label, newest = self._served.get(name), self.newest
        if label is None or newest is None or _line(label) != self._line:
            return 0
        return _number(newest) - _number(label)

    def _of_line(self) -> list[str]:
        return [label for label in self._served.values() if _line(label) == self._line]

    def _choose_line(self) -> None:
        counts = Counter(map(_line, self._served.values()))
        if not counts:
            return
        line, count = counts.most_common(1)[0]
        if 2 * count > len(self._served) or (self._line not in counts and self._line is None):
            self._line = line

    def _is_behind(self, label: str, newest: str) -> bool:
        return _line(label) == self._line and _number(label) < _number(newest)

    def _is_left_out(self, name: str, now: float) -> bool:
        return name in self._lags and now - self._lags[name] > self._stale_after

    def _note_spread(self, newest: str, now: float) -> None:
        if self._begun is None or self._begun[0] != newest:
            self._begun = newest, now
        if self.committed == newest and (self.last_spread is None or self.last_spread[0] != newest):
            self.last_spread = newest, now - self._begun[1]


def _line(label: str) -> str:
    """Return what all versions share that are ordered with `label`."""
    version = WeightVersion.parse(label)
    return label if version is None else f"@{version.incarnation}"


def _number(label: str) -> int:
    version = WeightVersion.parse(label)
    return 0 if version is None else version.number

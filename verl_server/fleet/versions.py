"""`FleetVersions`: which weights the fleet serves, and which servers do not have them.

`members` notes what the probes saw. Versions of one incarnation are ordered by their numbers (`weight_version`).
Nothing orders two incarnations or two free labels: clocks of hosts differ, and a server that somebody healed by hand
shows a label that is new but wrong. So the fleet has one *line*, an incarnation or a free label. It moves to another
one when the trainer says so (`commit`), or when more than half of the servers serve it. A server that does not answer
counts with what it served last, so that the only server that is left cannot move the fleet.

Within the line, a version is committed when every server has it that is not behind for too long. So no request can
demand a version that one server has alone, and no server with old weights gets a request that demands newer ones. The
committed version does not go back: a server that returns with older weights is left out at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from verl_server.weight_version import WeightVersion


class FleetVersions:
    """The versions of servers by name. Only servers whose weights are confirmed are noted."""

    def __init__(self, stale_after: float) -> None:
        """Leave a server out when it was behind for `stale_after` seconds."""
        self._stale_after = stale_after
        self._served: dict[str, str] = {}
        self._last: dict[str, str] = {}
        """Name -> label, also of servers that do not answer now."""
        self._overruled: dict[str, str] = {}
        """Name -> label of each server that served another line when the trainer committed this one."""
        self._line: str | None = None
        self._lags: dict[str, float] = {}
        """Name -> time since which the server is behind."""
        self._begun: tuple[str, float] | None = None
        """The newest version while not all servers have it, and when the first server had it."""
        self.committed: str | None = None
        """The version of the fleet. None until a server with confirmed weights was seen."""
        self.last_spread: tuple[str, float] | None = None
        """The version that all servers got last, and the seconds from the first server to the last one."""

    @property
    def newest(self) -> str | None:
        """The newest version of the line that a server has."""
        return max((label for label in self._served.values() if _line(label) == self._line), key=_number, default=None)

    def note(
        self, served: Mapping[str, str], now: float, silent: Collection[str] = (), *, is_complete: bool = False
    ) -> None:
        """Take the labels of all servers that answer and whose weights are confirmed, by name.

        `silent` are the servers that do not answer. `is_complete` is True if `served` has all servers of the fleet.
        """
        self._served = dict(served)
        self._last = {name: label for name, label in self._last.items() if name in silent} | self._served
        self._overruled = {name: label for name, label in self._overruled.items() if self._last.get(name) == label}
        if is_complete and len(set(map(_line, self._served.values()))) == 1:
            self._overruled = {}
        self._choose_line()
        newest = self.newest
        if newest is None:
            return
        if self.committed is not None and (
            _line(self.committed) != self._line or (is_complete and _number(newest) < _number(self.committed))
        ):
            self.committed = None  # the fleet serves another line, or all of it has older weights
        behind = [name for name, label in self._served.items() if self._is_behind(label, newest)]
        self._lags = {name: self._lags.get(name, now) for name in behind}
        counted = [
            label
            for name, label in self._served.items()
            if _line(label) == self._line and not self._is_left_out(name, now)
        ]
        known = [] if self.committed is None else [self.committed]
        self.committed = max([*known, min(counted, key=_number)], key=_number) if counted else self.committed
        self._note_spread(newest, now)

    def commit(self, label: str, now: float) -> bool:
        """Take the label of a push that is over: a server without it is left out. Return False if no server has it.

        A version that is older than the committed one changes nothing.
        """
        if label not in self._served.values():
            return False
        line = _line(label)
        if line != self._line or self.committed is None or _number(label) > _number(self.committed):
            self._line, self.committed = line, label
            self._overruled = {name: last for name, last in self._last.items() if _line(last) != line}
            newest = self.newest
            assert newest is not None
            self._note_spread(newest, now)
        return True

    def fault(self, name: str, now: float) -> str | None:
        """Return why a server must not get new work, or None if it may."""
        label = self._served.get(name)
        if label is None or self._line is None:
            return None
        if _line(label) != self._line:
            return (
                f"it serves version {label!r}, and the fleet serves {self.committed!r}. Nothing orders the two: push "
                f"to the others, too, or commit {label!r} (POST /fleet/commit)"
            )
        if self._is_left_out(name, now):
            return f"it serves version {label!r}, and the fleet serves {self.committed!r}"
        return None

    def lag(self, name: str) -> int:
        """Return by how many versions a server is behind the newest one. 0 for free labels."""
        label, newest = self._served.get(name), self.newest
        if label is None or newest is None or _line(label) != self._line:
            return 0
        return _number(newest) - _number(label)

    def _choose_line(self) -> None:
        counts = Counter(_line(label) for name, label in self._last.items() if name not in self._overruled)
        if not counts:
            return
        line, count = counts.most_common(1)[0]
        if 2 * count > len(self._last) or self._line is None:
            self._line = line

    def _is_behind(self, label: str, newest: str) -> bool:
        return _line(label) == self._line and _number(label) < _number(newest)

    def _is_left_out(self, name: str, now: float) -> bool:
        if self.committed is not None and _number(self._served[name]) < _number(self.committed):
            return True
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

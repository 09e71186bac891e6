"""Episodes over time: what they waited for, one by one and all together."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from verl_server.watch.index.line_rows import unpack_waits
from verl_server.watch.index.row_ids import row_id
from verl_server.watch.index.rows import Activity, LaneRow, Lanes, group_number

_OVERLAP = "is_lost = 0 AND began <= ? AND ended >= ?"
_COUNTED = 4000
"""Most episodes that `activity` unpacks. Of more, it takes evenly chosen ones."""


def lanes(connection: sqlite3.Connection, begin: float, end: float, limit: int) -> Lanes:
    """Return episodes that overlap a window of time, evenly chosen if they are more than `limit`."""
    ids = _overlapping(connection, begin, end)
    (unknown,) = connection.execute("SELECT count(*) FROM episodes WHERE began IS NULL").fetchone()
    rows = []
    for number in _chosen(ids, limit):
        row = connection.execute("SELECT * FROM episodes WHERE id = ?", (number,)).fetchone()
        place = f"{row['place']} " if row["place"] != "-" else ""
        rows.append(
            LaneRow(
                row=row_id(row),
                label=f"{place}{group_number(row['grp'])}-{row['member']}",
                began=row["began"],
                ended=row["ended"],
                stop_reason=row["stop_reason"],
                fault=row["fault"],
                parts=_parts(connection, number),
            )
        )
    return Lanes(rows=rows, episodes=len(ids), unknown=unknown)


def activity(connection: sqlite3.Connection, begin: float, end: float, points: int) -> Activity:
    """Return what the episodes of a window waited for."""
    ids = _overlapping(connection, begin, end)
    counted = _chosen(ids, _COUNTED)
    scale = len(ids) / len(counted) if counted else 1.0
    series = {kind: _Series(points) for kind in ("generate", "env", "queue")}
    width = (end - begin) / points
    for number in counted:
        for kind, first, last in _parts(connection, number):
            series[kind].add((first - begin) / width, (last - begin) / width)
    values = {kind: [round(scale * value, 4) for value in found.means()] for kind, found in series.items()}
    return Activity(begin=begin, end=end, share=len(counted) / len(ids) if ids else 1.0, **values)


class _Series:
    """The mean number of intervals at each of some equal parts of a window."""

    def __init__(self, points: int) -> None:
        self._points = points
        self._partly = [0.0] * points
        self._steps = [0] * (points + 1)

    def add(self, first: float, last: float) -> None:
        """Add an interval. The unit is one part of the window."""
        first, last = max(0.0, first), min(float(self._points), last)
        if first >= last:
            return
        at, until = int(first), int(last)
        if at == until:
            self._partly[at] += last - first
            return
        self._partly[at] += at + 1 - first
        if until < self._points:
            self._partly[until] += last - until
        self._steps[at + 1] += 1
        self._steps[until] -= 1

    def means(self) -> list[float]:
        whole, found = 0, []
        for partly, step in zip(self._partly, self._steps, strict=False):
            whole += step
            found.append(whole + partly)
        return found


def _overlapping(connection: sqlite3.Connection, begin: float, end: float) -> list[int]:
    found = connection.execute(f"SELECT id FROM episodes WHERE {_OVERLAP} ORDER BY began, id", (end, begin))
    return [number for (number,) in found]


def _chosen(ids: Sequence[int], limit: int) -> list[int]:
    if len(ids) <= limit:
        return list(ids)
    return [ids[i * len(ids) // limit] for i in range(limit)]


def _parts(connection: sqlite3.Connection, number: int) -> list[tuple[str, float, float]]:
    found = connection.execute("SELECT waits, began, first FROM lines WHERE episode = ? AND began NOTNULL", (number,))
    parts = [
        (kind, began - first + begin, began - first + end)
        for waits, began, first in found
        for kind, begin, end in unpack_waits(waits)
    ]
    return sorted(parts, key=lambda part: part[1])

"""`RunIndex`: the index of one run, for a process that reads it while the run may go on.

The page's server and the commands ask it. Any thread may call it. The rows are those of `rows`; `run_database` keeps
them up to date.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from verl_server.errors import BadRequestError
from verl_server.files.json_files import decode_json
from verl_server.rollout.trajectory import Trajectory, read_trajectory
from verl_server.watch.index import lane_rows
from verl_server.watch.index.episode_rows import (
    STEPS,
    branch_row,
    conditions,
    episode_row,
    group_row,
    step_place,
    step_row,
)
from verl_server.watch.index.line_files import read_line
from verl_server.watch.index.row_ids import find, row_id
from verl_server.watch.index.rows import (
    Activity,
    Episode,
    EpisodeFilter,
    EpisodePage,
    GroupOrder,
    GroupRow,
    Lanes,
    Order,
    Progress,
    RowGoneError,
    SearchPage,
    StepRow,
)
from verl_server.watch.index.run_database import RunDatabase
from verl_server.watch.index.run_tables import NEWEST
from verl_server.watch.index.text_search import TextSearch
from verl_server.watch.run_records import Label, TrainedTrajectory

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.5
"""Pause before the files are looked at again."""
_HUGE = 1e308
"""Stands for a number that is larger than each reward."""
_ORDERS: dict[str, tuple[str, bool]] = {
    "newest": (NEWEST, True),
    "oldest": (NEWEST, False),
    "reward": (f"coalesce(reward, {_HUGE})", False),
    "-reward": (f"coalesce(reward, -{_HUGE})", True),
    "tokens": ("tokens", False),
    "-tokens": ("tokens", True),
    "turns": ("turns", False),
    "-turns": ("turns", True),
    "seconds": ("coalesce(ended - began, 0)", False),
    "-seconds": ("coalesce(ended - began, 0)", True),
}
"""Order -> (what is compared, True if the largest is the first)."""
_COUNTED = "CASE WHEN is_scored AND NOT is_replaced THEN reward END"
_GROUP_ORDERS: dict[str, str] = {
    "spread": f"avg({_COUNTED} * {_COUNTED}) - avg({_COUNTED}) * avg({_COUNTED}) DESC",
    "reward": f"coalesce(avg({_COUNTED}), {_HUGE})",
    "tokens": "avg(tokens) DESC",
    "failed": "sum(is_failed AND NOT is_replaced) DESC",
    "group": "1",
}
_GROUP_KEY = ("place", "grp", "incarnation", "step", "phase")


class RunIndex:
    def __init__(self, path: Path) -> None:
        """`path` is the folder of a run, or a file of trajectories. Nothing is read before `start` or `poll`."""
        self.path = path
        self._database = RunDatabase(path)
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._follow, name=f"index-{path.name}", daemon=True)
        self._steps: dict[bool, tuple[int, list[StepRow]]] = {}

    def start(self) -> None:
        """Begin to index in a background thread, which follows a run that grows."""
        self._thread.start()

    def poll(self, seconds: float = 1.0) -> bool:
        """Index for about `seconds`, and return True if there is more to index. The background thread calls it."""
        return self._database.poll(seconds)

    def close(self) -> None:
        """End the thread, and remove the temporary database."""
        self._ends.set()
        if self._thread.is_alive():
            self._thread.join()
        self._database.close()

    def _follow(self) -> None:
        while not self._ends.is_set():
            try:
                pause = 0.0 if self._database.poll(_POLL_SECONDS) else _POLL_SECONDS
            except sqlite3.Error as error:  # a full disk, say
                logger.error("The index of %s cannot go on: %s. It tries again.", self.path, error)
                pause = 10 * _POLL_SECONDS
            self._ends.wait(pause)

    def progress(self) -> Progress:
        return self._database.progress()

    # -- steps and groups -------------------------------------------------------------------------------------

    def steps(self, *, lost: bool = False) -> list[StepRow]:
        """Return the steps in order, with the other places of the run around them."""
        generation = self._database.generation
        known = self._steps.get(lost)
        if known is None or known[0] != generation:
            with self._database.reading() as connection:
                rows = [step_row(row) for row in connection.execute(STEPS, (lost,))]
            known = self._steps[lost] = generation, sorted(rows, key=step_place)
        return known[1]

    def groups(
        self,
        place: str,
        only: EpisodeFilter | None = None,
        *,
        order: GroupOrder = "spread",
        limit: int = 1000,
        skip: int = 0,
    ) -> list[GroupRow]:
        """Return the groups of a step (`StepRow.name`) that have an episode which fits, with all of their episodes.

        The first `skip` groups are left out, and those after `limit` further ones.
        """
        condition, values = conditions(msgspec.structs.replace(only or EpisodeFilter(), place=place))
        lost = "" if only is not None and only.lost else "AND is_lost = 0"
        keys = ", ".join(_GROUP_KEY)
        having = "" if only is None else f"HAVING max({condition})"
        chosen = f"""SELECT {keys} FROM episodes e WHERE place = ? {lost} GROUP BY {keys} {having}
            ORDER BY {_GROUP_ORDERS[order]}, grp, incarnation, step LIMIT ? OFFSET ?"""
        with self._database.reading() as connection:
            found = connection.execute(chosen, (place, *(values if having else ()), limit, skip)).fetchall()
            return [self._group(connection, tuple(key)) for key in found]

    def group(self, row: str) -> GroupRow:
        """Return the group of an episode. Raise RowUnknownError or RowGoneError."""
        with self._database.reading() as connection:
            line = find(connection, row, self._database.starts.removed)
            return self._group(connection, tuple(line[key] for key in _GROUP_KEY))

    def _group(self, connection: sqlite3.Connection, key: tuple[Any, ...]) -> GroupRow:
        same = " AND ".join(f"{name} IS ?" for name in _GROUP_KEY)
        rows = connection.execute(f"SELECT * FROM episodes WHERE {same} ORDER BY member, attempt, file, offset", key)
        return group_row([episode_row(connection, row) for row in rows.fetchall()])

    # -- episodes ---------------------------------------------------------------------------------------------

    def episodes(
        self, only: EpisodeFilter, *, order: Order = "newest", limit: int = 100, after: str | None = None
    ) -> EpisodePage:
        """Return the episodes that fit, `limit` at a time. Raise BadRequestError for a wrong cursor."""
        if order not in _ORDERS:
            raise BadRequestError(f"{order!r:.100} is no order of episodes. These are: {', '.join(_ORDERS)}.")
        with self._database.reading() as connection:
            rows = self._ordered(connection, only, order, limit + 1, None if after is None else _cursor(after, 3))
            found = [episode_row(connection, row) for row in rows[:limit]]
            total = self._count(connection, only) if after is None else None
        cursor = None if len(rows) <= limit else _text([rows[limit - 1][k] for k in ("k", "file", "offset")])
        return EpisodePage(rows=found, cursor=cursor, total=total)

    def search(
        self, only: EpisodeFilter, text: str, *, cursor: str | None = None, seconds: float = 1.0, limit: int = 100
    ) -> SearchPage:
        """Search the texts of the episodes that fit, for about `seconds`: observations, actions, messages, errors and
        names of tools. ASCII letters match in both cases. Raise BadRequestError for a wrong cursor."""
        until = time.monotonic() + seconds
        after, wanted = None if cursor is None else _cursor(cursor, 4), TextSearch(text)
        page = SearchPage(rows=[], places=[], cursor=None, searched_bytes=after.pop() if after else 0, total_bytes=0)
        condition, values = conditions(only)
        with self._database.reading() as connection:
            total = f"SELECT coalesce(sum(bytes), 0) FROM episodes WHERE {condition}"
            (page.total_bytes,) = connection.execute(total, values).fetchone()
            while rows := self._ordered(connection, only, "newest", 50, after):
                for row in rows:
                    after = [row["k"], row["file"], row["offset"]]
                    if (found := self._search(connection, row["id"], wanted)) is not None:
                        page.rows.append(episode_row(connection, row))
                        page.places.append(found)
                    page.searched_bytes += row["bytes"]
                    if len(page.rows) >= limit or time.monotonic() >= until:
                        page.cursor = _text([*after, page.searched_bytes])
                        return page
        return page

    def _search(self, connection: sqlite3.Connection, episode: int, wanted: TextSearch) -> str | None:
        for file, offset, length in connection.execute(
            "SELECT file, offset, length FROM lines WHERE episode = ?", (episode,)
        ):
            line = read_line(self._database.folder / file, offset, length)
            if line is not None and (found := wanted.find(line)) is not None:
                return found
        return None

    def _count(self, connection: sqlite3.Connection, only: EpisodeFilter) -> int:
        condition, values = conditions(only)
        count: int = connection.execute(f"SELECT count(*) FROM episodes WHERE {condition}", values).fetchone()[0]
        return count

    def _ordered(
        self, connection: sqlite3.Connection, only: EpisodeFilter, order: str, limit: int, after: list[Any] | None
    ) -> list[sqlite3.Row]:
        condition, values = conditions(only)
        key, descends = _ORDERS[order]
        way, sign = ("DESC", "<") if descends else ("", ">")
        if after is not None:
            condition += f" AND {key} {sign}= ? AND ({key}, file, offset) {sign} (?, ?, ?)"
            values += [after[0], *after]
        return connection.execute(
            f"SELECT {key} AS k, * FROM episodes WHERE {condition} "
            f"ORDER BY {key} {way}, file {way}, offset {way} LIMIT {int(limit)}",
            values,
        ).fetchall()

    def episode(self, row: str) -> Episode:
        """Return the episode that has a line. Raise RowUnknownError or RowGoneError."""
        with self._database.reading() as connection:
            line = find(connection, row, self._database.starts.removed)
            head = connection.execute("SELECT * FROM episodes WHERE id = ?", (line["episode"],)).fetchone()
            lines = connection.execute(
                "SELECT * FROM lines WHERE episode = ? ORDER BY branch, session", (line["episode"],)
            )
            branches = [branch_row(connection, each) for each in lines.fetchall()]
            return Episode(head=episode_row(connection, head), branches=branches)

    # -- lines of all episodes, for an export -------------------------------------------------------------------

    def line_ids(self, step: int | None = None) -> Iterator[tuple[int, int]]:
        """Yield (number, bytes) of the lines, without lost ones, in the order of files and offsets.

        With `step`, yield those that the step used.
        """
        with self._database.reading() as connection:
            yield from connection.execute(
                "SELECT id, length FROM lines WHERE kind != 'damaged' AND is_lost = 0 AND (?1 IS NULL OR used = ?1) "
                "ORDER BY file, offset",
                (step,),
            )

    def line(self, number: int) -> dict[str, Any]:
        """Return the columns of a line, with its id as `row`."""
        with self._database.reading() as connection:
            found = connection.execute("SELECT * FROM lines WHERE id = ?", (number,)).fetchone()
            return dict(found) | {"row": row_id(found)}

    # -- lines ------------------------------------------------------------------------------------------------

    def trajectory(self, row: str) -> Trajectory:
        """Return a line. Raise RowUnknownError, RowGoneError, or BadRequestError if it is damaged."""
        with self._database.reading() as connection:
            line = find(connection, row, self._database.starts.removed)
        text, where = self._line(line)
        found = read_trajectory(text, where)
        label = decode_json(text, Label, where)
        keys = (label.step, str(found.task.seed), found.task.group, found.member, found.attempt, found.branch)
        if keys != tuple(line[key] for key in ("step", "seed", "grp", "member", "attempt", "branch")):
            raise self._moved(line["file"])
        return found

    def trained(self, row: str) -> TrainedTrajectory | None:
        """Return what the trainer recorded about a line, None if nothing. Raise as `trajectory`."""
        with self._database.reading() as connection:
            line = find(connection, row, self._database.starts.removed)
            found = connection.execute(
                "SELECT * FROM trained WHERE grp = ? AND member = ? AND sampled_step = ? AND incarnation = ? "
                "AND sampled_rank IS ? AND attempt = ? AND session = ? AND branch = ? ORDER BY id DESC LIMIT 1",
                [line[k] for k in ("grp", "member", "step", "incarnation", "rank", "attempt", "session", "branch")],
            ).fetchone()
        if found is None:
            return None
        record = decode_json(self._line(found)[0], TrainedTrajectory, f"{found['file']} at byte {found['offset']}")
        if (record.group, record.member, record.session, record.branch) != tuple(
            found[key] for key in ("grp", "member", "session", "branch")
        ):
            raise self._moved(found["file"])
        return record

    def _line(self, row: sqlite3.Row) -> tuple[bytes, str]:
        """Return the line of a row, and where it is. Raise RowGoneError if it is not there any more."""
        file = self._database.folder / row["file"]
        line = read_line(file, row["offset"], row["length"])
        if line is None:
            raise self._moved(row["file"])
        return line, f"{file} at byte {row['offset']}"

    def _moved(self, file: str) -> RowGoneError:
        self._database.doubt(file)
        return RowGoneError(f"{file} was removed or replaced since it was indexed. It is indexed again: reload.")

    # -- times ------------------------------------------------------------------------------------------------

    def span(self) -> tuple[float, float] | None:
        """Return the times of the first begin and of the last end of an episode, None if none is known."""
        with self._database.reading() as connection:
            first, last = connection.execute("SELECT min(began), max(ended) FROM episodes WHERE is_lost = 0").fetchone()
        return None if first is None else (first, last)

    def lanes(self, begin: float, end: float, limit: int = 60) -> Lanes:
        """Return episodes that overlap a window of time, evenly chosen if they are more than `limit`."""
        with self._database.reading() as connection:
            return lane_rows.lanes(connection, begin, end, limit)

    def activity(self, begin: float, end: float, points: int = 300) -> Activity:
        """Return what the episodes waited for over a window of time. Raise BadRequestError for an empty window."""
        if not (begin < end and 0 < points <= 10_000):
            raise BadRequestError("A window of time has a begin before its end, and 1 to 10,000 points.")
        with self._database.reading() as connection:
            return lane_rows.activity(connection, begin, end, points)


def _text(cursor: list[Any]) -> str:
    return msgspec.json.encode(cursor).decode()


def _cursor(text: str, length: int) -> list[Any]:
    """Return the values of a cursor. Raise BadRequestError for a text that is none."""
    values = decode_json(text.encode("utf-8", "replace"), list[Any], "The cursor")
    if len(values) != length or not all(isinstance(value, int | float | str) for value in values):
        raise BadRequestError("The cursor is not one of this list: begin again without it.")
    return values

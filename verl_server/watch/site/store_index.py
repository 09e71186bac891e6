"""`StoreIndex`: the sessions of a server's store, as views ask them of a run's index. `runs` opens it for `--store`.

`store_rows` makes the rows of the sessions that this module chooses.
"""

from __future__ import annotations

import time

from verl_server.rollout.trajectory import Trajectory
from verl_server.watch.index import rows
from verl_server.watch.index.session_store import SessionOrder, SessionRow, SessionStore
from verl_server.watch.run_records import TrainedTrajectory
from verl_server.watch.site import store_rows
from verl_server.watch.site.parts import parts_of

_PAGE = 1000
"""Sessions that are asked for at once."""
_GROUPS = 2000
"""Most sessions whose groups are listed: the newest."""
_ALL = rows.EpisodeFilter()


class StoreIndex:
    """What views ask of an index of episodes."""

    def __init__(self, store: SessionStore) -> None:
        self._store = store
        self._known_numbers: tuple[int, dict[str, int]] = (-1, {})
        """Generation of the store, and the numbers of its groups then."""

    def start(self) -> None: ...

    def close(self) -> None: ...

    def poll(self) -> bool:
        return False

    def progress(self) -> rows.Progress:
        done, total = self._store.progress
        return rows.Progress(
            bytes_indexed=done,
            bytes_total=total,
            episodes=self._store.sessions(limit=1).total,
            damaged=self._store.damaged,
            generation=self._store.generation,
        )

    def steps(self, *, lost: bool = False) -> list[rows.StepRow]:
        found = self._sessions()
        return [store_rows.step_row(found, self.groups(store_rows.PLACE))] if found else []

    def groups(self, place: str, found: rows.EpisodeFilter = _ALL) -> list[rows.GroupRow]:
        """Return the groups of the sessions. Sessions without a group are groups of their own."""
        numbers = self._numbers()
        by_group: dict[int, list[SessionRow]] = {}
        for session in self._sessions():
            by_group.setdefault(numbers[store_rows.group_name(session)], []).append(session)
        return [
            store_rows.group_row(number, [self._row(session) for session in members])
            for number, members in by_group.items()
            if any(store_rows.fits(self._row(session), found) for session in members)
        ]

    def group(self, row: str) -> rows.GroupRow:
        root = self._root(row)
        return store_rows.group_row(self._numbers().get(store_rows.group_name(root), 0), self._members(root))

    def _root(self, row: str) -> SessionRow:
        """Return the session of a row, or the one whose sub-agents have it. Raise SessionNotFoundError (404)."""
        session = self._store.session(row.rpartition(":")[0])
        while session.parent:
            session = self._store.session(session.parent)
        return session

    def _members(self, session: SessionRow) -> list[rows.EpisodeRow]:
        """Return the episodes of a session's group."""
        name = store_rows.group_name(session)
        found = [each for each in self._sessions() if store_rows.group_name(each) == name] or [session]
        members = [self._row(each) for each in found]
        for member, row in enumerate(members):
            row.member = member
        return members

    def episodes(
        self, found: rows.EpisodeFilter, *, order: rows.Order = "newest", limit: int = 100, after: str | None = None
    ) -> rows.EpisodePage:
        start = int(after) if after is not None and after.isdecimal() else 0
        by: SessionOrder = "newest" if order in ("seconds", "-seconds") else order  # type: ignore[assignment]
        page: list[rows.EpisodeRow] = []
        while True:
            part = self._store.sessions(order=by, after=start, limit=limit)
            total = part.total if after is None and found == _ALL else None
            for place, session in enumerate(part.rows):
                if len(page) == limit:
                    return rows.EpisodePage(rows=page, cursor=str(start + place), total=total)
                row = self._row(session)
                if store_rows.fits(row, found):
                    page.append(row)
            if part.after is None:
                return rows.EpisodePage(rows=page, cursor=None, total=total)
            start = part.after

    def search(
        self,
        found: rows.EpisodeFilter,
        text: str,
        *,
        cursor: str | None = None,
        seconds: float = 1.0,
        limit: int = 100,
    ) -> rows.SearchPage:
        """Search the texts of the sessions, the newest first. A cursor is a number of sessions."""
        end = time.monotonic() + seconds
        start = int(cursor) if cursor is not None and cursor.isdecimal() else 0
        total = self._store.sessions(limit=1).total
        matches: list[rows.EpisodeRow] = []
        places: list[str] = []
        place = start
        while place < total and len(matches) < limit and (place == start or time.monotonic() < end):
            for session in self._store.sessions(order="newest", after=place, limit=1).rows:
                row = self._row(session)
                excerpt = self._excerpt(session.session, text) if store_rows.fits(row, found) else None
                if excerpt is not None:
                    matches.append(row)
                    places.append(excerpt)
            place += 1
        done, size = self._store.progress
        return rows.SearchPage(
            rows=matches,
            places=places,
            cursor=str(place) if place < total else None,
            searched_bytes=done * place // max(1, total),
            total_bytes=size,
        )

    def _excerpt(self, session: str, text: str) -> str | None:
        """Return the surroundings of a text in a session, None if it does not have it."""
        wanted = text.casefold()
        for trajectory in self._store.trajectories(session):
            for turn in range(len(trajectory.turns)):
                for part in parts_of(trajectory, turn, None):
                    at = part.text.casefold().find(wanted)
                    if at >= 0:
                        return part.text[max(0, at - 60) : at + len(text) + 60]
                    if part.name is not None and wanted in part.name.casefold():
                        return part.name
        return None

    def episode(self, row: str) -> rows.Episode:
        root = self._root(row)
        found, waiting = [], [root]
        while waiting:
            found.append(waiting.pop(0))
            waiting += (self._store.session(child) for child in found[-1].children)
        branches = [
            store_rows.branch_row(each, branch) for each in found for branch in self._store.branches(each.session)
        ]
        head = next(each for each in self._members(root) if each.row == f"{root.session}:0")
        return rows.Episode(head=head, branches=branches)

    def trajectory(self, row: str) -> Trajectory:
        session, _, branch = row.rpartition(":")
        for trajectory in self._store.trajectories(session):
            if str(trajectory.branch) == branch:
                return trajectory
        raise rows.RowUnknownError(f"The session {session:.100} has no branch {branch:.20}.")

    def trained(self, row: str) -> TrainedTrajectory | None:
        return None

    def lanes(self, begin: float, end: float, limit: int = 60) -> rows.Lanes:
        """Return sessions that overlap a window, evenly chosen. What they waited for is not known."""
        found = [each for each in self._sessions() if each.created <= end and store_rows.end_of(each) >= begin]
        found.sort(key=lambda each: each.created)
        chosen = found if len(found) <= limit else [found[place * len(found) // limit] for place in range(limit)]
        return rows.Lanes(rows=[store_rows.lane_row(each) for each in chosen], episodes=len(found), unknown=0)

    def activity(self, begin: float, end: float, points: int = 300) -> rows.Activity:
        return rows.Activity(begin=begin, end=end, generate=[], env=[], queue=[], share=1.0)

    def _sessions(self) -> list[SessionRow]:
        """Return the newest sessions that are no sub-agents'."""
        found: list[SessionRow] = []
        start: int | None = 0
        while start is not None and len(found) < _GROUPS:
            page = self._store.sessions(order="newest", after=start, limit=_PAGE)
            found += page.rows
            start = page.after
        return found

    def _numbers(self) -> dict[str, int]:
        """Return group -> its number in the order of the sessions, the oldest first."""
        generation, numbers = self._known_numbers
        if generation != self._store.generation:
            generation = self._store.generation
            names = dict.fromkeys(store_rows.group_name(each) for each in reversed(self._sessions()))
            numbers = {name: number for number, name in enumerate(names)}
            self._known_numbers = generation, numbers
        return numbers

    def _row(self, session: SessionRow) -> rows.EpisodeRow:
        return store_rows.episode_row(session, self._numbers().get(store_rows.group_name(session), 0))

"""`StoreRun`: a server's session store as a run without steps. `runs` opens it for `--store`.

A session is an episode, and each of its branches a row SESSION:BRANCH. `StoreTail` and `StoreIndex` answer what views
ask of a run's files and of its index.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Any

from verl_server.rollout.trajectory import Trajectory
from verl_server.watch.index import rows
from verl_server.watch.index.run_tail import RunState, StepTimes
from verl_server.watch.index.session_store import SessionOrder, SessionRow, SessionStore
from verl_server.watch.run_records import AnyEvent, TrainedTrajectory
from verl_server.watch.site.parts import parts_of

_PLACE = "-"
_PAGE = 1000
"""Sessions that are asked for at once."""
_GROUPS = 2000
"""Most sessions whose groups are listed: the newest."""
_ALL = rows.EpisodeFilter()


class StoreTail:
    """What views ask of a run's metrics and events: a store has none."""

    def __init__(self, store: SessionStore) -> None:
        self._store = store
        self.exit_status: int | None = None
        self.error: str | None = None
        self.started: float | None = None
        self.last: float | None = None

    @property
    def generation(self) -> int:
        return self._store.generation

    @property
    def settings(self) -> dict[str, Any]:
        return {"command": "serve", "model_path": self._store.model_path}

    @property
    def state(self) -> RunState:
        return self._store.state

    @property
    def warnings(self) -> list[str]:
        return self._store.warnings

    def poll(self) -> bool:
        grown = self._store.poll()
        if grown or self.last is None:
            newest = self._store.sessions(order="newest", limit=1, children=True).rows
            oldest = self._store.sessions(order="oldest", limit=1, children=True).rows
            self.started = oldest[0].created if oldest else None
            self.last = newest[0].active if newest else None
        return grown

    def steps(self, *, lost: bool = False) -> list[int]:
        return []

    def names(self) -> list[str]:
        return []

    def metrics(
        self, names: Sequence[str] | None = None, first: int | None = None, last: int | None = None
    ) -> dict[str, list[Any]]:
        return {name: [] for name in ("step", "time", *(names or ()))}

    def events(
        self, kinds: Collection[str] | None = None, after: int = 0, limit: int = 1000, *, newest: bool = False
    ) -> list[tuple[int, AnyEvent]]:
        return []

    def steps_between(self, begin: float, end: float, limit: int = 1000) -> list[StepTimes]:
        return []


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
        if not found:
            return []
        groups = self.groups(_PLACE)
        rewards = [each.reward for each in found if each.reward is not None and each.sampled]
        return [
            rows.StepRow(
                name=_PLACE,
                step=None,
                episodes=len(found),
                groups=len(groups),
                scored=len(rewards),
                mean_reward=_mean(rewards),
                without_spread=sum(group.scored > 1 and group.spread == 0 for group in groups),
                failed=0,
                replaced=0,
                unsampled=sum(not each.sampled for each in found),
                mean_tokens=_mean([each.sampled for each in found]) or 0.0,
                most_tokens=max(each.tokens for each in found),
                mean_turns=_mean([each.turns for each in found]) or 0.0,
                sampled=sum(each.sampled for each in found),
                began=min(each.created for each in found),
                ended=max(each.active for each in found),
            )
        ]

    def groups(self, place: str, found: rows.EpisodeFilter = _ALL) -> list[rows.GroupRow]:
        """Return the groups of the sessions. Sessions without a group are groups of their own."""
        numbers = self._numbers()
        by_group: dict[int, list[SessionRow]] = {}
        for session in self._sessions():
            by_group.setdefault(numbers[_group_name(session)], []).append(session)
        return [
            _group_row(number, [self._row(session) for session in members])
            for number, members in by_group.items()
            if any(_fits(self._row(session), found) for session in members)
        ]

    def group(self, row: str) -> rows.GroupRow:
        root = self._root(row)
        return _group_row(self._numbers().get(_group_name(root), 0), self._members(root))

    def _root(self, row: str) -> SessionRow:
        """Return the session of a row, or the one whose sub-agents have it. Raise SessionNotFoundError (404)."""
        session = self._store.session(row.rpartition(":")[0])
        while session.parent:
            session = self._store.session(session.parent)
        return session

    def _members(self, session: SessionRow) -> list[rows.EpisodeRow]:
        """Return the episodes of a session's group."""
        found = [each for each in self._sessions() if _group_name(each) == _group_name(session)] or [session]
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
            for place, session in enumerate(part.rows):
                if len(page) == limit:
                    return rows.EpisodePage(rows=page, cursor=str(start + place))
                row = self._row(session)
                if _fits(row, found):
                    page.append(row)
            if part.after is None:
                return rows.EpisodePage(rows=page, cursor=None)
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
                excerpt = self._excerpt(session.session, text) if _fits(row, found) else None
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
            rows.BranchRow(
                row=f"{each.session}:{branch.branch}",
                session=each.session,
                parent=each.parent,
                branch=branch.branch,
                fork_of=branch.fork_of,
                shared=branch.shared,
                turns=len(branch.turns),
                tokens=branch.tokens,
                sampled=branch.sampled,
                logprob=None,
                is_trained=False,
            )
            for each in found
            for branch in self._store.branches(each.session)
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
        found = [each for each in self._sessions() if each.created <= end and _end(each) >= begin]
        found.sort(key=lambda each: each.created)
        chosen = found if len(found) <= limit else [found[place * len(found) // limit] for place in range(limit)]
        lanes = [
            rows.LaneRow(
                row=f"{each.session}:0",
                label=f"{_PLACE} {each.session}",
                began=each.created,
                ended=_end(each),
                stop_reason=str(each.state),
                fault=None,
                parts=[],
            )
            for each in chosen
        ]
        return rows.Lanes(rows=lanes, episodes=len(found), unknown=0)

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
            names = dict.fromkeys(_group_name(each) for each in reversed(self._sessions()))
            numbers = {name: number for number, name in enumerate(names)}
            self._known_numbers = generation, numbers
        return numbers

    def _row(self, session: SessionRow) -> rows.EpisodeRow:
        return rows.EpisodeRow(
            row=f"{session.session}:0",
            place=_PLACE,
            step=None,
            start_step=None,
            rank=None,
            incarnation=None,
            group=self._numbers().get(_group_name(session), 0),
            member=0,
            attempt=0,
            seed="",
            episode_id=session.group or None,
            task="",
            phase=None,
            fate="",
            is_lost=False,
            is_replaced=False,
            is_unsampled=not session.sampled,
            reward=session.reward,
            stop_reason=str(session.state),
            fault=None,
            error=session.reason or None,
            branches=1,
            turns=session.turns,
            tokens=session.tokens,
            sampled=session.sampled,
            generate_seconds=session.generate_seconds,
            env_seconds=0.0,
            queue_seconds=0.0,
            began=session.created,
            ended=_end(session),
            time=session.active,
            oldest_version=session.oldest_version,
            newest_version=session.newest_version,
            versions=len({session.oldest_version, session.newest_version} - {""}),
            tools=[],
            logprob=None,
            is_trained=False,
            trained_step=None,
            advantage=None,
            age=None,
            gap_mean=None,
            gap_max=None,
            entropy=None,
        )


def _end(session: SessionRow) -> float:
    return session.active if session.ended is None else session.ended


def _group_name(session: SessionRow) -> str:
    return session.group or session.session


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _fits(row: rows.EpisodeRow, found: rows.EpisodeFilter) -> bool:
    """Return True if a session has what a filter wants. A store has neither steps nor faults."""
    reward, tokens = row.reward, row.tokens
    return all(
        (
            found.place in (None, _PLACE),
            found.first_step is None and found.last_step is None,
            found.stop_reason in (None, row.stop_reason),
            found.fault is None and found.tool is None,
            found.least_reward is None or (reward is not None and reward >= found.least_reward),
            found.most_reward is None or (reward is not None and reward <= found.most_reward),
            found.least_tokens is None or tokens >= found.least_tokens,
            found.most_tokens is None or tokens <= found.most_tokens,
            found.has_error is None or found.has_error == bool(row.error),
            found.group in (None, row.group),
            found.version in (None, row.oldest_version, row.newest_version),
        )
    )


def _group_row(number: int, members: list[rows.EpisodeRow]) -> rows.GroupRow:
    for member, row in enumerate(members):
        row.group, row.member = number, member
    rewards = [row.reward for row in members if row.reward is not None and not row.is_unsampled]
    mean = _mean(rewards)
    spread = None if mean is None else (sum((each - mean) ** 2 for each in rewards) / len(rewards)) ** 0.5
    ends: dict[str, int] = {}
    for row in members:
        ends[str(row.stop_reason)] = ends.get(str(row.stop_reason), 0) + 1
    return rows.GroupRow(
        place=_PLACE,
        step=None,
        start_step=None,
        incarnation=None,
        rank=None,
        group=number,
        seed="",
        task=members[0].episode_id or members[0].row,
        fate="",
        is_lost=False,
        episodes=len(members),
        scored=len(rewards),
        mean_reward=mean,
        spread=spread,
        least_reward=min(rewards, default=None),
        most_reward=max(rewards, default=None),
        failed=0,
        replaced=0,
        mean_tokens=_mean([row.tokens for row in members]) or 0.0,
        most_tokens=max(row.tokens for row in members),
        mean_turns=_mean([row.turns for row in members]) or 0.0,
        ends=ends,
        members=members,
    )

"""`GroupJournal`: the groups of episodes that have finished, on the disk, until a checkpoint counts them as done.

A run that is killed loses what its processes hold: episodes that have ended, and that no step has trained. So each
group is written to journal-rankN.msgpack as soon as all of its episodes have ended. `grpo` (through `step_journal`) and
`async_grpo` put groups, and a resumed run reads those that it need not play again (`kept_groups`).

A thread writes, and flushes each group to the disk, so that neither training nor episodes wait. A group that cannot be
written (a full disk, say) does not end the run, because the journal is only needed after a kill: the group is played
again then. It is logged, and an event of the run.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from verl_server.errors import VerlServerError
from verl_server.files.json_values import jsonable
from verl_server.files.record_file import Place, RecordFile, read_records
from verl_server.rollout.agent_loop import Rollout
from verl_server.rollout.recorded_turns import EpisodeProgress
from verl_server.train.journal_records import GroupHead, decode_record, journal_paths, other_journals
from verl_server.train.turn_journal import TurnJournal, read_turns
from verl_server.watch.run_records import JournalFailed, RunEvent

logger = logging.getLogger(__name__)

_NAME = "journal"
_MOST_WAITING = 4096
"""Groups that wait to be written. Beyond it, the disk is taken for one that does not answer."""
_COMPACT_BYTES = 16 * 2**20
"""Bytes that nobody needs before the file is written anew between two checkpoints."""
_CLOSE_SECONDS = 30.0
"""Seconds that `close` waits for the disk."""


class FinishedGroup(GroupHead, kw_only=True):
    """A record of the journal: a group all of whose episodes have ended."""

    base: str
    """Label of the checkpoint's weights from which the start of the run continued that played the group. "" if that
    start began the run."""
    rollout: Rollout
    """Its episodes, with those that others replaced."""


def read_groups(folder: Path, is_wanted: Callable[[GroupHead], bool]) -> Iterator[FinishedGroup]:
    """Yield the groups in all journals of a run's folder whose heads `is_wanted`, in the order of each journal.

    A group may be there several times. Raise BadRequestError, which names the file, if one is damaged.
    """
    for path in journal_paths(folder, _NAME):
        for place, payload in read_records(path):
            if is_wanted(decode_record(payload, GroupHead, path, place)):
                yield decode_record(payload, FinishedGroup, path, place)


def check_journals(folder: Path) -> None:
    """Read all journals of a run's folder. Raise BadRequestError, which names the file, if one is damaged."""
    for _ in read_groups(folder, lambda head: False):
        pass
    for _ in read_turns(folder, lambda head: False):
        pass


class GroupJournal:
    """The writer of one rank's journal. Any thread may call it, and nobody waits for the disk."""

    def __init__(
        self,
        folder: Path,
        rank: int = 0,
        ranks: int = 1,
        note: Callable[[RunEvent], None] = lambda event: None,
        records_turns: bool = False,
    ) -> None:
        """`note` takes the event of a journal that cannot be written. Nothing is created before the first group.

        With `records_turns`, groups that have not finished are recorded, too (`TurnJournal`).
        """
        self.base = ""
        """`FinishedGroup.base` of the groups that are put. A run that continues sets it before it plays."""
        self._rank = rank
        self._file = RecordFile(folder / f"{_NAME}-rank{rank}.msgpack")
        self._others = other_journals(folder, _NAME, rank, ranks)
        self._note = note
        self._turns = TurnJournal(folder, rank, ranks, note) if records_turns else None
        self._index: list[tuple[GroupHead, Place]] | None = None
        """The records of the file. None: it was not read."""
        self._missing = 0
        """Groups that could not be written since the last one that was."""
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name="group-journal", daemon=True)
        self._thread.start()

    def put(self, number: int, version: str, step: int, rollout: Rollout) -> None:
        """Write a group. It is encoded before this returns, so its episodes may be changed afterwards.

        A group in which every episode failed is left out: when it is played again, it may succeed.
        """
        if all(trajectory.reward is None for trajectory in rollout.trajectories):
            self._close_group(number)
            return
        group = FinishedGroup(number=number, version=version, base=self.base, step=step, rollout=rollout)
        try:
            payload = msgspec.msgpack.encode(group, enc_hook=jsonable)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:  # a value of the environment
            self._fail(error)
            return
        head = GroupHead(number=number, version=version, step=step)
        self._queue_up(lambda: self._append(head, payload))
        self._queue_up(lambda: self._close_group(number))

    @property
    def records_turns(self) -> bool:
        """True if `progress` records groups that have not finished."""
        return self._turns is not None

    def progress(self, number: int, version: str, step: int, progress: EpisodeProgress) -> None:
        """Record a turn, or an episode that has ended, of a group that goes on. The arguments are those of `put`."""
        if self._turns is not None:
            self._turns.put(number, version, self.base, step, progress)

    def go_on(self, plays: Mapping[tuple[int, int], float]) -> None:
        """Record further turns of these episodes behind those that an earlier start of the run recorded."""
        if self._turns is not None:
            self._turns.go_on(plays)

    def keep(self, is_needed: Callable[[GroupHead], bool], *, at_once: bool = False) -> None:
        """Remove the groups that nobody needs. Without `at_once`, do it when they are many.

        `is_needed` is called in another thread.
        """
        self._queue_up(lambda: self._compact(is_needed, at_once))
        if self._turns is not None:
            self._turns.keep(is_needed, at_once=at_once)

    def close(self) -> None:
        """Write what waits, and end the thread. A disk that does not answer is left behind."""
        try:
            self._queue.put(None, timeout=_CLOSE_SECONDS)
            self._thread.join(_CLOSE_SECONDS)
        except queue.Full:
            logger.error("%s: the disk did not answer for %d s.", self._file.path, _CLOSE_SECONDS)
        if self._turns is not None:
            self._turns.close()

    def _close_group(self, number: int) -> None:
        """Remove the turns of a group that is in the journal, or that no start could keep."""
        if self._turns is not None:
            self._turns.close_group(number)

    def _queue_up(self, work: Callable[[], None]) -> None:
        try:
            self._queue.put_nowait(work)
        except queue.Full:
            self._fail(OSError(f"{_MOST_WAITING} groups wait for the disk"))

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work()
        self._file.close()

    def _append(self, head: GroupHead, payload: bytes) -> None:
        try:
            self._read().append((head, self._file.append(payload)))
        except (OSError, VerlServerError) as error:
            self._fail(error)
            return
        if self._missing:
            logger.warning("%s is written again. It lacks %d groups.", self._file.path, self._missing)
            self._missing = 0

    def _compact(self, is_needed: Callable[[GroupHead], bool], at_once: bool) -> None:
        try:
            self._remove(is_needed, at_once)
        except (OSError, VerlServerError) as error:
            logger.error("%s keeps groups that nobody needs, because it cannot be written: %s", self._file.path, error)

    def _remove(self, is_needed: Callable[[GroupHead], bool], at_once: bool) -> None:
        index = self._read()
        needed = [(head, place) for head, place in index if is_needed(head)]
        size = sum(place.length for _, place in needed)
        dead = sum(place.length for _, place in index) - size
        if dead and (at_once or dead >= max(_COMPACT_BYTES, size)):
            places = self._file.keep([place for _, place in needed])
            self._index = [(head, place) for (head, _), place in zip(needed, places, strict=True)]
        for path in list(self._others) if at_once else []:
            if not any(is_needed(head) for head, _ in _heads(path)):
                path.unlink(missing_ok=True)
                self._others.remove(path)

    def _read(self) -> list[tuple[GroupHead, Place]]:
        if self._index is None:
            path = self._file.path
            self._index = [(decode_record(p, GroupHead, path, place), place) for place, p in self._file.read()]
        return self._index

    def _fail(self, error: Exception) -> None:
        """Log the first of several failures in a row, and note it as an event."""
        self._missing += 1
        if self._missing == 1:
            logger.error(
                "A finished group cannot be written to %s: %s. The run goes on. If it is killed, it plays the group "
                "again when it is resumed.",
                *(self._file.path, error),
            )
            self._note(JournalFailed(rank=self._rank, file=self._file.path.name, error=str(error)))


def _heads(path: Path) -> Iterator[tuple[GroupHead, Place]]:
    return ((decode_record(payload, GroupHead, path, place), place) for place, payload in read_records(path))

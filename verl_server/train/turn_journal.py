"""`TurnJournal`: the turns of groups that have not finished, on the disk, until the group is in the `GroupJournal`.

With `--replay-actions`, the `GroupJournal` hands each turn on when the environment has answered it, and each episode
that has ended while others of its group go on. A resumed run continues the episodes from there (`open_groups`).

A thread writes what has come together in `_FLUSH_SECONDS`, as one record that is flushed to the disk. So a kill loses
the turns of this time, and of the flush; nobody waits for the disk. Turns that cannot be written do not end the run.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from verl_server.errors import VerlServerError
from verl_server.files.json_values import jsonable
from verl_server.files.record_file import Place, RecordFile, read_records
from verl_server.rollout.recorded_turns import EpisodeProgress
from verl_server.train.journal_records import GroupHead, decode_record, journal_paths, other_journals
from verl_server.watch.run_records import JournalFailed, RunEvent

logger = logging.getLogger(__name__)

_NAME = "turns"
_FLUSH_SECONDS = 0.5
"""Seconds between two writes: the turns of this time are lost in a kill."""
_MOST_WAITING = 256 * 2**20
"""Bytes that wait to be written. Beyond it, the disk is taken for one that does not answer."""
_COMPACT_BYTES = 16 * 2**20
"""Bytes that nobody needs before the file is written anew between two checkpoints."""
_CLOSE_SECONDS = 30.0
"""Seconds that `close` waits for the disk."""


class TurnRecord(GroupHead, kw_only=True):
    """A turn of an episode that goes on, or an episode that has ended, of a group that goes on."""

    base: str
    """`FinishedGroup.base`."""
    play: float
    """Wall time of the episode's first turn. An episode that began again has another one, and the latest counts."""
    progress: EpisodeProgress


def read_turns(folder: Path, is_wanted: Callable[[GroupHead], bool]) -> Iterator[TurnRecord]:
    """Yield the turns in all journals of a run's folder of the groups whose heads `is_wanted`.

    The turns of an episode are in their order, unless several files have them. Raise BadRequestError, which names the
    file, if one is damaged.
    """
    for path in journal_paths(folder, _NAME):
        for place, payload in read_records(path):
            for raw, head in _entries(payload, path, place):
                if is_wanted(head):
                    yield decode_record(raw, TurnRecord, path, place)


def _entries(payload: bytes, path: Path, place: Place) -> Iterator[tuple[msgspec.Raw, GroupHead]]:
    """Yield each turn of a record, and its head."""
    for raw in decode_record(payload, list[msgspec.Raw], path, place):
        yield raw, decode_record(raw, GroupHead, path, place)


class TurnJournal:
    """The writer of one rank's journal. Any thread may call it, and nobody waits for the disk."""

    def __init__(
        self, folder: Path, rank: int = 0, ranks: int = 1, note: Callable[[RunEvent], None] = lambda event: None
    ) -> None:
        """`note` takes the event of a journal that cannot be written. Nothing is created before the first turn."""
        self._rank = rank
        self._file = RecordFile(folder / f"{_NAME}-rank{rank}.msgpack")
        self._others = other_journals(folder, _NAME, rank, ranks)
        self._note = note
        self._index: list[tuple[Place, dict[tuple[int, str, int], int]]] | None = None
        """Place of each record, and (number, version, step) of a group -> bytes of its turns. None: the file was not
        read."""
        self._is_missing = False
        """True if the last turns could not be written."""
        self._lock = threading.Lock()
        # What follows is guarded by the lock.
        self._waiting: list[tuple[GroupHead, bytes]] = []
        self._bytes = 0
        self._plays: dict[tuple[int, int], float] = {}
        self._closed: set[int] = set()
        """Groups that have finished."""
        self._is_needed: Callable[[GroupHead], bool] = lambda head: True
        self._has_news = self._compacts = False
        """True if the file may have turns that nobody needs, and if these are removed at once."""
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="turn-journal", daemon=True)
        self._thread.start()

    def put(self, number: int, version: str, base: str, step: int, progress: EpisodeProgress) -> None:
        """Write a turn or an episode. It is encoded before this returns, so it may be changed afterwards."""
        place = number, progress.member
        with self._lock:
            if (progress.turn is not None and progress.turn.number == 0) or place not in self._plays:
                self._plays[place] = time.time()
            play = self._plays[place]
        record = TurnRecord(number=number, version=version, base=base, step=step, play=play, progress=progress)
        try:
            payload = msgspec.msgpack.encode(record, enc_hook=jsonable)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:  # a value of the environment
            self._fail(error)
            return
        with self._lock:
            is_full = self._bytes + len(payload) > _MOST_WAITING
            if not is_full:
                self._waiting.append((GroupHead(number=number, version=version, step=step), payload))
                self._bytes += len(payload)
        if is_full:
            self._fail(OSError(f"{_MOST_WAITING // 2**20} MiB of turns wait for the disk"))

    def go_on(self, plays: Mapping[tuple[int, int], float]) -> None:
        """Write further turns of episodes, (number, member), that are in the journal: `TurnRecord.play` of each."""
        with self._lock:
            self._plays.update(plays)

    def close_group(self, number: int) -> None:
        """Remove the turns of a group that has finished."""
        with self._lock:
            self._closed.add(number)
            self._plays = {place: play for place, play in self._plays.items() if place[0] != number}
            self._has_news = True

    def keep(self, is_needed: Callable[[GroupHead], bool], *, at_once: bool = False) -> None:
        """Remove the turns of groups that nobody needs. Without `at_once`, do it when they are many.

        `is_needed` is called in another thread.
        """
        with self._lock:
            self._is_needed, self._has_news = is_needed, True
            self._compacts = self._compacts or at_once

    def close(self) -> None:
        """Write what waits, and end the thread. A disk that does not answer is left behind."""
        self._end.set()
        self._thread.join(_CLOSE_SECONDS)
        if self._thread.is_alive():
            logger.error("%s: the disk did not answer for %d s.", self._file.path, _CLOSE_SECONDS)

    # -- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._end.wait(_FLUSH_SECONDS):
            self._flush()
        self._flush()
        self._file.close()

    def _flush(self) -> None:
        with self._lock:
            waiting, self._waiting, self._bytes = self._waiting, [], 0
            closed, is_needed = frozenset(self._closed), self._is_needed
            has_news, at_once, self._has_news, self._compacts = self._has_news, self._compacts, False, False

        def is_live(head: GroupHead) -> bool:
            return head.number not in closed and is_needed(head)

        try:
            self._append([(head, payload) for head, payload in waiting if head.number not in closed])
            if has_news:
                self._remove(is_live, at_once)
        except (OSError, VerlServerError) as error:
            self._fail(error)

    def _append(self, turns: Sequence[tuple[GroupHead, bytes]]) -> None:
        if not turns:
            return
        index = self._read()
        place = self._file.append(msgspec.msgpack.encode([msgspec.Raw(payload) for _, payload in turns]))
        index.append((place, _sizes((head, len(payload)) for head, payload in turns)))
        if self._is_missing:
            logger.warning("%s is written again. It lacks turns.", self._file.path)
            self._is_missing = False

    def _remove(self, is_live: Callable[[GroupHead], bool], at_once: bool) -> None:
        sizes = [
            (size, is_live(GroupHead(number=number, version=version, step=step)))
            for _, groups in self._read()
            for (number, version, step), size in groups.items()
        ]
        live, dead = sum(size for size, lives in sizes if lives), sum(size for size, lives in sizes if not lives)
        if dead and (at_once or dead >= max(_COMPACT_BYTES, live)):
            self._rewrite(is_live)
        for path in list(self._others) if at_once else []:
            heads = (head for place, payload in read_records(path) for _, head in _entries(payload, path, place))
            if not any(map(is_live, heads)):
                path.unlink(missing_ok=True)
                self._others.remove(path)

    def _rewrite(self, is_live: Callable[[GroupHead], bool]) -> None:
        payloads, groups = list[bytes](), list[dict[tuple[int, str, int], int]]()
        for place, payload in self._file.read():
            entries = [entry for entry in _entries(payload, self._file.path, place) if is_live(entry[1])]
            if entries:
                payloads.append(msgspec.msgpack.encode([raw for raw, _ in entries]))
                groups.append(_sizes((head, len(bytes(raw))) for raw, head in entries))
        self._index = list(zip(self._file.rewrite(payloads), groups, strict=True))

    def _read(self) -> list[tuple[Place, dict[tuple[int, str, int], int]]]:
        if self._index is None:
            path = self._file.path
            self._index = [
                (place, _sizes((head, len(bytes(raw))) for raw, head in _entries(payload, path, place)))
                for place, payload in self._file.read()
            ]
        return self._index

    def _fail(self, error: Exception) -> None:
        """Log the first of several failures in a row, and note it as an event."""
        if not self._is_missing:
            self._is_missing = True
            logger.error(
                "Turns cannot be written to %s: %s. The run goes on. If it is killed, it plays their episodes from an "
                "earlier turn, or from the beginning.",
                *(self._file.path, error),
            )
            self._note(JournalFailed(rank=self._rank, file=self._file.path.name, error=str(error)))


def _sizes(turns: Iterator[tuple[GroupHead, int]]) -> dict[tuple[int, str, int], int]:
    """Return (number, version, step) of each group -> bytes of its turns."""
    found: dict[tuple[int, str, int], int] = defaultdict(int)
    for head, size in turns:
        found[head.number, head.version, head.step] += size
    return found

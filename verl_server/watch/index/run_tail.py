"""`RunTail`: metrics, events, evaluations and state of one run, for a process that follows a folder that may grow.

The page's server asks it, from any thread. `poll` reads what was appended since the last call and nothing else.
Metrics are kept as columns of numbers, and of an event only its place in the file, so that a run of 100,000 steps takes
some ten megabytes. Nothing in the folder is changed, and no lock is taken.
"""

from __future__ import annotations

import math
import threading
from array import array
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import msgspec

from verl_server.errors import BadRequestError
from verl_server.files.json_files import parse_json
from verl_server.files.segment_tail import Line, SegmentTail
from verl_server.watch.index.evaluation_tail import EvaluationRow, EvaluationTail
from verl_server.watch.index.event_tail import EventTail, StepTimes
from verl_server.watch.index.number_columns import NumberColumns
from verl_server.watch.index.run_state import RunState, StoredSettings, state_of
from verl_server.watch.index.step_rows import StepRows
from verl_server.watch.run_files import Lineage, label_of
from verl_server.watch.run_records import AnyEvent

__all__ = ["EvaluationRow", "RunState", "RunTail", "StepTimes"]

_NO_FIGURES = ("step", "rank")
_PHASES = "phases."
_PIECE = 4 * 2**20
"""Bytes that are read at once, under the lock."""


class RunTail:
    def __init__(self, path: Path) -> None:
        """`path` is the folder of a run, or a file of trajectories. Nothing is read before `poll`."""
        self.path = path
        self.generation = 0
        """Grows when a call of `poll` found something new."""
        self.settings: dict[str, Any] = {}
        """The settings that the run stored; {} if there are none."""
        self.state: RunState = "unknown"
        self._settings = StoredSettings(path)
        self._polling = threading.Lock()
        self._lock = threading.RLock()
        """Held while columns are read or grow, but not from one piece of a long file to the next."""
        self._forget()

    def _forget(self) -> None:
        self._metrics = _Metrics(self.path)
        self._events = EventTail(self.path)
        self._evaluations = EvaluationTail(self.path)

    def poll(self) -> bool:
        """Read what is new. Return True if something was. A fault of a file becomes a warning, never an exception."""
        with self._polling:
            return self._poll()

    def _poll(self) -> bool:
        has_changed = False
        if any(tail.is_replaced() for tail in self._tails):
            with self._lock:
                self._forget()
            has_changed = True
        has_more = self.path.is_dir()
        while has_more:
            before = self._position
            with self._lock:
                has_more = self._events.read() | self._metrics.read() | self._evaluations.read()
                has_changed |= self._position != before
        settings, state = self._settings.read(), state_of(self.path, self._events.last_start_or_end)
        has_changed |= settings != self.settings or state != self.state
        with self._lock:
            self.settings, self.state = settings, state
            self.generation += has_changed
        return has_changed

    @property
    def _tails(self) -> list[SegmentTail]:
        return [self._metrics.tail, self._evaluations.tail, *self._events.tails]

    @property
    def _position(self) -> int:
        return sum(tail.position for tail in self._tails)

    @property
    def lineage(self) -> Lineage:
        """The starts of the run."""
        with self._lock:
            return self._events.lineage

    @property
    def exit_status(self) -> int | None:
        """Exit status of a run that has ended, None before and for a run that tells none."""
        end = self._events.end
        return None if end is None else end.exit_status

    @property
    def error(self) -> str | None:
        """The error that ended the run."""
        end = self._events.end
        return None if end is None else end.error

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes of metrics, evaluations and events that were read, and bytes of the files."""
        return self._position, sum(tail.size for tail in self._tails)

    @property
    def damaged(self) -> int:
        """Number of lines that could not be read."""
        return sum(tail.faults.damaged for tail in self._tails)

    @property
    def warnings(self) -> list[str]:
        """The first faults of the files, each with its file."""
        return [text for tail in self._tails for text in tail.faults.warnings] + self._settings.warnings

    @property
    def started(self) -> float | None:
        """Wall time of the first event, or of the first line of metrics."""
        return min((t for t in (self._events.first_time, self._metrics.first_time) if t), default=None)

    @property
    def last(self) -> float | None:
        """Wall time of the last event, or of the last line of metrics."""
        return max((t for t in (self._events.last_time, self._metrics.last_time) if t), default=None)

    def steps(self, *, lost: bool = False) -> list[int]:
        """Return the steps that have metrics, in their order."""
        with self._lock:
            rows = self._metrics.rows
            return [rows.step(row) for row in rows.between(self._events.lineage, None, None, lost=lost)]

    def names(self) -> list[str]:
        """Return the names of the figures that some line has, in the order in which they appeared.

        Those of the phases, such as "phases.train", are seconds of the event `step_ended`.
        """
        with self._lock:
            own = [name for name in self._metrics.columns.names() if not name.startswith(_PHASES)]
            return own + [_PHASES + name for name in self._events.phase_names()]

    def metrics(
        self,
        names: Sequence[str] | None = None,
        first: int | None = None,
        last: int | None = None,
        *,
        lost: bool = False,
    ) -> dict[str, list[Any]]:
        """Return columns of one length: step, time and the figures `names` of the steps `first` to `last`, included.

        A figure in a dict has a name like "losses.kl". None stands for a line without the figure, NaN for a figure that
        was not finite. Without `lost`, steps that a resumed run ran again are left out. An unknown name is a column of
        None. Without `names`, all figures are returned: a long run is to be asked for a few names at a time.
        """
        with self._lock:
            found = self._metrics
            rows = found.rows.between(self._events.lineage, first, last, lost=lost)
            steps = [found.rows.step(row) for row in rows]
            columns: dict[str, list[Any]] = {"step": steps, "time": found.columns.column("time", rows)}
            for name in self.names() if names is None else names:
                if name.startswith(_PHASES):
                    columns[name] = self._events.phase(name.removeprefix(_PHASES), steps)
                elif name not in columns:
                    columns[name] = found.columns.column(name, rows)
            return columns

    def line(self, step: int) -> dict[str, Any] | None:
        """Return the whole line of metrics of a step, or None if there is none."""
        with self._lock:
            rows = self._metrics.rows.between(self._events.lineage, step, step)
            return self._metrics.line(rows[-1]) if rows else None

    def events(
        self, kinds: Collection[str] | None = None, after: int = 0, limit: int = 1000, *, newest: bool = False
    ) -> list[tuple[int, AnyEvent]]:
        """Return (number, event) of at most `limit` events with a number above `after`, of some kinds or of all.

        Numbers begin at 1, and stay. With `newest`, return the last ones, still in the order of their numbers.
        """
        with self._lock:
            return self._events.events(kinds, after, limit, newest=newest)

    def times(self, first: int | None = None, last: int | None = None, *, lost: bool = False) -> list[StepTimes]:
        """Return when the steps `first` to `last`, included, ran."""
        with self._lock:
            return self._events.times(first, last, lost=lost)

    def steps_between(self, begin: float, end: float, limit: int = 1000) -> list[StepTimes]:
        """Return the steps that ran in a window of time, lost ones too, evenly chosen if they exceed `limit`."""
        with self._lock:
            return self._events.steps_between(begin, end, limit)

    def evaluations(self, *, lost: bool = False) -> list[EvaluationRow]:
        """Return the evaluations that have ended, by their steps. With `lost`, those of weights that are lost, too."""
        with self._lock:
            records = self._evaluations.records(None if lost else self._events.lineage)
            began = self._events.evaluations_began
        return [EvaluationRow(record=r, began=began.get((r.incarnation, r.step), r.time - r.seconds)) for r in records]

    def evaluation_playing(self) -> tuple[int, float] | None:
        """Return the step and the begin of the evaluation that plays now; None if there is none."""
        with self._lock:
            start = self._events.last_start_or_end
            if self.state != "running" or start is None:
                return None
            newest = next(reversed(self._events.evaluations_began.items()), None)
            if newest is None:
                return None
            (incarnation, step), began = newest
            has_ended = incarnation != start.incarnation or self._evaluations.has(incarnation, step)
            return None if has_ended else (step, began)

    def phases(self, step: int) -> dict[str, float]:
        """Return phase -> seconds of a step that has ended, else {}."""
        found = self.times(step, step)
        return found[-1].phases if found else {}


class _Metrics:
    """The lines of metrics.jsonl."""

    def __init__(self, folder: Path) -> None:
        self.tail = SegmentTail(folder / "metrics.jsonl")
        self.rows = StepRows()
        self.columns = NumberColumns()
        self.first_time: float | None = None
        self.last_time: float | None = None
        self._files, self._offsets = array("H"), array("q")

    def read(self) -> bool:
        return self.tail.read(self._take, _PIECE)

    def line(self, row: int) -> dict[str, Any]:
        return _parsed(self.tail.line_at(self._files[row], self._offsets[row]), str(self.tail.path))

    def _take(self, line: Line) -> None:
        content = _parsed(line.data, line.where)
        label = label_of(content, line.where)
        if label.step is None:
            raise BadRequestError(f"{line.where}: the line has no step")
        row = self.rows.append(label.step, label.incarnation, line.where)
        self._files.append(line.file)
        self._offsets.append(line.offset)
        if label.time is not None:
            self.first_time = label.time if self.first_time is None else self.first_time
            self.last_time = label.time
        for name in _NO_FIGURES:
            content.pop(name, None)
        _restore_not_finite(content)
        self.columns.append(row, content)


def _parsed(line: bytes, where: str) -> dict[str, Any]:
    """Return the object of a line. Other writers than ours may have written NaN."""
    try:
        content = msgspec.json.decode(line)
    except (msgspec.DecodeError, ValueError, RecursionError):
        content = parse_json(line, where)
    if not isinstance(content, dict):
        raise BadRequestError(f"{where}: the line is no JSON object")
    return content


def _restore_not_finite(content: dict[str, Any]) -> None:
    """Put NaN in the place of the nulls that stand for it at the outermost level. Others are absent figures."""
    names = content.pop("not_finite", None)
    for name in names if isinstance(names, list) else ():
        if isinstance(name, str) and name in content and content[name] is None:
            content[name] = math.nan

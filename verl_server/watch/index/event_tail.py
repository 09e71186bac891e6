"""`EventTail`: the events of a run as they are appended, and when each step ran. `RunTail` asks it.

An event is kept as its kind and its place, and read again when it is asked for. The starts and the last end of the run
are kept whole.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from heapq import merge
from itertools import islice
from pathlib import Path

import msgspec

from verl_server.errors import BadRequestError
from verl_server.files.segment_tail import Line, SegmentTail
from verl_server.watch.index.number_columns import NumberColumns
from verl_server.watch.index.step_rows import StepRows
from verl_server.watch.run_files import Lineage, decode_event, rank_paths
from verl_server.watch.run_records import (
    AnyEvent,
    EvaluationBegan,
    RunEnded,
    RunResumed,
    RunStarted,
    StepBegan,
    StepEnded,
)

_PIECE = 4 * 2**20
"""Bytes that are read at once."""
_MOST_PHASES = 100
"""Names of phases beyond these are left out."""
_LOOK_BACK = 16
"""Steps among which the begin of a step that ended is sought."""


class StepTimes(msgspec.Struct, kw_only=True):
    """When a step ran. Times are wall times in seconds since 1970."""

    step: int
    incarnation: str
    began: float
    ended: float | None
    """None: the step runs, or the run ended in it."""
    phases: dict[str, float]
    """Phase -> seconds, in the order of the phases. {} before the end."""
    is_lost: bool
    """True if a resumed run ran the step again."""


class EventTail:
    def __init__(self, folder: Path) -> None:
        self.tails = [SegmentTail(folder / "events.jsonl")]
        """One for each file with events: those of rank 0 first."""
        self.lineage = Lineage(iter(()))
        self.last_start_or_end: RunStarted | RunResumed | RunEnded | None = None
        self.first_time: float | None = None
        self.last_time: float | None = None
        self.evaluations_began: dict[tuple[str, int], float] = {}
        """(incarnation, step) of an evaluation -> time of its begin."""
        self._folder = folder
        self._starts: list[AnyEvent] = []
        self._kinds: dict[str, array[int]] = {}
        """Kind -> numbers of its events."""
        self._sources, self._files, self._offsets = array("H"), array("H"), array("q")
        """Of each event: number of its tail, number of the tail's file, and place in the file."""
        self._rows = StepRows()
        self._began, self._ended = array("d"), array("d")
        """Times of each row of `_rows`. An end that is not known is -1."""
        self._phases = NumberColumns()
        self._phase_order: list[str] = []
        """The phases of all steps in their order in a step, also of those that few steps have."""

    @property
    def end(self) -> RunEnded | None:
        """The end of the run, unless it goes on."""
        event = self.last_start_or_end
        return event if isinstance(event, RunEnded) else None

    def read(self) -> bool:
        """Read a piece of what is new. Return True if there is more."""
        known = {tail.path for tail in self.tails}
        self.tails += [SegmentTail(path) for path in rank_paths(self._folder, "events") if path not in known]
        has_more = False
        for source, tail in enumerate(self.tails):
            has_more |= tail.read(lambda line, source=source: self._take(source, line), _PIECE)  # type: ignore[misc]
        return has_more

    def events(
        self, kinds: Collection[str] | None, after: int, limit: int, *, newest: bool
    ) -> list[tuple[int, AnyEvent]]:
        """See `RunTail.events`. An event whose file was removed is left out."""
        wanted = self._numbers(kinds, max(0, after))
        chosen = wanted[max(0, len(wanted) - limit) :] if newest else wanted[: max(0, limit)]
        return [(number, event) for number in chosen if (event := self._event(number - 1)) is not None]

    def times(self, first: int | None, last: int | None, *, lost: bool) -> list[StepTimes]:
        """See `RunTail.times`."""
        return [self._times(row) for row in self._rows.between(self.lineage, first, last, lost=lost)]

    def phase_names(self) -> list[str]:
        known = self._phases.names()
        return [name for name in self._phase_order if name in known]

    def phase(self, name: str, steps: Iterable[int]) -> list[float | None]:
        """Return the seconds of a phase in some steps, None where they are unknown. Lost steps are not considered."""
        rows = self._rows.between(self.lineage, None, None)
        found = dict(zip(map(self._rows.step, rows), self._phases.column(name, rows), strict=True))
        return [found.get(step) for step in steps]

    def steps_between(self, begin: float, end: float, limit: int) -> list[StepTimes]:
        """See `RunTail.steps_between`."""
        now = self.last_time or 0.0
        found = [
            row
            for row, (began, ended) in enumerate(zip(self._began, self._ended, strict=True))
            if began <= end and begin <= (now if ended < 0 else ended)
        ]
        count = min(limit, len(found))
        return [self._times(found[i * len(found) // count]) for i in range(count)]

    def _numbers(self, kinds: Collection[str] | None, after: int) -> Sequence[int]:
        if kinds is None:
            return range(after + 1, len(self._offsets) + 1)
        found = [self._kinds[kind] for kind in set(kinds) if kind in self._kinds]
        return array("I", merge(*(islice(numbers, bisect_right(numbers, after), None) for numbers in found)))

    def _event(self, index: int) -> AnyEvent | None:
        tail = self.tails[self._sources[index]]
        try:
            return decode_event(tail.line_at(self._files[index], self._offsets[index]), str(tail.path))
        except BadRequestError:
            return None

    def _take(self, source: int, line: Line) -> None:
        event = decode_event(line.data, line.where)
        if event is None:
            return
        match event:
            case RunStarted() | RunResumed():
                self.last_start_or_end = event
                self._starts.append(event)
                self.lineage = Lineage(iter(self._starts))
            case RunEnded():
                self.last_start_or_end = event
            case StepBegan():
                self._begin(event, event.time, line.where)
            case StepEnded():
                self._end(event, line.where)
            case EvaluationBegan():
                self.evaluations_began[event.incarnation, event.step] = event.time
        self._sources.append(source)
        self._files.append(line.file)
        self._offsets.append(line.offset)
        kind = str(type(event).__struct_config__.tag)
        self._kinds.setdefault(kind, array("I")).append(len(self._offsets))
        self.first_time = event.time if self.first_time is None else self.first_time
        self.last_time = event.time

    def _begin(self, event: StepBegan | StepEnded, began: float, where: str) -> int:
        row = self._rows.append(event.step, event.incarnation, where)
        self._began.append(began)
        self._ended.append(-1.0)
        return row

    def _end(self, event: StepEnded, where: str) -> None:
        newest = range(len(self._rows) - 1, max(-1, len(self._rows) - 1 - _LOOK_BACK), -1)
        place = (event.step, event.incarnation)
        row = next((row for row in newest if (self._rows.step(row), self._rows.incarnation(row)) == place), None)
        if row is None or self._ended[row] >= 0:  # the line of its begin was damaged
            row = self._begin(event, event.time - sum(event.phases.values()), where)
        self._ended[row] = event.time
        self._phases.append(row, event.phases)
        before = 0
        for name in event.phases:
            if name not in self._phase_order:
                if len(self._phase_order) == _MOST_PHASES:
                    break
                self._phase_order.insert(before, name)
            before = self._phase_order.index(name) + 1

    def _times(self, row: int) -> StepTimes:
        step, incarnation, ended = self._rows.step(row), self._rows.incarnation(row) or "", self._ended[row]
        phases = self._phases.row(row)
        return StepTimes(
            step=step,
            incarnation=incarnation,
            began=self._began[row],
            ended=None if ended < 0 else ended,
            phases={name: phases[name] for name in self._phase_order if name in phases},
            is_lost=not self.lineage.has(step, incarnation),
        )

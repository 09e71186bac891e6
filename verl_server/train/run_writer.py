"""`RunWriter`: one rank's writer of the files of a training run. `watch.run_records` describes the lines.

    metrics.jsonl              one `StepMetrics` for each step
    errors.jsonl               one `Failure` for each episode that failed
    events.jsonl               what happened to the run, its servers and its steps, one event a line
    trajectories-rankN.jsonl   every trajectory of rank N
    trained-rankN.jsonl        what the trainer of rank N computed for each trajectory that it trained
    untrained-rankN.jsonl      trajectories of rank N that ended in a step which the run did not complete
    evaluations.jsonl          one `Evaluation` for each time that the held-out tasks were played
    held-out-rankN.jsonl       trajectories of rank N in evaluations
    events-rankN.jsonl         segments that rank N > 0 has removed, and faults of its journal
    index-rankN.sqlite         a row for each line about a trajectory of rank N (`watch.index`), for readers

A file with the number of a rank is written by that rank, the others by rank 0. Lines are only appended: a resumed run
appends the steps that run again under another incarnation, and `run_files` tells them from the lost ones. Files are
rotated by size (`files.segments`). Any thread may call a `RunWriter`.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from verl_server.files.json_values import jsonable
from verl_server.files.segments import SEGMENT_BYTES, Segments, remove_oldest, segment_files
from verl_server.rollout.trajectory import Trajectory, labelled
from verl_server.train.metrics import StepMetrics
from verl_server.train.rollout_report import Failure
from verl_server.watch.index.index_file import IndexFile
from verl_server.watch.index.line_rows import Row, trained_row, trajectory_row
from verl_server.watch.index.row_kinds import index_of_rank
from verl_server.watch.run_files import rank_paths
from verl_server.watch.run_records import (
    Evaluation,
    JournalFailed,
    Label,
    RunEvent,
    RunResumed,
    RunStarted,
    SegmentRemoved,
    TrainedTrajectory,
)

logger = logging.getLogger(__name__)

GIB = 2**30
KEPT_BYTES = 16 * GIB
"""Default of the size of all trajectories of a run."""
_BOUNDED = ("trajectories", "trained", "held-out")
_SEGMENTS = 8
"""Segments that a bound of the size holds at least, so that removing one removes a small part."""


class RunWriter:
    def __init__(
        self,
        folder: Path,
        incarnation: str,
        *,
        rank: int = 0,
        ranks: int = 1,
        kept_bytes: int = KEPT_BYTES,
    ) -> None:
        """Take `kept_bytes`, the most bytes of trajectories of all ranks. 0 writes no trajectories.

        Nothing is created before the first line is written.
        """
        self.folder = folder
        self.incarnation = incarnation
        self._rank = rank
        self._kept_bytes = kept_bytes // ranks
        self._lock = threading.RLock()
        """Held while lines are written and segments are removed: events are in the order of their times, and no two
        threads remove one segment. Reentrant, because a removed segment is an event."""
        segment_bytes = min(SEGMENT_BYTES, max(1, self._kept_bytes // _SEGMENTS))
        self._trajectories = Segments(folder / f"trajectories-rank{rank}.jsonl", segment_bytes)
        self._trained = Segments(folder / f"trained-rank{rank}.jsonl", segment_bytes)
        self._held_out = Segments(folder / f"held-out-rank{rank}.jsonl", segment_bytes)
        # Files of an earlier start with more ranks are bounded, too, because no rank writes them now.
        kept = (self._trajectories, self._trained, self._held_out)
        own = [path for kind in _BOUNDED for path in rank_paths(folder, kind) if _rank_of(path) % ranks == rank]
        self._bounded = list(dict.fromkeys([*(file.path for file in kept), *own]))
        self._size = sum(file.stat().st_size for path in self._bounded for file in segment_files(path))
        self._index = IndexFile(index_of_rank(folder, rank))
        self._untrained = Segments(folder / f"untrained-rank{rank}.jsonl")
        self._metrics = Segments(folder / "metrics.jsonl")
        self._errors = Segments(folder / "errors.jsonl")
        self._evaluations = Segments(folder / "evaluations.jsonl")
        self._events = Segments(folder / (f"events-rank{rank}.jsonl" if rank else "events.jsonl"))

    def close(self) -> None:
        trajectories = (self._trajectories, self._trained, self._untrained, self._held_out)
        files = (*trajectories, self._metrics, self._errors, self._evaluations, self._events)
        with self._lock:
            for file in files:
                file.close()
            self._index.close()

    def begin(self, event: RunStarted | RunResumed) -> None:
        """Write the event of this start. Readers need it to tell the lines of several starts from each other.

        Rank 0 calls it before anything else is written. Raise OSError if it cannot be written.
        """
        self._append_event(event)

    def note(self, event: RunEvent) -> None:
        """Write an event with the time of now. On ranks > 0, do nothing unless it is about the rank's own files.

        An event that cannot be written is logged, and does not end the run.
        """
        if self._rank and not isinstance(event, SegmentRemoved | JournalFailed):
            return
        try:
            self._append_event(event)
        except OSError as error:
            logger.error("The event %s cannot be written: %s", type(event).__name__, error)

    def record(self, metrics: StepMetrics, failures: Sequence[Failure] = ()) -> None:
        """Append one step to metrics.jsonl and errors.jsonl. Rank 0 calls it. Set `not_finite` of the step."""
        metrics.not_finite = _not_finite(dataclasses.asdict(metrics))
        label = msgspec.structs.asdict(self._label(metrics.step))
        self._errors.append(_lines(label | msgspec.structs.asdict(failure) for failure in failures))
        values = dataclasses.asdict(metrics)
        for name, figures in values["environments"].items():  # within an object, null is what was not finite
            values["environments"][name] = {key: figure for key, figure in figures.items() if figure is not None}
        self._metrics.append(_lines([label | _without_mixture(values)]))

    def record_trajectories(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Append this rank's trajectories of a step. Every rank calls it with its own."""
        if self._kept_bytes and trajectories:
            label = self._label(step)
            lines = _lines(labelled(trajectories, **msgspec.structs.asdict(label)))
            self._keep(
                self._trajectories, lines, lambda: [trajectory_row("trajectory", label, t) for t in trajectories]
            )

    def record_line(self, line: bytes, row: Row) -> None:
        """Append a trajectory as its line, which has its label.

        `row` is its row in the index. It begins with the kind: trajectory, or held-out.
        """
        if self._kept_bytes:
            self._keep(self._held_out if row[0] == "held-out" else self._trajectories, [line], lambda: [row])

    def record_held_out(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Append this rank's trajectories of an evaluation. `step` is `Evaluation.step`."""
        label = self._label(step)
        for trajectory in trajectories:
            (values,) = labelled([trajectory], **msgspec.structs.asdict(label))
            (line,) = _lines([values])
            self.record_line(line, trajectory_row("held-out", label, trajectory))

    def record_evaluation(self, evaluation: Evaluation) -> None:
        """Append an evaluation to evaluations.jsonl. Rank 0 calls it."""
        evaluation.incarnation, evaluation.time = self.incarnation, time.time()
        self._evaluations.append(_lines([_without_mixture(msgspec.to_builtins(evaluation))]))

    def record_trained(self, trained: Sequence[TrainedTrajectory]) -> None:
        """Append what the trainer computed for this rank's trajectories. Every rank calls it with its own."""
        if self._kept_bytes and trained:
            for record in trained:
                record.rank, record.incarnation, record.time = self._rank, self.incarnation, time.time()
            self._keep(self._trained, _lines(trained), lambda: [trained_row(record) for record in trained])

    def record_untrained(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Append this rank's trajectories that ended in a step which the run does not complete."""
        if trajectories:
            label = self._label(step)
            places = self._untrained.append(_lines(labelled(trajectories, **msgspec.structs.asdict(label))))
            self._index.add(places, lambda: [trajectory_row("untrained", label, t) for t in trajectories])

    def _keep(self, file: Segments, lines: Iterable[bytes], rows: Callable[[], Sequence[Row]]) -> None:
        """Append lines to a bounded file, with `rows` to the index.

        Remove the oldest segments with trajectories beyond the bound.
        """
        with self._lock:
            places = file.append(lines)
            self._index.add(places, rows)
            self._size += sum(place.length for place in places)
            if self._size > self._kept_bytes:  # looking for the segments takes longer than writing an episode
                for removed, size in remove_oldest(self._bounded, self._kept_bytes):
                    self._size -= size
                    self.note(SegmentRemoved(rank=_rank_of(removed), file=removed.name, bytes=size))

    def _label(self, step: int) -> Label:
        return Label(step=step, rank=self._rank, incarnation=self.incarnation, time=time.time())

    def _append_event(self, event: RunEvent) -> None:
        with self._lock:
            event.time, event.incarnation = time.time(), self.incarnation
            self._events.append(_lines([event]))


def _rank_of(file: Path) -> int:
    """Return N of KIND-rankN.jsonl, or of a segment of it."""
    return int(file.name.partition("-rank")[2].partition(".")[0])


def _lines(records: Iterable[Any]) -> Iterable[bytes]:
    return (msgspec.json.encode(record, enc_hook=jsonable) + b"\n" for record in records)


def _without_mixture(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a line, without the figures of environments if the run has no mixture."""
    return values if values["environments"] else {name: v for name, v in values.items() if name != "environments"}


def _not_finite(figures: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return the names of the figures that are NaN or infinite, which a line of JSON cannot hold."""
    names = []
    for name, value in figures.items():
        if isinstance(value, dict):
            names += _not_finite(value, f"{prefix}{name}.")
        elif isinstance(value, float) and not math.isfinite(value):
            names.append(prefix + name)
    return names

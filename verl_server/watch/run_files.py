"""Reads the files of a training run: metrics, events, and what is known of each trajectory.

A run that was killed and resumed has two sorts of lines about a step: those of the run that goes on, and lost ones, of
an incarnation that had gone further than the checkpoint. By default, the functions here yield the first sort only. All
of them read a run that grows, and folders of earlier versions.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from verl_server.errors import BadRequestError
from verl_server.files.json_files import convert, decode_json, parse_json
from verl_server.files.segments import read_segments
from verl_server.watch.run_records import AnyEvent, Evaluation, Label, RunResumed, RunStarted, TrainedTrajectory
from verl_server.weight_version import WeightVersion

_SEGMENT = re.compile(r"\.[1-9][0-9]*$")


class Lineage:
    """The starts of a run. It says which lines are of the run that goes on."""

    def __init__(self, events: Iterator[AnyEvent]) -> None:
        """`events` are those of the run, in order."""
        starts = [event for event in events if isinstance(event, RunStarted | RunResumed)]
        self._ends: dict[str | None, float] = {}
        end = float("inf")
        for start in reversed(starts):
            self._ends.setdefault(start.incarnation, end)
            end = min(end, start.next_step)
        self._ends.setdefault(None, end)

    def has(self, step: int | None, incarnation: str | None) -> bool:
        """Return True unless a later start runs `step` of `incarnation` again.

        An incarnation that no event names counts as one before the first event.
        """
        return step is None or step < self.end(incarnation)

    def end(self, incarnation: str | None) -> float:
        """Return the first step of `incarnation` that a later start runs again; infinity if there is none."""
        return self._ends.get(incarnation, self._ends[None])


def rank_paths(folder: Path, kind: str) -> list[Path]:
    """Return the paths KIND-rankN.jsonl that have segments in a folder, in the order of the ranks."""
    ranks = set()
    for file in folder.glob(f"{kind}-rank*.jsonl"):
        rank = _SEGMENT.sub("", file.stem).removeprefix(f"{kind}-rank")
        if rank.isascii() and rank.isdecimal():
            ranks.add(int(rank))
    return [folder / f"{kind}-rank{rank}.jsonl" for rank in sorted(ranks)]


def read_events(folder: Path) -> Iterator[AnyEvent]:
    """Yield the events of a run in the order of their times. Kinds that this version does not know are left out.

    Raise BadRequestError, which names the line, for a line that is damaged.
    """
    paths = [folder / "events.jsonl", *rank_paths(folder, "events")]
    yield from heapq.merge(*map(_events, paths), key=lambda event: event.time)


def read_lineage(folder: Path) -> Lineage:
    """Return the starts of a run. A folder of an earlier version has none, and no lost lines."""
    return Lineage(_events(folder / "events.jsonl"))


def read_metrics(folder: Path, *, lost: bool = False) -> Iterator[dict[str, Any]]:
    """Yield the lines of metrics.jsonl. With `lost`, those of steps that ran again, too.

    Raise BadRequestError, which names the line, for a line that is damaged.
    """
    lineage = read_lineage(folder)
    for where, line in read_segments(folder / "metrics.jsonl"):
        label = read_label(line, where)
        if lost or lineage.has(label.step, label.incarnation):
            yield parse_json(line, where)


def read_trained(folder: Path, *, lost: bool = False) -> Iterator[TrainedTrajectory]:
    """Yield what the trainer computed for each trained trajectory of all ranks. `lost` is as in `read_metrics`."""
    lineage = read_lineage(folder)
    for path in rank_paths(folder, "trained"):
        for where, line in read_segments(path):
            trained = decode_json(line, TrainedTrajectory, where)
            if lost or lineage.has(trained.step, trained.incarnation):
                yield trained


def read_evaluations(folder: Path, *, lost: bool = False) -> Iterator[Evaluation]:
    """Yield the evaluations of a run. With `lost`, those of weights that a resumed run has lost, too.

    The weights of checkpoint-STEP are lost if the step that made them runs again. If STEP itself does, they are those
    from which the run went on.
    """
    lineage = read_lineage(folder)
    for where, line in read_segments(folder / "evaluations.jsonl"):
        evaluation = decode_json(line, Evaluation, where)
        if lost or lineage.has(evaluation.step - 1, evaluation.incarnation):
            yield evaluation


class Judged(Protocol):
    """What says how good the weights of an evaluation are: fields of `Evaluation`."""

    step: int
    reward: float | None
    incomplete: str | None


J = TypeVar("J", bound=Judged)


def best_evaluation(evaluations: Iterable[J]) -> J | None:
    """Return the evaluation with the highest mean reward, the later one of two equals; None if there is none.

    Evaluations that are incomplete or without a reward do not count.
    """
    best: J | None = None
    highest: tuple[float, int] | None = None
    for each in evaluations:
        if each.incomplete is None and each.reward is not None:
            rank = each.reward, each.step
            if highest is None or rank > highest:
                best, highest = each, rank
    return best


class _MetricsLabel(Label):
    weight_version: str | None = None


def read_label(line: bytes, where: str) -> Label:
    """Return the label of a line. Without `incarnation`, it is that of `weight_version`, if the line has one."""
    return _checked(decode_json(line, _MetricsLabel, where), where)


def label_of(content: dict[str, Any], where: str) -> Label:
    """Return the label of a line that was parsed, as `read_label` does."""
    return _checked(convert(content, _MetricsLabel, where), where)


def _checked(label: _MetricsLabel, where: str) -> Label:
    if label.step is not None and label.step < 0:
        raise BadRequestError(f"{where}: step is negative")
    if label.incarnation is None and label.weight_version is not None:
        version = WeightVersion.parse(label.weight_version)
        label.incarnation = None if version is None else version.incarnation
    return label


class _Kind(msgspec.Struct):
    kind: str


def decode_event(line: bytes, where: str) -> AnyEvent | None:
    """Return the event of a line, None for a kind that this version does not know. Raise BadRequestError otherwise."""
    try:
        return _EVENTS.decode(line)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        if decode_json(line, _Kind, where).kind not in _KINDS:
            return None
        raise BadRequestError(f"{where}: {error}") from None


def _events(path: Path) -> Iterator[AnyEvent]:
    for where, line in read_segments(path):
        if (event := decode_event(line, where)) is not None:
            yield event


_EVENTS: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)
_KINDS = {event.__struct_config__.tag for event in AnyEvent.__args__}

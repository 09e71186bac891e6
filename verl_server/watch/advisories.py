"""`Advisor`: what is wrong with a run, with the figure, its bound, the likely cause and the remedy (`Advisory`).

`train.run_advisor` judges each step of a run that trains, and writes, logs and obeys the advisories. `advisories_of`
returns those of a run's folder: what the run wrote, and for starts of earlier versions what its files show. The rules
are in `advisory_rules`. This module reads files and figures only, and does not import torch.

An advisory is written when it becomes true, and again when it gets much worse. It ends after five steps in a row in
which its figure was clearly within the bound, so that one about a figure near its bound does not come and go.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import msgspec

from verl_server.errors import BadRequestError
from verl_server.files.json_files import parse_json, read_json
from verl_server.files.segments import SegmentFollower
from verl_server.gap_bounds import CAUSES, DTYPE_BOUNDS, GROWING_STEPS, GapHistory
from verl_server.watch.advisory_rules.figures import Finding, Past, RunSettings, StepFigures
from verl_server.watch.advisory_rules.rules import RULES
from verl_server.watch.run_files import Lineage, decode_event, read_label
from verl_server.watch.run_records import Alarm, AlarmEnded, AnyEvent, RunResumed, RunStarted, Severity

GAP = "logprob_gap"
"""The advisory about the gap of log-probabilities between server and trainer. Its severity is error if the gap is far
above its bound or keeps growing."""
NAMES: Mapping[str, str] = {
    GAP: "server and trainer disagree about log-probabilities",
    **{rule.name: rule.about for rule in RULES},
}
"""Name of each advisory -> what it finds."""
_QUIET_STEPS = 5
"""Steps in a row clearly within the bound after which an advisory has ended."""
_END_LEVEL = 0.8
"""Share of a bound beyond which an advisory that is true stays so. Idle shares of steady runs vary by a tenth."""
_SEVERITIES = get_args(Severity)
_GAP_REMEDY = (
    "Look at the last push in events.jsonl, and compare --compute-dtype with the dtype of the servers, and the "
    "temperature and the masks of requests with those of the trainer."
)


class Advisory(msgspec.Struct, frozen=True, kw_only=True):
    """Something that is wrong with a run, as it was found in a step."""

    name: str
    """One of `NAMES`."""
    step: int
    """The step in which it was found."""
    figure: float | None
    """The figure that is judged. None in events of earlier versions, and if it is not finite."""
    bound: float | None
    """The bound of the figure. None as `figure`."""
    message: str
    """The figures, as a sentence without its period."""
    cause: str
    """Likely causes, without a period. "" in events of earlier versions, whose message has them."""
    remedy: str
    """The remedy, as sentences. "" as `cause`."""
    severity: Severity
    ended: int | None = None
    """Step in which it had ended. None while it is true."""

    def describe(self) -> str:
        """Return all of it as one text."""
        parts = [f"{self.message.rstrip('.')}.", f"Likely causes: {self.cause}." if self.cause else ""]
        parts += [f"Remedy: {self.remedy}"] if self.remedy else []
        where = "" if self.message.startswith("Step ") else f"Step {self.step}: "  # earlier versions wrote it
        return where + " ".join(filter(None, parts))

    def event(self, *, stops: bool) -> Alarm:
        """Return the event of this advisory. `stops`: it ends the run."""
        return Alarm(stops=stops, **{name: getattr(self, name) for name in _RECORDED})

    @staticmethod
    def of(event: Alarm) -> Advisory:
        """Return the advisory of an event, also of an earlier version, whose alarms had no severity."""
        fields = {name: getattr(event, name) for name in _RECORDED}
        return Advisory(**fields | {"severity": event.severity or ("error" if event.stops else "warning")})


_RECORDED = tuple(name for name in Advisory.__struct_fields__ if name != "ended")


@dataclass
class _Open:
    """An advisory that is true now."""

    written: Finding
    quiet: int = 0
    """Steps in a row clearly within the bound."""

    def is_worse(self, found: Finding) -> bool:
        """Return True if the figure is twice as far beyond its bound as when it was written, or it is more severe."""
        if _SEVERITIES.index(found.severity) > _SEVERITIES.index(self.written.severity):
            return True
        now, then = abs(found.figure - found.bound), abs(self.written.figure - self.written.bound)
        return now > then and now >= 2 * then  # an infinite figure is not worse than another one


@dataclass
class Advisor:
    """Judges the steps of one run, in order."""

    dtype: str | None = None
    """Dtype in which server and trainer compute, whose bounds the gap has. None: the gap is not judged."""
    past: Past = field(default_factory=Past)
    """The settings of the run, and facts of the steps of its earlier starts."""
    ended: list[str] = field(default_factory=list)
    """Names of the advisories that ended with the last call."""

    def __post_init__(self) -> None:
        self._gaps = GapHistory(DTYPE_BOUNDS[self.dtype]) if self.dtype is not None else None
        self._recent = {rule.name: deque[StepFigures](maxlen=rule.most) for rule in RULES}
        self._open: dict[str, _Open] = {}

    def recall(self, line: Mapping[str, Any]) -> None:
        """Take the line of a step that an earlier start of the run completed, as one of its first steps may be.

        The step is not judged again, because its cause may have been removed before the run goes on.
        """
        self.past.add(_figures(line))

    def judge_gap(self, step: int, mean: float, largest: float, kl: float) -> list[Advisory]:
        """Judge the gap of log-probabilities of a step. Call it before the step trains."""
        self.ended = []
        if self._gaps is None:
            return []
        verdict, found = self._gaps.judge(mean, largest), None
        if verdict is not None:
            grew = f"; it grew over {GROWING_STEPS} steps" if verdict.grows else ""
            found = Finding(
                figure=mean,
                bound=self._gaps.bounds.warn_mean,
                message=f"log-probabilities of server and trainer differ: mean {mean:.2g}, largest {largest:.2g}, KL "
                f"{kl:.2g} nats; {self._gaps.expected(str(self.dtype))}{grew}",
                cause=CAUSES,
                remedy=_GAP_REMEDY,
                severity="error" if verdict.is_error else "warning",
            )
        return self._news(GAP, step, found, is_near=self._gaps.is_beyond(mean, largest, _END_LEVEL))

    def judge(self, line: Mapping[str, Any], phases: Mapping[str, float]) -> list[Advisory]:
        """Judge a complete step: the fields of its line in metrics.jsonl, and the seconds of its phases.

        Return the advisories that have become true, or much worse.
        """
        figures = _figures(line)
        figures.phases = dict(phases)
        self.ended = []
        self.past.add(figures)
        news: list[Advisory] = []
        for rule in RULES:
            if not rule.has(figures):
                continue
            recent = self._recent[rule.name]
            recent.append(figures)
            if len(recent) >= rule.least:
                found = rule.judge(list(recent), self.past)
                is_near = rule.name in self._open and rule.judge(list(recent), self.past, _END_LEVEL) is not None
                news += self._news(rule.name, figures.step, found, is_near=is_near)
        return news

    def _news(self, name: str, step: int, found: Finding | None, *, is_near: bool) -> list[Advisory]:
        """Note what a rule found. Return the advisory if it is new or much worse.

        `is_near`: a figure within the bound is too close to it for the advisory to end.
        """
        known = self._open.get(name)
        if found is None:
            if known is not None:
                known.quiet = 0 if is_near else known.quiet + 1
                if known.quiet == _QUIET_STEPS:
                    del self._open[name]
                    self.ended.append(name)
            return []
        if known is not None:
            known.quiet = 0
            if not known.is_worse(found):
                return []
        self._open[name] = _Open(found)
        typed = found.typed(self.past.settings.option)
        return [Advisory(name=name, step=step, **msgspec.structs.asdict(typed))]


def _figures(line: Mapping[str, Any]) -> StepFigures:
    try:
        return msgspec.convert(line, StepFigures)
    except msgspec.ValidationError as error:
        raise BadRequestError(f"The metrics of step {line.get('step')!r:.20} are damaged: {error}") from None


class FolderAdvisories:
    """The advisories of a run's folder, also of one that grows: `read` goes on where it stopped."""

    def __init__(self, folder: Path) -> None:
        self._events = SegmentFollower(folder / "events.jsonl")
        self._metrics = SegmentFollower(folder / "metrics.jsonl")
        settings = _settings(folder)
        self._dtype = _dtype(settings)
        self._advisor = Advisor(self._dtype, Past(RunSettings.of(settings)))
        self._incarnation: str | None = None
        self._starts: dict[str, RunStarted | RunResumed] = {}
        self._found: list[tuple[str | None, Advisory]] = []
        """(incarnation, advisory), in the order in which they were found."""

    def read(self) -> list[Advisory]:
        """Return the advisories so far, by their steps. Those of steps that a resumed run ran again are left out.

        Raise BadRequestError, which names the line, for a line that is damaged.
        """
        for where, line in self._events.read():  # first, because a start is written before its steps
            self._take_event(decode_event(line, where))
        for where, line in self._metrics.read():
            label = read_label(line, where)
            start = self._starts.get(label.incarnation or "")
            if label.step is not None and not (start is not None and start.advises):
                self._judge(parse_json(line, where), label.incarnation, gap=start is None)
        lineage = Lineage(iter(self._starts.values()))
        found = [each for incarnation, each in self._found if lineage.has(each.step, incarnation)]
        return sorted(found, key=lambda advisory: advisory.step)

    def _take_event(self, event: AnyEvent | None) -> None:
        match event:
            case RunStarted() | RunResumed():
                self._starts[event.incarnation] = event
                for name in NAMES:  # the new start judges anew
                    self._end(name, event.next_step)
            case Alarm():
                self._found.append((event.incarnation, Advisory.of(event)))
            case AlarmEnded():
                self._end(event.name, event.step)

    def _judge(self, line: Mapping[str, Any], incarnation: str | None, *, gap: bool) -> None:
        """Judge a step of a start that did not do it. `gap`: no events tell of its gap either."""
        if incarnation != self._incarnation:
            self._advisor, self._incarnation = Advisor(self._dtype, self._advisor.past), incarnation
        mean, largest, kl = (line.get(name) for name in ("logprob_gap_mean", "logprob_gap", "logprob_kl"))
        if gap and mean is not None and largest is not None and kl is not None:
            self._add(self._advisor.judge_gap(line["step"], mean, largest, kl), line["step"])
        phases = {name: line.get(f"{name}_seconds") or 0.0 for name in ("rollout", "train", "sync")}
        self._add(self._advisor.judge(line, phases), line["step"])

    def _add(self, found: Sequence[Advisory], step: int) -> None:
        self._found += [(self._incarnation, advisory) for advisory in found]
        for name in self._advisor.ended:
            self._end(name, step)

    def _end(self, name: str, step: int) -> None:
        for place, (incarnation, each) in enumerate(self._found):
            if each.name == name and each.ended is None:
                self._found[place] = incarnation, msgspec.structs.replace(each, ended=step)


def advisories_of(folder: Path) -> list[Advisory]:
    """Return the advisories of a run's folder, by their steps, as `FolderAdvisories.read` does."""
    return FolderAdvisories(folder).read()


def _settings(folder: Path) -> Mapping[str, Any]:
    """Return the settings of a run's folder, none if they cannot be read."""
    try:
        return read_json(folder / "run.json")
    except BadRequestError:
        return {}


def _dtype(settings: Mapping[str, Any]) -> str | None:
    """Return the dtype of a run's passes, None if its settings do not tell."""
    found = "float32" if settings.get("command") == "demo" else settings.get("compute_dtype")
    return found if found in DTYPE_BOUNDS else None

"""Views of whole runs: the list of runs, settings, metrics, events. `app` serves them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from verl_server._version import __version__
from verl_server.watch.run_records import AnyEvent, RunEvent
from verl_server.watch.site.answers import runs as answers
from verl_server.watch.site.encoding import MOST_BYTES, encoded, encoded_page
from verl_server.watch.site.queries import Query
from verl_server.watch.site.runs import OpenRuns, Tail, WatchedRun
from verl_server.watch.site.texts import bounded, head, number, visible

POINTS = 1000
"""Default of the entries of a column."""
MOST_POINTS = 5000
_NAMES = 1000
"""Most names of figures of a run."""
_ENTRY_BYTES = 20
"""Bytes of a value with its bounds, at the least: more points than fit are not tried."""
_DIGITS, _TIME_DIGITS = 7, 14
EVENTS = 500
"""Most events of an answer."""


def describe(run: WatchedRun) -> answers.Run:
    """Return a run as the list shows it."""
    tail, progress = run.tail, run.progress()
    steps = tail.steps()
    episodes = 0 if progress is None else progress.episodes
    is_new = tail.state == "unknown" and tail.started is None and not episodes and not steps
    texts, problem = run.tokens()
    warnings = [head(warning, 500) for warning in tail.warnings[:20]]
    if progress is not None and progress.damaged:
        warnings.append(f"{progress.damaged} lines of trajectories are damaged. They are left out.")
    if progress is not None and progress.error:
        warnings.append(head(progress.error, 500))
    return answers.Run(
        id=run.id,
        name=head(run.path.resolve().name, 200),
        path=head(str(run.path), 1000),
        kind=run.kind,
        state="new" if is_new else tail.state,
        generation=run.generation(),
        started=tail.started,
        last=run.modified() if tail.last is None else tail.last,
        steps=len(steps),
        last_step=steps[-1] if steps else None,
        episodes=episodes,
        progress=answers.Progress(
            bytes=0 if progress is None else progress.bytes_indexed,
            total=0 if progress is None else progress.bytes_total,
        ),
        exit_status=tail.exit_status,
        error=None if tail.error is None else head(tail.error, 4000),
        tokenizer=None if texts is None else visible(str(texts.file.parent)),
        tokenizer_problem=problem or None,
        warnings=warnings,
    )


def runs_answer(runs: OpenRuns, query: Query) -> bytes:
    query.finish()
    found = [describe(run) for run in runs.runs.values()]
    answer = answers.Runs(runs=found, version=__version__)
    while len(body := encoded(answer)) > MOST_BYTES:
        answer.runs.pop()
        answer.left_out += 1
    return body


def settings_answer(run: WatchedRun, query: Query) -> bytes:
    query.finish()
    return encoded(answers.RunSettings(run=describe(run), settings=bounded(run.tail.settings)))


def live(run: WatchedRun) -> answers.Live:
    """Return what the live stream says of a run."""
    tail, progress = run.tail, run.progress()
    steps = tail.steps()
    return answers.Live(
        run=run.id,
        generation=run.generation(),
        state=tail.state,
        steps=len(steps),
        last_step=steps[-1] if steps else None,
        episodes=0 if progress is None else progress.episodes,
        progress=answers.Progress(
            bytes=0 if progress is None else progress.bytes_indexed,
            total=0 if progress is None else progress.bytes_total,
        ),
    )


def metrics_answer(run: WatchedRun, query: Query) -> bytes:
    """Return columns of the metrics. With more bytes than an answer may have, the points become fewer."""
    first, last = query.integer("from", 0), query.integer("to", 0)
    points = query.integer("points", 2, MOST_POINTS) or POINTS
    asked = query.text("names")
    query.finish()
    known = _names(run.tail)
    names = known if asked is None else [name for name in asked.split(",") if name in known]
    points = min(points, max(2, MOST_BYTES // (_ENTRY_BYTES * max(1, len(names)))))
    while True:
        body = encoded(_metrics(run, known, names, first, last, points))
        if len(body) <= MOST_BYTES or points == 2:
            return body
        points = max(2, points // 2)


def _names(tail: Tail) -> list[str]:
    return [name for name in tail.names() if "," not in name and len(name) <= 200][:_NAMES]


def _metrics(
    run: WatchedRun, known: list[str], names: Sequence[str], first: int | None, last: int | None, points: int
) -> answers.Metrics:
    all_steps = run.tail.steps()
    step: list[int] = []
    answer = answers.Metrics(
        run=run.id,
        names=known,
        step=step,
        values={},
        first=all_steps[0] if all_steps else None,
        last=all_steps[-1] if all_steps else None,
    )
    # One figure at a time: all columns of 100,000 steps as Python's numbers would take hundreds of megabytes.
    for name in names or [""]:
        column = run.tail.metrics([name] if name else [], first, last)
        steps = column["step"]
        width = max(1, math.ceil(len(steps) / points))
        if not answer.step:
            answer.step = [chunk[-1] for chunk in _chunks(steps, width)]
            answer.thinned = width
        if not name:
            continue
        buckets = [bucket_of(chunk) for chunk in _chunks(column[name], width)][: len(answer.step)]
        if not any(value is not None for _, value, _ in buckets):
            continue
        digits = _TIME_DIGITS if name == "time" else _DIGITS
        answer.values[name] = [number(value, digits) for _, value, _ in buckets]
        if width > 1:
            answer.low[name] = [number(low, digits) for low, _, _ in buckets]
            answer.high[name] = [number(high, digits) for _, _, high in buckets]
    return answer


def _chunks(column: list[Any], width: int) -> list[list[Any]]:
    return [column[start : start + width] for start in range(0, len(column), width)]


def bucket_of(column: list[Any]) -> tuple[float | None, float | None, float | None]:
    """Return least, mean and largest of the numbers; NaN or an infinity if one is among them: a chart must show it."""
    values = [float(value) for value in column if isinstance(value, int | float)]
    if not values:
        return None, None, None
    odd = [value for value in values if not math.isfinite(value)]
    mean = odd[0] if odd else math.fsum(values) / len(values)
    finite = [value for value in values if math.isfinite(value)] or odd
    return min(finite), mean, max(finite)


def events_answer(run: WatchedRun, query: Query) -> bytes:
    after = query.integer("after", 0) or 0
    kinds = query.text("kinds")
    query.finish()
    found = run.tail.events(None if kinds is None else kinds.split(","), after, EVENTS)
    events = [_event(place, event) for place, event in found]
    answer = answers.Events(events=events, next=found[-1][0] if len(found) == EVENTS else None)
    return encoded_page(answer, "events", lambda number: events[number - 1].number)


def _event(place: int, event: AnyEvent) -> answers.Event:
    facts = msgspec.to_builtins(event)
    step = facts.pop("step", None)
    for name in ("time", "incarnation", "kind"):
        facts.pop(name, None)
    assert isinstance(event, RunEvent)
    return answers.Event(
        number=place,
        kind=str(event.__struct_config__.tag),
        time=event.time,
        incarnation=head(event.incarnation, 100),
        step=step,
        facts=bounded(facts),
    )

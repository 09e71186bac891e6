"""The view "who waits": trainer, pushes, servers and episodes over a window of time. `app` serves it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from verl_server.watch.index import rows
from verl_server.watch.index.run_tail import StepTimes
from verl_server.watch.run_records import (
    AnyEvent,
    PushBegan,
    PushEnded,
    RunEnded,
    ServerHealed,
    ServerLaunched,
    ServerLost,
    ServerRelaunched,
)
from verl_server.watch.site.answers import lanes as answers
from verl_server.watch.site.answers.values import Number, Span
from verl_server.watch.site.encoding import encoded
from verl_server.watch.site.page_errors import PageError
from verl_server.watch.site.queries import Query
from verl_server.watch.site.runs import Tail, WatchedRun
from verl_server.watch.site.texts import head, number

_ROWS = 60
_MOST_ROWS = 300
_MOST_PARTS = 200
"""Most waits of an episode's lane. Neighbours of a longer episode become one."""
_MOST_STEPS = 1000
_MOST_EVENTS = 4000
"""Most events of a window that are read for its pushes."""
_MOST_EVALUATIONS = 1000
_LEAST_WAIT = 0.02
"""Share of an evaluation. A shorter time between two steps is not spent waiting for it."""
_POINTS = 300
_SERVER_EVENTS = ("server_launched", "server_lost", "server_relaunched", "server_healed", "run_ended")
_TRAINER_WORKS = ("train", "sync", "record")


def lanes_answer(run: WatchedRun, query: Query) -> bytes:
    begin, end = query.figure("from"), query.figure("to")
    limit = query.integer("rows", 0, _MOST_ROWS)
    query.finish()
    first, last = _extent(run)
    if first is None or last is None:
        answer = answers.Lanes(begin=None, end=None, first=None, last=None)
        answer.notes.append("No times are known yet.")
        return encoded(answer)
    begin = first if begin is None else begin
    end = last if end is None else end
    if end < begin:
        raise PageError(400, f"The window ends at {end:g}, before it begins at {begin:g}.", "Set from below to.")
    found = run.index.lanes(begin, end, _ROWS if limit is None else limit)
    steps = run.tail.steps_between(begin, end, _MOST_STEPS)
    pushes, notes = _pushes(run.tail, begin, end)
    evaluations = _evaluations(run.tail, begin, end, last)
    trainer = [phase for step in steps for phase in _phases(step, last)]
    if len(steps) < _MOST_STEPS:  # else some steps are left out, and what lies between two of them is unknown
        trainer += [phase for evaluation in evaluations for phase in _waits_for(evaluation, steps, begin, end)]
        trainer.sort(key=lambda phase: phase[1])
    counts = _counts(run.index.activity(begin, end, _POINTS), found.episodes)
    if found.unknown:
        notes.append(f"The times of {found.unknown} episodes are unknown: an earlier version recorded them.")
    answer = answers.Lanes(
        begin=begin,
        end=end,
        first=first,
        last=last,
        trainer=trainer,
        pushes=pushes,
        evaluations=evaluations,
        servers=_servers(run.tail, last),
        episodes=[_episode(row) for row in found.rows],
        total=found.episodes,
        counts=counts,
        idle=_idle(trainer, counts, begin, end, first, last),
        notes=notes,
    )
    return encoded(answer)


def _extent(run: WatchedRun) -> tuple[float | None, float | None]:
    """Return the first and the last time of a run: of its events, its steps and its episodes."""
    times = [time for time in (run.tail.started, run.tail.last) if time is not None]
    for step in run.index.steps():
        times += [time for time in (step.began, step.ended) if time is not None]
    return (min(times), max(times)) if times else (None, None)


def _phases(step: StepTimes, last: float) -> Iterator[tuple[str, float, float, int]]:
    """Yield the phases of a step, which lie one after the other and end with it.

    A step that has no end yet is one phase without a name. Times before the first phase are the trainer's wait.
    """
    if step.ended is None:
        yield "running", step.began, max(step.began, last), step.step
        return
    end = step.ended
    spans = []
    for name, seconds in reversed(step.phases.items()):
        begin = max(step.began, end - max(0.0, seconds))
        if end > begin:
            spans.append((head(name, 30), begin, end, step.step))
        end = begin
    yield from reversed(spans)


def _evaluations(tail: Tail, begin: float, end: float, last: float) -> list[answers.EvaluationSpan]:
    """Return the evaluations of a window, lost ones too. One that plays now ends at the newest time of the run."""
    found = [
        answers.EvaluationSpan(
            step=row.record.step,
            begin=row.began,
            end=row.ended,
            reward=number(row.record.reward),
            push_delay=number(row.record.push_delay),
            incomplete=None if row.record.incomplete is None else head(row.record.incomplete, 200),
        )
        for row in tail.evaluations(lost=True)
        if row.began <= end and row.ended >= begin
    ]
    playing = tail.evaluation_playing()
    if playing is not None and playing[1] <= end:
        step, began = playing
        found.append(
            answers.EvaluationSpan(
                step=step, begin=began, end=max(began, last), reward=None, push_delay=None, incomplete=None
            )
        )
    return found[-_MOST_EVALUATIONS:]


def _waits_for(
    evaluation: answers.EvaluationSpan, steps: Sequence[StepTimes], begin: float, end: float
) -> Iterator[tuple[str, float, float, int]]:
    """Yield the parts of an evaluation in which no step ran, as far as they lie in a window: the trainer waited for it.

    `steps` are those of the window, in the order of their times.
    """
    least = _LEAST_WAIT * (evaluation.end - evaluation.begin)
    begin, end = max(begin, evaluation.begin), min(end, evaluation.end)
    running = [(step.began, end if step.ended is None else step.ended) for step in steps]
    for began, ended in [*running, (end, end)]:
        if min(began, end) - begin > least:
            yield "evaluation", begin, min(began, end), evaluation.step
        begin = max(begin, ended)


def _pushes(tail: Tail, begin: float, end: float) -> tuple[list[tuple[str, float, float, str | None]], list[str]]:
    """Return the pushes of a window, and what must be said about them."""
    found: list[tuple[str, float, float, str | None]] = []
    number = _event_before(tail, begin)
    read = 0
    while read < _MOST_EVENTS:
        events = tail.events(("push_began", "push_ended"), number, 500)
        for number, event in events:  # noqa: B007 - the last number is where the next request begins
            if isinstance(event, PushBegan) and event.time > end:
                return found, []
            if isinstance(event, PushEnded) and event.time - event.seconds <= end and event.time >= begin:
                error = None if event.error is None else head(event.error, 200)
                found.append((head(event.version, 100), event.time - event.seconds, event.time, error))
        read += len(events)
        if len(events) < 500 or events[-1][1].time > end + 3600:
            return found, []
    return found[:1000], ["The window has more pushes than are drawn. Zoom in."]


def _event_before(tail: Tail, time: float) -> int:
    """Return the number of an event before a time, near to it: events lie in the order of their times."""
    newest = tail.events(None, 0, 1, newest=True)
    low, high = 0, newest[0][0] if newest else 0
    while high - low > 100:
        middle = (low + high) // 2
        found = tail.events(None, middle, 1)
        if found and found[0][1].time < time:
            low = middle
        else:
            high = middle
    return low


def _servers(tail: Tail, last: float) -> list[answers.ServerLane]:
    """Return when each server had the trainer's weights."""
    since: dict[str, float] = {}
    state: dict[str, str] = {}
    spans: dict[str, list[Span]] = {}

    def change(url: str, kind: str, time: float) -> None:
        if url in state and time > since[url]:
            spans.setdefault(url, []).append((state[url], since[url], time))
        since[url], state[url] = time, kind

    for _, event in tail.events(_SERVER_EVENTS, 0, 1000):
        _note_server(event, change, list(state))
    for url in list(state):
        change(url, state[url], last)
    return [answers.ServerLane(url=head(url, 200), spans=each[-500:]) for url, each in list(spans.items())[:64]]


def _note_server(event: AnyEvent, change: Callable[[str, str, float], None], urls: Sequence[str]) -> None:
    if isinstance(event, ServerLaunched | ServerHealed):
        change(event.url, "up", event.time)
    elif isinstance(event, ServerLost | ServerRelaunched):
        change(event.url, "lost", event.time)
    elif isinstance(event, RunEnded):
        for url in urls:
            change(url, "ended", event.time)


def _episode(row: rows.LaneRow) -> answers.EpisodeLane:
    step, _, label = row.label.rpartition(" ")
    return answers.EpisodeLane(
        row=row.row,
        label=label,
        step=int(step) if step.isdecimal() else step or "-",
        stop_reason=row.stop_reason,
        begin=round(row.began, 4),
        end=round(row.ended, 4),
        parts=_merged(row.parts),
    )


def _merged(parts: Sequence[tuple[str, float, float]]) -> list[Span]:
    """Return the waits of an episode. Of more than `_MOST_PARTS`, neighbours become one of the longer kind."""
    found = [(head(kind, 30), round(begin, 4), round(end, 4)) for kind, begin, end in parts]
    while len(found) > _MOST_PARTS:
        pairs = [found[place : place + 2] for place in range(0, len(found), 2)]
        found = [(max(pair, key=lambda each: each[2] - each[1])[0], pair[0][1], pair[-1][2]) for pair in pairs]
    return found


def _counts(activity: rows.Activity, episodes: int) -> answers.Counts:
    points = len(activity.generate)
    if not points or not episodes:
        return answers.Counts()
    interval = (activity.end - activity.begin) / points
    return answers.Counts(
        time=[round(activity.begin + place * interval, 4) for place in range(points)],
        interval=interval,
        generate=[round(value, 3) for value in activity.generate],
        env=[round(value, 3) for value in activity.env],
        queue=[round(value, 3) for value in activity.queue],
        share=activity.share,
    )


def _idle(
    trainer: Sequence[tuple[str, float, float, int]],
    counts: answers.Counts,
    begin: float,
    end: float,
    first: float,
    last: float,
) -> dict[str, Number]:
    """Return the idle shares of the part of the window in which the run was there."""
    begin, end = max(begin, first), min(end, last)
    found: dict[str, Number] = {}
    if end <= begin:
        return found
    if trainer:
        busy = sum(
            max(0.0, min(until, end) - max(since, begin)) for name, since, until, _ in trainer if name in _TRAINER_WORKS
        )
        found["trainer"] = number(max(0.0, 1.0 - busy / (end - begin)), 4)
    if counts.time:
        inside = [place for place, time in enumerate(counts.time) if begin <= time + counts.interval / 2 <= end]
        for name, column in (("generation", counts.generate), ("environments", counts.env)):
            shares = [max(0.0, 1.0 - column[place]) for place in inside]
            found[name] = number(sum(shares) / len(shares) if shares else None, 4)
    return found

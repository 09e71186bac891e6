"""The view of advisories: what is wrong with a run. `app` serves it.

The run's events have them; for starts of earlier versions, `watch.advisories` judges the metrics now.
"""

from __future__ import annotations

from verl_server.errors import BadRequestError
from verl_server.watch.advisories import Advisory
from verl_server.watch.run_records import RunResumed, RunStarted
from verl_server.watch.site.answers import advisories as answers
from verl_server.watch.site.encoding import encoded
from verl_server.watch.site.queries import Query
from verl_server.watch.site.runs import WatchedRun
from verl_server.watch.site.texts import head, number

_TEXT = 4000


def advisories_answer(run: WatchedRun, query: Query) -> bytes:
    query.finish()
    if run.kind not in ("training", "demo"):
        return encoded(answers.Advisories(advisories=[], judged=False))
    try:
        said = run.advisories()
    except BadRequestError as error:  # a damaged line: what comes after it is not judged
        return encoded(answers.Advisories(advisories=[], judged=False, problem=head(str(error), _TEXT)))
    by_name: dict[str, list[Advisory]] = {}
    for advisory in said:
        by_name.setdefault(advisory.name, []).append(advisory)
    is_computed = not _run_advises(run)
    found = [_advisory(each, is_computed=is_computed) for each in by_name.values()]
    found.sort(key=lambda each: (each.ended is not None, each.severity != "error", -each.step))
    return encoded(answers.Advisories(advisories=found))


def _run_advises(run: WatchedRun) -> bool:
    """Return True if a start of the run wrote its advisories itself."""
    starts = run.tail.events(("run_started", "run_resumed"), 0, 1000)
    return any(isinstance(event, RunStarted | RunResumed) and event.advises for _, event in starts)


def _advisory(said: list[Advisory], *, is_computed: bool) -> answers.Advisory:
    """Return what was said under one name. `said` is in the order of the steps."""
    newest = said[-1]
    return answers.Advisory(
        name=head(newest.name, 100),
        severity="notice" if newest.severity == "info" else newest.severity,
        step=newest.step,
        first_step=said[0].step,
        count=len(said),
        figure={} if newest.figure is None else {head(newest.name, 100): number(newest.figure)},
        bound=number(newest.bound),
        message=head(newest.message, _TEXT),
        cause=head(newest.cause, _TEXT),
        remedy=head(newest.remedy, _TEXT),
        ended=newest.ended,
        computed=is_computed,
    )

"""The view of a run's evaluations on held-out tasks. `app` serves it.

The episodes of each evaluation are a place among the steps of the run, `held-out-N`, which the views of steps show.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from verl_server.watch.run_files import best_evaluation
from verl_server.watch.run_records import Evaluation
from verl_server.watch.site.answers import evaluations as answers
from verl_server.watch.site.encoding import encoded_page
from verl_server.watch.site.queries import Query
from verl_server.watch.site.runs import WatchedRun
from verl_server.watch.site.texts import head, number

_CHECKPOINT = re.compile(r"checkpoint-([0-9]{1,15})")


def evaluations_answer(run: WatchedRun, query: Query) -> bytes:
    after = query.integer("after", 0) or 0
    query.finish()
    records = [row.record for row in run.tail.evaluations()]
    playing = run.tail.evaluation_playing()
    best, kept = best_evaluation(records), _checkpoints(run.path)
    found = (_evaluation(record, record is best, record.step in kept) for record in records[after:])
    answer = answers.Evaluations(evaluations=[], playing=None if playing is None else playing[0])
    return encoded_page(answer, "evaluations", lambda place: after + place, found)


def _evaluation(record: Evaluation, best: bool, checkpoint: bool) -> answers.Evaluation:
    return answers.Evaluation(
        step=record.step,
        version=head(record.version, 100),
        episodes=record.episodes,
        failed=record.failed,
        unfinished=record.unfinished,
        reward=number(record.reward),
        success=number(record.success),
        seconds=number(record.seconds),
        push_delay=number(record.push_delay),
        incomplete=None if record.incomplete is None else head(record.incomplete, 1000),
        time=record.time,
        best=best,
        checkpoint=checkpoint,
    )


def _checkpoints(folder: Path) -> set[int]:
    """Return the steps of the checkpoints in a run's folder."""
    try:
        names = os.listdir(folder)
    except OSError:  # a file of trajectories, or a folder that is gone
        return set()
    return {int(found[1]) for name in names if (found := _CHECKPOINT.fullmatch(name)) is not None}

"""Which evaluated weights of a run are the best, read from evaluations.jsonl of its folder.

`kept_checkpoints` keeps their checkpoint, and `forks` begins another run from it. The lines are those of an evaluation
on held-out tasks (`watch.run_records`); a run without evaluations has no such file, and no best step.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import msgspec

from verl_server.files.json_files import decode_json
from verl_server.files.segments import read_segments, segment_files
from verl_server.watch.run_files import Lineage, best_evaluation, read_lineage

EVALUATIONS = "evaluations.jsonl"


class _Evaluated(msgspec.Struct):
    """The keys of a line that say how good the weights are."""

    step: int
    reward: float | None = None
    incomplete: str | None = None
    incarnation: str | None = None


def best_evaluated_step(
    out: Path, lineage: Lineage | None = None, *, among: Collection[int] | None = None
) -> int | None:
    """Return the step of the evaluation with the highest mean reward, the later one of two equals. None: there is none.

    The weights are those of checkpoint-STEP. Evaluations that are incomplete or without a reward do not count, nor do
    those of weights that a resumed run has lost. `lineage` has the starts of the run; by default they are read from
    `out`. With `among`, only these steps count. Raise BadRequestError, which names the line, for a damaged line.
    """
    path = out / EVALUATIONS
    if not segment_files(path):
        return None
    lineage = lineage or read_lineage(out)
    found = (decode_json(line, _Evaluated, where) for where, line in read_segments(path))
    # The weights before `step` are lost if the step that made them runs again, not if `step` itself does.
    kept = (each for each in found if lineage.has(each.step - 1, each.incarnation))
    best = best_evaluation(each for each in kept if among is None or each.step in among)
    return None if best is None else best.step

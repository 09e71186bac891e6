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
from verl_server.watch.run_files import Lineage, read_lineage

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
    best: tuple[float, int] | None = None
    for where, line in read_segments(path):
        found = decode_json(line, _Evaluated, where)
        # The weights before `step` are lost if the step that made them runs again, not if `step` itself does.
        if found.incomplete is not None or not lineage.has(found.step - 1, found.incarnation):
            continue
        if found.reward is None or (among is not None and found.step not in among):
            continue
        if best is None or (found.reward, found.step) > best:
            best = found.reward, found.step
    return None if best is None else best[1]

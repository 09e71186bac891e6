"""Which checkpoints of a run stay: the newest ones, and the one of the best evaluated weights.

`run` calls `remove_old_checkpoints` after each save, when the new checkpoint is on the disk. A checkpoint that is to go
first loses its name. So a removal that is interrupted, at any time, leaves no half of a checkpoint under a name from
which a run would continue.
"""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

from verl_server.errors import BadRequestError
from verl_server.files.durable import flush
from verl_server.train.checkpoints import checkpoints_of, step_of
from verl_server.train.evaluations import best_evaluated_step

logger = logging.getLogger(__name__)

KEPT = 2
"""Default of the number of newest checkpoints that stay."""


def remove_old_checkpoints(out: Path, keep: int) -> None:
    """Remove the checkpoints but the `keep` newest and the best evaluated one.

    The newest one must be on the disk. Remove what interrupted saves and removals have left, too. One process calls it,
    while nobody saves to `out`. What cannot be removed is logged, and does not end the run.
    """
    checkpoints = {step_of(folder): folder for folder in checkpoints_of(out)}
    try:
        if old := sorted(checkpoints)[:-keep]:
            best = best_evaluated_step(out, among=checkpoints)
            for step in old:
                if step != best:
                    os.replace(checkpoints[step], out / f".{checkpoints[step].name}.removed")
            # Otherwise a loss of power may bring a name back whose files are gone.
            flush(out)
    except (BadRequestError, OSError) as error:
        logger.warning("Older checkpoints in %s are not removed. %s", out, error)
        return
    for unnamed in out.glob(".checkpoint-*"):
        shutil.rmtree(unnamed, ignore_errors=True)

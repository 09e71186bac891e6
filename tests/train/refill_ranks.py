"""`python -m tests.train.refill_ranks FAULT RANK [grpo's arguments]`: `faulty_run` with tasks that are always solved.

The fault "SIGKILL in a refill" kills a rank in step `STEP`, after the first round and before the second one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any
from unittest import mock

from tests.train import faulty_run
from verl_server.rollout.trajectory import Task, Trajectory
from verl_server.train.grpo import GRPO


def is_solved(seed: int) -> bool:
    """Return True if all episodes of a task have the same reward: three tasks of five."""
    return seed * 7 % 5 < 3


def main(arguments: Sequence[str]) -> int:
    fault, rank, *rest = arguments
    make, play = faulty_run._trajectory, GRPO._play

    def solved(task: Task, version: str) -> Trajectory:
        trajectory = make(task, version)
        if is_solved(task.seed):
            trajectory.reward = 1.0
        return trajectory

    def killed(run: GRPO, groups: range, *arguments: Any) -> Any:
        if run.next_step == faulty_run.STEP and groups.start > 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return play(run, groups, *arguments)

    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(faulty_run, "_trajectory", solved))
        if fault == "SIGKILL in a refill":
            fault = "none"
            if int(os.environ.get("RANK", "0")) == int(rank):
                patches.enter_context(mock.patch.object(GRPO, "_play", killed))
        return faulty_run.main([fault, rank, *rest])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

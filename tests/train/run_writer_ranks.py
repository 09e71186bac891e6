"""`python -m tests.train.run_writer_ranks RUN RESULTS` on each rank: write three steps, as `train.run` does."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.train.conftest import make_trajectory
from verl_server.rollout.agent_loop import Rollout
from verl_server.train.metrics import describe_rollout
from verl_server.train.ranks import all_ranks, setup_ranks
from verl_server.train.rollout_report import RolloutReport
from verl_server.train.run import Step, _record
from verl_server.train.run_writer import RunWriter
from verl_server.watch.run_records import RunStarted, StepBegan, TrainedTrajectory
from verl_server.weight_version import new_incarnation


def main(run: Path, results: Path) -> None:
    setup_ranks("cpu")
    ranks = all_ranks(60.0)
    incarnation = ranks.call("incarnation", lambda _: new_incarnation())
    files = RunWriter(run, incarnation, rank=ranks.rank, ranks=ranks.size)
    ranks.call("begin", lambda _: files.begin(RunStarted(ranks=ranks.size, version="1")))
    for step in range(3):
        files.note(StepBegan(step=step))
        metrics = describe_rollout(RolloutReport(), step=step, version=f"{step}@{incarnation}", ranks=2, gap=None)
        trained = TrainedTrajectory(
            step=step, sampled_step=step, group=ranks.rank, member=0, advantage=1.0, age=0, positions=[], logprobs=[]
        )
        rollout = Rollout(trajectories=[make_trajectory(ranks.rank, 1.0)], seconds=1.0)
        _record(files, Step(metrics, rollout, [], [trained]))
    files.close()
    ranks.call("written", lambda _: None)
    (results / f"{ranks.rank}.jsonl").write_text(json.dumps({"check": "written", "error": ""}) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

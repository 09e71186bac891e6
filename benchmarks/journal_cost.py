"""Measure the cost of the journal of finished groups: microseconds of the caller, and of the thread that flushes.

    python -m benchmarks.journal_cost --out runs/journal-cost

The groups have `--episodes` episodes of `--turns` turns with `--tokens` sampled tokens each. The folder decides which
disk is measured. Prints one JSON line.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

from verl_server.files.record_file import RecordFile
from verl_server.rollout.agent_loop import Rollout
from verl_server.rollout.trajectory import StopReason, Task, Trajectory
from verl_server.train.journal import GroupJournal


@dataclass(frozen=True)
class Args:
    out: Path = Path("runs/journal-cost")
    """Folder of the journal."""
    groups: int = 50
    """Groups to write."""
    episodes: int = 16
    """Episodes of a group."""
    turns: int = 5
    """Turns of an episode."""
    tokens: int = 1
    """Sampled tokens of a turn; the policy reads three more."""


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "journal-rank0.msgpack"
    path.unlink(missing_ok=True)
    group = Rollout(trajectories=[_episode(args, member) for member in range(args.episodes)], seconds=1.0)
    callers, flushes, append = list[float](), list[float](), RecordFile.append

    def timed(file: RecordFile, payload: bytes) -> object:
        start = time.perf_counter()
        place = append(file, payload)
        flushes.append(time.perf_counter() - start)
        return place

    RecordFile.append = timed  # type: ignore[method-assign, assignment]
    journal = GroupJournal(args.out)
    for number in range(args.groups):
        start = time.perf_counter()
        journal.put(number, "0@5f2c9a1e", 0, group)
        callers.append(time.perf_counter() - start)
    journal.close()
    figures = {
        "bytes_per_group": path.stat().st_size // args.groups,
        "caller_us": round(statistics.median(callers) * 1e6),
        "write_and_fsync_us": round(statistics.median(flushes) * 1e6),
        "write_and_fsync_us_max": round(max(flushes) * 1e6),
    }
    print(json.dumps(figures))


def _episode(args: Args, member: int) -> Trajectory:
    trajectory = Trajectory(task=Task(seed=0, member=member), member=member)
    for _ in range(args.turns):
        trajectory.append_observation({"text": "higher"}, [1, 2, 3])
        trajectory.append_output([7] * args.tokens, [-0.7312] * args.tokens, ["12@5f2c9a1e"] * args.tokens)
        trajectory.turns[-1].reward = 0.0
    trajectory.finish(StopReason.DONE)
    return trajectory


if __name__ == "__main__":
    main()

"""Measure what a checkpoint costs a training run: for how long the run waits, and how much slower its steps are.

    python -m benchmarks.save_cost --out runs/save-cost

trains a policy with the shape of SmolLM2-135M (random weights) on the CPU, on trajectories made up, and saves it
`--saves` times: first so that the run waits (`--no-save-in-background`), then beside the steps, with the same trainer.
Nothing is played. The disk holds two checkpoints (1.6 GB each), and the memory one copy of the state beside the trainer
(6 GB in all).

One line of JSON for each figure: the median of `values`. `step` is a step without a save, and `step_beside` one that
ended while a checkpoint was being written. `held` is the time for which the run waits. In the background, its first
value includes the allocation of the copy. `write` is the time until the checkpoint is on the disk. `disk` is the rate
of one file of 256 MiB with a flush.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.options import report
from verl_server.files.command_options import parse_options
from verl_server.models.tiny import make_model_folder
from verl_server.rollout.trajectory import StopReason, Task, Trajectory
from verl_server.train.batches import Sample
from verl_server.train.checkpoint_writer import CheckpointWriter
from verl_server.train.checkpoints import Progress
from verl_server.train.grpo import PolicyTrainer
from verl_server.train.options import GRPOConfig
from verl_server.train.policy import load_policy
from verl_server.train.ranks import SaveGroup, all_ranks, setup_ranks
from verl_server.train.run_end import Progressing
from verl_server.watch.run_records import CheckpointSaved, RunEvent

_SHAPE: dict[str, Any] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
"""Shape of SmolLM2-135M."""
_DISK_BYTES = 256 * 2**20
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Args:
    """Measure what a checkpoint costs a training run."""

    out: Path = Path("runs/save-cost")
    """Folder of the model and the checkpoints."""
    saves: int = 2
    """Saves of each kind."""
    steps: int = 4
    """Steps without a save."""
    samples: int = 2
    """Trajectories of a step."""
    tokens: int = 16
    """Sampled tokens of a trajectory."""


class Run:
    """A run that trains, and does nothing else."""

    def __init__(self, trainer: PolicyTrainer, args: Args) -> None:
        self.state = trainer.state
        self.next_step = 0
        self._trainer = trainer
        self._args = args

    def step(self) -> float:
        """Run a step, and return its seconds."""
        start = time.monotonic()
        self._trainer.update([self._sample(i) for i in range(self._args.samples)], self.next_step)
        self.next_step += 1
        return time.monotonic() - start

    def reached(self) -> Progressing:
        return Progressing(self.next_step, self.next_step)

    def checkpoint(self, reached: Progressing) -> Progress:
        return self.state.progress(reached)

    def saved(self, progress: Progress) -> None:
        """Do nothing: there is no journal."""

    def _sample(self, number: int) -> Sample:
        count = self._args.tokens
        trajectory = Trajectory(task=Task(seed=number, group=number, episode_id=str(number)))
        trajectory.append_observation({}, [1, 2])
        trajectory.append_output([3 + (7 * number + i) % 30000 for i in range(count)], [-10.0] * count, ["0"] * count)
        trajectory.turns[0].reward = float(number % 2)
        trajectory.finish(StopReason.DONE)
        return Sample(trajectory, 0.5 if number % 2 else -0.5)


def measure(args: Args, run: Run, *, in_background: bool) -> None:
    events: list[RunEvent] = []
    groups = SaveGroup.of_all_ranks(), SaveGroup.of_all_ranks()
    writer = CheckpointWriter(
        args.out, run, all_ranks(), *groups, keep=1, in_background=in_background, note=events.append
    )
    beside: list[float] = []
    for _ in range(args.saves):
        run.step()
        writer.begin(run.reached())
        before = len(events)
        while in_background:
            seconds = run.step()
            writer.settle()
            if len(events) > before:
                break
            beside.append(seconds)
    saved = [event for event in events if isinstance(event, CheckpointSaved)]
    kind = "background" if in_background else "wait"
    _report_seconds(f"held_{kind}", [event.held_seconds or 0.0 for event in saved])
    _report_seconds(f"write_{kind}", [event.seconds for event in saved])
    if beside:
        _report_seconds("step_beside", beside)


def _report_seconds(name: str, seconds: list[float]) -> None:
    report(name, statistics.median(seconds), "s", values=[round(value, 3) for value in seconds])


def disk_rate(folder: Path) -> float:
    """Return the bytes per second of one file that is written and flushed."""
    file, piece = folder / "disk", os.urandom(2**20)
    start = time.monotonic()
    with file.open("wb") as opened:
        for _ in range(_DISK_BYTES // len(piece)):
            opened.write(piece)
        opened.flush()
        os.fsync(opened.fileno())
    seconds = time.monotonic() - start
    file.unlink()
    return _DISK_BYTES / seconds


def main() -> None:
    args = parse_options(Args, None, "python -m benchmarks.save_cost")
    args.out.mkdir(parents=True, exist_ok=True)
    setup_ranks("cpu")
    folder = make_model_folder(args.out / "model", "llama", init_std=0.02, **_SHAPE)
    config = GRPOConfig(epochs=1, minibatches=1, learning_rate=1e-5)
    trainer = PolicyTrainer(load_policy(str(folder), _CPU, compute_dtype=torch.float32), config, 1000, _CPU)
    run = Run(trainer, args)
    run.step()
    parameters = sum(parameter.numel() for parameter in trainer.policy.parameters())
    report("parameters", parameters / 1e6, "million", load=os.getloadavg()[0], cores=os.cpu_count())
    report("disk", disk_rate(args.out) / 1e6, "MB/s")
    _report_seconds("step", [run.step() for _ in range(args.steps)])
    measure(args, run, in_background=False)
    measure(args, run, in_background=True)
    report("disk", disk_rate(args.out) / 1e6, "MB/s", load=os.getloadavg()[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

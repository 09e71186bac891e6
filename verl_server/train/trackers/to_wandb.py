"""Weights & Biases: one run, whose files are in the folder `wandb` of the training run.

WANDB_PROJECT, WANDB_MODE and the other variables of the package apply. W&B's own step is the step of training. It must
not fall, and one step has one row, so an evaluation has its step as the figure `evaluation/step`, which is its x axis.
"""

from __future__ import annotations

import os

import wandb

from verl_server.train.trackers.tracked_run import PROJECT, Figures, TrackedRun, exit_kind


class WandbRun:
    def __init__(self, run: TrackedRun) -> None:
        earlier = run.run_in("wandb")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=os.environ.get("WANDB_NAME", run.name),
            id=earlier,
            resume=None if earlier is None else "allow",
            dir=run.folder,
            config=run.settings,
            allow_val_change=True,
            # Nothing is printed in this process, and its signals are those of the training run.
            settings=wandb.Settings(console="off"),
        )
        self.run_id: str | None = self._run.id
        self._run.define_metric("evaluation/step", hidden=True)
        self._run.define_metric("evaluation/*", step_metric="evaluation/step")
        self._row = max(run.next_step, self._run.step)  # that of W&B is higher if steps were lost
        self._evaluated = -1
        """The last row that has an evaluation."""

    def log(self, figures: Figures) -> None:
        self._row = max(self._row, figures.step)
        if figures.kind == "step":
            self._run.log(figures.figures, step=self._row)
            return
        if self._row == self._evaluated:
            self._row += 1  # a second evaluation would replace the first one
        self._evaluated = self._row
        self._run.log(figures.figures | {"evaluation/step": figures.step}, step=self._row)

    def close(self, exit_status: int) -> None:
        self._run.finish(exit_code={"complete": 0, "stopped": 255, "failed": 1}[exit_kind(exit_status)])


def open_run(run: TrackedRun) -> WandbRun:
    return WandbRun(run)

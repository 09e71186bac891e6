"""Trackio: a run of the project `verl-server` in its local database (TRACKIO_DIR), or on TRACKIO_SERVER_URL."""

from __future__ import annotations

import trackio

from verl_server.train.trackers.tracked_run import PROJECT, Figures, TrackedRun


class TrackioRun:
    def __init__(self, run: TrackedRun) -> None:
        # Its own `resume` takes the newest run of this name, which may be that of another folder.
        self._run = trackio.init(
            project=PROJECT,
            name=run.name,
            config=run.settings,
            resume="never",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        earlier = run.run_in("trackio")
        if earlier is not None:
            self._run.id = earlier
        self.run_id: str | None = self._run.id

    def log(self, figures: Figures) -> None:
        self._run.log(figures.figures, step=figures.step)

    def close(self, exit_status: int) -> None:
        self._run.finish()


def open_run(run: TrackedRun) -> TrackioRun:
    return TrackioRun(run)

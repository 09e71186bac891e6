"""MLflow: a run of the experiment `verl-server`, or of MLFLOW_EXPERIMENT_NAME, at MLFLOW_TRACKING_URI.

Settings are the parameters of the run. MLflow permits no change of a parameter, so those of the first start stay.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from verl_server.train.trackers.tracked_run import PROJECT, Figures, TrackedRun, exit_kind, texts

_PARAMS_AT_ONCE = 100
_PARAM_LENGTH = 6000
"""MLflow's own bounds."""


class MlflowRun:
    def __init__(self, run: TrackedRun) -> None:
        self._client = MlflowClient()
        earlier = run.run_in("mlflow")
        if earlier is not None:
            self._client.set_terminated(earlier, status="RUNNING")  # raises if the store has no such run
            self.run_id: str | None = earlier
            return
        experiment = _experiment(self._client, os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT))
        self.run_id = self._client.create_run(experiment, run_name=run.name).info.run_id
        params = _params(run.settings)
        for first in range(0, len(params), _PARAMS_AT_ONCE):
            self._client.log_batch(self.run_id, params=params[first : first + _PARAMS_AT_ONCE])

    def log(self, figures: Figures) -> None:
        now = int(time.time() * 1e3)
        metrics = [Metric(name, figure, now, figures.step) for name, figure in figures.figures.items()]
        self._client.log_batch(self.run_id, metrics=metrics)

    def close(self, exit_status: int) -> None:
        status = {"complete": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}[exit_kind(exit_status)]
        self._client.set_terminated(self.run_id, status=status)


def _experiment(client: MlflowClient, name: str) -> str:
    """Return the id of an experiment, which is created unless it exists."""
    try:
        experiment: str = client.create_experiment(name)
        return experiment
    except MlflowException:
        found = client.get_experiment_by_name(name)
        if found is None:
            raise
        return str(found.experiment_id)


def _params(settings: Mapping[str, Any]) -> list[Param]:
    return [Param(name, value[:_PARAM_LENGTH]) for name, value in texts(settings).items()]


def open_run(run: TrackedRun) -> MlflowRun:
    return MlflowRun(run)

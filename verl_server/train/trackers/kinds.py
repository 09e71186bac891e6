"""The trackers that `--logger` can name: the package and the extra of each, and what to do if one fails.

`TrainArgs` checks the names before anything starts. `open_tracker` opens a tracker in the process of the trackers; only
there, its package is imported.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Literal

from verl_server.errors import BadRequestError
from verl_server.train.trackers.tracked_run import TrackedRun, Tracker

Logger = Literal["tensorboard", "wandb", "mlflow", "trackio"]
"""A tracker. Its name is that of its package and of the extra of this package, too."""
REMEDIES: dict[str, str] = {
    "tensorboard": "Look at the permissions of the run's folder and at the space on its disk.",
    "wandb": "Log in with `wandb login`, or set WANDB_MODE=offline and run `wandb sync` later.",
    "mlflow": "Set MLFLOW_TRACKING_URI to a store or a server that answers.",
    "trackio": "Set TRACKIO_DIR to a folder that can be written, or see to the server of TRACKIO_SERVER_URL.",
}


def check_loggers(names: Sequence[str]) -> None:
    """Raise BadRequestError for a tracker that is named twice, or whose package is not installed."""
    if len(set(names)) < len(names):
        raise BadRequestError(f"--logger names a tracker twice: {' '.join(names)}.")
    missing = [name for name in names if not is_installed(name)]
    if missing:
        raise BadRequestError(
            f"--logger {' '.join(missing)}: not installed here. Install what is missing with `pip install "
            f"'verl-server[{','.join(missing)}]'`, or remove the name from --logger."
        )


def is_installed(package: str) -> bool:
    # A folder of this name, such as the `wandb` that wandb writes, is found as a package without a file.
    found = importlib.util.find_spec(package)
    return found is not None and found.origin is not None


def open_tracker(name: str, run: TrackedRun) -> Tracker:
    """Open the run in a tracker: a new run of the tracker, or the one that an earlier start had."""
    module = importlib.import_module(f"verl_server.train.trackers.to_{name}")
    tracker: Tracker = module.open_run(run)
    return tracker

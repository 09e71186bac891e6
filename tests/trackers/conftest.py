"""The trackers' packages without a network: each writes to a folder of the test session.

`make test-trackers` runs these tests in an environment of its own, which has the packages.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "NO_PROXY": "*"}

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Set where the packages write, for the processes of the tests and for those that read."""
    folder = tmp_path_factory.mktemp("stores")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder}/mlflow.db")
        patch.setenv("TRACKIO_DIR", str(folder / "trackio"))
        patch.setenv("HOME", str(folder))  # no keys and settings of the user
        yield folder

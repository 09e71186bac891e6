"""Checkpoints of a training run: model, optimizer, the next step and the served version.

All ranks call `save_checkpoint` and `load_checkpoint` together. Every rank writes its own shards (torch's distributed
checkpoint), so a run may continue on another number of ranks. No random state is stored: episodes, draws and the order
of training are functions of the seed and the step.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from verl_server.train.policy import Policy


@dataclass(frozen=True)
class Progress:
    """The progress of a run, stored as run.json in its checkpoint."""

    next_step: int
    """The step to run next."""
    version: int
    """Version under which these weights are pushed to the server."""
    has_optimizer_state: bool = True
    """False before the first optimizer step."""


def latest_checkpoint(out: Path) -> Path | None:
    """The finished checkpoint of the highest step, or None. A checkpoint is finished once it contains run.json."""
    finished = [file.parent for file in out.glob("checkpoint-*/run.json")]
    return max(finished, key=lambda folder: int(folder.name.rpartition("-")[2]), default=None)


def save_checkpoint(
    out: Path, policy: Policy, optimizer: torch.optim.Optimizer, *, next_step: int, version: int
) -> Path:
    """Write a checkpoint to a folder of its own, then remove the older ones. Returns the folder.

    Does nothing if the newest checkpoint is of this step already.
    """
    folder = out / f"checkpoint-{next_step}"
    if latest_checkpoint(out) == folder:
        return folder
    progress = Progress(next_step, version, has_optimizer_state=bool(optimizer.state))
    leader = dist.get_rank() == 0
    if leader:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    dist.barrier()
    state_dict_saver.save(_state(policy, optimizer, progress), checkpoint_id=folder)
    if leader:
        unfinished = folder / "run.json.new"
        unfinished.write_text(json.dumps(asdict(progress)) + "\n")
        os.replace(unfinished, folder / "run.json")
        for older in out.glob("checkpoint-*"):
            if older != folder:
                shutil.rmtree(older)
    dist.barrier()
    return folder


def load_checkpoint(folder: Path, policy: Policy, optimizer: torch.optim.Optimizer) -> Progress:
    """Restore model and optimizer in place, and return the progress of the run."""
    progress = Progress(**json.loads((folder / "run.json").read_text()))
    state = _state(policy, optimizer, progress)
    state_dict_loader.load(state, checkpoint_id=folder)
    set_model_state_dict(policy, state["model"])
    if progress.has_optimizer_state:
        set_optimizer_state_dict(policy, optimizer, state["optimizer"])
    return progress


def _state(policy: Policy, optimizer: torch.optim.Optimizer, progress: Progress) -> dict[str, Any]:
    """The state dictionaries to save, in this rank's shards. If the optimizer has no state yet, torch creates it."""
    state: dict[str, Any] = {"model": get_model_state_dict(policy)}
    if progress.has_optimizer_state:
        state["optimizer"] = get_optimizer_state_dict(policy, optimizer)
    return state

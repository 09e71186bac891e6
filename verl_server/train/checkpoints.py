"""Checkpoints of a training run: model, optimizer, the scale of the loss, the next step and the served version.

All ranks call `save_checkpoint` and `load_checkpoint` together. Every rank writes its own shards (torch's distributed
checkpoint), so a run may continue on another number of ranks. No random state is stored: episodes, draws and the order
of training are functions of the seed and the step.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from verl_server.errors import VerlServerError
from verl_server.train.durable import discard, publish, temporary_folder
from verl_server.train.policy import Policy
from verl_server.train.ranks import SaveGroup


@dataclass(frozen=True)
class Progress:
    """The progress of a run, stored as run.json in its checkpoint."""

    next_step: int
    """The step to run next."""
    version: int
    """Version under which these weights are pushed to the server."""
    has_optimizer_state: bool = True
    """False before the first optimizer step."""
    loss_scaling: dict[str, Any] | None = None
    """State of `LossScaling`; absent in the checkpoint of a run that does not scale its loss."""


class CheckpointError(VerlServerError):
    """A checkpoint could not be written. The one before it is still there."""


def latest_checkpoint(out: Path) -> Path | None:
    """The finished checkpoint of the highest step, or None. A checkpoint is finished once it contains run.json."""
    finished = [file.parent for file in out.glob("checkpoint-*/run.json")]
    return max(finished, key=lambda folder: int(folder.name.rpartition("-")[2]), default=None)


def save_checkpoint(
    out: Path,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    *,
    next_step: int,
    version: int,
    loss_scaling: dict[str, Any] | None = None,
    saving: SaveGroup | None = None,
) -> Path:
    """Write a checkpoint to a folder of its own, then remove the older ones. Returns the folder.

    The folder appears when all of it is on the disk. Does nothing if the newest checkpoint is of this step already.
    Raises CheckpointError on all ranks if a rank cannot write. `loss_scaling`: `LossScaling.state_dict()`.
    `saving`: the connections to use; by default they are made for this call.
    """
    saving = saving or SaveGroup.of_all_ranks()
    folder = out / f"checkpoint-{next_step}"
    progress = Progress(next_step, version, bool(optimizer.state), loss_scaling)

    def begin(_: list[bytes]) -> str | None:
        return None if latest_checkpoint(out) == folder else str(temporary_folder(folder))

    def finish(_: list[bytes]) -> None:
        values = {name: value for name, value in asdict(progress).items() if value is not None}
        (Path(unfinished) / "run.json").write_text(json.dumps(values) + "\n")
        publish(folder)
        for older in out.glob("checkpoint-*"):
            if older != folder:
                shutil.rmtree(older, ignore_errors=True)

    try:
        unfinished = saving.ranks.call("save_checkpoint", begin)
        if unfinished is None:
            return folder
        state = _state_to_save(policy, optimizer, progress)
        state_dict_saver.save(state, checkpoint_id=unfinished, process_group=saving.process_group)
        saving.ranks.call("save_checkpoint: finish", finish)
    except (CheckpointException, OSError) as error:
        if saving.ranks.rank == 0:
            discard(folder)
        reason = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        before = latest_checkpoint(out)
        kept = "There is no earlier one." if before is None else f"{before} is still valid."
        raise CheckpointError(f"{folder} could not be written ({type(reason).__name__}: {reason}). {kept}") from error
    return folder


def load_checkpoint(folder: Path, policy: Policy, optimizer: torch.optim.Optimizer) -> Progress:
    """Restore model and optimizer in place, and return the progress of the run."""
    progress = Progress(**json.loads((folder / "run.json").read_text()))
    state = _state_to_load(policy, optimizer, progress)
    state_dict_loader.load(state, checkpoint_id=folder)
    # Each tied parameter is there once, so "strict" would miss its other name.
    set_model_state_dict(policy, state["model"], options=StateDictOptions(strict=False))
    if progress.has_optimizer_state:
        set_optimizer_state_dict(policy, optimizer, state["optimizer"])
    return progress


def _state_to_load(policy: Policy, optimizer: torch.optim.Optimizer, progress: Progress) -> dict[str, Any]:
    """The state dictionaries to fill, in this rank's shards. If the optimizer has no state yet, torch creates it."""
    names = {f"language_model.{name}" for name, _ in policy.stored_weights()}
    state: dict[str, Any] = {"model": {n: value for n, value in get_model_state_dict(policy).items() if n in names}}
    if progress.has_optimizer_state:
        state["optimizer"] = get_optimizer_state_dict(policy, optimizer)
    return state


def _state_to_save(policy: Policy, optimizer: torch.optim.Optimizer, progress: Progress) -> dict[str, Any]:
    """The same dictionaries from the stored parameters, so that they are right after an error inside a pass, too."""
    names: dict[torch.Tensor, str] = {p: f"language_model.{name}" for name, p in policy.stored_weights()}
    model = {name: parameter.detach() for parameter, name in names.items()}
    state: dict[str, Any] = {"model": model}
    if progress.has_optimizer_state:
        groups = [
            group | {"params": [names[parameter] for parameter in group["params"]]} for group in optimizer.param_groups
        ]
        state["optimizer"] = {
            "state": {names[parameter]: dict(values) for parameter, values in optimizer.state.items()},
            "param_groups": groups,
        }
    return state

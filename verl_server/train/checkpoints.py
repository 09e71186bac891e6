"""Checkpoints of a training run: model, optimizer, the scale of the loss, the next step and the served version.

A checkpoint gets its name when it is complete. Its run.json lists its files with their sizes and checksums, and has a
checksum of itself, so that an error names a lost or damaged file before a run continues.

All ranks call `save_checkpoint` and `load_checkpoint` together. Every rank writes its own shards (torch's distributed
checkpoint), so a run may continue on another number of ranks. No random state is stored: episodes, draws and the order
of training are functions of the seed and the step. `checkpoint_writer` calls the two halves of `save_checkpoint`,
`state_of` and `write_checkpoint`, to write while the steps go on.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from verl_server.errors import BadRequestError, VerlServerError
from verl_server.files.durable import discard, flush, publish, temporary_folder
from verl_server.files.json_files import convert, read_json
from verl_server.train.critic import Critic
from verl_server.train.policy import Policy
from verl_server.train.ranks import SaveGroup

PIECE = 16 * 2**20
"""Bytes of a file that are read at once."""


@dataclass(frozen=True)
class Progress:
    """The progress of a run, stored as run.json in its checkpoint."""

    next_step: int
    """The step to run next."""
    version: int
    """Number of the version of these weights."""
    has_optimizer_state: bool = True
    """False before the first optimizer step."""
    loss_scaling: dict[str, Any] | None = None
    """State of `LossScaling`; absent in the checkpoint of a run that does not scale its loss."""
    incarnation: str | None = None
    """Incarnation that wrote the checkpoint: its version was `version`@`incarnation` (`weight_version`). A run that
    continues from it pushes the weights under an incarnation of its own."""
    next_group: int | None = None
    """Number of the first group that has not started. None in a synchronous run whose steps have played no further
    groups (`refill`): each step has played as many as `groups`."""
    undone_groups: list[int] | None = None
    """The groups that have started and were not trained. The run starts them again when it continues. None in a
    synchronous run."""
    ancestors: dict[str, int] | None = None
    """Earlier incarnation -> number of its last version from which these weights come (`ancestors`)."""
    further: dict[str, bool] | None = None
    """Name of each further model (PPO's critic) -> whether its optimizer has a state. Absent if there is none."""
    draw: dict[str, Any] | None = None
    """State of `EnvironmentDraw`. Absent in a run without a mixture of environments."""

    def first_group(self, groups: int) -> int:
        """Return the number of the first group that has not started, of a run with `groups` groups a step."""
        return self.next_step * groups if self.next_group is None else self.next_group

    @property
    def label(self) -> str:
        """Label of these weights. "" if the incarnation is not known."""
        return "" if self.incarnation is None else f"{self.version}@{self.incarnation}"


Model = Policy | Critic
Trained = tuple[Model, torch.optim.Optimizer]
"""A model and its optimizer."""
POLICY = "policy"
"""Name of the policy among the models of a trainer. A checkpoint has the keys of the others under their names."""


class CheckpointError(VerlServerError):
    """A checkpoint could not be written. The checkpoint before it still exists."""


def latest_checkpoint(out: Path) -> Path | None:
    """Return the checkpoint of the highest step, or None. `check_checkpoint` checks if it is complete."""
    return max(checkpoints_of(out), key=step_of, default=None)


def check_checkpoint(folder: Path) -> Progress:
    """Read all files of a checkpoint, and return its progress. Raise BadRequestError if one is lost or damaged."""
    try:
        progress, listed = read_listed(folder)
        files = {folder / name: entry for name, entry in listed.items()}
        for file, (size, _) in files.items():
            if not file.is_file():
                raise BadRequestError(f"{file} is missing")
            if (found := file.stat().st_size) != size:
                raise BadRequestError(f"{file} has {found:,} bytes instead of {size:,}")
        for file, checksum in _file_checksums(list(files)).items():
            if checksum != files[file][1]:
                raise BadRequestError(f"the checksum of {file} is wrong")
        return progress
    except (BadRequestError, OSError) as error:
        older = [other for other in checkpoints_of(folder.parent) if step_of(other) < step_of(folder)]
        remedy = (
            f"continue from {max(older, key=step_of).name}" if older else "start again, for there is no earlier one"
        )
        reason = str(error).rstrip(".")
        raise BadRequestError(
            f"The checkpoint {folder} cannot be continued: {reason}. Restore it, or remove the folder to {remedy}."
        ) from None


def read_listed(folder: Path) -> tuple[Progress, dict[str, tuple[int, str]]]:
    """Return (progress, file -> (size, checksum)) of a checkpoint. Raise BadRequestError if its run.json is damaged."""
    values = _read_values(folder)
    progress = _progress(values, folder)
    return progress, convert(values.get("files"), dict[str, tuple[int, str]], f"files of {folder / 'run.json'}")


def check_fits(folder: Path, policy: Policy) -> None:
    """Raise BadRequestError, which names a weight, if a checkpoint is of another model than `policy`.

    `check_checkpoint` has read its files before.
    """
    stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    prefix = "model.language_model."
    found = {
        name.removeprefix(prefix): str(list(getattr(value, "size", ())))
        for name, value in stored.items()
        if name.startswith(prefix)
    }
    wanted = {name: str(list(parameter.shape)) for name, parameter in policy.stored_weights()}
    for name in sorted(found.keys() | wanted.keys()):
        if found.get(name) != wanted.get(name):
            raise BadRequestError(
                f"{folder} is of another model than --model-path: {name} is {found.get(name, 'absent')} in the "
                f"checkpoint and {wanted.get(name, 'absent')} in the model. Name the model with which its run began."
            )


def write_progress(folder: Path, progress: Progress) -> None:
    """Write the run.json of a checkpoint, after all other files were written to its folder."""
    values = {name: value for name, value in asdict(progress).items() if value is not None}
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    checksums = _file_checksums(files)
    values["files"] = {str(file.relative_to(folder)): [file.stat().st_size, checksums[file]] for file in files}
    (folder / "run.json").write_text(json.dumps(values | {"checksum": _checksum(values)}) + "\n")


def _read_values(folder: Path) -> dict[str, Any]:
    values = read_json(folder / "run.json")
    if "checksum" not in values:
        raise BadRequestError(f"{folder / 'run.json'} has no checksum, as one of an earlier version of this package")
    if values.pop("checksum", None) != _checksum(values):
        raise BadRequestError(f"the checksum of {folder / 'run.json'} is wrong")
    return values


def _progress(values: dict[str, Any], folder: Path) -> Progress:
    """Return the progress in run.json of a checkpoint. Raise BadRequestError if run.json belongs to another folder."""
    file = folder / "run.json"
    known = {"files", *(field.name for field in fields(Progress))}
    if unknown := sorted(values.keys() - known):
        raise BadRequestError(f"{file} has keys that this version of the package does not know: {', '.join(unknown)}")
    progress = convert(values, Progress, str(file))
    if folder.name != f"checkpoint-{progress.next_step}":
        raise BadRequestError(f"{file} has next_step={progress.next_step}: the folder was renamed")
    return progress


def checkpoints_of(out: Path) -> list[Path]:
    """Return the folders of all checkpoints in the folder of a run, in no order."""
    return [folder for folder in out.glob("checkpoint-*") if folder.is_dir() and folder.name[11:].isdecimal()]


def step_of(checkpoint: Path) -> int:
    """Return the step that a run which continues from this checkpoint runs first."""
    return int(checkpoint.name[11:])


def _checksum(values: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=16).hexdigest()


def _file_checksums(files: list[Path]) -> dict[Path, str]:
    with ThreadPoolExecutor() as pool:  # crc32 releases the interpreter
        return dict(zip(files, pool.map(_file_checksum, files), strict=True))


def _file_checksum(file: Path) -> str:
    value = 0
    with file.open("rb") as opened:
        while piece := opened.read(PIECE):
            value = zlib.crc32(piece, value)
    return f"{value:08x}"


def save_checkpoint(
    out: Path, models: Mapping[str, Trained], progress: Progress, saving: SaveGroup | None = None
) -> Path:
    """Write a checkpoint of `models`, which have reached `progress`, and return its folder; see `write_checkpoint`.

    By default, the connections are made for this call.
    """
    write_checkpoint(out, state_of(models, progress), progress, saving or SaveGroup.of_all_ranks())
    return out / f"checkpoint-{progress.next_step}"


def write_checkpoint(out: Path, state: dict[str, Any], progress: Progress, saving: SaveGroup) -> bool:
    """Write a checkpoint to a folder of its own, beside those of earlier steps, and return True.

    `state` is the result of `state_of`, or a copy of it in host memory. The folder appears when all of it is on the
    disk; `kept_checkpoints` removes older ones then. Return False, and write nothing, if the newest checkpoint already
    is of this step. All ranks call it, in any thread. Raise CheckpointError on all ranks if a rank cannot write, or is
    lost.
    """
    folder = out / f"checkpoint-{progress.next_step}"

    def begin(_: list[bytes]) -> str | None:
        return None if latest_checkpoint(out) == folder and _is_whole(folder) else str(temporary_folder(folder))

    def finish(_: list[bytes]) -> None:
        write_progress(Path(unfinished), progress)
        for lines in out.glob("*.jsonl"):  # the steps before this one are not run again
            with contextlib.suppress(FileNotFoundError):  # the oldest segment of a bounded file was removed
                flush(lines)
        publish(folder)

    try:
        unfinished = saving.ranks.call("save_checkpoint", begin)
        if unfinished is None:
            return False
        # Copying ahead would use CUDA of whatever thread writes. The disk is slower than the copies.
        writer = FileSystemWriter(unfinished, per_thread_copy_ahead=0)
        state_dict_saver.save(state, storage_writer=writer, process_group=saving.process_group)
        saving.ranks.call("save_checkpoint: finish", finish)
    except (Exception, CheckpointException) as error:  # torch derives its own from BaseException
        if saving.ranks.rank == 0:
            discard(folder)
        reason = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        before = latest_checkpoint(out)
        kept = "There is no earlier one." if before is None else f"{before} is still valid."
        raise CheckpointError(f"{folder} could not be written ({type(reason).__name__}: {reason}). {kept}") from error
    return True


def load_checkpoint(folder: Path, models: Mapping[str, Trained]) -> Progress:
    """Restore the models and their optimizers in place, and return the progress of the run.

    `check_checkpoint` has read all files before. Raise BadRequestError if they cannot be read, or if they have other
    models.
    """
    progress = _progress(_read_values(folder), folder)
    if (found := {POLICY, *(progress.further or {})}) != set(models):
        raise BadRequestError(
            f"The checkpoint {folder} has the models {sorted(found)}, and this run has {sorted(models)}. Continue it "
            "with the command that began it."
        )
    parts = list(_parts(models, progress))
    state: dict[str, Any] = {}
    for prefix, model, own, has_state in parts:
        state |= _state_to_load(prefix, model, own, has_state)
    try:
        state_dict_loader.load(state, checkpoint_id=folder)
    except CheckpointException as error:
        reason = next(iter(error.failures.values()))[0]
        raise BadRequestError(f"The checkpoint {folder} cannot be read: {type(reason).__name__}: {reason}") from error
    for prefix, model, own, has_state in parts:
        # Each tied parameter is there once, so "strict" would miss its other name.
        set_model_state_dict(model, state[f"{prefix}model"], options=StateDictOptions(strict=False))
        if has_state:
            set_optimizer_state_dict(model, own, state[f"{prefix}optimizer"])
    return progress


def state_of(models: Mapping[str, Trained], progress: Progress) -> dict[str, Any]:
    """Return the state dictionaries that a checkpoint stores, with this rank's shards of weights and optimizers.

    They have the stored parameters themselves, which are also right after an error inside a pass.
    """
    state: dict[str, Any] = {}
    for prefix, model, optimizer, has_state in _parts(models, progress):
        state |= _state_to_save(prefix, model, optimizer, has_state)
    return state


def _parts(
    models: Mapping[str, Trained], progress: Progress
) -> Iterator[tuple[str, Model, torch.optim.Optimizer, bool]]:
    """Yield (prefix of the keys, model, optimizer, whether it has a state) of each model."""
    for name, trained in models.items():
        if name == POLICY:
            yield "", *trained, progress.has_optimizer_state
        else:
            yield f"{name}.", *trained, (progress.further or {})[name]


def _is_whole(folder: Path) -> bool:
    try:
        check_checkpoint(folder)
    except BadRequestError:
        return False
    return True


def _state_to_load(
    prefix: str, model: Model, optimizer: torch.optim.Optimizer, has_optimizer_state: bool
) -> dict[str, Any]:
    """Return the state dictionaries to fill, in this rank's shards. torch creates a missing state of the optimizer."""
    names = {name for name, _ in model.checkpoint_weights()}
    values = {name: value for name, value in get_model_state_dict(model).items() if name in names}
    state: dict[str, Any] = {f"{prefix}model": values}
    if has_optimizer_state:
        state[f"{prefix}optimizer"] = get_optimizer_state_dict(model, optimizer)
    return state


def _state_to_save(
    prefix: str, model: Model, optimizer: torch.optim.Optimizer, has_optimizer_state: bool
) -> dict[str, Any]:
    """Return the same dictionaries from the stored parameters."""
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.checkpoint_weights()}
    state: dict[str, Any] = {f"{prefix}model": {name: parameter.detach() for parameter, name in names.items()}}
    if has_optimizer_state:
        groups = [
            group | {"params": [names[parameter] for parameter in group["params"]]} for group in optimizer.param_groups
        ]
        state[f"{prefix}optimizer"] = {
            "state": {names[parameter]: dict(values) for parameter, values in optimizer.state.items()},
            "param_groups": groups,
        }
    return state

"""A run that begins from a checkpoint of another run (`--fork`).

`RunFolder.open` calls `fork_checkpoint` on rank 0, before anything else starts. The checkpoint is copied into the new
run's folder, and everything behind that is as for a run that continues: the other run is only read, may go on, and may
remove the checkpoint meanwhile, and the new run can be resumed before its first own checkpoint.
"""

from __future__ import annotations

import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from verl_server.errors import BadRequestError
from verl_server.files.durable import discard, publish, temporary_folder
from verl_server.train.checkpoints import PIECE, checkpoints_of, latest_checkpoint, read_listed, step_of
from verl_server.train.evaluations import best_evaluated_step

ForkStep = int | Literal["best"] | None
"""The step of a checkpoint, the one of the best evaluated weights, or None: the newest one."""


@dataclass(frozen=True)
class Forked:
    """The beginning of a forked run."""

    source: Path
    """The checkpoint of the other run."""
    checkpoint: Path
    """Its copy, in the folder of the new run."""
    version: str
    """Version of its weights in the other run."""


def fork_checkpoint(run: Path, step: ForkStep, out: Path, command: str) -> Forked:
    """Copy a checkpoint of `run` into `out`, the folder of a new run of `command`.

    Raise BadRequestError if there is no such run or checkpoint, if it is damaged, or is removed while it is read, and
    if the command cannot continue it.
    """
    source = find_checkpoint(run, step, out)
    target = out / source.name
    try:
        progress, files = read_listed(source)
        if progress.undone_groups is not None and not command.startswith("train.async_"):
            asynchronous = command.replace("train.", "train.async_")
            raise BadRequestError(
                "it is of an asynchronous run, whose groups are not trained in their order. Fork it with "
                f"verl_server.{asynchronous}: --max-staleness 0 is the synchronous run"
            )
        partial = temporary_folder(target)
        for name, (_, checksum) in files.items():
            _copy(source, partial, name, checksum)
        shutil.copyfile(source / "run.json", partial / "run.json")
        publish(target)
    except (BadRequestError, OSError) as error:
        discard(target)
        if not source.is_dir():
            raise BadRequestError(
                f"{source} was removed while it was read: its run goes on, and keeps its newest checkpoints "
                f"(--keep-checkpoints). {_those_that_exist(run)}"
            ) from None
        raise BadRequestError(f"{source} cannot be forked: {str(error).rstrip('.')}.") from None
    version = str(progress.version) if progress.incarnation is None else f"{progress.version}@{progress.incarnation}"
    return Forked(source, target, version)


def find_checkpoint(run: Path, step: ForkStep, out: Path) -> Path:
    """Return the checkpoint of `run` that `step` names.

    Raise BadRequestError, which names the steps that exist, if there is none, and if `run` is `out`.
    """
    run = run.resolve()
    if run == out.resolve():
        raise BadRequestError(f"--fork {run} is the folder of --out. Name another --out, or continue with --resume.")
    if not run.is_dir():
        raise BadRequestError(f"--fork {run} does not exist. Name the folder of a training run.")
    newest = latest_checkpoint(run)
    if newest is None:
        is_checkpoint = run.name.removeprefix("checkpoint-").isdecimal()
        remedy = (
            f"Name its run: --fork {run.parent} --fork-step {step_of(run)}" if is_checkpoint else "Name another run"
        )
        raise BadRequestError(f"--fork {run} has no checkpoint. {remedy}.")
    if step is None:
        return newest
    if step != "best":
        checkpoint = run / f"checkpoint-{step}"
        if checkpoint not in checkpoints_of(run):
            raise BadRequestError(f"{run} has no checkpoint of step {step}. {_those_that_exist(run)}")
        return checkpoint
    best = best_evaluated_step(run, among={step_of(folder) for folder in checkpoints_of(run)})
    if best is None:
        raise BadRequestError(f"{run} has no checkpoint that was evaluated. {_those_that_exist(run)}")
    return run / f"checkpoint-{best}"


def _those_that_exist(run: Path) -> str:
    steps = sorted(step_of(folder) for folder in checkpoints_of(run))
    return f"Steps to name with --fork-step: {', '.join(map(str, steps)) or 'none'}."


def _copy(source: Path, target: Path, name: str, checksum: str) -> None:
    """Copy a file of a checkpoint. Raise BadRequestError if it is damaged."""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise BadRequestError(f"{source / 'run.json'} lists {name}, which is not in its folder")
    (target / name).parent.mkdir(parents=True, exist_ok=True)
    found = 0
    with (source / name).open("rb") as reading, (target / name).open("wb") as writing:
        while piece := reading.read(PIECE):
            found = zlib.crc32(piece, found)
            writing.write(piece)
    if f"{found:08x}" != checksum:
        raise BadRequestError(f"the checksum of {source / name} is wrong")

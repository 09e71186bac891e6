"""`RunFolder`: the folder of `--out`, with the files of one training run.

    run.json             the settings of the run
    metrics.jsonl        one line for each step
    trajectories.jsonl   four trajectories of rank 0 of each step (`--keep-trajectories few`)
    trajectories-rankN.jsonl   all trajectories of rank N (`--keep-trajectories all`)
    errors.jsonl         one line for each episode that failed
    untrained-rankN.jsonl   episodes of rank N that ended in a step which the run did not complete
    checkpoint-STEP/     the state from which `--resume` continues (see `checkpoints`)
    model/               the trained policy as a Hugging Face folder

A file with the number of a rank is written by that rank, the others by rank 0. Lines are appended when a step ends. A
line of a trajectory has `step` and `rank` before the fields of `Trajectory`: `rollout.trajectory.read_jsonl` loads it.

`--resume` plays a step that was not completed again, and keeps its earlier episodes in untrained-rankN.jsonl.
"""

from __future__ import annotations

import dataclasses
import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from verl_server.errors import BadRequestError
from verl_server.files.durable import discard, flush, make_folder, replace_file
from verl_server.files.json_files import decode_json, whole_lines
from verl_server.files.run_output import Claim, check_settings, claim_folder, recorded, store_settings, stored_settings
from verl_server.rollout.trajectory import Trajectory, append_jsonl, labelled, rank_files
from verl_server.train.checkpoints import check_checkpoint, latest_checkpoint
from verl_server.train.metrics import Failure, StepMetrics
from verl_server.train.run_settings import MAY_DIFFER

logger = logging.getLogger(__name__)

_FILES = ("metrics.jsonl", "trajectories.jsonl", "errors.jsonl")
_FEW = 4
"""Number of trajectories of each step that `few` keeps."""


class RunFolder:
    def __init__(
        self,
        path: Path,
        settings: Callable[[], dict[str, Any]] | None = None,
        keep_trajectories: Literal["few", "all"] = "few",
    ) -> None:
        """Take `settings`, which returns what run.json stores and a resumed run compares. None stores nothing."""
        self.path = path
        self._keeps_all = keep_trajectories == "all"
        self._settings = settings
        self._run_file = path / "run.json"
        self._is_resumed = self._replaces = False
        self._claim: Claim | None = None

    def open(self, resume: bool) -> str | None:
        """Check and lock the folder before anything starts, and return the checkpoint to continue from, or None.

        Rank 0 calls it. Raise BadRequestError if another process trains in this folder now, or if `start` or `resume`
        refuses the folder.
        """
        self._claim = claim_folder(self.path)
        try:
            if resume:
                return str(self.resume())
            self.start()
            return None
        except BaseException:
            self.close()
            raise

    def begin(self) -> None:
        """Store the settings of a new run. Rank 0 calls it when the server is up."""
        if self._replaces:
            for folder in (self.path / "model", self.path / "checkpoint-0"):  # of a run that had no first step
                shutil.rmtree(folder, ignore_errors=True)
        if self._settings is not None and not (self._is_resumed and self._run_file.exists()):
            store_settings(self._run_file, self._settings())

    def close(self) -> None:
        """Release the folder."""
        if self._claim is not None:
            self._claim.release()

    def start(self) -> None:
        """Create the folder. Raise BadRequestError if it already contains a run."""
        found = recorded(self.path, also=("model",))
        if self._has_no_step(found):
            found, self._replaces = [], True
        checkpoint = latest_checkpoint(self.path)
        if found:
            raise BadRequestError(
                f"{self.path} already holds a run ({', '.join(found)}). "
                + ("Continue it with --resume, or name" if checkpoint is not None else "Name")
                + " another folder with --out."
            )
        make_folder(self.path)
        flush(self.path.parent)

    def _has_no_step(self, found: Sequence[str]) -> bool:
        """Return True if an earlier run ended before its first step, with the initial weights saved."""
        if "checkpoint-0" not in found or not set(found) <= {"checkpoint-0", "model"} or not self._run_file.exists():
            return False
        return bool(stored_settings(self._run_file).get("command") == "train.grpo")

    def resume(self) -> Path:
        """Prepare the folder for a run that continues, and return the checkpoint to continue from.

        Lines of later steps are removed from the jsonl files, because these steps run again. Raise BadRequestError if
        there is no checkpoint, if a file is damaged, or if the run has other settings.
        """
        checkpoint = latest_checkpoint(self.path)
        if checkpoint is None:
            raise BadRequestError(
                f"There is nothing to resume in {self.path}: it contains no finished checkpoint. Start a new run "
                "without --resume, or name the folder of an earlier run with --out."
            )
        if self._settings is not None:
            if self._run_file.exists():
                check_settings(self.path, self._run_file, self._settings(), MAY_DIFFER)
            else:
                logger.warning("%s is missing, so the settings of the run are not compared.", self._run_file)
        self._is_resumed = True
        discard(self.path / "model")  # as an interrupted `save_policy` left it
        step = check_checkpoint(checkpoint).next_step
        names = (*_FILES, *(file.name for file in rank_files(self.path)))
        lines = {name: _lines_before(self.path / name, step) for name in names}
        if lacking := sorted(set(range(step)) - {number for number, _ in lines["metrics.jsonl"]}):
            logger.warning(
                "%s lacks %d of the %d steps before %s: %s. The run continues without them.",
                self.path / "metrics.jsonl",
                len(lacking),
                step,
                checkpoint.name,
                ", ".join(map(str, lacking[:10])) + (", ..." if len(lacking) > 10 else ""),
            )
        for name, kept in lines.items():
            if (self.path / name).exists():
                _rewrite(self.path / name, [line for _, line in kept])
        return checkpoint

    def record(self, metrics: StepMetrics, failures: Sequence[Failure] = ()) -> None:
        """Append one step to metrics.jsonl and errors.jsonl. Rank 0 calls it."""
        append_jsonl(self.path / "metrics.jsonl", [dataclasses.asdict(metrics)])
        if failures:
            append_jsonl(self.path / "errors.jsonl", failures)

    def record_trajectories(self, step: int, rank: int, trajectories: Sequence[Trajectory]) -> None:
        """Append the trajectories of `rank` that the run keeps. Every rank calls it with its own of a step."""
        if self._keeps_all:
            file, kept = self.path / f"trajectories-rank{rank}.jsonl", trajectories
        else:
            file, kept = self.path / "trajectories.jsonl", trajectories[: _FEW if rank == 0 else 0]
        if kept:
            self.path.mkdir(parents=True, exist_ok=True)  # a rank of another machine may have a folder of its own
            append_jsonl(file, labelled(kept, step=step, rank=rank))

    def record_untrained(self, step: int, rank: int, trajectories: Sequence[Trajectory]) -> None:
        """Append `trajectories`, which ended in a step that the run does not complete, to the jsonl file of `rank`.

        Every rank calls it with its own trajectories.
        """
        if trajectories:
            self.path.mkdir(parents=True, exist_ok=True)  # a rank of another machine may have a folder of its own
            append_jsonl(self.path / f"untrained-rank{rank}.jsonl", labelled(trajectories, step=step, rank=rank))


class _Step(msgspec.Struct):
    """The key that all lines of the jsonl files have."""

    step: Annotated[int, msgspec.Meta(ge=0)]


def _lines_before(file: Path, step: int) -> list[tuple[int, bytes]]:
    """Return (step, line) of the lines before `step`. A last line that was cut off is left out.

    Raise BadRequestError for any other line that is damaged.
    """
    kept = []
    for where, line in whole_lines(file):
        try:
            found = decode_json(line, _Step, where).step
        except BadRequestError as error:
            raise BadRequestError(f"{error}. The line is damaged: remove it to continue without it.") from None
        if found < step:
            kept.append((found, line))
    return kept


def _rewrite(file: Path, lines: Sequence[bytes]) -> None:
    shorter = file.with_suffix(".new")
    shorter.write_bytes(b"".join(lines))
    replace_file(shorter, file)

"""`RunFolder`: the folder of `--out`: checked, locked, begun anew or continued from its checkpoint.

    run.json             the settings of the run
    *.jsonl              the records of the run (`run_writer`)
    checkpoint-STEP/     the state from which `--resume` continues (see `checkpoints`)
    model/               the trained policy as a Hugging Face folder

`--resume` plays a step that was not completed again. It removes no line: those of lost steps have another incarnation.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from verl_server.errors import BadRequestError
from verl_server.files.durable import discard, flush, make_folder
from verl_server.files.json_files import decode_json
from verl_server.files.run_output import Claim, check_settings, claim_folder, recorded, store_settings, stored_settings
from verl_server.files.segments import read_segments
from verl_server.train.checkpoints import check_checkpoint, latest_checkpoint
from verl_server.train.run_settings import MAY_DIFFER, REMOVED

logger = logging.getLogger(__name__)


class RunFolder:
    def __init__(
        self,
        path: Path,
        settings: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        """Take `settings`, which returns what run.json stores and a resumed run compares. None stores nothing."""
        self.path = path
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

        Lines of later steps stay, and the incarnation tells them from those of the steps that run again. Raise
        BadRequestError if there is no checkpoint, if a file is damaged, or if the run has other settings.
        """
        checkpoint = latest_checkpoint(self.path)
        if checkpoint is None:
            raise BadRequestError(
                f"There is nothing to resume in {self.path}: it contains no finished checkpoint. Start a new run "
                "without --resume, or name the folder of an earlier run with --out."
            )
        if self._settings is not None:
            if self._run_file.exists():
                check_settings(self.path, self._run_file, self._settings(), MAY_DIFFER | REMOVED)
            else:
                logger.warning("%s is missing, so the settings of the run are not compared.", self._run_file)
        self._is_resumed = True
        discard(self.path / "model")  # as an interrupted `save_policy` left it
        step = check_checkpoint(checkpoint).next_step
        if lacking := sorted(set(range(step)) - _steps_before(self.path, step)):
            logger.warning(
                "%s lacks %d of the %d steps before %s: %s. The run continues without them.",
                self.path / "metrics.jsonl",
                len(lacking),
                step,
                checkpoint.name,
                ", ".join(map(str, lacking[:10])) + (", ..." if len(lacking) > 10 else ""),
            )
        return checkpoint


class _Step(msgspec.Struct):
    """The key that all lines of metrics.jsonl have."""

    step: Annotated[int, msgspec.Meta(ge=0)]


def _steps_before(folder: Path, step: int) -> set[int]:
    """Return the steps before `step` in metrics.jsonl. A last line that was cut off is left out.

    Raise BadRequestError for any other line that is damaged.
    """
    found = set()
    for where, line in read_segments(folder / "metrics.jsonl"):
        try:
            found.add(decode_json(line, _Step, where).step)
        except BadRequestError as error:
            raise BadRequestError(f"{error}. The line is damaged: remove it to continue without it.") from None
    return {number for number in found if number < step}

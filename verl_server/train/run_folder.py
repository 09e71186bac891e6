"""`RunFolder`: the folder of `--out`: checked, locked, begun anew or continued from its checkpoint.

    run.json             the settings of the run
    *.jsonl              the records of the run (`run_writer`)
    *.msgpack            groups that have finished and that no checkpoint counts as done (`journal`)
    checkpoint-STEP/     the state from which `--resume` continues (see `checkpoints`)
    model/               the trained policy as a Hugging Face folder

`--resume` plays a step that was not completed again. It removes no line: those of lost steps have another incarnation.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from verl_server.errors import BadRequestError
from verl_server.files.durable import discard, flush, make_folder
from verl_server.files.json_files import decode_json
from verl_server.files.run_output import Claim, check_settings, claim_folder, recorded, store_settings, stored_settings
from verl_server.files.segments import read_segments
from verl_server.train.checkpoints import check_checkpoint, latest_checkpoint, step_of
from verl_server.train.forks import Forked
from verl_server.train.journal import check_journals
from verl_server.train.run_settings import MAY_DIFFER, NOTED, REMOVED, typed_names

logger = logging.getLogger(__name__)


class RunFolder:
    def __init__(
        self,
        path: Path,
        settings: Callable[[], dict[str, Any]] | None = None,
        fork: Callable[[], Forked] | None = None,
    ) -> None:
        """Take `settings`, which returns what run.json stores and a resumed run compares. None stores nothing.

        `fork` copies the checkpoint of another run, from which this one begins, into the folder.
        """
        self.path = path
        self.forked: Forked | None = None
        """The beginning of a forked run."""
        self._settings = settings
        self._fork = fork
        self._run_file = path / "run.json"
        self._is_resumed = self._has_begun = False
        self._replaced: list[str] = []
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
            if self._fork is None:
                return None
            self.forked = self._fork()
            return str(self.forked.checkpoint)
        except BaseException:
            self.close()
            raise

    def begin(self, described: Mapping[str, Any] | None = None) -> None:
        """Store the settings of a new run, with what `described` adds. Rank 0 calls it when the server is up."""
        copied = self.forked.checkpoint if self.forked is not None else None
        for name in self._replaced:  # of a run that had no first step
            if self.path / name != copied:
                shutil.rmtree(self.path / name, ignore_errors=True)
        if self._settings is not None and not (self._is_resumed and self._run_file.exists()):
            settings = self._settings() | dict(described or {})
            store_settings(self._run_file, settings if copied is None else settings | {"fork_step": step_of(copied)})
        self._has_begun = True

    def close(self) -> None:
        """Release the folder. A forked run that has not begun leaves nothing that blocks the corrected command."""
        if self.forked is not None and not self._has_begun and self.forked.checkpoint.name not in self._replaced:
            shutil.rmtree(self.forked.checkpoint, ignore_errors=True)
        if self._claim is not None:
            self._claim.release()

    def start(self) -> None:
        """Create the folder. Raise BadRequestError if it already contains a run."""
        found = recorded(self.path, also=("model",))
        if self._has_no_step(found):
            found, self._replaced = [], found
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
        """Return True if an earlier run ended before its first step, with the weights saved from which it began."""
        first = [name for name in found if name != "model"]
        if len(first) != 1 or not first[0].startswith("checkpoint-") or not self._run_file.exists():
            return False
        stored = stored_settings(self._run_file)
        is_training = str(stored.get("command")).startswith("train.")
        return is_training and first[0] == f"checkpoint-{_first_step(stored)}"

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
        first = 0
        if self._settings is not None:
            if self._run_file.exists():
                wanted, differ = self._settings(), MAY_DIFFER | NOTED | REMOVED
                stored = check_settings(self.path, self._run_file, wanted, differ, typed_names(wanted))
                first = _first_step(stored)
            else:
                logger.warning("%s is missing, so the settings of the run are not compared.", self._run_file)
        self._is_resumed = True
        discard(self.path / "model")  # as an interrupted `save_policy` left it
        step = check_checkpoint(checkpoint).next_step
        check_journals(self.path)
        if lacking := sorted(set(range(first, step)) - _steps_before(self.path, step)):
            logger.warning(
                "%s lacks %d of the %d steps before %s: %s. The run continues without them.",
                self.path / "metrics.jsonl",
                len(lacking),
                step - first,
                checkpoint.name,
                ", ".join(map(str, lacking[:10])) + (", ..." if len(lacking) > 10 else ""),
            )
        return checkpoint


def _first_step(settings: Mapping[str, Any]) -> int:
    """Return the step with which a run began: not 0 if it is a fork of another run."""
    step = settings.get("fork_step")
    return step if isinstance(step, int) else 0


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

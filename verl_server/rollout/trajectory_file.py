"""`TrajectoryFile`: the file of `verl-server rollout --out`, with the settings of the run in FILE.run.json beside it.

Each trajectory is appended when it ends. A resumed run keeps the episodes that the policy ended, and plays the others.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from verl_server.errors import BadRequestError
from verl_server.json_files import numbered_lines
from verl_server.rollout.trajectory import Trajectory, append_jsonl, is_unsampled, read_jsonl, read_trajectory
from verl_server.run_output import Claim, check_settings, claim_file, store_settings

logger = logging.getLogger(__name__)


class TrajectoryFile:
    """The output of one run. `close` it at the end."""

    def __init__(
        self, file: Path, settings: dict[str, Any], may_differ: dict[str, str], *, resume: bool = False
    ) -> None:
        """Check and lock the file. Nothing of an earlier run is changed before `begin`.

        `settings`: what `check_settings` compares in a resumed run, without those of `may_differ`. A file that is no
        regular one (/dev/null, a pipe) is written as it is, and cannot be resumed.
        Raises BadRequestError if the file cannot be written, has trajectories and `resume` is False, or is of another
        run.
        """
        self.file = file.resolve() if file.is_symlink() else file
        self._settings, self._may_differ = settings, may_differ
        self._run_file = self.file.with_name(f"{self.file.name}.run.json")
        self._kept: list[bytes] = []
        self.finished: set[int] = set()
        """Seeds of the episodes that a resumed run does not play again."""
        self._claim: Claim | None = None
        if self.file.exists() and not self.file.is_file() and not self.file.is_dir():
            if resume:
                raise BadRequestError(f"{file} is no regular file, so there is nothing to resume.")
            return
        self._claim = claim_file(self.file)
        try:
            if self.is_empty:
                if resume:
                    logger.warning("%s has no trajectories: there is nothing to resume, and the run begins.", file)
            elif not resume:
                raise BadRequestError(
                    f"{file} has the trajectories of another run. Continue that run with --resume, name another file "
                    "with --out, or remove this one."
                )
            else:
                self._check(self._settings, may_differ | {"model": "it is known when the server has answered"})
                self._read()
        except BaseException:
            self.close()
            raise

    @property
    def is_empty(self) -> bool:
        """True if no trajectory was written."""
        return self.file.stat().st_size == 0

    def begin(self, model: str) -> None:
        """Begin to write. `model` is the server's. Raises BadRequestError if the resumed run had another one."""
        if self._claim is None:
            return
        settings = self._settings | {"model": model}
        if self.is_empty:
            store_settings(self._run_file, settings)
        else:
            self._check(settings, self._may_differ)
            self._claim.replace(self._kept)

    def add(self, trajectory: Trajectory) -> None:
        """Append a trajectory that has ended."""
        append_jsonl(self.file, [trajectory])

    def trajectories(self) -> list[Trajectory]:
        """All trajectories of the file, with those before the resumption. [] if it is no regular file."""
        return [] if self._claim is None else read_jsonl(self.file)

    def close(self) -> None:
        """Release the file."""
        if self._claim is not None:
            self._claim.release()

    def _check(self, settings: dict[str, Any], may_differ: dict[str, str]) -> None:
        if not self._run_file.exists():
            raise BadRequestError(
                f"{self.file} has trajectories, but {self._run_file.name} with the settings of their run is missing. "
                "Restore it, or name another file with --out."
            )
        check_settings(self.file, self._run_file, settings, may_differ)

    def _read(self) -> None:
        """Note which episodes are there.

        A last line that was cut off, and episodes that the policy did not end or had no part in, are dropped.
        """
        for where, line in numbered_lines(self.file):
            if not line.endswith(b"\n"):
                return
            try:
                trajectory = read_trajectory(line, where)
            except BadRequestError as error:
                raise BadRequestError(f"A line is damaged: {error}") from None
            reason = trajectory.stop_reason
            if reason is not None and reason.is_scored and not is_unsampled([trajectory]):
                self._kept.append(line)
                self.finished.add(trajectory.task.seed)

"""`TrajectoryFile`: the file of `verl-server rollout --out`, with the settings of the run in FILE.run.json beside it.

FILE.index.sqlite has a row for each trajectory (`watch.index`).

Each trajectory is appended when it ends. A resumed run plays those again that the infrastructure ended, or in which the
policy sampled no token.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec

from verl_server.errors import BadRequestError, VerlServerError
from verl_server.files.json_files import whole_lines
from verl_server.files.json_values import jsonable
from verl_server.files.run_output import Claim, check_settings, claim_file, store_settings, stored_settings
from verl_server.files.segments import LinePlace
from verl_server.rollout.trajectory import Fault, Trajectory, read_jsonl, read_trajectory
from verl_server.watch.index.index_file import IndexFile
from verl_server.watch.index.line_rows import trajectory_row
from verl_server.watch.index.row_kinds import index_beside
from verl_server.watch.pipe_output import PipeOutput, is_no_regular_file
from verl_server.watch.run_records import Label

logger = logging.getLogger(__name__)


class TrajectoryFile:
    """The output of one run. `close` it at the end."""

    def __init__(
        self, file: Path, settings: dict[str, Any], may_differ: dict[str, str], *, resume: bool = False
    ) -> None:
        """Check and lock the file. Nothing of an earlier run is changed before `begin`.

        A resumed run compares `settings`, except those of `may_differ`. A file that is not regular (/dev/null, a pipe)
        is opened once and written as it is, and cannot be resumed. If every episode of an earlier run failed without a
        sampled token, `begin` replaces that run. Raise BadRequestError if the file cannot be written, has trajectories
        and `resume` is False, or is of another run.
        """
        self.file = file
        self._settings, self._may_differ = settings, may_differ
        self._kept: dict[tuple[int, int], bytes] = {}
        self._replaces = False
        self._claim: Claim | None = None
        self._index: IndexFile | None = None
        self._pipe: PipeOutput | None = None
        if is_no_regular_file(file):
            if resume:
                raise BadRequestError(f"{file} is no regular file, so there is nothing to resume.")
            self._pipe = PipeOutput(file)
            return
        if file.is_dir():
            raise BadRequestError(f"{file} is a folder. Name a file.")
        self.file = file.resolve() if file.is_symlink() else file
        self._run_file = self.file.with_name(f"{self.file.name}.run.json")
        self._claim = claim_file(self.file)
        try:
            self._replaces = not self.is_empty and self._has_failures_only()
            if self.is_empty or self._replaces:
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

    @property
    def is_stdout(self) -> bool:
        """True if the trajectories go where this process prints."""
        output = self._claim if self._pipe is None else self._pipe
        return output is not None and output.is_stdout

    @property
    def finished(self) -> set[tuple[int, int]]:
        """(seed, member) of the episodes that a resumed run does not play again."""
        return set(self._kept)

    def begin(self, model: str) -> None:
        """Begin to write. `model` is the server's model. Raise BadRequestError if the resumed run had another model."""
        if self._claim is None:
            return
        settings = self._settings | {"model": model}
        if self._replaces:
            logger.warning("In the earlier run in %s, every episode failed. It is replaced.", self.file)
            self._claim.replace([])
        if self.is_empty:
            store_settings(self._run_file, settings)
        else:
            self._check(settings, self._may_differ)
            self._claim.replace(list(self._kept.values()))
        database = index_beside(self.file)
        database.unlink(missing_ok=True)  # of the file before
        self._index = IndexFile(database)

    def add(self, trajectory: Trajectory) -> None:
        """Append a trajectory that has ended. Raise VerlServerError if the file cannot be written any more."""
        if self._pipe is not None:
            self._pipe.write(msgspec.json.encode(trajectory, enc_hook=jsonable) + b"\n")
            return
        line = msgspec.json.encode(trajectory, enc_hook=jsonable) + b"\n"
        try:
            with self.file.open("ab") as output:
                place = LinePlace(self.file.name, output.tell(), len(line))
                output.write(line)
        except OSError as error:
            raise VerlServerError(
                f"{self.file} cannot be written: {error.strerror or error}. The same command with --resume continues."
            ) from None
        if self._index is not None:
            self._index.add([place], lambda: [trajectory_row("trajectory", Label(), trajectory)])

    def trajectories(self) -> list[Trajectory]:
        """Return all trajectories of the file, with those before the resumption; [] if it is no regular file."""
        return [] if self._claim is None else read_jsonl(self.file)

    def close(self) -> None:
        """Release the file."""
        if self._index is not None:
            self._index.close()
        if self._claim is not None:
            self._claim.release()
        if self._pipe is not None:
            self._pipe.close()

    def _has_failures_only(self) -> bool:
        """Return True if the file is of this command, and no episode in it has a sampled token or a reward."""
        try:
            if not self._run_file.exists() or stored_settings(self._run_file).get("command") != "rollout":
                return False
            found = (read_trajectory(line, where) for where, line in whole_lines(self.file))
            return all(trajectory.reward is None and not any(trajectory.loss_mask) for trajectory in found)
        except BadRequestError:  # a damaged file may have had episodes of use
            return False

    def _check(self, settings: dict[str, Any], may_differ: dict[str, str]) -> None:
        if not self._run_file.exists():
            raise BadRequestError(
                f"{self.file} has trajectories, but {self._run_file.name} with the settings of their run is missing. "
                "Restore it, or name another file with --out."
            )
        check_settings(self.file, self._run_file, settings, may_differ)

    def _read(self) -> None:
        """Record the episodes in the file.

        Drop a last line that was cut off, and episodes that the infrastructure ended or the policy had no part in. If
        an episode has several lines, keep the last one.
        """
        repeated = 0
        for where, line in whole_lines(self.file):
            try:
                trajectory = read_trajectory(line, where)
            except BadRequestError as error:
                fault = str(error).removesuffix(" Remove the line.").rstrip(".")
                raise BadRequestError(
                    f"A line is damaged: {fault}. Remove the line, and --resume plays its episode again; or begin "
                    "another run with another --out."
                ) from None
            if _is_complete(trajectory):
                place = trajectory.task.seed, trajectory.member
                repeated += place in self._kept
                self._kept.pop(place, None)
                self._kept[place] = line
        if repeated:
            logger.warning(
                "%s has %d lines of episodes that have another line further down. The last line of each is kept.",
                *(self.file, repeated),
            )


def _is_complete(trajectory: Trajectory) -> bool:
    """Return True if a resumed run does not play the episode again. A slow or failing policy gets no second try."""
    reason = trajectory.stop_reason
    if reason is None or not any(trajectory.loss_mask):
        return False
    # An earlier version recorded no fault, and left all ends without a reward that are not regular.
    return reason.is_regular if trajectory.fault is None else trajectory.fault is not Fault.INFRASTRUCTURE

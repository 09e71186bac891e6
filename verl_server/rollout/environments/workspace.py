"""`WorkspaceEnvironment`: a private folder in which an installed agent works, and a check that judges what it left.

The runner resets it, starts a program with `folder` as its working folder, and plays one `step` with the program's
final answer. The step copies the folder, adds the check's own files and runs the check's command there, isolated. The
policy owns the folder until then: nothing in it is trusted, and whatever its content prevents is a reward of 0.
`workspace_task.py` reads the task's options.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from verl_server.errors import BadRequestError
from verl_server.files.trees import TreeBounds, TreeError, copy_tree, read_below, write_below
from verl_server.rollout.disk_bound import launch_within
from verl_server.rollout.environment import EnvError
from verl_server.rollout.environments.installation import installation_of
from verl_server.rollout.environments.isolation import Isolation, check_isolation, isolated_program
from verl_server.rollout.environments.text import WithoutTools
from verl_server.rollout.environments.workspace_task import CHECK_PATH, read_workspace
from verl_server.rollout.launched import Program
from verl_server.rollout.loop_slots import LoopSlots
from verl_server.rollout.scratch import private_folder, remove_folder

T = TypeVar("T")

_OUTPUT_BYTES = 2**20
_REPORT_CHARACTERS = 8_000
_FILE_BYTES = 2**30
_GRACE = 0.2
_WAIT_SECONDS = 600.0
"""Seconds of a step in addition to the check's own: to wait for other checks, and to copy the workspace."""
_DISK_BYTES = 2**33
"""Bytes of the files that a check may leave on the disk, beside the copy of the workspace."""
_REWARD_FILE = "reward"


@dataclass(frozen=True)
class _Place:
    """Where a check finds what it needs."""

    workspace: Path
    """The copy of the workspace, with the files of the check."""
    home: Path
    answer: Path
    """File with the final answer."""


_INSIDE = _Place(Path("/workspace"), Path("/home/check"), Path("/answer.txt"))
"""The place as an isolated check sees it."""


def _place(judged: Path) -> _Place:
    return _Place(judged / "workspace", judged / "home", judged / "answer.txt")


def check_slots() -> LoopSlots:
    """Return the bound of checks that run at one time: the number of cores. The maker of the environments owns it."""
    return LoopSlots(os.cpu_count() or 1)


class WorkspaceEnvironment(WithoutTools):
    """A `TextEnvironment` with one step: the final answer, after which a check gives the reward, from 0 to 1."""

    def __init__(
        self,
        options: Mapping[str, Any],
        *,
        isolation: Isolation = "bubblewrap",
        bounds: TreeBounds | None = None,
        slots: LoopSlots | None = None,
    ) -> None:
        """`options` are those of a task. `bounds` are the largest workspace that is judged, and the largest `copy`.
        `slots` bound the checks that run at one time (`check_slots`). None: there are no others.

        Raise BadRequestError for wrong options, and if this machine cannot isolate a check.
        """
        check_isolation(isolation)
        self._task = read_workspace(options)
        self._isolation = isolation
        self._bounds = bounds or TreeBounds()
        self._slots = slots or check_slots()
        self._root: Path | None = None
        self._work: asyncio.Future[Any] | None = None

    @property
    def folder(self) -> Path:
        """The workspace: the working folder of the program. It is there between `reset` and `close`."""
        return self._own / "workspace"

    @property
    def step_seconds(self) -> float:
        """Most seconds of the step."""
        return self._task.check.seconds + _WAIT_SECONDS

    async def reset(self, seed: int | None) -> str:
        """Make the workspace. The observation is "": the task's input says what there is to do."""
        await self.close()
        self._root = await asyncio.to_thread(private_folder, "workspace")
        await self._in_thread(self._fill)
        return ""

    async def step(self, text: str) -> tuple[str, float | None, bool]:
        """Judge the workspace and the final answer `text`. Raise EnvError if the check cannot run.

        The observation is a report for the user: the end of the check and the last lines of its output.
        """
        judged = self._own / "check"
        async with self._slots.here:
            try:
                left_out = await self._in_thread(lambda: self._copy_for_check(judged, text))
            except TreeError as error:  # the policy's fault: it must not choose an end of the infrastructure
                return f"The workspace cannot be judged, so the reward is 0: {error}", 0.0, True
            report, reward = await self._judge(judged)
        if left_out:
            names = ", ".join(f"{path!r:.100}" for path in left_out[:5])
            report += f"\n(Not copied for the check, because they are no files: {len(left_out)}, such as {names}.)"
        return report, reward, True

    async def close(self) -> None:
        """Remove the workspace. It waits for a copy that a cancelled step left behind."""
        if self._work is not None:
            await asyncio.gather(self._work, return_exceptions=True)
        root, self._root = self._root, None
        if root is not None:
            await asyncio.to_thread(remove_folder, root)

    @property
    def _own(self) -> Path:
        if self._root is None:
            raise BadRequestError("The workspace is there after reset() and before close() only.")
        return self._root

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Run file work beside the event loop. OSError is the infrastructure's: a full disk, for example."""
        self._work = asyncio.ensure_future(asyncio.to_thread(work))
        try:
            return await asyncio.shield(self._work)
        except OSError as error:
            raise EnvError(f"The workspace could not be written: {error}") from error

    def _fill(self) -> None:
        task = self._task
        if task.copy is None:
            self.folder.mkdir()
        else:
            try:
                copy_tree(task.copy, self.folder, self._bounds)
            except TreeError as error:
                raise EnvError(f"environment.copy: {task.copy} cannot be copied: {error}") from error
        for path, file in task.files.items():
            write_below(self.folder, path, file.data, file.mode)

    def _copy_for_check(self, judged: Path, answer: str) -> list[str]:
        place = _place(judged)
        for folder in (judged, place.home):
            folder.mkdir()
        left_out = copy_tree(self.folder, place.workspace, self._bounds)
        for path, file in self._task.check.files.items():
            write_below(place.workspace, path, file.data, file.mode)
        place.answer.write_bytes(answer.encode("utf-8", "replace"))
        return left_out

    async def _judge(self, judged: Path) -> tuple[str, float]:
        """Run the check in the copy. Return (report, reward)."""
        check = self._task.check
        log = judged / "output"
        program = self._program(judged, log)
        try:
            async with asyncio.timeout(check.seconds):
                exit = await launch_within(program, [judged], _DISK_BYTES, "the bound of a check")
        except TimeoutError:
            end = f"The check failed: it ran longer than {check.seconds:.3g} s and was ended."
            return await asyncio.to_thread(_report, end, log), 0.0
        if exit.exceeded:
            return await asyncio.to_thread(_report, f"The check failed: {exit.exceeded}", log), 0.0
        if exit.code is None:
            raise EnvError(f"The check did not run: {exit.error}. Its last lines:\n{exit.output}")
        if exit.code != 0:
            return await asyncio.to_thread(_report, f"The check failed: exit code {exit.code}.", log), 0.0
        reward, end = await asyncio.to_thread(_reward, _place(judged).home)
        return await asyncio.to_thread(_report, end, log), reward

    def _program(self, judged: Path, log: Path) -> Program:
        check = self._task.check
        argv = check.command
        if check.is_of_workspace:  # if it is missing, the shell ends with 127: that is the policy's failure
            argv = ["/bin/sh", "-c", 'exec "$0" "$@"', *argv]
        limits = {
            "RLIMIT_AS": check.memory_bytes,
            "RLIMIT_CPU": math.ceil(check.seconds) + 1,
            "RLIMIT_FSIZE": _FILE_BYTES,
            "RLIMIT_CORE": 0,
        }
        place = _place(judged)
        is_isolated = self._isolation == "bubblewrap"
        if is_isolated:
            argv = isolated_program(
                argv,
                cwd=_INSIDE.workspace,
                readable=installation_of(Path(sys.executable)),
                readable_at={_INSIDE.answer: place.answer},
                writable_at={_INSIDE.workspace: place.workspace, _INSIDE.home: place.home},
                limits=limits,
            )
        seen = _INSIDE if is_isolated else place
        return Program(
            argv=argv,
            env={
                "PATH": CHECK_PATH,
                "HOME": str(seen.home),
                "LANG": "C.UTF-8",
                "PYTHONNOUSERSITE": "1",
                "PYTHONPYCACHEPREFIX": str(seen.home),  # byte code of the policy does not run in the place of a source
                "VERL_ANSWER_FILE": str(seen.answer),
                "VERL_REWARD_FILE": str(seen.home / _REWARD_FILE),
            },
            cwd="/" if is_isolated else str(place.workspace),
            limits={} if is_isolated else limits,
            log=log,
            log_bytes=_OUTPUT_BYTES,
            grace=_GRACE,
            is_isolated=is_isolated,
        )


def _reward(home: Path) -> tuple[float, str]:
    """Return (reward, sentence) of a check that passed: the number in its reward file, 1.0 if it wrote none.

    The policy's code may have written the file, if the check runs it. So a wrong number is a reward of 0.
    """
    if not os.path.lexists(home / _REWARD_FILE):
        return 1.0, "The check passed, so the reward is 1."
    content = read_below(home, _REWARD_FILE, 100)
    try:
        reward = float(content or "")
    except ValueError:
        reward = math.nan
    if 0.0 <= reward <= 1.0:
        return reward, f"The check passed with the reward {reward:.6g}."
    return 0.0, f"The reward is 0, because $VERL_REWARD_FILE has no number from 0 to 1, but {content!r:.150}."


def _report(end: str, log: Path) -> str:
    try:
        output = log.read_bytes().decode(errors="replace")
    except FileNotFoundError:
        output = ""
    kept = output[-_REPORT_CHARACTERS:]
    name = "Its output" if len(kept) == len(output) else "The end of its output"
    return f"{end} {name}:\n{kept}" if kept.strip() else f"{end} It wrote nothing."

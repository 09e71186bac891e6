"""`read_workspace`: the options of a `workspace` task, read and checked before its episode begins.

`workspace.py` plays them. docs/environments.md says how such tasks are written.
"""

from __future__ import annotations

import base64
import binascii
import math
import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from verl_server.errors import BadRequestError
from verl_server.files.json_files import convert

CHECK_PATH = f"/usr/local/bin:/usr/bin:/bin:{sys.prefix}/bin"
"""PATH of a check: the system's programs, then those of this interpreter's environment, such as pytest."""
_MOST_BYTES = 4096
_MOST_NAME_BYTES = 255


class _File(msgspec.Struct, forbid_unknown_fields=True):
    """A file as a task writes it, if it is more than a text."""

    text: str | None = None
    base64: str | None = None
    mode: str = "644"


class _Check(msgspec.Struct, forbid_unknown_fields=True):
    command: list[str]
    files: dict[str, str | _File] = {}
    seconds: float = 30.0
    memory_bytes: int = 4 * 2**30


class _Options(msgspec.Struct, forbid_unknown_fields=True):
    check: _Check
    files: dict[str, str | _File] = {}
    copy: str | None = None


class TaskFile(msgspec.Struct, frozen=True):
    """A file that a task writes into its workspace."""

    data: bytes
    mode: int
    """Permission bits."""


class Check(msgspec.Struct, frozen=True):
    """The check of a task: it judges the workspace that the policy left."""

    command: list[str]
    files: Mapping[str, TaskFile]
    """Path in the workspace -> file. The policy never sees these files."""
    seconds: float
    """Most seconds that the command runs."""
    memory_bytes: int
    """Address space of each of its processes."""

    @property
    def is_of_workspace(self) -> bool:
        """True if the command is a path in the workspace that is no file of the check: the policy may remove it."""
        program = self.command[0]
        return "/" in program and not program.startswith("/") and os.path.normpath(program) not in self.files


class Workspace(msgspec.Struct, frozen=True):
    """A task of the environment `workspace`."""

    files: Mapping[str, TaskFile]
    """Path in the workspace -> file."""
    copy: Path | None
    """A folder of the runner whose content is copied into the workspace first."""
    check: Check


def read_workspace(options: Mapping[str, Any]) -> Workspace:
    """Return the task. Raise BadRequestError, which names the option and what it should be."""
    if not options.get("check"):
        raise BadRequestError(
            'environment.check is missing. Write {"check": {"command": [PROGRAM, ...], "files": {PATH: TEXT}}}: the '
            "command's exit code 0 is the reward 1."
        )
    given = convert(dict(options), _Options, "environment")
    copy = None if given.copy is None else Path(given.copy)
    if copy is not None and not copy.is_dir():
        raise BadRequestError(f"environment.copy: there is no folder {given.copy!r:.300} (seen from {Path.cwd()}).")
    files = _files(given.files, "environment.files")
    return Workspace(files=files, copy=copy, check=_check(given.check))


def _check(given: _Check) -> Check:
    if not (given.command and given.command[0]):
        raise BadRequestError('environment.check.command is empty. Write it as a list, such as ["python3", "test.py"].')
    if any("\0" in word for word in given.command):
        raise BadRequestError("environment.check.command has a NUL character, which no command can have.")
    own = _files(given.files, "environment.check.files")
    _check_program(given.command[0], own)
    if not (math.isfinite(given.seconds) and given.seconds > 0):
        raise BadRequestError(f"environment.check.seconds must be a number above 0, not {given.seconds}.")
    if given.memory_bytes < 2**24:
        raise BadRequestError(
            f"environment.check.memory_bytes must be at least {2**24:,}, not {given.memory_bytes:,}: no program starts "
            "with less."
        )
    return Check(command=given.command, files=own, seconds=given.seconds, memory_bytes=given.memory_bytes)


def _check_program(program: str, files: Mapping[str, TaskFile]) -> None:
    where = "environment.check.command"
    if program.startswith("/") or "/" not in program:
        if shutil.which(program, path=CHECK_PATH) is None:
            raise BadRequestError(
                f"{where}: there is no program {program!r:.200} (PATH of a check: {CHECK_PATH}). Install it, or add a "
                "script to environment.check.files and write its path: ./NAME."
            )
    elif (file := files.get(os.path.normpath(program))) is not None and not file.mode & 0o100:
        raise BadRequestError(
            f'{where}: {program!r:.200} is no program, because its file has not the mode "755": write '
            f'{{"text": ..., "mode": "755"}}, or name an interpreter: ["sh", {program!r:.200}].'
        )


def _files(given: Mapping[str, str | _File], where: str) -> dict[str, TaskFile]:
    files = {_path(path, where): _file(file, f"{where}[{path!r:.200}]") for path, file in given.items()}
    if len(files) < len(given):
        raise BadRequestError(f"{where} names a file twice, such as 'a' and './a'.")
    folders = {parent for path in files for parent in _parents(path)}
    if both := sorted(folders & files.keys()):
        raise BadRequestError(f"{where}[{both[0]!r:.200}] is a file and a folder: another path continues it.")
    return files


def _path(path: str, where: str) -> str:
    """Return the path without "." and double slashes."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    wrong = ""
    if path.startswith("/"):
        wrong = "is an absolute path"
    elif ".." in parts:
        wrong = "leaves the workspace with '..'"
    elif not parts or path.endswith(("/", "/.")):
        wrong = "names no file"
    elif "\0" in path:
        wrong = "has a NUL character"
    elif len(path.encode()) > _MOST_BYTES or any(len(part.encode()) > _MOST_NAME_BYTES for part in parts):
        wrong = f"is too long (at most {_MOST_BYTES} bytes, and {_MOST_NAME_BYTES} between two slashes)"
    if wrong:
        raise BadRequestError(
            f"{where}[{path!r:.200}] {wrong}. Write a path inside the workspace, such as src/main.py."
        )
    return "/".join(parts)


def _parents(path: str) -> Iterable[str]:
    parts = path.split("/")
    return ("/".join(parts[:end]) for end in range(1, len(parts)))


def _file(given: str | _File, where: str) -> TaskFile:
    if isinstance(given, str):
        return TaskFile(given.encode(), 0o644)
    if (given.text is None) == (given.base64 is None):
        raise BadRequestError(f'{where} needs either "text" or "base64".')
    if not (len(given.mode) in (3, 4) and set(given.mode) <= set("01234567") and int(given.mode, 8) <= 0o777):
        raise BadRequestError(f'{where}.mode must be permissions in octal, such as "755", not {given.mode!r:.50}.')
    return TaskFile(_data(given, where), int(given.mode, 8))


def _data(given: _File, where: str) -> bytes:
    if given.base64 is None:
        return (given.text or "").encode()
    try:
        return base64.b64decode(given.base64, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadRequestError(f"{where}.base64 is not base64: {error}") from None

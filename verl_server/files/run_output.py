"""The output of a run: one rule for each command that writes files.

1. The place is checked before a server, a model or an environment starts: `claim_folder` and `claim_file` create
   missing parents, try to write, and lock the place, so that no second process writes a run there.
2. What another run recorded is refused. A place in which nothing was recorded is free: a command that was refused does
   not block the corrected one.
3. The settings of a run are stored beside its output when it begins. A resumed run compares them (`check_settings`),
   and is refused with a list if one differs. Each command names the settings that may differ, with the reason.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import logging
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from verl_server.errors import BadRequestError
from verl_server.files.durable import make_folder, replace_file, write_file
from verl_server.files.json_files import read_json

logger = logging.getLogger(__name__)

_HOST = re.compile(r"(\w+://)[^/\s]+")
_ABSENT = object()
_LOCKS = Path("/proc/locks")
"""Linux lists in it the locks of all processes that this one can see."""
_COMMAND = "command"
"""Key of the stored settings that an earlier version of this package did not write."""


RECORDS = (
    "metrics.jsonl",
    "trajectories.jsonl",
    "trajectories-rank*.jsonl",
    "episodes.jsonl",
    "errors.jsonl",
    "untrained-rank*.jsonl",
    "held-out-rank*.jsonl",
    "evaluations.jsonl",
    "journal-rank*.msgpack",
    "turns-rank*.msgpack",
    "checkpoint-*",
    "agents/*",
)
"""The files that the commands record in the folder of a run."""


def recorded(folder: Path, also: Sequence[str] = ()) -> list[str]:
    """Return the names of files that a run of any command recorded in a folder, without empty files.

    `also` are further names that the caller would write.
    """
    found = [path for pattern in (*RECORDS, *also) for path in sorted(folder.glob(pattern))]
    return [str(path.relative_to(folder)) for path in found if path.is_dir() or path.stat().st_size]


class Claim:
    """The right to write at a place. It ends with `release`, at the latest with the process."""

    def __init__(self, place: Path, descriptor: int, *, is_new: bool = False) -> None:
        """`descriptor` is the locked file or folder, which `release` closes.

        `is_new` is True if it was created for this claim.
        """
        self.place = place
        self._is_new = is_new
        self._descriptor = descriptor

    @property
    def is_stdout(self) -> bool:
        """True if this process prints to the claimed file."""
        return is_stdout(self._descriptor)

    def replace(self, lines: Sequence[bytes]) -> None:
        """Replace the content of a claimed file atomically. The new file is locked, too."""
        new = self.place.with_name(f".{self.place.name}.partial")
        new.write_bytes(b"".join(lines))
        descriptor = os.open(new, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        _lock(descriptor, self.place)
        replace_file(new, self.place)
        os.close(self._descriptor)
        self._descriptor = descriptor

    def release(self) -> None:
        """Release the place. A new file to which nothing was written is removed."""
        if self._descriptor < 0:
            return
        if self._is_new and self.place.is_file() and not self.place.stat().st_size:
            self.place.unlink()
        os.close(self._descriptor)
        self._descriptor = -1


def is_stdout(descriptor: int) -> bool:
    """Return True if an open file is the standard output of this process."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.fstat(1))
    except OSError:  # the process has no standard output
        return False


def check_folder(folder: Path) -> None:
    """Create a folder unless it exists, and write to it on trial.

    Raise BadRequestError, which names the folder and the reason, if files cannot be written there.
    """
    make_folder(folder)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\n")
            file.flush()
    except OSError as error:
        raise BadRequestError(f"The folder {folder} cannot be written: {error.strerror or error}.") from None


def claim_folder(folder: Path) -> Claim:
    """Create a folder unless it exists, write to it on trial, and lock it.

    Raise BadRequestError if it cannot be written, or if another process writes a run there.
    """
    check_folder(folder)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    _lock(descriptor, folder)
    return Claim(folder, descriptor)


def claim_file(file: Path) -> Claim:
    """Create a file and the folders above it unless they exist, and lock it.

    Raise BadRequestError if it cannot be written, or if another process writes a run there.
    """
    check_folder(file.parent)
    while True:
        is_new = not file.exists()
        try:
            descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except IsADirectoryError:
            raise BadRequestError(f"{file} is a folder. Name a file.") from None
        except OSError as error:
            raise BadRequestError(f"The file {file} cannot be written: {error.strerror or error}.") from None
        _lock(descriptor, file)
        if _is_same(descriptor, file):
            return Claim(file, descriptor, is_new=is_new)
        os.close(descriptor)  # another process removed its empty file meanwhile


def is_claimed(place: Path) -> bool | None:
    """Return True if a process of this machine holds the claim of a place. None if the system does not tell.

    No lock is taken for it: a run that begins at this moment would be refused.
    """
    try:
        stat = place.stat()
        key = f"{os.major(stat.st_dev):02x}:{os.minor(stat.st_dev):02x}:{stat.st_ino}"
        locks = (line.split() for line in _LOCKS.read_text().splitlines())
        return any(lock[1] == "FLOCK" and lock[3] == "WRITE" and key in lock for lock in locks)
    except FileNotFoundError:
        return None if place.exists() else False
    except (OSError, ValueError, IndexError):
        return None


def _lock(descriptor: int, place: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise BadRequestError(
            f"Another process writes a run to {place} now. Name another place, or wait for its end."
        ) from None
    except OSError as error:  # a file system without locks
        logger.debug("%s cannot be locked: %s", place, error)


def _is_same(descriptor: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), file.stat())
    except FileNotFoundError:
        return False


# -- settings -------------------------------------------------------------------------------------------------


def settings_of(command: str, options: object, *, without: Sequence[str] = ()) -> dict[str, Any]:
    """Return the fields of a dataclass as JSON values, nested ones as "outer.inner", with the name of the command.

    `without` has the names to omit: the place itself, and keys, which are never stored.
    """
    return {_COMMAND: command} | {name: plain(v) for name, v in _flat(options).items() if name not in without}


def plain(value: Any) -> Any:
    """Return a value as JSON reads it."""
    return json.loads(msgspec.json.encode(value, enc_hook=str))


def _flat(options: Any, prefix: str = "") -> dict[str, Any]:
    values: dict[str, Any] = {}
    for field in dataclasses.fields(options):
        name, value = prefix + field.name, getattr(options, field.name)
        values |= _flat(value, f"{name}.") if dataclasses.is_dataclass(value) else {name: value}
    return values


def location(text: str) -> str:
    """Return the absolute path of a file or folder that exists, of `FILE.py` in "FILE.py:NAME", else the text itself.

    A hub id, a module and a command are such texts.
    """
    file, colon, name = text.rpartition(":") if re.search(r"\.py:\w+$", text) else (text, "", "")
    try:
        path = Path(file).expanduser().resolve()
        return f"{path}{colon}{name}" if path.exists() else text
    except (OSError, RuntimeError, ValueError):  # no path: a text with a NUL, or one that is too long
        return text


def without_host(url: str) -> str:
    """Replace each "scheme://host:port" in a text by "scheme://*", because a resumed run may use another host."""
    return _HOST.sub(r"\1*", url)


def check_settings(
    place: Path,
    file: Path,
    wanted: Mapping[str, Any],
    may_differ: Mapping[str, str],
    shown_as: Callable[[str], str] = str,
) -> dict[str, Any]:
    """Compare settings with the settings that the run at `place` stored in `file`, and return the stored settings.

    `may_differ` has names, or "outer.*" for all names in `outer`. `shown_as` returns the name of a setting for
    messages, if the user types another one. Raise BadRequestError with a list of all other
    differences, or if the file cannot be read.
    """
    found = stored_settings(file)
    names = found.keys() | wanted.keys()
    # A run of an earlier version lacks the settings that are new. One of today lacks none.
    lacking = {name for name in names if name not in found or (_COMMAND not in found and name not in wanted)}
    if lacking:
        shown = ", ".join(map(shown_as, sorted(lacking)))
        logger.warning("%s is of an earlier version. These settings are not compared: %s.", file, shown)
        names -= lacking
    compared = [name for name in sorted(names) if not _is_allowed(name, may_differ)]
    different = [
        f"{shown_as(name)}: was {_shown(found, name)}, is {_shown(wanted, name)}"
        for name in compared
        if found.get(name, _ABSENT) != wanted.get(name, _ABSENT)
    ]
    if different:
        raise BadRequestError(
            f"{place} is a run with other settings ({'; '.join(different)}). Repeat its settings to continue it, or "
            "begin another run with another --out."
        )
    return found


def stored_settings(file: Path) -> dict[str, Any]:
    """Return the settings that a run stored. Raise BadRequestError, with the remedy, if the file is damaged."""
    try:
        return read_json(file)
    except BadRequestError as error:
        raise BadRequestError(
            f"{str(error).rstrip('.')}. It has the settings of the run: restore it, or begin another run with another "
            "--out."
        ) from None


def store_settings(file: Path, settings: Mapping[str, Any]) -> None:
    """Write the settings of a run, complete or not at all. Raise BadRequestError if the file cannot be written."""
    try:
        write_file(file, json.dumps(settings, indent=2).encode() + b"\n")
    except OSError as error:
        raise BadRequestError(f"The file {file} cannot be written: {error.strerror or error}.") from None


def _is_allowed(name: str, may_differ: Mapping[str, str]) -> bool:
    outer = [name[:end] + ".*" for end, letter in enumerate(name) if letter == "."]
    return name in may_differ or any(pattern in may_differ for pattern in outer)


def _shown(settings: Mapping[str, Any], name: str) -> str:
    return repr(settings[name]) if name in settings else "absent"

"""A disk that forgets: what a folder may look like if the power fails while a process writes to it.

    with recorded(folder) as recording:
        write(folder / "a")
        recording.mark("a is written")
    for disk in recording.disks():
        disk.write_to(elsewhere)
        assert "a is written" not in disk.marks or (elsewhere / "a").read_bytes() == ...

A file system promises what was flushed (`os.fsync`) and nothing else. So after a loss of power

- a file has the content of its last fsync, or any part of what was written since: nothing, the new length with zeros in
  place of the data, a half, or everything;
- a folder has the names of its last fsync, and the changes of names since (created, renamed, removed) up to any one of
  them. Changes of one folder come in their order, and a rename is whole. Two folders, and names and contents, are
  independent: a new name may be there without its content, a file may be gone while the rename before it is lost.

`recorded` follows the operations of Python (audit events, and os.fsync). What native code writes is noticed at the next
operation, so its order is known less exactly, never its durability. Renames from one folder to another are refused.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

_WATCHED = ("open", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.link", "os.truncate")
_COARSE = 100_000_000
"""Nanoseconds that are longer than a tick of any file system's clock."""


@dataclass(eq=False)
class _File:
    seen: list[tuple[int, bytes]] = field(default_factory=list)
    """(number of the next operation, content then), whenever the content had changed."""
    synced: list[tuple[int, bytes]] = field(default_factory=list)
    """(number of the operation, content) of each fsync."""
    stamp: tuple[int, ...] = ()

    def contents(self, point: int) -> list[bytes]:
        """Return the contents that it may have at a point: the flushed one first, then partial ones, the whole last."""
        synced = _last(self.synced, point - 1, b"")
        now = _last(self.seen, point, b"")
        if now == synced:
            return [synced]
        common = len(synced) if now.startswith(synced) else 0  # appended, or written anew
        zeros = now[:common] + bytes(len(now) - common)
        return [synced, zeros, now[:common], now[: (common + len(now)) // 2], now]


@dataclass(eq=False)
class _Folder:
    entries: dict[str, _File | _Folder] = field(default_factory=dict)
    """The names now."""
    changes: list[tuple[int, Callable[[dict[str, Any]], None]]] = field(default_factory=list)
    """(number of the operation, change of the names), in order."""
    synced: list[tuple[int, int]] = field(default_factory=list)
    """(number of the operation, changes that it flushed) of each fsync."""

    def change(self, number: int, apply: Callable[[dict[str, Any]], None]) -> None:
        apply(self.entries)
        self.changes.append((number, apply))

    def counts(self, point: int) -> range:
        """Return the numbers of changes that the disk may have at a point."""
        return range(_last(self.synced, point - 1, 0), sum(number < point for number, _ in self.changes) + 1)

    def names(self, count: int) -> dict[str, _File | _Folder]:
        names: dict[str, _File | _Folder] = {}
        for _, apply in self.changes[:count]:
            apply(names)
        return names


def _last(entries: list[tuple[int, Any]], point: int, default: Any) -> Any:
    """Return the value of the last entry whose number is at most `point`."""
    return next((value for number, value in reversed(entries) if number <= point), default)


class Disk:
    """The folder as one loss of power leaves it."""

    def __init__(self, point: int, operation: str, marks: frozenset[str], tree: dict[str, Any]) -> None:
        self.point = point
        """Number of operations before the loss."""
        self.operation = operation
        """The last one of them."""
        self.marks = marks
        """What was marked before the loss."""
        self._tree = tree

    def write_to(self, folder: Path) -> None:
        """Make `folder` this disk. What it has is removed."""
        shutil.rmtree(folder, ignore_errors=True)
        _write(self._tree, folder)

    def __str__(self) -> str:
        return f"power lost after operation {self.point} ({self.operation}): {_listed(self._tree)}"


def _write(tree: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True)
    for name, content in tree.items():
        if isinstance(content, bytes):
            (folder / name).write_bytes(content)
        else:
            _write(content, folder / name)


def _hash(tree: dict[str, Any]) -> int:
    return hash(frozenset((name, c if isinstance(c, bytes) else _hash(c)) for name, c in tree.items()))


def _listed(tree: dict[str, Any]) -> str:
    entries = (f"{n} {len(c)} B" if isinstance(c, bytes) else f"{n}/ [{_listed(c)}]" for n, c in sorted(tree.items()))
    return ", ".join(entries)


class Recording:
    """The operations of this process on a folder, in order."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self.operations: list[str] = []
        self._marks: list[tuple[int, str]] = []
        self._root = _Folder()
        self._lock = threading.RLock()
        self._look()  # what exists is on the disk
        self._flush_all(self._root)

    def mark(self, what: str) -> None:
        """Note that something is done: a disk of a later loss has the mark."""
        with self._lock:
            self._look()
            self._note(f"done: {what}")
            self._marks.append((len(self.operations), what))

    def disks(self, samples: int = 3, seed: int = 0) -> Iterator[Disk]:
        """Yield the disks of a loss at each point, without equal ones.

        At each point: everything that was not flushed is lost; all names are there without what was written, or with
        zeros in its place; all contents without the names; nothing is lost; and `samples` drawn ones.
        """
        with self._lock:
            self._look()
        draw, known = random.Random(seed), set[tuple[frozenset[str], int]]()
        for point in range(len(self.operations) + 1):
            choices: list[Callable[[Any], Any]] = [lambda options: options[0], lambda options: options[-1]]
            choices += [draw.choice] * samples
            pairs = [(names, contents) for names in choices[:2] for contents in choices[:2]]
            pairs += [(choice, choice) for choice in choices[2:]]
            pairs.insert(2, (choices[1], lambda options: options[min(1, len(options) - 1)]))  # zeros
            marks = frozenset(what for number, what in self._marks if number <= point)
            for names, contents in pairs:
                tree = _lost(self._root, point, names, contents)
                if (key := (marks, _hash(tree))) not in known:
                    known.add(key)
                    yield Disk(point, self.operations[point - 1] if point else "none", marks, tree)

    # -- following the process ---------------------------------------------------------------------------------

    def heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Take an audit event, which comes before its operation."""
        if event not in _WATCHED or (event == "open" and not _writes(arguments)):
            return
        with self._lock:
            self._look()
            if event == "os.rename":
                self._rename(self._inside(arguments[0], arguments[2]), self._inside(arguments[1], arguments[3]))

    def fsync(self, descriptor: int) -> None:
        """Take an fsync that has succeeded."""
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        with self._lock:
            if (place := self._inside(path)) is None:
                return
            self._look()
            found = self._find(place)
            if found is None:  # it was removed meanwhile
                return
            number = self._note(f"fsync {place}")
            if isinstance(found, _Folder):
                found.synced.append((number, len(found.changes)))
            else:
                found.synced.append((number, found.seen[-1][1]))

    def _note(self, operation: str) -> int:
        self.operations.append(operation)
        return len(self.operations) - 1

    def _rename(self, source: Path | None, target: Path | None) -> None:
        if source is None and target is None:
            return
        if source is None or target is None or source.parent != target.parent:
            raise NotImplementedError(f"{source} is renamed to another folder ({target})")
        above = self._find(source.parent)
        if not isinstance(above, _Folder) or source.name not in above.entries:
            return  # it fails
        old, new = source.name, target.name

        def apply(names: dict[str, Any]) -> None:
            names[new] = names.pop(old)

        above.change(self._note(f"rename {source} to {target.name}"), apply)

    def _look(self) -> None:
        """Take note of what has changed since the last operation."""
        self._look_at(self._root, self.folder)

    def _look_at(self, folder: _Folder, path: Path) -> None:
        with os.scandir(path) as entries:
            found = {entry.name: entry for entry in entries if not entry.is_symlink()}
        for name in folder.entries.keys() - found.keys():
            number = self._note(f"remove {(path / name).relative_to(self.folder)}")
            folder.change(number, lambda names, name=name: names.pop(name))  # type: ignore[misc]
        for name, entry in sorted(found.items()):
            if name not in folder.entries:
                new = _Folder() if entry.is_dir() else _File()
                number = self._note(f"create {(path / name).relative_to(self.folder)}")
                folder.change(number, lambda names, name=name, new=new: names.update({name: new}))  # type: ignore[misc]
            node = folder.entries[name]
            with contextlib.suppress(FileNotFoundError):  # another thread removed it
                if isinstance(node, _Folder):
                    self._look_at(node, path / name)
                else:
                    self._look_in(node, path / name)

    def _look_in(self, file: _File, path: Path) -> None:
        status = path.stat()
        stamp = status.st_ino, status.st_size, status.st_mtime_ns
        # The clock of the file system is coarse: a file that changes twice at one of its times has one stamp.
        if stamp != file.stamp or time.time_ns() - status.st_mtime_ns < _COARSE:
            content = path.read_bytes()
            if not file.seen or content != file.seen[-1][1]:
                file.seen.append((len(self.operations), content))
            file.stamp = stamp

    def _flush_all(self, folder: _Folder) -> None:
        """Note that everything in a folder is on the disk before the first operation."""
        folder.changes = [(-1, apply) for _, apply in folder.changes]
        folder.synced.append((-1, len(folder.changes)))
        for entry in folder.entries.values():
            if isinstance(entry, _Folder):
                self._flush_all(entry)
            else:
                before = (-1, entry.seen[-1][1])
                entry.seen, entry.synced = [before], [before]
        self.operations.clear()

    def _inside(self, path: Any, folder: int = -1) -> Path | None:
        """Return the path below the recorded folder, None for another one. `folder` is a descriptor, or -1."""
        try:
            above = Path(os.readlink(f"/proc/self/fd/{folder}")) if folder != -1 else Path.cwd()
            return Path(os.path.normpath(above / os.fsdecode(path))).relative_to(self.folder)
        except (ValueError, TypeError, OSError):
            return None

    def _find(self, place: Path) -> _File | _Folder | None:
        found: _File | _Folder | None = self._root
        for part in place.parts:
            found = found.entries.get(part) if isinstance(found, _Folder) else None
        return found


def _writes(arguments: tuple[Any, ...]) -> bool:
    flags = arguments[2] if len(arguments) > 2 and isinstance(arguments[2], int) else 0
    return bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC))


def _lost(folder: _Folder, point: int, names: Callable[[Any], int], contents: Callable[[Any], bytes]) -> dict[str, Any]:
    """Return the tree on a disk: name -> content of a file, or the tree of a folder."""
    return {
        name: _lost(entry, point, names, contents) if isinstance(entry, _Folder) else contents(entry.contents(point))
        for name, entry in folder.names(names(folder.counts(point))).items()
    }


@functools.cache
def _open_recordings() -> list[Recording]:
    """Return the recordings that hear of events. An audit hook cannot be removed, so there is one for all of them."""
    recordings: list[Recording] = []

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        for recording in recordings:
            recording.heard(event, arguments)

    sys.addaudithook(hear)
    return recordings


@contextlib.contextmanager
def recorded(folder: Path) -> Iterator[Recording]:
    """Record what this process does in `folder`, which exists. All of its threads are followed."""
    recording = Recording(folder)
    fsync = os.fsync

    def followed(descriptor: Any) -> None:
        fsync(descriptor)
        recording.fsync(descriptor if isinstance(descriptor, int) else descriptor.fileno())

    _open_recordings().append(recording)
    try:
        with mock.patch.object(os, "fsync", followed), mock.patch.object(os, "fdatasync", followed):
            yield recording
    finally:
        _open_recordings().remove(recording)

"""What the journals of a run have in common: the head of their records, and their files.

`journal` has the groups that have finished, `turn_journal` the turns of the others. Each rank writes a file of both.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from verl_server.errors import BadRequestError
from verl_server.files.record_file import Place

T = TypeVar("T")


class GroupHead(msgspec.Struct, kw_only=True):
    """What says which group a record is of, and whether somebody needs it."""

    number: int
    """Number of the group in the run, in the order of the tasks."""
    version: str
    """Label of the weights that were served when the group began to play."""
    step: int
    """Step of the trainer in which the group began to play."""


def journal_paths(folder: Path, name: str) -> list[Path]:
    """Return the files NAME-rankN.msgpack of a run's folder, in the order of the ranks."""
    found = [path for path in folder.glob(f"{name}-rank*.msgpack") if path.stem.rpartition("-rank")[2].isdecimal()]
    return sorted(found, key=_rank_of)


def other_journals(folder: Path, name: str, rank: int, ranks: int) -> list[Path]:
    """Return the files of ranks that are gone, and for whose removal `rank` is responsible.

    They are those of an earlier start with more ranks. No rank writes them now.
    """
    return [path for path in journal_paths(folder, name) if _rank_of(path) >= ranks and _rank_of(path) % ranks == rank]


def _rank_of(path: Path) -> int:
    return int(path.stem.rpartition("-rank")[2])


def decode_record(payload: bytes | msgspec.Raw, kind: type[T], path: Path, place: Place) -> T:
    """Return a record of a journal. Raise BadRequestError, which names the file, if it is of another kind."""
    try:
        return msgspec.msgpack.decode(payload, type=kind)
    except msgspec.DecodeError as error:
        raise BadRequestError(
            f"{path} has at byte {place.offset} a group that this version of the package cannot read: {error}. Remove "
            "the file to continue without its groups, which are then played again."
        ) from None

"""`EvaluationTail`: the lines of evaluations.jsonl as they are appended. `RunTail` asks it.

They are few, one for some steps, so that they are kept whole.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from verl_server.files.json_files import decode_json
from verl_server.files.segment_tail import Line, SegmentTail
from verl_server.watch.run_files import Lineage
from verl_server.watch.run_records import Evaluation

_PIECE = 4 * 2**20
"""Bytes that are read at once."""


class EvaluationRow(msgspec.Struct, kw_only=True):
    """An evaluation that has ended."""

    record: Evaluation
    began: float
    """Wall time of its begin, in seconds since 1970."""

    @property
    def ended(self) -> float:
        """Wall time of the end of its last episode."""
        return self.began + self.record.seconds


class EvaluationTail:
    def __init__(self, folder: Path) -> None:
        self.tail = SegmentTail(folder / "evaluations.jsonl")
        self._records: list[Evaluation] = []
        self._keys: set[tuple[str, int]] = set()

    def read(self) -> bool:
        """Read a piece of what is new. Return True if there is more."""
        return self.tail.read(self._take, _PIECE)

    def has(self, incarnation: str, step: int) -> bool:
        """Return True if the start of the run with this incarnation has ended an evaluation of this step."""
        return (incarnation, step) in self._keys

    def records(self, lineage: Lineage | None) -> list[Evaluation]:
        """Return the evaluations by their steps. With `lineage`, those of weights that it has lost are left out."""
        found = (r for r in self._records if lineage is None or lineage.has(r.step - 1, r.incarnation))
        return sorted(found, key=lambda record: record.step)

    def _take(self, line: Line) -> None:
        record = decode_json(line.data, Evaluation, line.where)
        self._records.append(record)
        self._keys.add((record.incarnation, record.step))

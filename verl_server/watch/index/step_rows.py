"""`StepRows`: which rows of a table are about which steps, and which of them a resumed run has run again.

`RunTail` has one for its metrics and `EventTail` one for the times of the steps.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from verl_server.errors import BadRequestError
from verl_server.watch.run_files import Lineage


class StepRows:
    def __init__(self) -> None:
        self._steps = array("q")
        self._incarnations = array("I")
        self._numbers: dict[str | None, int] = {}
        self._names: list[str | None] = []
        self._sorted: dict[bool, tuple[Lineage | None, array[int]]] = {}
        """With lost rows or without -> (the lineage by which they were chosen, rows in the order of their steps)."""

    def __len__(self) -> int:
        return len(self._steps)

    def append(self, step: int, incarnation: str | None, where: str) -> int:
        """Append a row and return its number. Raise BadRequestError, which names `where`, for a step without sense."""
        if not 0 <= step < 2**53:
            raise BadRequestError(f"{where}: {step} is no number of a step")
        if incarnation not in self._numbers:
            self._numbers[incarnation] = len(self._names)
            self._names.append(incarnation)
        self._steps.append(step)
        self._incarnations.append(self._numbers[incarnation])
        self._sorted.clear()
        return len(self._steps) - 1

    def step(self, row: int) -> int:
        return self._steps[row]

    def incarnation(self, row: int) -> str | None:
        return self._names[self._incarnations[row]]

    def between(self, lineage: Lineage, first: int | None, last: int | None, *, lost: bool = False) -> Sequence[int]:
        """Return the rows of the steps `first` to `last`, included, in the order of the steps.

        Without `lost`, only those that `lineage` has.
        """
        known, rows = self._sorted.get(lost, (None, None))
        if rows is None or (known is not lineage and not lost):
            names = self._names
            chosen = (
                row
                for row in range(len(self._steps))
                if lost or lineage.has(self._steps[row], names[self._incarnations[row]])
            )
            rows = array("I", sorted(chosen, key=self._steps.__getitem__))
            self._sorted[lost] = lineage, rows
        begin = 0 if first is None else bisect_left(rows, first, key=self._steps.__getitem__)
        end = len(rows) if last is None else bisect_right(rows, last, key=self._steps.__getitem__)
        return rows[begin:end]

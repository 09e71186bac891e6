"""`NumberColumns`: the figures of many lines, one column of numbers for each figure. `RunTail` keeps its metrics so.

A column begins with the first line that has the figure and takes four or eight bytes a line, so that 100,000 lines of
sixty figures need some twenty megabytes.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

_ABSENT_INT = -(2**31)
_ABSENT = -sys.float_info.max
"""Stand for a line without the figure. No figure has these values."""
_MOST_COLUMNS = 1000
_LONGEST_NAME = 200
_DEEPEST = 4
"""Levels of objects within objects that are looked through for figures."""


class NumberColumns:
    def __init__(self) -> None:
        self._columns: dict[str, _Column] = {}

    def append(self, row: int, content: Mapping[str, Any]) -> None:
        """Set the figures of a row: the numbers in `content`, those of an inner object with names like "losses.kl".

        The values of inner objects are always numbers, so that null stands for one that was not finite, which JSON
        lacks. At the outermost level, null stands for an absent figure. Rows are appended in their order. Names beyond
        1,000, and long ones, are left out.
        """
        self._append(row, content, "", _DEEPEST)

    def names(self) -> list[str]:
        """Return the names in the order in which they appeared."""
        return list(self._columns)

    def column(self, name: str, rows: Sequence[int]) -> list[float | None]:
        """Return a figure of some rows: None where it is absent."""
        column = self._columns.get(name)
        return [None] * len(rows) if column is None else column.of(rows)

    def row(self, row: int) -> dict[str, float]:
        """Return all figures of one row."""
        found = {name: column.of((row,))[0] for name, column in self._columns.items()}
        return {name: value for name, value in found.items() if value is not None}

    def _append(self, row: int, content: Mapping[str, Any], prefix: str, depth: int) -> None:
        for key, value in content.items():
            kind = type(value)
            if kind is float or kind is int:
                self._put(row, prefix + key, value)
            elif kind is bool:
                self._put(row, prefix + key, int(value))
            elif value is None and prefix:
                self._put(row, prefix + key, math.nan)
            elif kind is dict and depth:
                self._append(row, value, f"{prefix}{key}.", depth - 1)

    def _put(self, row: int, name: str, value: float) -> None:
        column = self._columns.get(name)
        if column is None:
            if len(self._columns) >= _MOST_COLUMNS or len(name) > _LONGEST_NAME:
                return
            column = self._columns[sys.intern(name)] = _Column(row)
        column.put(row, value)


class _Column:
    __slots__ = ("_end", "_first", "_values")

    def __init__(self, first: int) -> None:
        self._first = self._end = first
        self._values: array[Any] = array("i")
        """int32 until a value does not fit, then float64."""

    def put(self, row: int, value: float) -> None:
        """Set the value of a row. A second value of the same row is left out."""
        if row != self._end:
            if row < self._end:
                return
            self._values.extend(array(self._values.typecode, [self._absent]) * (row - self._end))
        self._end = row + 1
        try:
            if value == _ABSENT_INT:
                value = float(value)
            self._values.append(value)
        except (TypeError, OverflowError):
            self._append_float(value)

    def of(self, rows: Sequence[int]) -> list[float | None]:
        values, first, end, absent = self._values, self._first, self._end, self._absent
        found = (values[row - first] if first <= row < end else absent for row in rows)
        return [None if value == absent else value for value in found]

    @property
    def _absent(self) -> float:
        return _ABSENT_INT if self._values.typecode == "i" else _ABSENT

    def _append_float(self, value: float) -> None:
        """Append a number that is no int32."""
        if self._values.typecode == "i":
            self._values = array("d", [_ABSENT if each == _ABSENT_INT else each for each in self._values])
        try:
            self._values.append(value)
        except OverflowError:  # an integer beyond float64
            self._values.append(math.copysign(math.inf, value))

"""The table at the end of a run."""

from __future__ import annotations

from typing import Any

from benchmarks.gates.figures import Lines
from benchmarks.gates.parts import Part
from benchmarks.gates.shares import Row

_HEAD = ("figure", "value", "unit", "limit", "share", "committed", "verdict")
_NUMBERS = ("value", "limit", "share", "committed")


def make_table(rows: list[Row]) -> str:
    """The rows as text with aligned columns. Values are given to four digits, shares to a thousandth."""
    cells = [_HEAD, *(_cells(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for each in cells:
        aligned = [
            text.rjust(width) if head in _NUMBERS else text.ljust(width)
            for text, width, head in zip(each, widths, _HEAD, strict=True)
        ]
        lines.append("  ".join(aligned).rstrip())
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def _cells(row: Row) -> tuple[str, ...]:
    value, limit = (_number(each) for each in (row.value, row.limit))
    share, committed = ("-" if each is None else f"{each:.3f}" for each in (row.share, row.committed))
    return row.figure.name, value, row.figure.unit, limit, share, committed, row.verdict


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def describe_failures(parts: list[Part], lines: Lines) -> str:
    """The end of stderr of each part that failed, empty if there is none."""
    found = []
    for part in parts:
        end = lines.get((part.name, "part_end"), {})
        if end.get("code", 0) != 0:
            how = f"killed after {end['seconds']:g} s" if end["timed_out"] else f"exit status {end['code']}"
            found.append(
                f"{part.name} ({how}): python -m benchmarks.{part.command}\n{_indented(end.get('stderr', ''))}"
            )
    return "\n\n".join(found)


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines()[-20:]) or "    (nothing on stderr)"


def as_line(row: Row) -> dict[str, Any]:
    """The row as a line of `--out`."""
    numbers = {name: getattr(row, name) for name in ("value", "limit", "share", "committed")}
    rounded = {name: None if value is None else round(value, 4) for name, value in numbers.items()}
    verdict = {"verdict": row.verdict, "ok": row.is_ok}
    return {"part": row.figure.part, "name": "gate", "figure": row.figure.name} | rounded | verdict

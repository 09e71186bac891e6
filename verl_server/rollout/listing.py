"""`Listing`: rows of facts for a terminal of any width, without a fact that is cut or pressed out.

Commands and live views print one. Rows stand in aligned columns if the widest of them fits, else each row is its facts
by name, wrapped. rich's own tables make columns narrower until they are empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

_GAP = "  "


@dataclass(frozen=True)
class Row:
    facts: tuple[str, ...]
    """One text for each column."""
    note: str = ""
    """Text of any length below the row."""


class Listing:
    """A rich renderable. Texts are shown as they are: they hold no markup."""

    def __init__(self, names: Sequence[str], rows: Sequence[Row], *, left: int = 1) -> None:
        """Take the columns' names. The first `left` columns are aligned to the left, the others to the right."""
        self._names, self._rows, self._left = tuple(names), rows, left

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = [self._names, *(row.facts for row in self._rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        fits = sum(widths) + len(_GAP) * (len(widths) - 1) <= options.max_width
        if fits:
            yield Text(self._aligned(self._names, widths), style="bold")
        for row in self._rows:
            if fits:
                yield Text(self._aligned(row.facts, widths))
            else:
                facts = [f"{name} {fact}" for name, fact in zip(self._names, row.facts, strict=True)]
                yield from _packed(facts, options.max_width)
            if row.note:
                yield from _packed(row.note.split(), options.max_width, indent=_GAP, gap=" ")

    def _aligned(self, facts: Sequence[str], widths: Sequence[int]) -> str:
        cells = [
            fact.ljust(width) if i < self._left else fact.rjust(width)
            for i, (fact, width) in enumerate(zip(facts, widths, strict=True))
        ]
        return _GAP.join(cells).rstrip()


def _packed(parts: Sequence[str], width: int, *, indent: str = "", gap: str = _GAP) -> list[Text]:
    """Return lines of at most `width` characters with as many parts each as fit. Lines after the first are indented."""
    lines, line = [], indent
    for part in parts:
        joined = f"{line}{gap}{part}" if line.strip() else f"{line}{part}"
        if len(joined) > width and line.strip():
            lines.append(line)
            joined = f"{indent}{_GAP}{part}"
        line = joined
    return [Text(line, overflow="fold") for line in (*lines, line)]

"""The rows of `benchmarks.card_table`: what its file of JSON lines has, and the Markdown table of a card.

A cell is one process: an engine with a shape in one round. The line "cell" names it, and the lines of its benchmark
follow with the same `part`. So a figure that was written is kept whatever ends the process later.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.workload import NamedWork, parse_work

OURS = "verl-server"
Kind = Literal["works", "push", "ceilings"]

_SIZES = {
    "decode_256": ("256x128x512", "16x16x64"),
    "decode_1": ("1x128x512", "1x16x64"),
    "prefill": ("256x1024x1", "16x128x1"),
    "decode_64": ("64x128x512", "8x16x64"),
    "decode_8": ("8x128x512", "4x16x64"),
    "rl": ("256x1024x1024x1", "16x64x64x1"),
}
"""Workload -> its sizes for the shapes of real models and for `tiny`, in the order in which they run. `rl` runs once,
after the others have warmed the engine, because a run takes as long as all others together."""
_TITLES = {
    "decode_1": "decode",
    "decode_8": "decode",
    "decode_64": "decode",
    "decode_256": "decode",
    "prefill": "prefill",
    "rl": "RL shape",
    "push": "weight push",
}
"""Figure -> its title, in the order of the table."""


def works_of(shape: str) -> dict[str, str]:
    """Return the workloads of a shape for the option --works: name -> text."""
    return {name: f"{name}={sizes[shape == 'tiny']}" for name, sizes in _SIZES.items()}


def wanted_figures(kind: Kind, shape: str) -> list[str]:
    """Return the names of the lines that a cell must have."""
    if kind == "ceilings":
        return ["gemm_ceiling", "memory_bandwidth"]
    return list(works_of(shape)) if kind == "works" else ["push"]


@dataclass(frozen=True)
class Cell:
    """One process of the table."""

    card: str
    engine: str
    version: str
    shape: str
    kind: Kind
    round: int

    @property
    def part(self) -> str:
        """The name under which its lines are written. It has the card and the version."""
        return f"{self.card} | {self.engine} {self.version} | {self.shape} {self.kind} {self.round}"

    def line(self) -> dict[str, Any]:
        return {"name": "cell", "part": self.part} | self.__dict__


@dataclass(frozen=True)
class Table:
    """The figures that a file holds by (part, name), and its cells in the order in which they were first run."""

    cells: dict[str, Cell]
    figures: dict[tuple[str, str], dict[str, Any]]

    @classmethod
    def read(cls, path: Path) -> Table:
        """Read a file. A line that was cut, because the machine ended while it was written, is left out."""
        cells: dict[str, Cell] = {}
        figures: dict[tuple[str, str], dict[str, Any]] = {}
        for text in path.read_text().splitlines() if path.exists() else []:
            try:
                line = json.loads(text)
            except json.JSONDecodeError:
                continue
            part, name = line.get("part", ""), line.get("name", "")
            if name == "cell":
                cells[part] = Cell(**{field: line[field] for field in Cell.__dataclass_fields__})
            else:
                figures[part, name] = line
        return cls(cells, figures)

    def missing(self, cell: Cell) -> list[str]:
        """Return the figures that the cell does not have yet."""
        return [name for name in wanted_figures(cell.kind, cell.shape) if (cell.part, name) not in self.figures]

    def lines(self, name: str, card: str, engine: str, version: str, shape: str) -> list[dict[str, Any]]:
        """Return the lines of a figure, one for each round."""
        return [
            self.figures[part, name]
            for part, cell in self.cells.items()
            if (cell.card, cell.engine, cell.version, cell.shape) == (card, engine, version, shape)
            and (part, name) in self.figures
        ]


def render(table: Table) -> str:
    """Return Markdown: for each card a table with a row for each shape and figure, and a column for each engine."""
    cards = list(dict.fromkeys(cell.card for cell in table.cells.values()))
    return "\n".join(_render_card(table, card) for card in cards)


def _render_card(table: Table, card: str) -> str:
    cells = [cell for cell in table.cells.values() if cell.card == card]
    versions = {cell.engine: cell.version for cell in cells}  # the version that was run last
    engines = sorted(versions, key=lambda engine: (engine != OURS, list(versions).index(engine)))
    head = ["", *(f"{engine} {versions[engine]}" for engine in engines), "limit", "of the limit", "to the best other"]
    rows = [
        _row(table, card, shape, name, {engine: versions[engine] for engine in engines})
        for shape in dict.fromkeys(cell.shape for cell in cells if cell.kind != "ceilings")
        for name in _TITLES
    ]
    body = "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *filter(None, rows)])
    notes = [_limits(table, cells), *_failures(table, cells), *_neighbours(table, cells)]
    return f"### {card}\n\n{body}\n\n" + "\n".join(f"{note}\n" for note in notes if note)


def _row(table: Table, card: str, shape: str, name: str, versions: dict[str, str]) -> list[str] | None:
    """Return the cells of a row, None if no engine has the figure."""
    found = {engine: table.lines(name, card, engine, version, shape) for engine, version in versions.items()}
    if not any(found.values()):
        return None
    medians = {engine: statistics.median(_values(lines)) for engine, lines in found.items() if lines}
    field, is_time = ("limit_ms", True) if name == "push" else ("limit", False)
    limits = [line[field] for line in found.get(OURS, []) if line.get(field)]
    limit = statistics.median(limits) if limits else None
    ours, others = medians.get(OURS), [value for engine, value in medians.items() if engine != OURS]
    share = None if ours is None or limit is None else _better(ours, limit, is_time)
    best = None if ours is None or not others else _better(ours, min(others) if is_time else max(others), is_time)
    unit = next(line["unit"] for lines in found.values() for line in lines)
    title = f"{shape.upper()}, {_TITLES[name]}{_sizes(shape, name)}, {unit}"
    numbers = [_spread(_values(lines)) for lines in found.values()]
    return [title, *numbers, _number(limit), _ratio(share), _ratio(best)]


def _better(ours: float, other: float, is_time: bool) -> float:
    """Return the ratio that is larger if ours is better."""
    return other / ours if is_time else ours / other


def _sizes(shape: str, name: str) -> str:
    if name == "push":
        return ""
    work: NamedWork = parse_work(works_of(shape)[name])
    prompts = work.work.prompts
    return f", {len(prompts)} x ({len(prompts[0])} + {work.work.output_lens[0]})"


def _values(lines: Sequence[dict[str, Any]]) -> list[float]:
    return [line["value"] for line in lines]


def _spread(values: list[float]) -> str:
    """Return the median, and behind it the least and the largest of several values."""
    if not values:
        return "-"
    spread = f" ({_number(min(values))} to {_number(max(values))})" if len(values) > 1 else ""
    return _number(statistics.median(values)) + spread


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _limits(table: Table, cells: list[Cell]) -> str:
    """Return a sentence with the physical limits of the card."""
    for cell in cells:
        if cell.kind == "ceilings" and not table.missing(cell):
            copy, product = (table.figures[cell.part, name]["value"] for name in ("memory_bandwidth", "gemm_ceiling"))
            return (
                f"A plain copy moves {_number(copy)} GB/s (read and written), and a large matrix product makes "
                f"{_number(product)} GFLOP/s on this card. The limits are computed from a copy and a product that the "
                "processes of this project's engine measure, for all requests of a workload at once, whatever the KV "
                "cache holds; that of a push is a plain copy of the same bytes."
            )
    return ""


def _failures(table: Table, cells: list[Cell]) -> list[str]:
    """Return a sentence for each cell whose last process failed and whose figures are missing."""
    found = []
    for cell in cells:
        end = table.figures.get((cell.part, "part_end"), {})
        if table.missing(cell) and end.get("code"):
            lines = [line for line in end.get("stderr", "").splitlines() if line.strip()]
            reason = f"killed after {end['seconds']:g} s" if end.get("timed_out") else (lines or ["no message"])[-1]
            found.append(
                f"{cell.engine} {cell.version}, {cell.shape}, round {cell.round}: no figure for "
                f"{', '.join(table.missing(cell))} ({reason:.200})."
            )
    return found


def _neighbours(table: Table, cells: list[Cell]) -> list[str]:
    """Return a sentence for each cell that ran while other programs held memory of its GPU."""
    return [
        f"{cell.engine} {cell.version}, {cell.shape}, round {cell.round}, ran beside other programs: {line['held']}"
        for cell in cells
        if (line := table.figures.get((cell.part, "beside_others"))) is not None
    ]

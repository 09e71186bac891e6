"""Committed shares: what each figure reached on each card, and the verdict about a run.

`shares.json` is card -> number of GPUs -> figure -> share of the limit. `--record` writes it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from benchmarks.gates.figures import Figure, Lines

SHARES = Path(__file__).with_name("shares.json")


@dataclass(frozen=True)
class Row:
    """One row of the table."""

    figure: Figure
    value: float | None
    limit: float | None
    share: float | None
    committed: float | None
    verdict: str
    is_ok: bool | None
    """None: no verdict."""


def read_shares(card: str, gpus: int, path: Path = SHARES) -> dict[str, float] | None:
    """figure -> committed share; None if nothing is committed for so many of these cards."""
    shares: dict[str, dict[str, dict[str, float]]] = json.loads(path.read_text())
    return shares.get(card, {}).get(str(gpus))


def record_shares(card: str, gpus: int, rows: list[Row], path: Path = SHARES) -> int:
    """Commit the shares of rows that were judged without committed ones. Rows of failed parts stay as they are.

    Returns the number of shares.
    """
    found = {row.figure.name: round(row.share, 4) for row in rows if row.share is not None and row.is_ok is not False}
    shares = json.loads(path.read_text())
    shares.setdefault(card, {}).setdefault(str(gpus), {}).update(found)
    path.write_text(json.dumps(shares, indent=2, sort_keys=True) + "\n")
    return len(found)


def judge(figure: Figure, lines: Lines, committed: dict[str, float] | None) -> Row:
    """Compare a figure of a run with its fixed bounds, and its share with the committed one of this card.

    `committed`: figure -> share; None for an unknown card.
    """
    value = limit = share = None
    missing = False
    try:
        value = figure.value(lines)
        limit = figure.limit(lines) if figure.limit else None
        share = figure.share(lines)
    except KeyError:
        missing = True
    earlier = (committed or {}).get(figure.name)
    verdict, is_ok = _verdict(figure, lines, value, share, earlier, committed is not None, missing)
    return Row(figure, value, limit, share, earlier, verdict, is_ok)


def _verdict(
    figure: Figure,
    lines: Lines,
    value: float | None,
    share: float | None,
    committed: float | None,
    is_known: bool,
    missing: bool,
) -> tuple[str, bool | None]:
    end, left = (lines.get((figure.part, name)) for name in ("part_end", "part_left"))
    if end is None:
        return (left["reason"], False if left["failure"] else None) if left else ("not run", None)
    if end["code"] != 0:
        return ("timed out" if end["timed_out"] else f"failed, exit status {end['code']}"), False
    if missing or value is None:
        return "missing in the output", False
    if figure.least is not None and value < figure.least:
        return f"below {figure.least:g}", False
    if figure.most is not None and value > figure.most:
        return f"above {figure.most:g}", False
    if share is None:
        return "ok", True
    if committed is None:
        if figure.least is not None or figure.most is not None:
            return "ok", True
        return ("not recorded" if is_known else "unknown card"), None
    return ("ok", True) if share >= figure.kept * committed else (f"below {figure.kept:g} of it", False)

"""A listing shows every fact at any width."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from verl_server.rollout.listing import Listing, Row

NAMES = ("episode", "branch", "end", "reward", "tokens")
ROWS = [
    Row(("0-0", "0", "generation_error", "-", "12345"), "The server [bold]answered[/x] HTTP 500: " + "word " * 40),
    Row(("1024-15", "1", "done", "0.25", "7")),
]


def shown(width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(Listing(NAMES, ROWS, left=3))
    text = console.file
    assert isinstance(text, io.StringIO)
    return text.getvalue().splitlines()


@pytest.mark.parametrize("width", [10, 20, 40, 80, 200])
def test_no_fact_is_cut_at_any_width(width: int) -> None:
    lines = shown(width)
    assert max(map(len, lines)) <= width
    together = "".join("".join(line.split()) for line in lines)
    for row in ROWS:
        assert all(fact in together for fact in row.facts)
        assert "".join(row.note.split()) in together, "markup is text here"


def test_columns_are_aligned_where_they_fit() -> None:
    head, first, *_, last = shown(80)
    assert head == "episode  branch  end               reward  tokens"
    assert first == "0-0      0       generation_error       -   12345"
    assert last == "1024-15  1       done                0.25       7"


def test_a_narrow_row_is_its_facts_by_name() -> None:
    assert shown(40)[:2] == ["episode 0-0  branch 0", "  end generation_error  reward -"]

"""Foreign texts and numbers become what JSON and a page can hold."""

from __future__ import annotations

import math

import msgspec
import pytest

from verl_server.watch.site.texts import bounded, head, number, visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("line\n\ttab", "line\n\ttab"),
        ("\x1b[31m", "\u241b[31m"),
        ("a\x00b\x7f", "a\u2400b\u2421"),
        ("\x9b", "\\x9b"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("\ud83d", "\\ud83d"),
        ("<b>\U0001f600", "<b>\U0001f600"),
    ],
)
def test_invisible_characters_are_shown(text: str, shown: str) -> None:
    assert visible(text) == shown
    assert msgspec.json.decode(msgspec.json.encode(visible(text))) == shown


def test_a_cut_text_says_so() -> None:
    assert head("x" * 10, 10) == "x" * 10
    assert head("x" * 11, 10) == "x" * 10 + "..."


@pytest.mark.parametrize(
    ("value", "shown"),
    [(1, 1.0), (0.1 + 0.2, 0.3), (math.nan, "NaN"), (-math.inf, "-Infinity"), (None, None), (True, None), ("1", None)],
)
def test_numbers_are_finite_or_texts(value: object, shown: object) -> None:
    assert number(value) == shown


def test_values_of_settings_are_bounded() -> None:
    nested: object = "end"
    for _ in range(50):
        nested = {"in": nested}
    found = bounded({"seed": 2**63, "nan": math.nan, "many": list(range(1000)), "nested": nested, "x" * 999: 1})
    assert found["seed"] == str(2**63) and found["nan"] == "NaN"
    assert len(found["many"]) == 201 and found["many"][-1] == "... 800 more"
    assert len(msgspec.json.encode(found)) < 3000

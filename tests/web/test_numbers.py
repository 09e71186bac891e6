"""Numbers in the words of callers."""

from __future__ import annotations

import pytest

from verl_server.web.numbers import whole_number


@pytest.mark.parametrize(("text", "number"), [("0", 0), ("7", 7), ("007", 7), ("999999999", 999999999)])
def test_ascii_digits_are_a_number(text: str, number: int) -> None:
    assert whole_number(text) == number


@pytest.mark.parametrize(
    "text", ["", "²", "٣", "1²", "+1", "-1", " 1", "1_0", "1.0", "0x1", "1e3", "9" * 10, "9" * 5000]
)
def test_anything_else_is_none(text: str) -> None:
    assert whole_number(text) is None


def test_the_most_digits_are_the_callers_choice() -> None:
    assert whole_number("9" * 18, most_digits=18) == 10**18 - 1
    assert whole_number("9" * 19, most_digits=18) is None

"""`whole_number`: reads a number that a caller wrote in a header, a query or an id.

`str.isdigit` accepts characters such as "²", which `int` refuses; `int` accepts signs, spaces and underscores.
"""

from __future__ import annotations


def whole_number(text: str, most_digits: int = 9) -> int | None:
    """Return the number that `text` is, in ASCII digits only and at most `most_digits` of them, or None."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= most_digits else None

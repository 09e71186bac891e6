"""Foreign texts and numbers in answers: visible characters, bounded lengths, numbers that JSON can hold.

`views` calls these for everything that a model, an environment or a file said.
"""

from __future__ import annotations

import math
import re
from typing import Any

from verl_server.watch.site.answers.values import Number

MOST_SETTING = 2000
"""Most characters of a text in settings and in the facts of an event."""
_MOST_ENTRIES = 200
_DEEPEST = 8

_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)


def _shown(code: int) -> str:
    if code < 0x20:
        return chr(0x2400 + code)  # the control pictures of Unicode
    if code == 0x7F:
        return "\u2421"
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


_VISIBLE = {code: _shown(code) for code in range(0x10000) if _HIDDEN.match(chr(code))}


def visible(text: str) -> str:
    """Return a text with its invisible characters shown: controls, marks of the writing direction, lone surrogates.

    Line ends and tabs stay.
    """
    return text.translate(_VISIBLE) if _HIDDEN.search(text) else text


def head(text: str, most: int) -> str:
    """Return the visible beginning of a text, "..." where it is cut."""
    return visible(text) if len(text) <= most else visible(text[:most]) + "..."


def number(value: Any, digits: int = 7) -> Number:
    """Return a figure with `digits` significant digits, "NaN" and the like for what JSON has no number for."""
    if value is None or isinstance(value, bool) or not isinstance(value, int | float):
        return None
    value = float(value)
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return float(f"{value:.{digits}g}")


def bounded(value: Any, depth: int = 0) -> Any:
    """Return a value of JSON with visible texts and finite numbers, and of a bounded size.

    Long texts, lists and objects are cut, and say so. Integers of more than 53 bits become texts.
    """
    if isinstance(value, str):
        return head(value, MOST_SETTING)
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return value if abs(value) < 2**53 else str(value)
    if isinstance(value, float):
        return number(value, 12)
    if depth == _DEEPEST:
        return "..."
    if isinstance(value, dict):
        kept = {head(str(key), 200): bounded(each, depth + 1) for key, each in list(value.items())[:_MOST_ENTRIES]}
        return kept | ({"...": f"{len(value) - _MOST_ENTRIES} more"} if len(value) > _MOST_ENTRIES else {})
    if isinstance(value, list | tuple):
        cut = [bounded(each, depth + 1) for each in value[:_MOST_ENTRIES]]
        return cut + ([f"... {len(value) - _MOST_ENTRIES} more"] if len(value) > _MOST_ENTRIES else [])
    return head(str(value), MOST_SETTING)

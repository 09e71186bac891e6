"""Values that several answers have, and the answer of an error. The package's text has the rules."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

Number: TypeAlias = float | str | None
Step: TypeAlias = int | str
Span: TypeAlias = tuple[str, float, float]
"""Kind, begin, end."""


class ErrorAnswer(msgspec.Struct, kw_only=True):
    """The body of every answer with a status of 400 or more."""

    error: str
    """What is wrong."""
    remedy: str = ""
    """What helps, "" if nothing is known."""

"""Session hints: ids of conversations that callers name, without a recorded session. A hint changes no output.

From earlier requests with the same id, the scheduler learns how long the prefix cache should keep their history. A hint
is the field `session_id` or `conversation_id` of a body, or the header `X-Session-ID`. `GenerateReqInput` reads the
fields; the dialects read the header with `header_hint`. `/close_session` says that no request with the hint follows.
"""

from __future__ import annotations

from collections.abc import Mapping

LONGEST_ID = 128
"""Largest length of a hint in characters. Every message of a sample contains it."""
_HEADER = "X-Session-ID"
_PREFIX = "hint:"
"""Prefix of hints. Ids of recorded sessions have no colon, so a hint cannot name the session of another caller."""


def hint_id(named: str | None) -> str:
    """Return the scheduler's id for the hint `named` of a caller, or "" if there is no hint.

    Only the first `LONGEST_ID` characters of `named` count.
    """
    return f"{_PREFIX}{named[:LONGEST_ID]}" if named else ""


def header_hint(headers: Mapping[str, str]) -> str:
    """Return the scheduler's id for the hint in the header `X-Session-ID`, or "" without this header."""
    return hint_id(headers.get(_HEADER))

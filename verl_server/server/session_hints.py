"""Session hints: ids by which callers name the sessions of requests that no session of the ledger records.

A hint changes no output. The scheduler learns from earlier requests with the same id for how long their history will be
needed in the prefix cache. A hint is the field `session_id` or `conversation_id` of a body, or the header
`X-Session-ID`. `GenerateReqInput` reads the fields; the dialects read the header with `header_hint`. `/close_session`
says that no request with the hint follows.
"""

from __future__ import annotations

from collections.abc import Mapping

LONGEST_ID = 128
"""Largest length of a hint in characters. Every message of a sample contains it."""
_HEADER = "X-Session-ID"
_PREFIX = "hint:"
"""The ids of the ledger's sessions have no colon. So a caller cannot name a session of somebody else."""


def hint_id(named: str | None) -> str:
    """Return the id by which the scheduler knows the session that a caller calls `named`, or "" for none.

    Only the first `LONGEST_ID` characters of `named` count.
    """
    return f"{_PREFIX}{named[:LONGEST_ID]}" if named else ""


def header_hint(headers: Mapping[str, str]) -> str:
    """Return the id by which the scheduler knows the session that `X-Session-ID` names, or "" without this header."""
    return hint_id(headers.get(_HEADER))

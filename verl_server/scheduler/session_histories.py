"""`SessionHistories`: where the history of each session ends in the prefix cache, and how many turns it has.

The `BatchPlanner` reports the requests that have a session id. So a turn is known as a continuation although its pages
were evicted, and the pages of a session that is over are evicted first.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from verl_server.scheduler.expected_return import EndedTurn
from verl_server.scheduler.radix_cache import PageNode

_MOST_SESSIONS = 65536
"""Bound on the sessions that are remembered. Callers may choose a new id for each request."""


@dataclass(slots=True)
class History:
    """The last turn of a session that ended."""

    turn: int
    """Number of turns that ended."""
    node: PageNode | None
    """Last page of the history. None if it is of an older weight version."""
    ended: EndedTurn | None
    """The last turn, until it is continued."""


class SessionHistories:
    """The latest sessions, by id."""

    def __init__(self) -> None:
        self._histories: OrderedDict[str, History] = OrderedDict()

    def find(self, session_id: str) -> History | None:
        """Return the history that a request of the session continues, or None."""
        return self._histories.get(session_id)

    def end_turn(self, session_id: str, node: PageNode, ended: EndedTurn) -> None:
        """Note that a turn ended with the page `node`."""
        self._histories[session_id] = History(ended.turn, node, ended)
        self._histories.move_to_end(session_id)
        if len(self._histories) > _MOST_SESSIONS:
            self._histories.popitem(last=False)

    def remove(self, session_id: str) -> History | None:
        """Forget a session that is over. Return its history, or None."""
        return self._histories.pop(session_id, None)

    def start_version(self) -> None:
        """Forget the pages, because they are of an older weight version."""
        for history in self._histories.values():
            history.node = None

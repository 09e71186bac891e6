"""`SessionHistories`: finds the turn that a request continues, and the end of each session's history in the prefix
cache.

The `BatchPlanner` reports the requests that arrive and end. A request continues the turn at whose last page its cached
prefix ends, or the last turn of its session, whose pages may be gone. Clients may also drop tokens of a turn's output
before the next turn, such as its reasoning. Then the cached prefix ends above the last page, after the turn's prompt.
`ExpectedReturn` learns from the turns that are continued. The pages of an ended session, and of dropped tokens, are
evicted first.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from dataclasses import dataclass

from verl_server.scheduler.cache.expected_return import EndedTurn, ExpectedReturn
from verl_server.scheduler.cache.page_node import PageNode
from verl_server.scheduler.cache.radix_cache import RadixCache
from verl_server.scheduler.schedule_batch import Req

_MOST_DROPPED = 1024
"""Bound on the pages between the end of a cached prefix and the end of the turn that a request continues."""
_MOST_SESSIONS = 65536
"""Bound on the sessions that are remembered. Callers may choose a new id for each request."""


@dataclass(slots=True)
class History:
    """The last turn of a session that ended."""

    turn: int
    """Number of turns that ended."""
    node: weakref.ref[PageNode]
    """Last page of the history, while it is cached. A reference to an evicted page would keep its whole path in memory.
    """
    ended: EndedTurn | None
    """The last turn, until it is continued."""


class SessionHistories:
    """The latest sessions, by id."""

    def __init__(self, cache: RadixCache, returns: ExpectedReturn) -> None:
        self._cache, self._returns = cache, returns
        self._histories: OrderedDict[str, History] = OrderedDict()

    def __len__(self) -> int:
        return len(self._histories)

    def begin_turn(self, req: Req, now: float) -> None:
        """Find the turn that a new request continues, and set `req.turn`."""
        ended = None if req.match is None else self._continued_at(req.match, req)
        if (history := self._histories.get(req.session_id)) is not None:
            req.turn = history.turn
            ended, history.ended = history.ended, None
        elif ended is not None:
            req.turn = ended.turn
        if ended is not None:
            self._returns.continued(ended, now)

    def end_turn(self, req: Req, node: PageNode, now: float) -> float:
        """Record that the turn of a request ended. The cached history of the turn ends at `node`.

        Return the time until which the history is likely to be continued.
        """
        if req.session_over:
            return now
        ended = EndedTurn(req.turn + 1, now, len(req.prompt_ids), req.session_id)
        if node.parent is not None:
            node.ended = ended
        if req.session_id:
            self._histories[req.session_id] = History(ended.turn, weakref.ref(node), ended)
            self._histories.move_to_end(req.session_id)
            if len(self._histories) > _MOST_SESSIONS:
                self._histories.popitem(last=False)
        return now + self._returns.keep_seconds(ended.turn)

    def _continued_at(self, node: PageNode, req: Req) -> EndedTurn | None:
        """Return the turn that `req` continues, or None. The cached prefix of `req` ends at `node`.

        No other request can continue the returned turn afterwards.
        """
        last = node if node.ended is not None else self._end_below(node, req)
        ended = None if last is None else last.ended
        if last is None or ended is None or ended.session_id != req.session_id:
            return None
        if last is not node:
            self._cache.finish(last)
        last.ended = None
        return ended

    def _end_below(self, node: PageNode, req: Req) -> PageNode | None:
        """Return the end of the history that `req` continues without some tokens of the last output.

        None if there is none.

        There is such a history if only one path continues below `node`, no request holds this path, and `req` begins
        with the whole prompt of the turn that ended there.
        """
        if node.parent is None or len(node.children) != 1:
            return None
        (first,) = node.children.values()
        last = first
        for _ in range(_MOST_DROPPED):
            if last.ended is not None or last.lock_ref or len(last.children) != 1:
                break
            (last,) = last.children.values()
        ended = last.ended
        if ended is None or last.lock_ref or len(req.token_ids) <= ended.prompt_len:
            return None
        cached = node.depth * self._cache.page_size
        rest = max(0, ended.prompt_len - cached)
        is_whole = rest < self._cache.page_size and first.key[:rest] == tuple(req.token_ids[cached : cached + rest])
        return last if is_whole else None

    def finish(self, session_id: str) -> None:
        """Record that no request will continue the session. The pages of its history are evicted first."""
        history = self._histories.pop(session_id, None)
        if history is None:
            return
        if history.ended is not None:
            self._returns.lost(history.ended)
        node = history.node()
        if node is not None:
            if node.ended is history.ended:
                node.ended = None
            self._cache.finish(node)

"""The plan of a session's next turn for a prompt of token ids: finds the stored turn that the prompt follows.

`SessionTurns` calls it on the event loop, for prompts that no text worker planned. Each turn is compared once, with its
own ids only. The comparison is divided into slices, between which the loop does other work. A turn that ends during the
comparison adds a branch and changes no stored turn, so the plan stays valid.
"""

from __future__ import annotations

from array import array

from verl_server.chat.session_view import Ids32, NextTurn
from verl_server.server.sessions.session import Session
from verl_server.server.sessions.turn import Turn, common_prefix
from verl_server.server.slices import Slices


async def plan_ids(session: Session | None, ids: Ids32) -> NextTurn:
    """Plan the turn of a prompt of token ids. `session` is None for a child session that does not exist yet.

    The prompt follows the longest turn whose sequence (prompt and output) it begins with; otherwise it begins a
    conversation.
    """
    if session is None or not session.finished:
        return NextTurn(-1, 0, ids, "root")
    count, slices = len(ids) // 4, Slices()
    turns = list(session.turns)
    common = array("q", bytes(8 * len(turns)))  # first ids of each turn's sequence that the prompt has, too
    best: tuple[int, bool, int] | None = None  # (tokens, delivered, turn)
    again = -1  # the latest turn of the same prompt
    for number, turn in enumerate(turns):
        if turn is None:
            continue
        before = count if turn.parent < 0 else common[turn.parent]
        common[number] = min(before, turn.shared)
        if before >= turn.shared:
            common[number] += _common_ids(ids, turn)
            await slices.end()
        if common[number] == turn.tokens:
            best = max(best or (-1, False, -1), (turn.tokens, turn.is_delivered, number))
        if common[number] == count == turn.prompt_tokens:
            again = number
    if best is not None:
        return plan_behind(session, best[2], best[0], ids[4 * best[0] :])
    if again >= 0:
        return NextTurn(again, count, b"", "retry")
    return NextTurn(-1, 0, ids, "child")


def plan_behind(session: Session, number: int, kept: int, ids: Ids32) -> NextTurn:
    """Plan the turn whose prompt is the first `kept` ids of a turn's sequence, and `ids`."""
    turn = session.turn(number)
    is_continued = kept < turn.tokens or turn.followers > 0
    return NextTurn(number, kept, ids, "edited" if is_continued else None)


def _common_ids(ids: Ids32, turn: Turn) -> int:
    """Return how many leading ids of `turn`, after the shared ids, equal the ids at the same positions of `ids`."""
    start = 4 * turn.shared
    found = common_prefix(ids[start : start + len(turn.prompt)], turn.prompt)
    if 4 * found == len(turn.prompt):
        start += len(turn.prompt)
        found += common_prefix(ids[start : start + len(turn.output)], turn.output)
    return found

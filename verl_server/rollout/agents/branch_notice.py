"""`BranchNotice`: the warning that the episodes of a run have many branches.

An agent that continues its conversations has one branch for each of them. One that changes its history begins a branch
at each change, whose context is rendered, sampled from and trained anew: many branches are a setting of the program to
correct, and cost much. `run_agents` adds each final episode, and asks at the end of the run.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from verl_server.rollout.token_counts import CHILD, ROOT, TokenCounts, branch_kind, count_tokens
from verl_server.rollout.trajectory import Trajectory

logger = logging.getLogger(__name__)

_MOST = 2.0
"""Branches of an episode, on average, from which on a run is warned about."""
_EPISODES = 8
"""Episodes after which the average is judged. Shorter runs are judged at their end."""
_SHOWN = 120
"""Characters of the message at which a branch departs."""


class BranchNotice:
    def __init__(self) -> None:
        self._counts = TokenCounts()
        self._example = ""
        self._is_given = False

    def add(self, name: str, branches: Sequence[Trajectory]) -> None:
        """Count the final episode `name`, and warn if the first episodes have too many branches."""
        if self._is_given or not branches:
            return
        self._counts += count_tokens(branches)
        self._example = self._example or _example(name, branches)
        if self._counts.episodes >= _EPISODES:
            self.end()

    def end(self) -> None:
        """Warn at the end of a run, if its episodes have too many branches and no warning was given."""
        if self._is_given or self._counts.branches_per_episode <= _MOST:
            return
        self._is_given = True
        found = self._counts.rows()
        logger.warning(
            "The first %d episodes have many branches: %s. A trainer computes the context of each branch anew (context "
            "tokens: %s). %sThe kinds are in docs/sessions.md; agents that change their history have settings for it.",
            *(self._counts.episodes, found["branches"], found["context tokens"], self._example),
        )


def _example(name: str, branches: Sequence[Trajectory]) -> str:
    """Return a sentence about the first branch that departs from another one, or "" without any."""
    conversations: set[str] = set()
    for t in branches:
        kind = branch_kind(t)
        if t.session in conversations and kind not in (None, ROOT, CHILD):
            own = next(turn for turn in t.turns if turn.action_span[1] > t.shared)
            said = own.messages[0] if own.messages else None
            text = "" if said is None else f" at the {said.role}'s message {' '.join(said.text.split())[:_SHOWN]!r}"
            return f"For example, branch {t.branch} of the episode {name} begins as {kind}{text}. "
        conversations.add(t.session)
    return ""

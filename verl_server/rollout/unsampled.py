"""Episodes without a sampled token: they end with a reward or at a limit, but the policy had no part in them.

There are two causes: an agent that calls another server than its session's, and a first prompt that fills the context.
These episodes are counted as `unsampled`, are in no mean reward, and are not trained on. The first unsampled episode is
logged.
"""

from __future__ import annotations

import logging

from verl_server.rollout.trajectory import StopReason

logger = logging.getLogger(__name__)

_TOO_LONG = (
    "The first prompt does not fit: shorten it, or raise what bounds it (the server's --context-length and its KV "
    "cache, or the limit of an episode's tokens)"
)
_BYPASSED = (
    "No request of the agent was answered in its session. If it called another server, let it use session.openai(), "
    "session.anthropic() or session.http(), or session.base_url with session.api_key; a program uses OPENAI_BASE_URL "
    "with OPENAI_API_KEY, or ANTHROPIC_BASE_URL with ANTHROPIC_API_KEY. If the session refused its requests, look at "
    "the errors that it received: its first prompt may not fit"
)
_EMPTY = "The answers of the server are empty: look at its sampling parameters, for example at stop strings"


def is_too_long(reason: StopReason | None) -> bool:
    """Return True if an unsampled episode with this end had a first prompt that does not fit."""
    return reason in (StopReason.CONTEXT_FULL, StopReason.MAX_TOKENS)


def remedy(*, too_long: bool, agent: bool) -> str:
    """Return a sentence, without its period, about the cause of an unsampled episode. `agent`: an agent played it."""
    return _TOO_LONG if too_long else _BYPASSED if agent else _EMPTY


class UnsampledNotice:
    """The notice of the first unsampled episode, with the remedy. Other modules count the others."""

    def __init__(self, *, agent: bool) -> None:
        """`agent` is True if an agent plays the episodes, and False if `AgentLoop` does."""
        self._agent = agent
        self._is_given = False

    def give(self, name: str, reason: StopReason | None, reward: float | None) -> None:
        """Log the episode `name`, if it is the first one."""
        if self._is_given:
            return
        self._is_given = True
        logger.warning(
            "The episode %s ended as %s with the reward %s, but the policy sampled no token in it. It is in no mean "
            "reward, and is not trained on. %s. Further episodes like this are counted as `unsampled`.",
            *(name, reason, reward, remedy(too_long=is_too_long(reason), agent=self._agent)),
        )

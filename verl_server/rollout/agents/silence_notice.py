"""`SilenceNotice`: the warnings that no episode of a run has a sampled token, or that each one has an empty answer.

Such a run has nothing to train on, or rewards nothing that the policy did: usually the agent is set up wrongly.
`notices.py` adds each final episode. The first ones are judged, so that nobody waits for the end of the run.
"""

from __future__ import annotations

import logging

from verl_server.rollout.agents.types import AgentEpisode
from verl_server.rollout.trajectory import Fault, StopReason

logger = logging.getLogger(__name__)

_EPISODES = 4
"""Episodes after which a run is judged. Shorter runs are judged at their end."""
_OUTPUT_LINES = 5
_OUTPUT_CHARACTERS = 1000
_NO_TOKEN_CAUSES = (
    "Likely causes: the agent asks another base URL than that of its session, or with another client; it waits for a "
    "login, a key or a setting, and ends (its output says so); or its first prompt does not fit into the context, "
    "and the session refuses it"
)
_NO_ANSWER_CAUSES = (
    "Likely causes: the program writes its answer in another form than its recipe reads (other words or another "
    "version: the recipe names those that were run); its last request was refused; or the policy itself says nothing "
    "at the end"
)


class SilenceNotice:
    def __init__(self) -> None:
        self._episodes = 0
        self._first: AgentEpisode | None = None
        """The first episode, until the run is known to sample."""
        self._has_token = self._has_answer = False
        self._is_judged = False

    def add(self, episode: AgentEpisode) -> None:
        """Count a final episode, and warn if all of the first ones are silent."""
        if self._is_judged:
            return
        self._episodes += 1
        self._first = self._first or episode
        self._has_token |= episode.sampled_tokens > 0
        self._has_answer |= not _is_empty(episode)
        self._is_judged = self._has_token and self._has_answer
        if self._episodes >= _EPISODES:
            self.end()

    def end(self) -> None:
        """Warn at the end of a run, if all of its episodes are silent and no warning was given."""
        if self._is_judged or self._first is None:
            return
        self._is_judged, first = True, self._first
        self._first = None
        if not self._has_token:
            causes = "" if first.fault is Fault.INFRASTRUCTURE else f" {_NO_TOKEN_CAUSES}."
            logger.warning(
                "None of the first %d episodes has a recorded token. Episode %s ended as %s: %s.%s",
                *(self._episodes, first.name, first.reason, _said(first), causes),
            )
        elif not self._has_answer and self._episodes > 1:
            logger.warning(
                "Each of the first %d episodes ended regularly with an empty answer, although the policy sampled. "
                "Episode %s: %s. %s.",
                *(self._episodes, first.name, _said(first), _NO_ANSWER_CAUSES),
            )


def _is_empty(episode: AgentEpisode) -> bool:
    """Return True if an agent that has answers ended regularly, and its answer is empty."""
    return episode.reason is StopReason.DONE and isinstance(episode.result, str) and not episode.result.strip()


def _said(episode: AgentEpisode) -> str:
    """Return the error of an episode, else the end of what its program printed."""
    lines = "\n".join(episode.output.splitlines()[-_OUTPUT_LINES:])[-_OUTPUT_CHARACTERS:]
    said = episode.error or (f"the program's last lines are\n{lines}" if lines.strip() else "it printed nothing")
    return said.rstrip(". \n")

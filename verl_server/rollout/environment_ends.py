"""`end_of`: the stop reason of an episode in which a call of the environment failed, for both players."""

from __future__ import annotations

from verl_server.rollout.away import is_refused
from verl_server.rollout.environment import ActionRefusedError, EnvAwayError, EnvTimeoutError
from verl_server.rollout.trajectory import StopReason


def end_of(error: Exception) -> StopReason:
    """Return the reason of the end that `error` of an environment causes."""
    if isinstance(error, EnvTimeoutError):
        return StopReason.ENV_TIMEOUT
    return StopReason.ACTION_REFUSED if isinstance(error, ActionRefusedError) else StopReason.ENV_ERROR


def is_away(error: Exception) -> bool:
    """Return True if `error` of an environment means that its server could not be reached."""
    return isinstance(error, EnvAwayError) or is_refused(error)

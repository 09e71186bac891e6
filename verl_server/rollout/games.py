"""The import path that documents showed before `verl_server.rollout.environments.games` held the module."""

from verl_server.rollout.environments.games import GuessNumber, HeavyTail, ReasoningGym

__all__ = ["GuessNumber", "HeavyTail", "ReasoningGym"]

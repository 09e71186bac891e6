"""The reward of an episode: from a function, from the environment, or from the exit of a program.

The runner computes the reward after the agent has ended. An agent's own output is never a reward by itself.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from typing import Any, Literal

from verl_server.errors import BadRequestError
from verl_server.rollout.agents.threads import in_thread
from verl_server.rollout.agents.types import AgentEpisode, RewardFunction
from verl_server.rollout.trajectory import Fault, StopReason

Reward = RewardFunction | Literal["exit", "environment"]


def is_scored(reward: Reward, reason: StopReason, fault: Fault, sampled: int) -> bool:
    """Return True if an episode with this end, for which `fault` is responsible, has a reward.

    The policy must have sampled a token in an episode that failed. If the exit is the reward, every exit has one.
    """
    has_part = sampled > 0 or reason.is_regular or (reward == "exit" and reason is StopReason.AGENT_ERROR)
    return fault is Fault.POLICY and has_part


async def compute(reward: Reward, episode: AgentEpisode, seconds: float) -> float:
    """Return the reward of an ended episode.

    Raise BadRequestError if a reward function raises, takes longer than `seconds` or returns no finite number.
    """
    if reward == "exit":
        return 1.0 if episode.reason is StopReason.DONE else 0.0
    if reward == "environment":
        assert episode.environment_reward is not None
        return episode.environment_reward
    assert callable(reward)
    bound = asyncio.timeout(seconds)
    try:
        async with bound:
            value = await _called(reward, episode)
    except Exception as error:
        if bound.expired():
            raise BadRequestError(
                f"The reward function did not return within {seconds:.3g} s (AgentLimits.reward_seconds)."
            ) from None
        raise BadRequestError(f"The reward function raised {type(error).__name__}: {error}") from error
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise BadRequestError(f"The reward function must return a finite number, not {value!r}.")
    return float(value)


async def _called(reward: RewardFunction, episode: AgentEpisode) -> Any:
    if inspect.iscoroutinefunction(reward):
        return await reward(episode)
    value = await in_thread(lambda: reward(episode), "reward")
    return await value if inspect.isawaitable(value) else value

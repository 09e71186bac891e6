"""The reward of an episode: from a function, from the environment, from the exit of a program, or from the agent.

The runner computes the reward after the agent has ended. What the policy wrote is never a reward by itself: "agent" is
for functions that return a `Scored`, such as the environments of verifiers.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from typing import Any, Literal

from verl_server.errors import BadRequestError
from verl_server.rollout.agents.threads import in_thread
from verl_server.rollout.agents.types import AgentEpisode, RewardFunction, Scored
from verl_server.rollout.trajectory import Fault, StopReason

Reward = RewardFunction | Literal["exit", "environment", "agent"]


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
    if reward == "agent":
        if not isinstance(episode.result, Scored):
            raise BadRequestError(
                f'reward="agent" needs a Scored from the agent, which returned {episode.result!r:.200}.'
            )
        reward = _own_score
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


def is_judged(reward: Reward, episode: AgentEpisode, environment_judged: bool) -> bool:
    """Return True if the party that `reward` names judged the episode. Otherwise it has the score of a failure."""
    if reward == "agent":
        return isinstance(episode.result, Scored) or episode.reason is StopReason.DONE
    return reward != "environment" or environment_judged or episode.reason is StopReason.DONE


def _own_score(episode: AgentEpisode) -> float:
    return float(episode.result.reward)


async def _called(reward: RewardFunction, episode: AgentEpisode) -> Any:
    if inspect.iscoroutinefunction(reward):
        return await reward(episode)
    value = await in_thread(lambda: reward(episode), "reward")
    return await value if inspect.isawaitable(value) else value

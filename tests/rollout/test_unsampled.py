"""Episodes with a reward and without a sampled token: counted, in no mean, logged once, and played again."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from tests.rollout.agents.common import Echo, chat, player, run
from tests.rollout.fakes import FakeEnvironment, WordRenderer, generated, says
from tests.rollout.test_agent_loop import FakeEngine
from verl_server.messages.session_types import Branch, SessionTrajectory
from verl_server.rollout.agent_loop import AgentLoop
from verl_server.rollout.agents.types import AgentEpisode, AgentRun, AgentSession, AgentTask
from verl_server.rollout.environment import EnvError, StepResult
from verl_server.rollout.environments.openenv import OpenEnvEnvironment
from verl_server.rollout.episode import Limits
from verl_server.rollout.trajectory import StopReason, Task, Trajectory, is_unsampled, summarize


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "verl_server.rollout.unsampled"]


@pytest.mark.parametrize("reason", StopReason)
@pytest.mark.parametrize("reward", [None, 1.0])
@pytest.mark.parametrize("sampled", [False, True])
def test_which_ends_count(reason: StopReason, reward: float | None, sampled: bool) -> None:
    t = Trajectory(task=Task(seed=0), stop_reason=reason, reward=reward, tokens=[1], loss_mask=[int(sampled)])
    assert is_unsampled([t]) == (not sampled and (reward is not None or reason.is_regular))
    t.loss_mask = [0]
    other = Trajectory(task=Task(seed=0), tokens=[1], loss_mask=[int(sampled)])
    assert is_unsampled([t, other]) == (not sampled and (reward is not None or reason.is_regular))


# -- the built-in loop ------------------------------------------------------------------------------------------


class SilentEngine(FakeEngine):
    """Answers with no tokens at all."""

    async def async_generate(self, *given: Any, **named: Any) -> Any:
        answer = await super().async_generate(*given, **named)
        return [generated([]) for _ in answer] if isinstance(answer, list) else generated([])


CASES: dict[str, tuple[Any, Limits, StopReason, str]] = {
    "the first prompt fills the context": (FakeEngine, Limits(), StopReason.CONTEXT_FULL, "The first prompt does not"),
    "the first prompt fills max_tokens": (
        FakeEngine,
        Limits(max_tokens=2),
        StopReason.MAX_TOKENS,
        "The first prompt does not",
    ),
    "empty answers": (SilentEngine, Limits(), StopReason.DONE, "The answers of the server are empty"),
    "empty answers until max_turns": (SilentEngine, Limits(max_turns=1), StopReason.MAX_TURNS, "The answers of the"),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("lockstep", [False, True])
def test_an_episode_of_the_loop(case: str, lockstep: bool, caplog: pytest.LogCaptureFixture) -> None:
    make, limits, reason, text = CASES[case]
    engine = make()
    if reason is StopReason.CONTEXT_FULL:
        engine.scheduler_info = {"context_length": 2}
    is_over = reason is StopReason.DONE

    def environment() -> FakeEnvironment:
        return FakeEnvironment(says("ab"), says("z", 1.0, is_over))

    with AgentLoop(engine, environment, WordRenderer(), limits=limits) as loop, caplog.at_level(logging.WARNING):
        play = loop.run_lockstep if lockstep else loop.run
        stats = [summarize(play([Task(seed=i) for i in range(3)]).trajectories) for _ in range(2)]
    assert [s.stop_reasons for s in stats] == [{reason: 3}] * 2
    assert [(s.unsampled, s.mean_reward, s.trainable) for s in stats] == [(3, None, 0)] * 2
    (warning,) = warnings(caplog)
    assert text in warning and f"ended as {reason}" in warning


def test_an_episode_that_plays_is_not_counted(caplog: pytest.LogCaptureFixture) -> None:
    with AgentLoop(FakeEngine(), lambda: FakeEnvironment(says("ab"), says("z", 1.0, True)), WordRenderer()) as loop:
        stats = summarize(loop.run([Task(seed=0)]).trajectories)
    assert (stats.unsampled, stats.mean_reward, warnings(caplog)) == (0, 1.0, [])


def test_an_environment_that_ends_at_its_reset_gives_no_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the loop and behind an agent: the episode fails."""
    with AgentLoop(FakeEngine(), lambda: FakeEnvironment(says("ab", 1.0, True)), WordRenderer()) as loop:
        trajectory = loop.run([Task(seed=0)]).trajectories[0]
    assert (trajectory.stop_reason, trajectory.reward) == (StopReason.ENV_ERROR, None)

    async def over(*_: Any, **__: Any) -> StepResult:
        return says("ab", 1.0, True)

    environment = OpenEnvEnvironment("http://127.0.0.1:9")
    monkeypatch.setattr(environment._remote, "reset", over)
    with pytest.raises(EnvError, match="done before the first turn"):
        asyncio.run(environment.reset(0))


# -- agents -----------------------------------------------------------------------------------------------------


async def bypasses(session: AgentSession, task: AgentTask) -> None:
    """Play the environment with an answer of its own."""
    assert session.environment is not None
    await session.environment.step(str(task.seed))


async def asks_first(session: AgentSession, task: AgentTask) -> None:
    """Sample in the first task only."""
    if task.seed == 0:
        await chat(session, "say 0")
    await bypasses(session, task)


def test_an_agent_that_bypasses_its_session(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def play(agent: Any, resume: bool = False) -> AgentRun:
        options: dict[str, Any] = {"environment": lambda task: Echo(), "describe": {"agent": "the same"}}
        return run(agent, 3, out=tmp_path, resume=resume, **options)

    first = play(bypasses)
    assert [episode.reward for episode in first.episodes] == [1.0] * 3
    assert (first.unsampled, first.trajectories) == (3, [])
    (warning,) = warnings(caplog)
    assert "with the reward 1.0" in warning and "session.base_url" in warning
    second = play(asks_first, resume=True)
    assert (len(second.episodes), second.unsampled) == (3, 2), "they are played again"
    third = play(player, resume=True)
    assert (len(third.episodes), third.unsampled, len(third.trajectories)) == (2, 0, 3)


def test_tokens_of_sub_agents_count() -> None:
    episode = AgentEpisode(AgentTask(), 0, 0, 0, 0, reason=StopReason.DONE, reward=1.0, tokens=0)
    assert episode.is_unsampled
    child = Branch(0, "main", "child", [], 0, [1, 2], [0, 1], [0.0, -1.0], [])
    episode.trajectory = SessionTrajectory(
        session="s", state="finished", reason="done", reward=1.0, group="g", metadata={}, branches=[child]
    )
    assert (episode.sampled_tokens, episode.is_unsampled) == (1, False)
    episode.reason, episode.reward, episode.trajectory = StopReason.AGENT_ERROR, None, None
    assert not episode.is_unsampled, "a failed episode is a failed one"

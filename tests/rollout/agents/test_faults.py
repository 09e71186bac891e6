"""The ends of agents' episodes: the policy's are scored, and only the infrastructure's are replaced, also on resume."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import JSONResponse

from tests.rollout.agents.common import FAST, Echo, chat, player, program, run
from verl_server.rollout.agents.output import read_lines
from verl_server.rollout.agents.run import session_seed
from verl_server.rollout.agents.types import AgentEpisode, AgentSession, AgentTask
from verl_server.rollout.environment import ActionRefusedError, EnvError, EnvTimeoutError
from verl_server.rollout.faults import FAULTS, FaultRules
from verl_server.rollout.replacements import attempt_seed
from verl_server.rollout.trajectory import Fault, StopReason


async def two_turns(session: AgentSession, task: AgentTask) -> None:
    await chat(session, "say 1")
    await chat(session, "say 2")


async def raises(session: AgentSession, task: AgentTask) -> None:
    await chat(session, "say 1")
    raise RuntimeError("a bug")


async def hangs(session: AgentSession, task: AgentTask) -> None:
    await chat(session, "say 1")
    await asyncio.Event().wait()


async def raises_at_once(session: AgentSession, task: AgentTask) -> None:
    raise RuntimeError("a bug")


def failing_server() -> Any:
    return lambda messages: JSONResponse({"error": "x"}, 500)


def half(episode: AgentEpisode) -> float:
    return 0.5


class Faulty(Echo):
    """An environment whose step raises `error`."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    async def step(self, text: str) -> tuple[str, float | None, bool]:
        raise self.error


def faulty(error: Exception) -> dict[str, Any]:
    return {"environment": lambda task: Faulty(error), "reward": half}


KILLED = program("chat('say 1'); import signal; os.kill(os.getpid(), signal.SIGKILL)")


@pytest.mark.parametrize(
    ("agent", "options", "reason"),
    [
        (two_turns, {}, StopReason.DONE),
        (two_turns, {"limits": {"max_turns": 1}}, StopReason.MAX_TURNS),
        (two_turns, {"limits": {"max_tokens": 1}}, StopReason.MAX_TOKENS),
        (hangs, {"limits": {"seconds": 0.5}}, StopReason.TIME_LIMIT),
        (hangs, {"limits": {"idle_seconds": 0.2}}, StopReason.IDLE),
        (raises, {}, StopReason.AGENT_ERROR),
        (player, faulty(ActionRefusedError("no")), StopReason.ACTION_REFUSED),
        (player, faulty(EnvTimeoutError("late")), StopReason.ENV_TIMEOUT),
        (player, faulty(EnvError("gone")), StopReason.ENV_ERROR),
        (two_turns, {"policy": failing_server()}, StopReason.GENERATION_ERROR),
        (KILLED, {}, StopReason.AGENT_KILLED),
    ],
)
def test_ends_of_agents(agent: Any, options: dict[str, Any], reason: StopReason) -> None:
    limits = dataclasses.replace(FAST, **options.pop("limits", {}))
    result = run(agent, limits=limits, retries=1, **{"reward": half} | options)
    fault = FAULTS[reason]
    attempts = 2 if fault is Fault.INFRASTRUCTURE else 1
    assert [(e.reason, e.fault) for e in result.episodes] == [(reason, fault)] * attempts
    assert {e.reward for e in result.episodes} == {0.5 if fault is Fault.POLICY else None}
    assert [e.final for e in result.episodes] == [False] * (attempts - 1) + [True]
    assert [t.fault for t in result.trajectories] == [fault] * len(result.trajectories)


@pytest.mark.parametrize("source", ["agent", "reward", "environment"])
def test_an_error_that_no_file_can_hold_ends_its_own_episode_only(tmp_path: Path, source: str) -> None:
    """The policy writes "\\ud83d" in JSON, and whoever reads it quotes that in an exception."""

    async def agent(session: AgentSession, task: AgentTask) -> None:
        if source == "environment":
            await player(session, task)
        await chat(session, "say 1")
        if source == "agent":
            raise ValueError("\ud83d")

    def reward(episode: AgentEpisode) -> float:
        if source == "reward":
            raise ValueError("\ud83d")
        return 0.5

    environment = (lambda task: Faulty(EnvError("\ud83d"))) if source == "environment" else None
    result = run(agent, environment=environment, reward=reward, retries=0, out=tmp_path / "run")
    (episode,) = result.episodes
    assert "\\ud83d" in str(episode.error)
    assert [line.error for line in read_lines(tmp_path / "run/episodes.jsonl")] == [episode.error]
    assert {t.error for t in result.trajectories} == {episode.error}


def test_an_agent_that_failed_without_a_sampled_token_has_no_reward() -> None:
    result = run(raises_at_once, reward=half, retries=1)
    assert [(e.reason, e.reward, e.is_unsampled) for e in result.episodes] == [(StopReason.AGENT_ERROR, None, False)]


def test_a_failure_that_no_verifier_scored_has_the_stated_reward() -> None:
    """The environment returned no reward before the crash. What it returned before another end counts."""

    async def stops(session: AgentSession, task: AgentTask) -> None:
        assert session.environment is not None
        await session.environment.step(await chat(session, "say 0"))
        raise RuntimeError("a bug")

    def environment(task: AgentTask) -> Echo:
        return Echo()

    stated = FaultRules(score_failed=-1.0)
    assert run(raises, environment=environment, faults=stated).episodes[0].reward == -1.0
    assert run(stops, environment=environment, faults=stated).episodes[0].reward == 1.0
    assert run(raises, environment=environment, faults=FaultRules(score_failed=None)).episodes[0].reward is None


def test_each_attempt_has_another_seed_and_a_group_has_a_bound() -> None:
    options = faulty(EnvError("gone"))
    result = run(player, 2, group_size=3, retries=5, replacements=2, seed=7, **options)
    assert Counter(e.index for e in result.episodes if not e.final) == {0: 2, 1: 2}
    assert sum(e.final for e in result.episodes) == 6
    for episode in result.episodes:
        assert episode.seed == attempt_seed(session_seed(7, episode.index, episode.member), episode.attempt)
    assert len({e.seed for e in result.episodes}) == 10


@pytest.mark.parametrize(("fault", "attempts", "reward"), [("infrastructure", 2, None), ("unknown", 1, None)])
def test_an_option_moves_a_reason(fault: str, attempts: int, reward: float | None) -> None:
    result = run(raises, reward=half, retries=1, faults=FaultRules((f"agent_error={fault}",)))
    assert [(str(e.fault), e.reward) for e in result.episodes] == [(fault, reward)] * attempts


def test_a_resumed_run_goes_on_with_the_next_attempt_and_what_the_group_has_left(tmp_path: Path) -> None:
    """The run ended after one replaced attempt of the first member. A group has one replacement."""
    options: dict[str, Any] = faulty(EnvError("gone")) | {"retries": 3, "replacements": 1, "group_size": 2}
    run(player, out=tmp_path, max_concurrency=1, **options)
    places = [(e.member, e.attempt, e.final) for e in read_lines(tmp_path / "episodes.jsonl")]
    assert places == [(0, 0, False), (0, 1, True), (1, 0, True)]
    file = tmp_path / "episodes.jsonl"
    file.write_bytes(file.read_bytes().splitlines(keepends=True)[0])
    resumed = run(player, out=tmp_path, resume=True, max_concurrency=1, **options)
    assert [(e.member, e.attempt, e.final) for e in resumed.episodes] == [(0, 1, True), (1, 0, True)]
    assert resumed.episodes[0].seed == attempt_seed(session_seed(0, 0, 0), 1)
    lines = read_lines(file)
    assert [(e.fault, e.is_replaced) for e in lines] == [
        (Fault.INFRASTRUCTURE, True),
        (Fault.INFRASTRUCTURE, False),
        (Fault.INFRASTRUCTURE, False),
    ]


def test_a_resumed_run_plays_no_scored_failure_again(tmp_path: Path) -> None:
    run(raises, 2, reward=half, out=tmp_path)
    assert run(raises, 2, reward=half, out=tmp_path, resume=True).episodes == []
    faults = FaultRules(score_failed=None)
    other = tmp_path / "other"
    limits = dataclasses.replace(FAST, max_turns=1)
    options: dict[str, Any] = {"environment": lambda task: Echo(), "faults": faults, "limits": limits}
    (episode,) = run(two_turns, out=other, **options).episodes
    assert (episode.reason, episode.reward) == (StopReason.MAX_TURNS, None)
    assert run(two_turns, out=other, resume=True, **options).episodes == []

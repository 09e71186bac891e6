"""Episodes that verifiers plays: their ends, and the life of what they share. The package is a fake here."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tests.rollout.agents.common import run
from tests.rollout.fake_sessions import FakeServer
from verl_server.errors import BadRequestError
from verl_server.rollout.agents import verifiers_agent
from verl_server.rollout.agents.types import AgentLimits, AgentRun, Scored
from verl_server.rollout.agents.verifiers_agent import VerifiersAgent, end_of
from verl_server.rollout.faults import FAULTS, FaultRules
from verl_server.rollout.trajectory import Fault, StopReason


def error(kind: str, message: str = "why") -> Any:
    return SimpleNamespace(type=kind, message=message)


def trace(**changes: Any) -> Any:
    regular: dict[str, Any] = {
        "agent": SimpleNamespace(name="agent", trainable=True),
        "ok": True,
        "errors": [],
        "calls": [SimpleNamespace(error=None)],
        "is_timeout": False,
        "stop_condition": "agent_completed",
        "rewards": {"right": SimpleNamespace(score=0.5)},
        "metrics": {"length": 3.0, "skipped": None, "ratio": float("nan")},
        "reward": 0.25,
    }
    return SimpleNamespace(**regular | changes)


def episode(*traces: Any, errors: Any = (), is_timeout: bool = False) -> Any:
    return SimpleNamespace(traces=list(traces), errors=list(errors), is_timeout=is_timeout)


SCORED = Scored(reward=0.25, metrics={"right": 0.5, "length": 3.0})
JUDGE = SimpleNamespace(name="judge", trainable=False)
LONG = error("ProviderError", "upstream 400: context_length_exceeded")


@pytest.mark.parametrize(
    ("played", "reason", "result"),
    [
        (episode(trace()), StopReason.DONE, SCORED),
        (episode(trace(), trace(agent=JUDGE)), StopReason.DONE, SCORED),
        (episode(trace(stop_condition="max_turns")), StopReason.MAX_TURNS, SCORED),
        (episode(trace(stop_condition="max_output_tokens")), StopReason.MAX_TOKENS, SCORED),
        (episode(trace(stop_condition="agent_timeout", is_timeout=True)), StopReason.TIME_LIMIT, SCORED),
        (episode(trace(calls=[SimpleNamespace(error=LONG)])), StopReason.CONTEXT_FULL, SCORED),
        (episode(trace(ok=False, errors=[LONG])), StopReason.CONTEXT_FULL, None),
        (episode(trace(ok=False, errors=[error("ProviderError")])), StopReason.GENERATION_ERROR, None),
        (episode(trace(calls=[SimpleNamespace(error=error("ProviderError"))])), StopReason.GENERATION_ERROR, None),
        (episode(trace(ok=False, errors=[error("SandboxError")])), StopReason.ENV_ERROR, None),
        (episode(trace(ok=False, errors=[error("TaskError")])), StopReason.ENV_ERROR, None),
        (episode(trace(), trace(agent=JUDGE, ok=False, errors=[error("ProviderError")])), StopReason.ENV_ERROR, None),
        (episode(trace(), errors=[error("EnvError")]), StopReason.ENV_ERROR, None),
        (episode(errors=[error("TimeoutError")], is_timeout=True), StopReason.ENV_TIMEOUT, None),
        (episode(trace(stop_condition="scoring_timeout", is_timeout=True)), StopReason.ENV_TIMEOUT, None),
        (episode(trace(rewards={"right": None})), StopReason.ENV_ERROR, None),
        (episode(trace(), trace()), StopReason.ENV_ERROR, None),
        (episode(trace(agent=SimpleNamespace(name="agent", trainable=False))), StopReason.ENV_ERROR, None),
        (episode(trace(agent=JUDGE)), StopReason.ENV_ERROR, None),
    ],
)
def test_an_end_names_the_party_that_caused_it(played: Any, reason: StopReason, result: Scored | None) -> None:
    end = end_of(played, "agent")
    assert (end.reason, end.result) == (reason, result)
    assert (end.error is None) == (reason is StopReason.DONE)
    if result is not None:
        assert FAULTS[reason] is Fault.POLICY


class FakeEnvironment:
    """Stands in for `VerifiersEnvironment`: asks the session once, and scores row N with N."""

    api = SimpleNamespace(
        EvalClientConfig=lambda base_url, api_key_var: base_url,
        ModelContext=lambda model, client: (model, client),
    )
    role = "agent"
    made: list[FakeEnvironment]

    loops: set[asyncio.AbstractEventLoop]

    def __init__(self, name: str, settings: Any, max_turns: int | None = None) -> None:
        self.settings, self.max_turns = settings, max_turns
        self.env = self
        self.served = self.left = self.played = 0
        self.thread: threading.Thread | None = None
        self.fault: str | None = None
        type(self).made.append(self)

    def task(self, row: int) -> Any:
        return SimpleNamespace(row=row, key=f"key {row}", data=SimpleNamespace(prompt_text=f"say {row}"))

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        if self.fault == "serving":
            raise OSError("no port")
        self.served += 1
        self.thread = threading.current_thread()
        self.loops.add(asyncio.get_running_loop())
        try:
            yield
        finally:
            self.left += 1

    async def run_episode(self, task: Any, context: tuple[str, str]) -> Any:
        assert threading.current_thread() is self.thread
        model, base_url = context
        body = {"model": model, "messages": [{"role": "user", "content": f"say {task.row}"}]}
        async with httpx.AsyncClient() as client:
            (await client.post(f"{base_url}/chat/completions", json=body)).raise_for_status()
        if self.fault == "hang":
            try:
                await asyncio.Event().wait()
            finally:
                self.played += 1
        self.played += 1
        stopped = {"stop_condition": "max_turns"} if self.fault == "turns" else {}
        return episode(trace(reward=float(task.row), **stopped))


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> list[FakeEnvironment]:
    FakeEnvironment.made, FakeEnvironment.loops = [], set()
    monkeypatch.setattr(verifiers_agent, "VerifiersEnvironment", FakeEnvironment)
    return FakeEnvironment.made


def play(agent: VerifiersAgent, count: int = 2, **options: Any) -> AgentRun:
    return run(agent, agent.tasks(3, count), reward="agent", **options)


def test_episodes_share_what_the_environment_serves(made: list[FakeEnvironment]) -> None:
    agent = VerifiersAgent('verifiers:maze?{"taskset": {"a": 1}}', max_turns=7)
    result = play(agent, group_size=2)
    assert sorted((e.task.seed, e.task.input, e.reward) for e in result.episodes) == [
        (3, "say 3", 3.0),
        (3, "say 3", 3.0),
        (4, "say 4", 4.0),
        (4, "say 4", 4.0),
    ]
    assert all(e.metrics == {"right": 0.5, "length": 3.0} for e in result.episodes)
    assert all(t.metrics == {"right": 0.5, "length": 3.0} for t in result.trajectories) and result.trajectories
    assert [t.reward for t in result.trajectories] == [3.0, 3.0, 4.0, 4.0]
    (environment,) = made
    assert (environment.settings, environment.max_turns) == ({"taskset": {"a": 1}}, 7)
    play(agent, 1)  # another call, on another event loop
    assert (environment.served, environment.left, environment.played) == (1, 0, 5)
    agent.close()
    assert environment.left == 1
    play(agent, 1)
    agent.close()
    assert (environment.served, environment.left) == (2, 2)
    assert len(environment.loops) == 1  # locks of verifiers belong to the process, and to one loop


def test_scores_of_an_episode_that_reached_a_limit_count(made: list[FakeEnvironment]) -> None:
    agent = VerifiersAgent("verifiers:maze")
    made[0].fault = "turns"
    (played,) = play(agent, 1).episodes
    agent.close()
    assert (played.reason, played.fault, played.reward) == (StopReason.MAX_TURNS, Fault.POLICY, 3.0)


@pytest.mark.parametrize("failed", [0.0, -1.0, None])
def test_an_episode_that_our_limit_ends_has_the_score_of_a_failure(
    made: list[FakeEnvironment], failed: float | None
) -> None:
    def check(fake: FakeServer) -> None:
        assert made[0].played == 1  # verifiers' part has ended, too

    agent = VerifiersAgent("verifiers:maze")
    made[0].fault = "hang"
    limits, faults = AgentLimits(seconds=2.0), FaultRules(score_failed=failed)
    (played,) = play(agent, 1, limits=limits, faults=faults, check=check).episodes
    agent.close()
    assert (played.reason, played.reward, played.metrics) == (StopReason.TIME_LIMIT, failed, {})
    assert not played.reward_failed


def test_what_cannot_be_served_is_tried_again_by_the_next_episode(made: list[FakeEnvironment]) -> None:
    agent = VerifiersAgent("verifiers:maze")
    made[0].fault = "serving"
    (played,) = play(agent, 1, retries=0).episodes
    assert (played.reason, played.reward) == (StopReason.ENV_ERROR, None) and "no port" in (played.error or "")
    made[0].fault = None
    (played,) = play(agent, 1, retries=0).episodes
    agent.close()
    assert played.reward == 3.0


def test_held_out_rows_are_those_of_the_settings_for_them(made: list[FakeEnvironment]) -> None:
    with pytest.raises(BadRequestError, match=r"name them with `eval`"):
        VerifiersAgent("verifiers:maze", needs_held_out=True)
    made.clear()
    text = 'verifiers:maze?{"taskset": {"a": 1, "split": "train"}, "eval": {"taskset": {"split": "test"}}}'
    agent = VerifiersAgent(text, needs_held_out=True)
    assert [environment.settings for environment in made] == [
        {"taskset": {"a": 1, "split": "train"}},
        {"taskset": {"a": 1, "split": "test"}},
    ]
    assert agent.task(2).environment == {"split": "train", "key": "key 2"}
    tasks = [agent.task(2, held_out=True)]
    assert [e.reward for e in run(agent, tasks, reward="agent").episodes] == [2.0]
    agent.close()
    assert [environment.played for environment in made] == [0, 1]
    assert repr(agent) == f"VerifiersAgent({text!r})"


def test_a_function_without_a_score_has_no_reward() -> None:
    async def silent(session: Any, task: Any) -> str:
        return "1.0"

    (played,) = run(silent, 1, reward="agent").episodes
    assert played.reward is None and "needs a Scored from the agent" in (played.error or "")

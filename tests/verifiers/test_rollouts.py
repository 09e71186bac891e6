"""`verl-server rollout --tasks verifiers:NAME`: tokens, rewards, metrics and ends of episodes that verifiers plays."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl_server.cli import agents
from verl_server.errors import BadRequestError, VerlServerError
from verl_server.models.tiny import byte_tokenizer
from verl_server.rollout.agents.output import EpisodeLine, read_lines
from verl_server.rollout.agents.run import run_agents
from verl_server.rollout.agents.types import AgentLimits, AgentRun, Server
from verl_server.rollout.agents.verifiers_agent import VerifiersAgent, scored
from verl_server.rollout.environments.verifiers import VerifiersEnvironment
from verl_server.rollout.trajectory import Fault, StopReason, Trajectory, read_jsonl

SEAT: dict[str, Any] = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
_BRACE = byte_tokenizer().encode("}")[0]
CALLS = {"tool_choice": "required", "logit_bias": {str(_BRACE): 40}}
"""A random policy calls the tool in each turn, without arguments that the tool does not have."""
WALKS: dict[str, Any] = {"agent": SEAT | {"max_turns": 3, "sampling": CALLS}}


def name(environment: str, block: dict[str, Any]) -> str:
    return f"verifiers:{environment}?{json.dumps({'agent': SEAT} | block)}"


def play(text: str, server: Server, **options: Any) -> AgentRun:
    agent = VerifiersAgent(text)
    sampling = {"temperature": 1.0, "max_new_tokens": 48} | options.pop("sampling_params", {})
    try:
        return run_agents(
            agent, agent.tasks(0, 2), servers=[server], reward="agent", sampling_params=sampling, retries=0, **options
        )
    finally:
        agent.close()


def check_logprobs(trajectory: Trajectory, model: Any) -> None:
    """Assert the log-probability of each sampled token, in float32."""
    logits = model(torch.tensor([trajectory.tokens])).logits[0, :-1]
    expected = logits.log_softmax(-1)[range(len(logits)), trajectory.tokens[1:]]
    for at, mask in enumerate(trajectory.loss_mask):
        if mask:
            assert trajectory.logprobs[at] == pytest.approx(float(expected[at - 1]), abs=1e-4)


def alone(environment: str, block: dict[str, Any], server: Server, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the trace of row 0 that verifiers records without this project's runner, greedily."""
    monkeypatch.setenv("OWNER", server.api_key)
    host = VerifiersEnvironment(environment, {"agent": SEAT} | block)
    api = host.api
    context = api.ModelContext(
        model="policy",
        client=api.EvalClientConfig(base_url=f"{server.url}/v1", api_key_var="OWNER"),
        sampling=api.SamplingConfig(temperature=0.0, max_tokens=200),
    )

    async def run() -> Any:
        async with host.env.serving():
            return await host.env.run_episode(host.task(0), context)

    (trace,) = asyncio.run(run()).traces
    return trace


@pytest.mark.parametrize(("environment", "block"), [("verl-words", {}), ("verl-walk", WALKS)])
def test_scores_are_those_that_verifiers_has_alone(
    environment: str, block: dict[str, Any], server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = alone(environment, block, server, monkeypatch)
    greedy = {"temperature": 0.0, "max_new_tokens": 200}
    run = play(name(environment, block), server, sampling_params=greedy)
    (episode,) = [episode for episode in run.episodes if episode.index == 0]
    assert episode.reward == trace.reward != 0.0
    assert episode.metrics == scored(trace).metrics
    assert episode.turns == trace.num_turns
    assert episode.reason is (StopReason.MAX_TURNS if trace.stop_condition == "max_turns" else StopReason.DONE)


def test_one_turn_has_exact_tokens(server: Server, model: Path) -> None:
    run = play(name("verl-words", {}), server, group_size=2)
    reference: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    assert len(run.trajectories) == len(run.episodes) == 4
    with torch.inference_mode():
        for trajectory in run.trajectories:
            assert sum(trajectory.loss_mask) > 0 and len(trajectory.turns) == 1
            check_logprobs(trajectory, reference)
    for episode in run.episodes:
        amount, form = episode.metrics["amount"], episode.metrics["form"]
        assert episode.reward == pytest.approx(amount + 0.25 * form) and episode.metrics["characters"] >= 0
        assert episode.task.input == f"Write {episode.index + 1} letters."


def test_several_turns_of_tools_are_one_branch(server: Server, model: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    run = play(name("verl-walk", WALKS), server, sampling_params={"max_new_tokens": 200})
    assert [episode.reason for episode in run.episodes] == [StopReason.MAX_TURNS] * 2
    assert {episode.turns for episode in run.episodes} == {3} and len(run.trajectories) == 2
    for episode, trajectory in zip(sorted(run.episodes, key=lambda e: e.index), run.trajectories, strict=True):
        assert sum(trajectory.loss_mask) == episode.tokens and len(trajectory.turns) == 3
        text = tokenizer.decode(trajectory.tokens)
        seen = [int(place) for place in re.findall(r"You are at (-?\d+)\.", text)]
        assert len(seen) == 2 and episode.metrics["steps"] == 3.0  # the last call was executed, and not answered
        target = (2, -2)[episode.index]
        assert episode.metrics["near"] == episode.reward
        assert episode.reward in {1.0 / (1.0 + abs(seen[1] + step - target)) for step in (-1, 1)}


def test_a_failed_score_is_the_environments(server: Server) -> None:
    run = play(name("verl-words", {"taskset": {"fails": True}}), server)
    for episode in run.episodes:
        assert (episode.reason, episode.fault, episode.reward) == (StopReason.ENV_ERROR, Fault.INFRASTRUCTURE, None)
        assert "TaskError" in (episode.error or "") and "reference answer is missing" in (episode.error or "")


def test_a_prompt_that_is_too_long_is_the_policys(server: Server) -> None:
    run = play(name("verl-words", {}), server, limits=AgentLimits(max_context=20))
    for episode in run.episodes:
        assert episode.reason is StopReason.CONTEXT_FULL and episode.fault is Fault.POLICY


def test_the_bound_of_a_session_is_the_policys_and_scored_as_a_failure(server: Server) -> None:
    block = {"agent": SEAT | {"sampling": CALLS}}
    run = play(
        name("verl-walk", block), server, limits=AgentLimits(max_turns=1), sampling_params={"max_new_tokens": 200}
    )
    for episode in run.episodes:
        assert (episode.reason, episode.reward, episode.metrics) == (StopReason.MAX_TURNS, 0.0, {})


def command(text: str, server: Server, out: Path, *more: str) -> int:
    words = ["--tasks", text, "--server", server.url, "--out", str(out), "--groups", "2", "--group-size", "2"]
    return agents.main([*words, *more])


def test_a_resumed_run_plays_what_is_missing(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out = name("verl-words", {}), tmp_path / "run"
    monkeypatch.setenv("VERL_SERVER_API_KEY", server.api_key)
    assert command(text, server, out) == 0
    first: list[EpisodeLine] = read_lines(out / "episodes.jsonl")
    summary = json.loads((out / "summary.json").read_text())
    assert summary["metrics"] == {
        key: pytest.approx(sum(line.metrics[key] for line in first) / 4) for key in ("amount", "form", "characters")
    }
    lines = (out / "episodes.jsonl").read_text().splitlines(keepends=True)
    (out / "episodes.jsonl").write_text("".join(lines[:3]))

    monkeypatch.setenv("VERL_SERVER_API_KEY", server.api_key)
    with pytest.raises(VerlServerError, match="tasks_digest"):
        command(name("verl-words", {"taskset": {"split": "test"}}), server, out, "--resume")
    monkeypatch.setenv("VERL_SERVER_API_KEY", server.api_key)
    assert command(text, server, out, "--resume") == 0
    again = read_lines(out / "episodes.jsonl")
    assert again[:3] == first[:3] and len(again) == 4
    assert (again[3].task, again[3].member) == (first[3].task, first[3].member)
    assert again[3].metrics == first[3].metrics  # the same seed
    assert len(read_jsonl(out / "trajectories.jsonl")) == 4
    assert "vs-" not in capsys.readouterr().err  # no session key in a log


def test_settings_that_cannot_work_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PRIME_API_KEY", raising=False)
    for text, cause in {
        "verifiers:verl-nothing": "is not installed",
        "verifiers:verl-words": "sandbox of Prime Intellect",
        name("verl-words", {"taskset": {"lines": 2}}): "lines",
        name("verl-words", {"taskset": {"rows": 0}}): "no tasks",
        name("verl-words", {"retries": {"max_retries": 1}}): "play twice in one session",
        'verifiers:verl-words?{"id": "agentic-judge"}': "solver, judge play with the policy",
    }.items():
        with pytest.raises(BadRequestError, match=cause):
            VerifiersAgent(text)

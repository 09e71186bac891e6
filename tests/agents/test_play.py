"""Agents of unmodified SDKs play games through sessions, and the export is what was sampled.

The agents are the examples of `examples/`, as functions and as programs. Each log-probability is computed again with
transformers in float32.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from conftest import Served
from families import FAMILIES
from playing import AGENTS, GUESS, SUM, agent_named, as_params, check, environment, reasoning_of, thought_bias

from verl_server.rollout.agents.run import run_agents


@pytest.mark.parametrize("agent", AGENTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_an_agent_plays_and_its_export_is_exact(serve: Callable[[str], Served], name: str, agent: str) -> None:
    served = serve(name)
    bias = thought_bias(served)
    run = run_agents(
        agent_named(agent),
        [GUESS, SUM],
        servers=[served.server],
        environment=environment,
        group_size=2,
        retries=0,
        sampling_params=as_params(bias),
    )
    for episode in run.episodes:
        assert episode.reason == "done", f"{episode.error}: {episode.output}"
    assert len(run.trajectories) == 4, "one branch for each episode"
    guesses = [branch for branch in run.trajectories if branch.task.group == 0]
    assert max(len(branch.turns) for branch in guesses) > 2
    assert all(turn.action and len(turn.action["calls"]) == 1 for branch in guesses for turn in branch.turns)
    assert check(served, run, bias) > 100
    if (format := reasoning_of(served)) is not None:
        thought = served.family.token_id(format.open)
        assert any(thought in branch.tokens[slice(*turn.action_span)] for branch in guesses for turn in branch.turns)

"""An option that several commands have is the same one in each: name, default and the first sentence of its help."""

from __future__ import annotations

import dataclasses
from itertools import combinations
from typing import Any

import pytest

from verl_server.cli.agents import AgentRolloutArgs
from verl_server.cli.rollout import RolloutArgs, make_tasks
from verl_server.server.http.field_docs import field_docs
from verl_server.train.options import GRPOConfig, TrainArgs

COMMANDS: list[type[Any]] = [RolloutArgs, AgentRolloutArgs, TrainArgs, GRPOConfig]
DIFFERENT = {
    "out": "a file of trajectories, or the folder of a run",
    "environment": "an agent plays more kinds of environments than OpenEnv's servers",
    "server": "a trainer attaches to the servers that it names, or launches one",
    "model_path": "the policy of a trainer, or the model of a server that is launched",
    "limits": "sessions of agents have other bounds than episodes of an environment",
}
OTHER_DEFAULTS = {
    "groups": "an agent's file of tasks has a number of lines",
    "group_size": "GRPO compares the episodes of a group, so that one episode teaches nothing",
}


def options(kind: type[Any]) -> dict[str, tuple[Any, str]]:
    """Return name -> (default, first sentence of the help)."""
    docs = field_docs(kind)
    found = {}
    for field in dataclasses.fields(kind):
        factory = field.default_factory
        default = field.default if factory is dataclasses.MISSING else factory()
        found[field.name] = (default, docs.get(field.name, "").partition(". ")[0].rstrip("."))
    return found


def test_shared_options_agree() -> None:
    shared: set[str] = set()
    for one, other in combinations(COMMANDS, 2):
        left, right = options(one), options(other)
        for name in left.keys() & right.keys() - DIFFERENT.keys():
            shared.add(name)
            required = {dataclasses.MISSING, None}  # an option that one command needs and another can do without
            if name not in OTHER_DEFAULTS and {left[name][0], right[name][0]} != required:
                assert left[name][0] == right[name][0], (one, other, name)
            if GRPOConfig not in (one, other) or name not in ("groups", "seed"):
                assert left[name][1] == right[name][1], (one, other, name)
    assert {"groups", "group_size", "first_seed", "seed", "temperature", "max_concurrency", "resume"} <= shared
    assert {"agent", "tasks", "reward", "chat", "observation_key", "action_key", "api_key_file"} <= shared
    assert options(RolloutArgs)["limits"][0] == options(TrainArgs)["limits"][0], "by one class"


def test_both_rollouts_play_groups_with_draws_of_their_own() -> None:
    where = {"server": ("http://s",), "environment": "http://e"}
    tasks = make_tasks(RolloutArgs(**where, groups=3, group_size=2, first_seed=10, seed=1))
    assert [(t.group, t.member, t.seed) for t in tasks] == [(g, m, 10 + g) for g in range(3) for m in range(2)]
    assert len({t.sampling_seed for t in tasks}) == 6
    again = make_tasks(RolloutArgs(**where, groups=4, group_size=2, first_seed=10, seed=1))
    assert again[:6] == tasks, "further groups do not change the draws of the others"
    other = make_tasks(RolloutArgs(**where, groups=3, group_size=2, first_seed=10, seed=2))
    assert not {t.sampling_seed for t in other} & {t.sampling_seed for t in tasks}


@pytest.mark.parametrize("name", ["groups", "group_size"])
def test_no_groups_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} must be at least 1, not 0"):
        RolloutArgs(server=("http://s",), environment="http://e", **{name: 0})

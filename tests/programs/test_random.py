"""Policies without a script play: a random model, whose texts are noise, and the released SmolLM2-135M."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from conftest import Served
from playing import PROGRAMS, SHORT, agent, check, described, play, with_instructions
from scripts import TASKS


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("name", PROGRAMS)
def test_noise(name: str, served: Callable[[str], Served], program: Callable[[str], str]) -> None:
    tiny = served("tiny")
    tasks = [with_instructions(task) for task in TASKS]
    forced = {"max_new_tokens": 48, "temperature": 1.0}
    run = play(
        agent(SHORT[name], program), tasks, tiny.server, group_size=2, max_turns=4, forced_sampling_params=forced
    )
    print(described(run))
    check(run, tiny)
    assert all(episode.reward is not None and episode.tokens for episode in run.episodes)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_released_model(name: str, served: Callable[[str], Served], program: Callable[[str], str]) -> None:
    real = served("real")
    task = with_instructions(TASKS[1])
    forced = {"max_new_tokens": 64, "temperature": 1.0}
    run = play(agent(SHORT[name], program), [task], real.server, max_turns=2, forced_sampling_params=forced)
    print(described(run))
    check(run, real)
    assert all(episode.reward is not None and episode.tokens for episode in run.episodes)

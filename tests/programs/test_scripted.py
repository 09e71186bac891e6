"""The programs solve the example tasks, 16 episodes at once: the policy's texts are forced, its tokens are sampled."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import KEY, Served
from playing import PROGRAMS, SHORT, agent, check, described, play, with_instructions
from scripted import ScriptedRelay, exactly, forced_text
from scripts import FAILURES, REWARDS_OF_FAILURES, SOLUTIONS, TASKS, scripts

from verl_server.rollout.agents.types import Server
from verl_server.rollout.trajectory import StopReason


def test_forced_texts() -> None:
    known = scripts(SOLUTIONS)
    body = {"tools": [{"name": "Bash"}], "messages": [{"role": "user", "content": f"Now: {TASKS[1].input}"}]}
    called = forced_text(body, known)
    assert called.startswith('<tool_call>\n{"name": "Bash"') and "python3 puzzle.py" in called
    body["messages"] += [{"role": "assistant", "content": called}, {"role": "user", "content": "2"}]
    assert forced_text(body, known) == "21171191"
    assert forced_text({"messages": []}, known) == "A short text."
    assert exactly('a.b\n{"x"}') == 'a\\.b\\n\\{"x"\\}'
    with pytest.raises(LookupError, match="0 scripts"):
        forced_text({"tools": [{"name": "Bash"}], "messages": []}, known)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("name", PROGRAMS)
def test_sixteen_episodes_at_once(
    name: str, served: Callable[[str], Served], program: Callable[[str], str], tmp_path: Path
) -> None:
    tiny = served("tiny")
    relay = ScriptedRelay(tiny.server.url, scripts(SOLUTIONS))
    with relay.running():
        server = Server(relay.url, KEY)
        tasks = [with_instructions(task) for task in TASKS]
        run = play(agent(SHORT[name], program), tasks, server, group_size=6, max_concurrency=16, out=tmp_path / "run")
    print(described(run))
    assert [(episode.reason, episode.reward) for episode in run.episodes] == [(StopReason.DONE, 1.0)] * 18
    assert relay.unscripted == [] and {request["status"] for request in relay.requests} == {200}
    for episode in run.episodes:  # the program's history grows only: one branch
        assert episode.trajectory is not None
        (branch,) = episode.trajectory.branches
        assert len(branch.turns) == episode.turns == len(SOLUTIONS[episode.index])
    check(run, tiny)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("name", PROGRAMS)
def test_all_tools_and_work_that_is_not_done(
    name: str, served: Callable[[str], Served], program: Callable[[str], str], tmp_path: Path
) -> None:
    tiny = served("tiny")
    relay = ScriptedRelay(tiny.server.url, scripts(FAILURES))
    with relay.running():
        run = play(agent(name, program), TASKS, Server(relay.url, KEY), out=tmp_path / "run")
    print(described(run))
    episodes = sorted(run.episodes, key=lambda episode: episode.index)
    assert [episode.reward for episode in episodes] == REWARDS_OF_FAILURES
    assert {episode.reason for episode in episodes} == {StopReason.DONE} and relay.unscripted == []
    says = (tmp_path / "run" / "agents" / "1-0-0.check.log").read_text()
    assert "The check failed: exit code 1." in says and "'21171192', and should be 21171191" in says
    check(run, tiny)

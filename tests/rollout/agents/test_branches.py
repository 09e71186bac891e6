"""The trajectories of an agent's episode: texts, sub-agents, forks and times."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.rollout.agents.common import Echo, chat, run
from verl_server.files.json_files import numbered_lines
from verl_server.messages.session_types import Branch, BranchTurn, Message, SessionTrajectory
from verl_server.rollout.agents.branches import episode_trajectories
from verl_server.rollout.agents.types import AgentEpisode, AgentSession, AgentTask
from verl_server.rollout.rollout_clock import RolloutClock
from verl_server.rollout.trajectory import read_jsonl


def turn(number: int, end: int, ended: float) -> BranchTurn:
    times = (ended - 1.0, ended - 0.5, ended)
    return BranchTurn(number, end - 2, end - 1, end, "stop", times=times, reply=Message("assistant", str(number)))


def branch(number: int, session: str, turns: list[BranchTurn], shared: int = 0, fork_of: int | None = None) -> Branch:
    count = turns[-1].end
    mask, logprobs = [0, 1] * (count // 2), [0.0] * count
    return Branch(number, "main", session, turns, shared, [1] * count, mask, logprobs, [], fork_of=fork_of)


def episode(*branches: Branch, **fields: Any) -> AgentEpisode:
    trajectory = SessionTrajectory(
        session="ses", state="finished", reason="done", reward=1.0, group="", metadata={}, branches=list(branches)
    )
    return AgentEpisode(AgentTask(seed=1), 3, 0, 0, 7, trajectory=trajectory, **fields)


def test_a_branch_names_the_branch_that_it_departs_from_and_the_agent_of_a_sub_agent() -> None:
    main, fork, sub = episode_trajectories(
        episode(
            branch(0, "ses", [turn(0, 2, 101.0), turn(1, 4, 103.0)]),
            branch(1, "ses", [turn(0, 2, 101.0), turn(2, 4, 105.0)], shared=2, fork_of=0),
            branch(2, "ses.auto-1", [turn(3, 2, 104.0)]),
        )
    )
    assert [(t.parent, t.fork_of, t.shared) for t in (main, fork, sub)] == [("", None, 0), ("", 0, 2), ("ses", None, 0)]


def test_each_generation_is_an_event_of_one_branch() -> None:
    played = episode(
        branch(0, "ses", [turn(0, 2, 101.0), turn(1, 4, 103.5)]),
        branch(1, "ses", [turn(0, 2, 101.0), turn(2, 4, 105.0)], shared=2, fork_of=0),
        events=[("env", 1.0, 2.0)],
        began=50.0,
        server_clock=-100.0,
    )
    main, fork = episode_trajectories(played)
    assert [(e.kind, e.start, e.end) for e in main.events] == [
        ("generate", 0.0, 1.0),
        ("env", 1.0, 2.0),
        ("generate", 2.5, 3.5),
    ]
    assert [(e.kind, e.start, e.end) for e in fork.events] == [("generate", 4.0, 5.0)]
    assert main.began == fork.began == 50.0
    played.server_clock = None  # an older server
    assert [e.kind for t in episode_trajectories(played) for e in t.events] == ["env"]


def test_a_run_records_what_was_said_and_when(tmp_path: Path) -> None:
    async def agent(session: AgentSession, task: AgentTask) -> None:
        assert session.environment is not None
        await chat(session, "say 1")
        await session.environment.step(await chat(session, "say 2"))

    before = time.time()
    result = run(agent, 2, environment=lambda task: Echo(), out=tmp_path)
    after = time.time()
    assert read_jsonl(tmp_path / "trajectories.jsonl") != []
    assert len({t.began for t in result.trajectories}) == 1
    for t in result.trajectories:
        said = [([m.text for m in turn.messages], turn.reply and turn.reply.text) for turn in t.turns]
        assert said == [(["say 1"], "1"), (["say 2"], "2")]
        assert [event.kind for event in t.events] == ["env", "generate", "generate", "env"]
        assert t.began is not None
        assert before <= t.began <= after
        for event in t.events:
            assert -0.01 <= event.start <= event.end <= after - before + 0.01
    assert [t.parent for t in result.trajectories] == ["", ""]


@pytest.mark.parametrize("shift", [0.0, 3600.0, -3600.0])
def test_the_clock_of_a_server_is_moved_only_if_it_differs(shift: float) -> None:
    clock = RolloutClock()
    asked = clock()
    now = time.time()
    offset = clock.server_offset(now + shift, asked)
    assert offset is not None
    assert asked - 1e-5 <= now + shift + offset <= clock() + 1e-5
    if not shift:
        assert offset == pytest.approx(-clock.began, abs=1e-5)
    assert clock.server_offset(None, asked) is None


def test_files_of_an_earlier_version_are_read(tmp_path: Path) -> None:
    run(_says_one, 1, reward=lambda episode: 1.0, out=tmp_path)
    file = tmp_path / "trajectories.jsonl"
    old = []
    for _, line in numbered_lines(file):
        record = json.loads(line)
        for name in ("began", "parent", "fork_of", "shared"):
            del record[name]
        for each in record["turns"]:
            del each["messages"], each["reply"]
        old.append(json.dumps(record))
    file.write_text("\n".join(old) + "\n")
    (read,) = read_jsonl(file)
    assert (read.began, read.parent, read.fork_of, read.shared) == (None, "", None, 0)
    assert read.turns[0].messages == [] and read.turns[0].reply is None


async def _says_one(session: AgentSession, task: AgentTask) -> None:
    await chat(session, "say 1")

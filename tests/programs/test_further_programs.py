"""opencode, aider, mini-swe-agent, smolagents and OpenHands themselves play an episode by their recipes.

A program is found on PATH, or at the path in the variable PROGRAM_NAME, such as PROGRAM_MINI_SWE_AGENT. A test of a
program that is not installed is skipped.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import KEY, Served
from in_order import Relay, call, saying
from playing import check

from verl_server.errors import BadRequestError
from verl_server.rollout.agents.installed import InstalledAgent, ProgramOptions
from verl_server.rollout.agents.loading import load_agent
from verl_server.rollout.agents.run import run_agents
from verl_server.rollout.agents.types import AgentEpisode, AgentLimits, AgentRun, AgentTask, Server
from verl_server.rollout.trajectory import StopReason

DONE = "The file says hi there."
CODE = "I look.\n<code>\nprint(shell('{}'))\n</code>"
LOOK, WRITE = "cat hello.txt", "echo hi there > hello.txt"


@dataclass(frozen=True)
class Script:
    """The texts of the policy in an episode of a program, and the result of the episode."""

    recipe: str
    texts: list[str]
    branches: list[int]
    """Turns of each branch of the trajectory."""
    answer: str = DONE


SCRIPTS = [
    Script(
        "opencode",
        [
            "I look.\n" + call("bash", command=LOOK, description="Look"),
            call("grep", pattern="hello") + "\n" + call("write", filePath="hello.txt", content="hi there\n"),
            DONE,
        ],
        [3],
    ),
    Script(
        "mini-swe-agent",
        [
            "I look.\n" + call("bash", command=LOOK),
            call("bash", command="ls") + "\n" + call("bash", command=WRITE),
            DONE + "\n" + call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
        ],
        [3],
    ),
    Script("smolagents", [CODE.format(LOOK), CODE.format(WRITE), f"<code>\nfinal_answer('{DONE}')\n</code>"], [3]),
    Script(
        "openhands",
        [
            "I look.\n" + call("terminal", command=LOOK),
            call("terminal", command="ls") + "\n" + call("terminal", command=WRITE),
            call("finish", message=DONE),
        ],
        [3],
    ),
    # A file that a reply mentions is put in front of the question: the second prompt is another one.
    Script(
        "aider",
        ["I need notes.md, too.", f"hello.txt\n```\nhi there\n```\n\n{DONE}"],
        [1, 1],
        answer=f"hello.txt\n```\nhi there\n```\n\n{DONE}",
    ),
]


class Files:
    """An environment whose folder has two files. The task is done if hello.txt says "hi there"."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tools: list[dict[str, Any]] = []

    async def reset(self, seed: int | None) -> str:
        self.folder.mkdir()
        (self.folder / "hello.txt").write_text("hello\n")
        (self.folder / "notes.md").write_text("Nothing.\n")
        return "The folder has hello.txt and more."

    async def step(self, text: str) -> tuple[str, float | None, bool]:
        return "", float((self.folder / "hello.txt").read_text().strip() == "hi there"), True

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        raise BadRequestError("There are no tools.")

    async def close(self) -> None:
        pass


def agent(name: str) -> InstalledAgent:
    """Return the recipe with its program. Skip the test if the program is not installed."""
    path = os.environ.get(f"PROGRAM_{name.upper().replace('-', '_')}")
    found = load_agent(name, program=ProgramOptions(program=path))
    assert isinstance(found, InstalledAgent)
    try:
        found.check()
    except BadRequestError as error:
        if path is not None:
            raise
        pytest.skip(f"{found.recipe.install}: {error}")
    return found


def play(relay: Relay, player: InstalledAgent, folder: Path, **limits: Any) -> tuple[AgentRun, AgentEpisode]:
    ended: list[AgentEpisode] = []
    run = run_agents(
        player,
        [AgentTask(seed=1, input="Make hello.txt say: hi there")],
        servers=[Server(relay.url, KEY)],
        environment=lambda task: Files(folder / "work"),
        limits=AgentLimits(seconds=240.0, **limits),
        out=folder / "run",
        on_finish=ended.append,
        retries=0,
    )
    return run, ended[0]


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.recipe)
def test_a_program_plays_an_episode_with_tools(script: Script, served: Callable[[str], Served], tmp_path: Path) -> None:
    player = agent(script.recipe)
    tiny = served("tiny")
    with saying(tiny.server.url, script.texts) as relay:
        run, episode = play(relay, player, tmp_path)
    assert relay.refused == []
    assert episode.reason is StopReason.DONE, episode.output
    assert episode.result.strip() == script.answer
    assert [trajectory.reward for trajectory in run.trajectories] == [1.0] * len(script.branches)
    assert [len(trajectory.turns) for trajectory in run.trajectories] == script.branches
    # One request for each text, and none beside: a title, a summary or a commit's message would be trained.
    (bodies,) = relay.chats.values()
    assert len(bodies) == len(script.texts)
    check(run, tiny)


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("name", ["opencode", "smolagents", "openhands"])
def test_a_limit_of_the_session_ends_the_program(name: str, served: Callable[[str], Served], tmp_path: Path) -> None:
    (script,) = [script for script in SCRIPTS if script.recipe == name]
    player = agent(name)
    with saying(served("tiny").server.url, script.texts) as relay:
        run, episode = play(relay, player, tmp_path, max_turns=2)
    assert episode.reason is StopReason.MAX_TURNS, episode.output
    assert len(relay.refused) == 1
    assert [trajectory.reward for trajectory in run.trajectories] == [1.0]

"""Plays tasks with a program in its sandbox, and checks all that a run leaves behind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from conftest import Served

from verl_server.rollout.agents.installed import InstalledAgent, ProgramOptions
from verl_server.rollout.agents.loading import environment_factory, load_agent
from verl_server.rollout.agents.run import run_agents
from verl_server.rollout.agents.types import AgentLimits, AgentRun, AgentTask, Server

INSTRUCTIONS = "Solve the task with a command of the shell."
SHORT = {
    "claude-code": f"claude-code --tools Bash --system-prompt '{INSTRUCTIONS}'",
    "codex": """codex -c 'model_instructions_file="/workspace/instructions.md"'""",
}
"""Commands with short prompts, for tasks of `with_instructions`."""
PROGRAMS = tuple(SHORT)


def agent(command: str, program: Callable[[str], str]) -> InstalledAgent:
    """Return the agent of `--agent COMMAND`."""
    name = {"claude-code": "claude", "codex": "codex"}[command.split()[0]]
    found = load_agent(command, program=ProgramOptions(program=program(name)))
    assert isinstance(found, InstalledAgent)
    return found


def with_instructions(task: AgentTask) -> AgentTask:
    """Return the task with a file in which Codex finds its instructions, in the place of its own 17 KB."""
    files = task.environment["files"] | {"instructions.md": INSTRUCTIONS}
    return AgentTask(input=task.input, environment=task.environment | {"files": files})


def play(played: InstalledAgent, tasks: Sequence[AgentTask], server: Server, **options: Any) -> AgentRun:
    """Play the tasks in the environment `workspace`, in the sandbox."""
    limits = AgentLimits(max_turns=options.pop("max_turns", 8), seconds=240.0)
    environment = environment_factory("workspace")
    return run_agents(played, tasks, servers=[server], environment=environment, limits=limits, retries=0, **options)


def check(run: AgentRun, served: Served) -> None:
    """Recompute all branches. Assert that each sampled token is trained in one branch, and that no session is left."""
    sampled = sum(served.recomputation.check(branch) for branch in run.trajectories)
    assert sampled == sum(episode.tokens for episode in run.episodes)
    assert served.sessions() == 0
    for episode in run.episodes:
        assert episode.trajectory is not None and episode.final


def described(run: AgentRun) -> str:
    """Return one line for each episode: its end, reward, time, turns, tokens and branches."""
    lines = []
    for episode in run.episodes:
        assert episode.trajectory is not None
        branches = episode.trajectory.branches
        prompts, lengths = [branch.turns[0].prompt_end for branch in branches], [len(branch.ids) for branch in branches]
        lines.append(
            f"{episode.name}: {episode.reason}, reward {episode.reward}, {episode.seconds:.1f} s, "
            f"{episode.turns} turns, {episode.tokens} tokens, prompts {prompts}, branches {lengths}"
            + (f", {episode.error}" if episode.error else "")
        )
    return "\n".join(lines)

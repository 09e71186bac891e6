"""Agents with faults on a real server: each ends with its reason, the others sample what they sample without faults.

The server computes each row of a step by itself: compiled kernels, no prefix cache, no prompt in several steps. So a
token depends on its own conversation only, except for rounding in the attention of prompts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.depth import at_depth
from tests.rollout.agents.chaos import LEFT, Environments, FaultPlan, HttpEnvironment, environments, player, program
from tests.rollout.agents.redraw import Redraw
from tests.waiting import eventually
from verl_server import HttpServerEngineAdapter
from verl_server.models.tiny import make_model_folder
from verl_server.rollout.agents.run import arun_agents
from verl_server.rollout.agents.types import AgentEpisode, AgentLimits, AgentRun, AgentTask, Server
from verl_server.rollout.faults import FAULTS
from verl_server.rollout.scratch import private_root
from verl_server.rollout.trajectory import Fault, StopReason, Trajectory

KEY = "owner"
ROUNDING = 1e-4
"""Most that log-probabilities and draws of the server may differ from those of transformers."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_folder(tmp_path_factory.mktemp("qwen3"), "qwen3", init_std=0.2, max_position_embeddings=32_768)


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    store = str(tmp_path_factory.mktemp("store"))
    small: dict[str, Any] = {"kv_cache_gib": 0.25, "cpu_threads": 1, "port": 0}
    alone: dict[str, Any] = {
        "cpu_kernel_choice": "cpp",
        "disable_radix_cache": True,
        "chunked_prefill_size": 2**17,
        "check_invariants": True,
    }
    with HttpServerEngineAdapter(model_path=str(folder), api_key=KEY, session_store=store, **small, **alone) as engine:
        assert engine.url is not None
        yield Server(engine.url, KEY)


@dataclass(frozen=True)
class Size:
    functions: int
    programs: int
    plan: FaultPlan
    """The faults. Its seed was chosen so that there is every kind of fault, in functions and in programs."""
    limits: AgentLimits


def bounds(environment_seconds: float) -> AgentLimits:
    return AgentLimits(
        seconds=90, idle_seconds=60, environment_seconds=environment_seconds, restart_timeout=5, kill_grace=0.3
    )


# An environment without a fault must answer within `environment_seconds`, even if the machine stands still for seconds.
SIZES = [
    Size(12, 6, FaultPlan(373, hangs=0.05, errors=0.05, deaths=0.25), bounds(8)),
    Size(192, 64, FaultPlan(376, hangs=0.02, errors=0.02, deaths=0.01), bounds(10)),
]
CALM = bounds(60)
"""The limits of the run without faults, in which nothing waits for a bound."""


@dataclass
class Played:
    """What one run left: its episodes and trajectories by task, and its environment server."""

    episodes: dict[int, AgentEpisode]
    trajectories: dict[int, list[Trajectory]]
    environments: Environments


def play(server: Server, size: Size, plan: FaultPlan, limits: AgentLimits, mark: str) -> Played:
    """Let all functions and programs play at the same time."""

    async def run() -> tuple[AgentRun, AgentRun, Environments]:
        async with environments(plan) as served:
            options: dict[str, Any] = {
                "servers": [server],
                "environment": lambda task: HttpEnvironment(served.url, task.seed),
                "limits": limits,
                "retries": 0,
            }
            tasks = [AgentTask(seed=i) for i in range(size.functions + size.programs)]
            command = [sys.executable, "-I", "-S", "-c", program(plan, mark)]
            functions, programs = await asyncio.gather(
                arun_agents(player(plan), tasks[: size.functions], seed=1, **options),
                arun_agents(command, tasks[size.functions :], seed=2, **options),
            )
            async with asyncio.timeout(10):
                while served.waiting:
                    await asyncio.sleep(0.01)
        return functions, programs, served

    functions, programs, served = asyncio.run(asyncio.wait_for(run(), 240))
    episodes = [*functions.episodes, *programs.episodes]
    by_task: dict[int, list[Trajectory]] = {}
    for each in (*functions.trajectories, *programs.trajectories):
        by_task.setdefault(each.task.seed, []).append(each)
    assert len(episodes) == size.functions + size.programs
    return Played({each.task.seed: each for each in episodes}, by_task, served)


def gauges(server: Server) -> dict[str, float]:
    """Return what the server holds now."""
    names = ("sglang:num_running_reqs", "sglang:num_queue_reqs", "sglang:num_used_tokens")
    names += ("verl_server:sessions", "verl_server:session_bytes")
    text = httpx.get(f"{server.url}/metrics", trust_env=False).text
    found = {name: re.search(rf"^{name}{{[^}}]*}} (\S+)$", text, re.M) for name in names}
    return {name: float(match[1]) for name, match in found.items() if match is not None}


def processes(mark: str) -> list[str]:
    """Return the command lines of processes with `mark` in them."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if mark in line and entry.name != str(os.getpid()):
            found.append(line)
    return found


def descriptors() -> dict[str, str]:
    """Return what each descriptor of this process is."""
    found = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that lists the folder is closed by now
            found[number] = os.readlink(f"/proc/self/fd/{number}")
    return found


def check_ends(size: Size, wild: Played) -> None:
    """Assert that each episode ended for the reason that the plan has for it, within its bounds."""
    kinds = set()
    for task, episode in wild.episodes.items():
        is_program, death = task >= size.functions, size.plan.death(task)
        expected = size.plan.end(task, is_program)
        assert episode.reason is expected, (task, expected, episode.reason, episode.error)
        assert episode.final and episode.seconds < size.limits.seconds + size.limits.environment_seconds
        if expected is StopReason.DONE:
            assert (episode.reward, episode.error) == (1.0, None)
        else:
            is_scored = FAULTS[expected] is Fault.POLICY and episode.tokens
            assert episode.reward == (0.0 if is_scored else None) and episode.error, (task, expected)
        died = death if expected in (StopReason.AGENT_ERROR, StopReason.AGENT_KILLED) else None
        kinds.add((is_program, expected, died and died[1]))
    assert len(kinds) == 10, "five ends (two of them deaths) of functions and of programs"


def check_draws(model: Redraw, played: Played) -> int:
    """Assert that each token is what the seed of its session draws from the tokens before it. Return their number.

    That holds for failed episodes, too. A token may lose its draw by rounding.
    """
    tokens = 0
    for task, (trajectory, *others) in played.trajectories.items():
        assert not others, f"the session of task {task} has one branch"
        lost, errors = model.check(trajectory)
        assert float(lost.max()) < ROUNDING, (task, float(lost.max()))
        assert float(errors.max()) < ROUNDING, (task, float(errors.max()))
        tokens += len(lost)
    return tokens


def check_same(size: Size, calm: Played, wild: Played) -> int:
    """Assert that faults changed no token of another episode, and none before the fault of their own.

    Return the number of trajectories that differ because a draw was within rounding.
    """
    different = 0
    for task, (trajectory, *_) in wild.trajectories.items():
        (whole,) = calm.trajectories[task]
        end = len(whole.tokens)
        if size.plan.end(task, task >= size.functions) is not StopReason.DONE:
            end = min(whole.turns[len(trajectory.turns) - 1].action_span[1], len(trajectory.tokens))
        here, there = (list(zip(each.tokens[:end], each.loss_mask[:end], strict=True)) for each in (trajectory, whole))
        if here != there:
            first = next(i for i, pair in enumerate(zip(here, there, strict=False)) if pair[0] != pair[1])
            # `check_draws` found both tokens to be within rounding of the draw.
            assert trajectory.loss_mask[first] == whole.loss_mask[first] == 1, (task, first)
            different += 1
        assert wild.episodes[task].reason is not StopReason.DONE or end == len(trajectory.tokens) or here != there
    return different


def check_left_streams(size: Size, wild: Played) -> None:
    """Assert that a generation whose agent died was aborted, and that its tokens are recorded."""
    for task, episode in wild.episodes.items():
        death = size.plan.death(task)
        if death is None or death[1] != "during its generation":
            continue
        if episode.reason not in (StopReason.AGENT_ERROR, StopReason.AGENT_KILLED):
            continue
        (trajectory,) = wild.trajectories[task]
        assert len(trajectory.turns) == death[0]
        start, end = trajectory.turns[-1].action_span
        assert trajectory.turns[-1].finish_reason == "abort" and 0 < end - start < LEFT["max_tokens"]


@pytest.mark.timeout(600)  # each draw is computed again, which a busy machine takes minutes for
@pytest.mark.parametrize("size", at_depth(SIZES), ids=lambda size: f"{size.functions + size.programs} agents")
def test_faults_end_their_own_episode_only(
    server: Server, folder: Path, size: Size, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = private_root()  # the process keeps this folder and one descriptor of it, so both must exist before the count
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    mark = f"chaos-{os.getpid()}-{size.functions}"
    before, others, files = gauges(server), set(root.iterdir()), descriptors()
    assert before == dict.fromkeys(before, 0.0) and len(before) == 5
    calm = play(server, size, FaultPlan(size.plan.seed), CALM, mark)
    assert [e.error for e in calm.episodes.values() if e.reason is not StopReason.DONE] == []
    wild = play(server, size, size.plan, size.limits, mark)

    check_ends(size, wild)
    check_left_streams(size, wild)
    model = Redraw(folder)
    tokens = check_draws(model, calm) + check_draws(model, wild)
    different = check_same(size, calm, wild)
    print(f"{tokens} tokens, {different} of {len(wild.trajectories)} trajectories differ; {wild.environments.calls}")
    assert different <= len(wild.trajectories) // 50

    # Nothing is left behind.
    assert eventually(lambda: gauges(server) == before), gauges(server)
    assert processes(mark) == []
    assert {*tmp_path.iterdir(), *root.iterdir()} == others
    after = descriptors()
    assert len(after) <= len(files), f"left open: {after.items() - files.items()}"
    left = httpx.get(f"{server.url}/sessions", headers={"Authorization": f"Bearer {KEY}"}, trust_env=False).json()
    assert left["sessions"] == []

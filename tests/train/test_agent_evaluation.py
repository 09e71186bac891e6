"""Evaluations whose held-out tasks an agent plays: their seeds, their sessions, and a kill in the middle of one."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.rollout.fake_sessions import OWNER_KEY, fake_server
from tests.train import held_out_agent
from tests.train.test_agent_grpo import FAST
from verl_server.rollout.trajectory import Task
from verl_server.train import agent_groups
from verl_server.train.agent_groups import AgentGroups
from verl_server.train.evaluations import best_evaluated_step
from verl_server.train.grpo import make_tasks
from verl_server.train.held_out import HELD_OUT, HeldOut
from verl_server.train.options import GRPOConfig, TrainArgs
from verl_server.watch.index.session_store import SessionStore
from verl_server.watch.run_files import read_evaluations

HELD = HeldOut(tasks=3, samples=2, timeout=60.0, success=1.0)


def task_lines(file: Path, folder: Path, words: Sequence[str], *, held_out: bool) -> None:
    """Write a file of tasks for `held_out_agent`."""
    marked = {"held out": True} if held_out else {}
    inputs = [{"words": f"guess {text}", "folder": str(folder)} | marked for text in words]
    file.write_text("".join(json.dumps({"input": given}) + "\n" for given in inputs))


# -- seeds ---------------------------------------------------------------------------------------------------------


def seeds_of(folder: Path, calls: Sequence[Sequence[Task]], monkeypatch: pytest.MonkeyPatch) -> dict[Any, int]:
    """Return (environment's seed, member) -> seed of the session, after each list of tasks was played by one call."""
    # The fake server does not report the log-probabilities of the policy.
    monkeypatch.setattr(agent_groups, "check_usable", lambda *_: None)
    for name in ("train", "held"):
        task_lines(folder / f"{name}.jsonl", folder, ("1", "2"), held_out=name == "held")
    args = TrainArgs(
        model_path="m",
        agent=f"{held_out_agent.__file__}:ask",
        tasks=str(folder / "train.jsonl"),
        eval_file=str(folder / "held.jsonl"),
        reward=f"{held_out_agent.__file__}:share_of_even",
    )

    async def play() -> dict[Any, int]:
        found: dict[Any, int] = {}
        async with fake_server(lambda messages: "1") as fake:
            groups = AgentGroups(args)
            engine: Any = SimpleNamespace(url=fake.url, server_args=SimpleNamespace(api_key=OWNER_KEY))
            with groups.serving([engine]):
                for tasks in calls:
                    for t in (await groups.arun(tasks)).trajectories:
                        assert t.task.sampling_seed is not None
                        found[t.task.seed, t.member] = t.task.sampling_seed
            assert sorted(s.request.seed or 0 for s in fake.ended.values()) == sorted(found.values())
        return found

    return asyncio.run(asyncio.wait_for(play(), 60))


def test_seeds_are_those_of_the_tasks_however_ranks_and_trainers_divide_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A synchronous run plays the share of each rank by one call, an asynchronous one each episode by a call."""
    expected = {(t.seed, t.member): t.sampling_seed for t in HELD.share()}
    ranks = [HELD.share(rank, 2) for rank in range(2)]
    for calls in ([HELD.share()], ranks, [[task] for task in HELD.share()]):
        assert seeds_of(tmp_path, calls, monkeypatch) == expected
    config = GRPOConfig(groups=3, group_size=2)
    tasks = make_tasks(1, config, 0, 3)
    whole = seeds_of(tmp_path, [tasks], monkeypatch)
    assert whole == {(t.seed, t.member): t.sampling_seed for t in tasks}
    assert seeds_of(tmp_path, [tasks[2:]], monkeypatch).items() < whole.items()  # a resumed run has kept group 0


# -- a run ---------------------------------------------------------------------------------------------------------

STEPS, TASKS = 2, 5


@pytest.mark.timeout(420)
@pytest.mark.parametrize(
    ("trainer", "agent"),
    [
        ("grpo", f"{held_out_agent.__file__}:ask"),
        ("async_grpo", f"{sys.executable} -I -S {held_out_agent.__file__}"),
    ],
)
def test_an_evaluation_is_killed_and_played_again(chat_folder: Path, tmp_path: Path, trainer: str, agent: str) -> None:
    """The agent kills the trainer in the evaluation at step 1, whose tasks are the lines of --eval-file in turn."""
    out, log = tmp_path / "run", tmp_path / "run.log"
    task_lines(tmp_path / "train.jsonl", tmp_path, ("1", "2", "3", "4"), held_out=False)
    task_lines(tmp_path / "held.jsonl", tmp_path, ("11", "12"), held_out=True)
    command = [sys.executable, "-m", f"verl_server.train.{trainer}", "--model-path", str(chat_folder), *FAST]
    command += ["--out", str(out), "--steps", str(STEPS), "--grpo.groups", "2", "--grpo.group-size", "4"]
    command += ["--agent", agent, "--reward", f"{held_out_agent.__file__}:share_of_even", "--stop-on", "none"]
    command += ["--tasks", str(tmp_path / "train.jsonl"), "--eval-file", str(tmp_path / "held.jsonl")]
    command += ["--eval-every", "1", "--eval-tasks", str(TASKS), "--max-skipped-steps", "9"]

    def run(*more: str, kill: int | None = None) -> int:
        with log.open("a") as file:
            process = subprocess.Popen([*command, *more], stdout=file, stderr=file)
            if kill is not None:
                (tmp_path / "victim").write_text(f"{kill} {process.pid}")
            try:
                return process.wait(200)
            finally:
                process.kill()
                process.wait()

    assert run(kill=TASKS + 3) == -signal.SIGKILL, log.read_text()[-6000:]
    assert [(e.step, e.incomplete) for e in read_evaluations(out)] == [(0, None)]
    (tmp_path / "victim").unlink()
    assert run("--resume") == 0, log.read_text()[-6000:]
    evaluations = list(read_evaluations(out))
    assert [(e.step, e.episodes, e.failed, e.incomplete) for e in evaluations] == [
        (step, TASKS, 0, None) for step in (0, 1, 2)
    ]
    assert best_evaluated_step(out) == max(evaluations, key=lambda e: (e.reward or 0.0, e.step)).step

    completed = {(e.step, e.incarnation) for e in evaluations}
    lines = [json.loads(line) for line in (out / "held-out-rank0.jsonl").read_text().splitlines()]
    lines = [line for line in lines if (line["step"], line["incarnation"]) in completed]
    assert Counter(line["step"] for line in lines) == {0: TASKS, 1: TASKS, 2: TASKS}
    seeds = {task.seed: task.sampling_seed for task in HeldOut(TASKS, 1, 60.0, 1.0).share()}
    for line in lines:
        number, asked = line["task"]["seed"], line["turns"][0]["messages"][0]["text"]
        assert line["task"]["sampling_seed"] == seeds[number]
        assert asked == ("guess 11", "guess 12")[(number - HELD_OUT) % 2]
    assert len({line["session"] for line in lines}) == 3 * TASKS

    store = SessionStore(out / "sessions")
    while store.poll():
        pass
    assert store.sessions().rows == []

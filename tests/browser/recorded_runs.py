"""Folders of runs for the tests in a browser, written by the project's own writers. Nothing is trained.

`write_runs` writes those that most tests share. Others are written where they are needed: a run that grows, hostile
texts, an episode of 128,000 tokens. `benchmarks.watch_scale` writes 100,000 episodes.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

from tests.browser.guessing import fail, play, train, write_tokenizer
from tests.watch.site import recorded_runs as small_runs
from verl_server.files.run_output import store_settings
from verl_server.messages.session_types import Message, MessageCall
from verl_server.rollout.trajectory import Fault, StopReason, Task, Trajectory, append_jsonl
from verl_server.train.metrics import StepMetrics, describe_rollout
from verl_server.train.rollout_report import report_rollout
from verl_server.train.run_writer import RunWriter
from verl_server.watch.run_records import (
    HELD_OUT,
    Alarm,
    Evaluation,
    EvaluationBegan,
    EvaluationEnded,
    PushBegan,
    PushEnded,
    RunEnded,
    RunStarted,
    ServerLaunched,
    StepBegan,
    StepEnded,
)

FIRST = "5f2c9a1e"
BEGAN = 1_790_000_000.0
STEPS, GROUPS, MEMBERS = 40, 6, 6
STEP_SECONDS = 20.0
EVALUATED = (0, 10, 20, 30, STEPS)
"""Steps at which the run `steady` evaluates."""
HELD_OUT_TASKS, EVALUATION_SECONDS = 16, 12.0
ENV_ERROR = "The environment at http://games:8000 did not answer for 30 s. Is its server running?"
LONG_TOKENS = 128_000
HOSTILE = (
    '</script><script>window.stolen = 1; alert(1)</script><img src=x onerror="alert(2)"><svg onload=alert(3)>'
    '<a href="javascript:alert(4)">link</a> {{7*7}} ${alert(5)} \x1b[31mred\x1b[0m \u202egnp.exe\u2066 \x00\x07 '
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 "
    "\u0627\u0644\u0639\u0631\u0628\u064a\u0629 Z\u0351\u036b\u0343a\u0363 "
)
"""Text that does harm if a page takes it for something else than text."""
WORD = "endless" * 20_000
LONG_LINE = 5_000_000


@dataclass
class Clock:
    """The wall clock of a run that is written at once."""

    now: float = BEGAN

    def time(self) -> float:
        return self.now


@dataclass
class TrainingRun:
    """Writes the steps of a synchronous run of two ranks, which learns to guess."""

    folder: Path
    seed: int = 0
    best: float = 0.97
    """Skill at which the policy ends."""
    entropy_left: float = 0.3
    """Share of the entropy that is left at the end."""
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        write_tokenizer(self.folder / "model")
        settings = {
            "command": "train.grpo",
            "model_path": str(self.folder / "model"),
            "env_url": "http://games:8000",
            "group_size": MEMBERS,
            "learning_rate": 1e-5 if self.best > 0.9 else 1e-4,
            "entropy_bonus": 0.01 if self.best > 0.9 else 0.0,
        }
        store_settings(self.folder / "run.json", settings)
        self._draw = random.Random(self.seed)
        self._ranks = [RunWriter(self.folder, FIRST, rank=rank, ranks=2) for rank in range(2)]
        with self._written():
            self._ranks[0].begin(RunStarted(ranks=2, version="1", advises=True))
            self._ranks[0].note(ServerLaunched(url="http://127.0.0.1:8000"))

    @contextmanager
    def _written(self) -> Iterator[None]:
        """Write lines with the time of `clock`."""
        with patch("verl_server.train.run_writer.time", self.clock):
            yield

    def skill(self, step: int) -> float:
        return 0.1 + (self.best - 0.1) * (1.0 - 0.93**step)

    def write(self, first: int, last: int) -> None:
        with self._written():
            for step in range(first, last):
                self._step(step)

    def evaluate(self, step: int, incomplete: str | None = None) -> None:
        """Write an evaluation between two steps, whose weights have a checkpoint. One that is incomplete has half of
        its episodes."""
        main, began, version = self._ranks[0], self.clock.now, f"{step}@{FIRST}"
        draw = random.Random(f"{self.seed} {step}")
        tasks = [
            Task(seed=HELD_OUT + number, group=HELD_OUT + number, episode_id=f"held-out-{number}-0")
            for number in range(HELD_OUT_TASKS // (1 if incomplete is None else 2))
        ]
        played = [play(draw, task, skill=self.skill(step), version=version, began=began) for task in tasks]
        reward = sum(t.reward or 0.0 for t in played) / len(played)
        record = Evaluation(
            step=step, version=version, episodes=len(played), failed=0, unfinished=HELD_OUT_TASKS - len(played),
            reward=reward, success=reward, seconds=EVALUATION_SECONDS, push_delay=EVALUATION_SECONDS,
            incomplete=incomplete,
        )  # fmt: skip
        (self.folder / f"checkpoint-{step}").mkdir()
        with self._written():
            main.note(EvaluationBegan(step=step, version=version))
            self.clock.now = began + EVALUATION_SECONDS
            for rank, files in enumerate(self._ranks):
                files.record_held_out(step, played[rank::2])
            main.record_evaluation(record)
            names = ("step", "version", "seconds", "push_delay", "reward", "incomplete")
            main.note(EvaluationEnded(**{name: getattr(record, name) for name in names}))

    def advise(self, step: int) -> None:
        """Write an advisory."""
        with self._written():
            self._ranks[0].note(
                Alarm(
                    name="groups_without_spread",
                    step=step,
                    message="In 5 of 6 groups all rewards are alike",
                    stops=False,
                    figure=0.83,
                    bound=0.7,
                    cause="the tasks are too hard or too easy for the policy",
                    remedy="Choose tasks of a difficulty at which the policy succeeds sometimes.",
                    severity="warning",
                )
            )

    def end(self, error: str | None = None) -> None:
        with self._written():
            self._ranks[0].note(RunEnded(exit_status=0 if error is None else 1, error=error))
        self.close()

    def close(self) -> None:
        for files in self._ranks:
            files.close()

    def _step(self, step: int) -> None:
        main = self._ranks[0]
        began, version, skill = self.clock.now, f"{step}@{FIRST}", self.skill(step)
        main.note(StepBegan(step=step))
        played: list[list[Trajectory]] = [[], []]
        replaced: list[Trajectory] = []
        for group in range(GROUPS):
            # Three tasks come again in every step, so that steps and runs can be compared.
            seed = group if group < 3 else 1000 + step * GROUPS + group
            for member in range(MEMBERS):
                task = Task(seed=seed, group=step * GROUPS + group, member=member)
                t = play(self._draw, task, skill=skill, version=version, began=began)
                if step % 5 == 3 and group == 4 and member == 2:
                    replaced.append(fail(self._draw, task, version=version, began=began, error=ENV_ERROR))
                    t.attempt = 1
                if step % 7 == 5 and group == 5 and member == 1:
                    t = fail(self._draw, task, version=version, began=began, error=ENV_ERROR)
                played[group % 2].append(t)
        self.clock.now = began + 13.0
        for rank, (files, found) in enumerate(zip(self._ranks, played, strict=True)):
            files.record_trajectories(step, [*found, *(replaced if rank == 0 else [])])
        metrics = self._metrics(step, version, [t for found in played for t in found], replaced)
        self._train(step, played)
        self.clock.now = began + 18.5
        main.note(PushBegan(version=f"{step + 1}@{FIRST}"))
        self.clock.now = began + 19.5
        main.note(PushEnded(version=f"{step + 1}@{FIRST}", seconds=1.0))
        self.clock.now = began + STEP_SECONDS
        main.record(metrics, [])
        main.note(StepEnded(step=step, phases={"rollout": 13.0, "train": 5.5, "sync": 1.0, "record": 0.5}))

    def _train(self, step: int, played: list[list[Trajectory]]) -> None:
        for files, found in zip(self._ranks, played, strict=True):
            records = []
            for t in found:
                rewards = [other.reward for other in found if other.task.group == t.task.group]
                scored = [reward for reward in rewards if reward is not None]
                if t.reward is not None and len(set(scored)) > 1:
                    baseline = sum(scored) / len(scored)
                    records.append(train(self._draw, t, step, baseline, entropy=self._entropy(step)))
            files.record_trained(records)

    def _entropy(self, step: int) -> float:
        return 1.2 * (self.entropy_left + (1.0 - self.entropy_left) * 0.93**step)

    def _metrics(self, step: int, version: str, played: list[Trajectory], replaced: list[Trajectory]) -> StepMetrics:
        report = report_rollout(
            played, len(played), 13.0, step=step, rank=0, env_url="http://games:8000", server_url="http://s",
            replaced=replaced,
        )  # fmt: skip
        metrics = describe_rollout(report, step=step, version=version, ranks=2, gap=None)
        draw = self._draw
        metrics.success, metrics.train_seconds, metrics.sync_seconds = metrics.reward, 5.5, 1.0
        metrics.logprob_gap, metrics.logprob_gap_mean = 0.02 * draw.uniform(0.8, 1.6), 0.003 * draw.uniform(0.9, 1.2)
        metrics.losses = {
            "entropy": self._entropy(step),
            "kl_reference": 0.002 * step * draw.uniform(0.8, 1.2),
            "clip_share": 0.02 * draw.uniform(0.5, 2.0),
            "grad_norm": draw.uniform(0.4, 0.9),
        }
        return metrics


def write_runs(folder: Path) -> None:
    """Write the runs that most tests share: training runs of several kinds, agents, a rollout."""
    steady = TrainingRun(folder / "steady")
    for first, last in itertools.pairwise(EVALUATED):
        steady.evaluate(first)
        steady.write(first, last)
    steady.evaluate(STEPS)
    steady.end()
    for step in EVALUATED[:2]:
        (folder / "steady" / f"checkpoint-{step}").rmdir()
    hasty = TrainingRun(folder / "hasty", seed=1, best=0.45, entropy_left=0.02)
    hasty.evaluate(0)
    hasty.write(0, 10)
    hasty.evaluate(10)
    hasty.write(10, 20)
    hasty.evaluate(20, incomplete="timeout")
    hasty.write(20, 25)
    hasty.advise(24)
    hasty.end(error="OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
    small_runs.write_resumed_run(folder / "resumed")
    small_runs.write_asynchronous_run(folder / "asynchronous")
    write_agents_run(folder / "agents")


def write_agents_run(folder: Path) -> None:
    """Write an agents' run: branches, a sub-agent, tool calls, reasoning, and a long result."""
    small_runs.write_agents_run(folder)
    t = small_runs.trajectory(2, 0, 0.0, session="s20", turns=3)
    for turn in t.turns:
        turn.observation, turn.action = {}, {}
    call = MessageCall(name="run_tests", arguments='{"path": "tests/test_parser.py", "verbose": true}', id="c1")
    lines = "\n".join(f"tests/test_parser.py::test_case_{number} PASSED" for number in range(400))
    t.turns[0].messages = [
        Message(role="system", text="You repair programs. Run the tests before you answer."),
        Message(role="user", text="The parser refuses nested brackets. Repair it."),
    ]
    t.turns[0].reply = Message(
        role="assistant",
        text="I run the tests first.",
        reasoning="The failing test tells which rule is wrong.\n" * 12,
        calls=[call],
    )
    t.turns[1].messages = [Message(role="tool", text=f"{lines}\n1 failed: test_nested", call_id="c1")]
    t.turns[1].reply = Message(role="assistant", text="The rule for `)` ends the wrong bracket.")
    t.turns[2].messages = [Message(role="user", text="Go on.")]
    t.turns[2].reply = Message(role="assistant", text="Repaired.")
    append_jsonl(folder / "trajectories.jsonl", [t])


def write_hostile_run(folder: Path) -> None:
    """Write a run whose names, settings, texts, errors and versions are hostile, with a damaged line and a long one."""
    small_runs.write_tokenizer(folder / "model")
    settings = {"command": "train.grpo", "model_path": str(folder / "model"), "env_url": HOSTILE, "note": HOSTILE}
    store_settings(folder / "run.json", settings)
    files = RunWriter(folder, FIRST)
    files.begin(RunStarted(ranks=1, version=HOSTILE))
    files.note(ServerLaunched(url=HOSTILE))
    files.note(StepBegan(step=0))
    texts = [HOSTILE, WORD, "long line " * (LONG_LINE // 10), "\U0001f3f3\ufe0f\u200d\U0001f308" * 200]
    played = [small_runs.trajectory(0, member, float(member), said=text) for member, text in enumerate(texts)]
    for t in played:
        t.turns[0].observation = {"text": HOSTILE, HOSTILE: [HOSTILE]}
        t.task = Task(seed=1, group=0, member=t.member, episode_id=HOSTILE)
        t.weight_versions = [HOSTILE if version else "" for version in t.weight_versions]
    failed = small_runs.failed(1, 0, HOSTILE * 20)
    agents = small_runs.trajectory(2, 0, 1.0, session="s1")
    agents.turns[0].messages = [Message(role="<script>alert(6)</script>", text=HOSTILE)]
    agents.turns[0].reply = Message(
        role="assistant", text=HOSTILE, reasoning=HOSTILE, calls=[MessageCall(name=HOSTILE, arguments=HOSTILE, id="c")]
    )
    files.record_trajectories(0, [*played, failed, agents])
    files.record(small_runs.step_metrics(0, FIRST, 1.5, skipped=HOSTILE, losses={HOSTILE: 1.0, "kl": float("nan")}))
    files.note(Alarm(name="logprob_gap", step=0, message=HOSTILE, stops=False, cause=HOSTILE, remedy=HOSTILE))
    files.note(StepEnded(step=0, phases={HOSTILE: 1.0}))
    files.note(RunEnded(exit_status=1, error=HOSTILE))
    files.close()
    with (folder / "trajectories-rank0.jsonl").open("ab") as lines:
        lines.write(b'{"task": {"seed": 1}, "error": "\\ud800 a lone surrogate", "incarnation": "5f2c9a1e"}\n')
        lines.write(b"\xff\xfe\x00 no UTF-8\n")


def write_long_rollout(file: Path) -> None:
    """Write a rollout with one episode of 128,000 tokens in 64 turns, and its tokenizer beside it."""
    write_tokenizer(file.parent / "tokens")
    draw = random.Random(0)
    t = Trajectory(task=Task(seed=7))
    part = LONG_TOKENS // 128
    ids = list(range(20, 220))
    for number in range(64):
        t.append_observation({"text": f"part {number}"}, [draw.choice(ids) for _ in range(part)])
        sampled = [draw.choice(ids) for _ in range(part)]
        logprobs = [round(-draw.expovariate(2.0), 6) for _ in sampled]
        t.append_output(sampled, logprobs, [f"{number // 16}@{FIRST}"] * part)
        t.turns[-1].action, t.turns[-1].reward = {"text": f"answer {number}"}, 0.0
    t.finish(StopReason.MAX_TOKENS)
    t.fault = Fault.POLICY
    append_jsonl(file, [t])
    file.with_name(f"{file.name}.run.json").write_text(json.dumps({"model_path": str(file.parent / "tokens")}))

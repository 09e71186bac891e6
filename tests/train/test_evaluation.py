"""Held-out tasks are played at one version, between two steps, and the run goes on as without them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from tests.torchrun import run_ranks
from tests.train import async_ranks, faulty_run
from tests.train.faulty_run import Servers
from verl_server.errors import BadRequestError
from verl_server.rollout.agent_loop import Rollout
from verl_server.rollout.loop_thread import LoopThread, Running
from verl_server.rollout.trajectory import StopReason, Task, Trajectory
from verl_server.train.evaluation import Evaluated, describe_evaluation, play_held_out
from verl_server.train.held_out import HELD_OUT, HeldOut
from verl_server.train.mixture import MixedEnvironment, Mixture
from verl_server.train.options import GRPOConfig, TrainArgs
from verl_server.train.ranks import all_ranks
from verl_server.train.run_tasks import make_tasks
from verl_server.train.stopping import RunStoppedError, StopRequest
from verl_server.watch.run_files import read_evaluations, read_events
from verl_server.watch.run_records import (
    CheckpointSaved,
    Evaluation,
    EvaluationBegan,
    EvaluationEnded,
    HeldOutFigures,
    RunResumed,
)
from verl_server.weight_version import WeightVersion

HELD = HeldOut(tasks=3, samples=2, timeout=60.0, success=1.0)
VERSION = WeightVersion(4, "5f2c9a1e")
OTHER = WeightVersion(3, "5f2c9a1e")


def test_the_tasks_are_no_ranks_and_no_trainings() -> None:
    tasks = HELD.share()
    assert len(tasks) == HELD.episodes == 6 and len({task.sampling_seed for task in tasks}) == 6
    assert [(task.group - HELD_OUT, task.seed - HELD_OUT, task.member) for task in tasks] == [
        *((0, 0, 0), (0, 0, 1), (1, 1, 0), (1, 1, 1), (2, 2, 0), (2, 2, 1))
    ]
    divided = [HELD.share(rank, 2) for rank in range(2)]
    assert sorted((t.seed, t.member) for share in divided for t in share) == [(t.seed, t.member) for t in tasks]
    assert HELD.share(4, 5) == []  # more ranks than tasks
    first = [task.sampling_seed for task in HeldOut(tasks=3, samples=1, timeout=60.0, success=1.0).share()]
    assert [task.sampling_seed for task in tasks if task.member == 0] == first  # also with another number of samples
    trained = make_tasks(1000, GRPOConfig(seed=2**40, groups=64), 0, 64)
    assert max(task.seed for task in trained) < HELD_OUT == min(task.seed for task in tasks)


MIXTURE = Mixture(
    (MixedEnvironment("code", "http://a", 3, success=0.5), MixedEnvironment("math", "http://b", 1, success=1.0))
)
MIXED = HeldOut(tasks=5, samples=2, timeout=60.0, success=1.0, mixture=MIXTURE)


def test_the_environments_of_a_mixture_have_equally_many_tasks() -> None:
    tasks = MIXED.share()
    assert [(t.environment, t.seed - HELD_OUT) for t in tasks if t.member == 0] == [
        *(("code", 0), ("math", 0), ("code", 1), ("math", 1), ("code", 2))
    ]
    assert len({task.group for task in tasks}) == 5 and len({task.sampling_seed for task in tasks}) == 10
    divided = [task for rank in range(3) for task in MIXED.share(rank, 3)]
    assert sorted(divided, key=lambda t: (t.group, t.member)) == tasks


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eval_every": -1}, "--eval-every must not be negative"),
        ({"eval_tasks": 0}, "--eval-tasks and --eval-samples must be at least 1"),
        ({"eval_timeout": 0.0}, "--eval-timeout must be more than 0"),
        ({"eval_file": "a.jsonl"}, "--eval-file is for --agent"),
        ({"agent": "a", "tasks": "t.jsonl", "eval_every": 1}, "all lines of --tasks t.jsonl are trained on"),
        ({"agent": "a", "eval_file": "a.jsonl"}, "--eval-file is for --tasks FILE.jsonl"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequestError, match=message):
        TrainArgs(model_path="m", env_url="http://env:1", **options)


# -- between two steps ---------------------------------------------------------------------------------------------


class Scripted:
    """A player whose episodes end as `end` says: their reward, None if the environment failed. "never": it hangs."""

    environment_url = "http://env"
    is_agent = False

    def __init__(self, end: Callable[[Task], float | str | None], version: str = str(VERSION)) -> None:
        self._end, self._version = end, version
        self._thread = LoopThread("player")
        self.asked: list[bool] = []
        self.strandings: list[str] = []

    def start(
        self, tasks: Sequence[Task], on_finish: Any = None, *, version: str | None = None, replaces: bool = True
    ) -> Running[Rollout]:
        assert version == str(VERSION)
        self.asked.append(replaces)
        return self._thread.start(self._play(tasks, on_finish))

    def stranded(self, version: str | None = None) -> str | None:
        return self.strandings.pop() if self.strandings else None

    async def _play(self, tasks: Sequence[Task], on_finish: Any) -> Rollout:
        for task in tasks:
            trajectory = Trajectory(task=task, member=task.member)
            trajectory.append_observation({}, [1, 2])
            trajectory.append_output([3], [-1.0], [self._version])
            reward = self._end(task)
            while reward == "never":
                await asyncio.sleep(60)
            assert not isinstance(reward, str)
            trajectory.turns[0].reward = reward
            trajectory.finish(*((StopReason.ENV_ERROR, "it fell over") if reward is None else (StopReason.DONE,)))
            on_finish(trajectory)
        return Rollout(trajectories=[], seconds=0.1)


class Ensured(Servers):
    """Servers that count how often they were looked after."""

    ensured = 0

    def ensure(self, _: Any) -> None:
        self.ensured += 1


def evaluate(player: Scripted, held_out: HeldOut = HELD, servers: Servers | None = None) -> Evaluated:
    weights: Any = dict
    together: Any = (player, servers or Servers(), weights, all_ranks(), StopRequest())
    return play_held_out(held_out, 40, VERSION, *together)


def facts(record: Evaluation) -> tuple[Any, ...]:
    return record.episodes, record.failed, record.unfinished, record.reward, record.success, record.incomplete


@pytest.mark.usefixtures("one_rank")
class TestBetweenTwoSteps:
    def test_means_are_over_the_episodes_that_were_scored(self) -> None:
        rewards = {0: 1.0, 1: 0.5, 2: None}
        player = Scripted(lambda task: rewards[task.group - HELD_OUT])
        result = evaluate(player)
        assert facts(result.record) == (4, 2, 0, 0.75, 0.5, None)
        assert (result.record.step, result.record.version) == (40, "4@5f2c9a1e")
        assert result.record.push_delay == result.record.seconds > 0
        assert len(result.trajectories) == 6 and player.asked == [False]
        assert {failure.error for failure in result.report.failures} == {"it fell over"}

    def test_the_reward_of_a_mixture_is_weighed_with_its_weights(self) -> None:
        """Of ten episodes, four of `code` and all four of `math` are scored."""
        rewards = {"code": {0: 1.0, 1: 0.5, 2: None}, "math": {0: 0.25, 1: 0.75}}
        result = evaluate(Scripted(lambda task: rewards[str(task.environment)][task.seed - HELD_OUT]), MIXED)
        assert facts(result.record) == (8, 2, 0, 0.75 * 0.75 + 0.25 * 0.5, 0.75, None)
        assert result.record.environments == {
            "code": HeldOutFigures(episodes=4, failed=2, reward=0.75, success=1.0),
            "math": HeldOutFigures(episodes=4, failed=0, reward=0.5, success=0.0),
        }
        assert {(failure.environment, failure.url) for failure in result.report.failures} == {("code", "http://a")}

    def test_an_evaluation_without_one_of_the_environments_cannot_be_compared(self) -> None:
        result = evaluate(Scripted(lambda task: None if task.environment == "math" else 1.0), MIXED)
        assert facts(result.record) == (6, 4, 0, None, None, "unscored: math")
        assert result.record.environments["code"].reward == 1.0

    def test_tokens_of_another_version_are_left_out_and_counted(self) -> None:
        result = evaluate(Scripted(lambda task: 1.0, version=str(OTHER)))
        assert facts(result.record) == (0, 6, 0, None, None, "unscored")
        assert "3@5f2c9a1e instead of 4@5f2c9a1e" in result.report.failures[0].error

    def test_it_ends_with_what_has_ended_at_the_deadline(self) -> None:
        player = Scripted(lambda task: "never" if task.group == HELD_OUT + 2 else 1.0)
        result = evaluate(player, HeldOut(tasks=3, samples=2, timeout=0.2, success=1.0))
        assert facts(result.record) == (4, 0, 2, 1.0, 1.0, "timeout") and len(result.trajectories) == 4

    def test_an_error_is_recorded_and_not_raised(self) -> None:
        def fails(task: Task) -> float:
            if task.group > HELD_OUT:
                raise BadRequestError("a wrong token")
            return 1.0

        result = evaluate(Scripted(fails))
        assert facts(result.record) == (2, 0, 4, 1.0, 1.0, "BadRequestError: a wrong token")

    def test_a_server_that_is_lost_is_brought_back(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("verl_server.train.evaluation._LOOK_SECONDS", 0.0)
        gate: list[str] = []
        servers = Ensured()
        player = Scripted(lambda task: 1.0)
        player.strandings += ["no server", "no server"]
        start = player.start

        def held(*arguments: Any, **settings: Any) -> Running[Rollout]:
            gate.append("once")
            return start(*arguments, **settings)

        async def waits(tasks: Sequence[Task], on_finish: Any) -> Rollout:
            while servers.ensured < 3:
                await asyncio.sleep(0.001)
            return await Scripted._play(player, tasks, on_finish)

        player.start, player._play = held, waits  # type: ignore[method-assign]
        result = evaluate(player, servers=servers)
        assert servers.ensured == 3 and gate == ["once"]
        assert facts(result.record) == (6, 0, 0, 1.0, 1.0, None)

    def test_a_stop_ends_the_run(self) -> None:
        stop = StopRequest()
        stop.signal_number = signal.SIGTERM
        together: Any = (Scripted(lambda task: "never"), Servers(), dict, all_ranks(), stop)
        with pytest.raises(RunStoppedError, match="SIGTERM"):
            play_held_out(HELD, 40, VERSION, *together)


def test_the_line_of_the_log() -> None:
    record = Evaluation(
        step=40, version="4@5f2c9a1e", episodes=64, failed=0, reward=0.83, success=0.79, seconds=3.14, push_delay=0.4
    )
    text = "evaluation at step 40  reward 0.830  success 0.79  64 episodes in 3.1 s  push held 0.4 s"
    assert describe_evaluation(record, 40) == f"{text}  best so far: step 40"
    record.failed, record.unfinished, record.incomplete, record.reward, record.success = 2, 3, "timeout", None, None
    text = "evaluation at step 40  64 episodes in 3.1 s  2 failed  3 unfinished  push held 0.4 s  incomplete: timeout"
    assert describe_evaluation(record, None) == text


# -- whole runs ----------------------------------------------------------------------------------------------------

STEPS = 4
SETTINGS = ["--env-url", "http://nowhere", "--no-chat", "--device", "cpu", "--retry-pause", "0", "--steps", str(STEPS)]
SETTINGS += ["--grpo.groups", "2", "--grpo.group-size", "4", "--grpo.minibatches", "2", "--grpo.epochs", "1"]
SETTINGS += ["--grpo.learning-rate", "0.01", "--grpo.warmup-steps", "1", "--save-every", "0", "--save-timeout", "20"]
SETTINGS += ["--stop-on", "none"]
EVALUATED = ["--eval-every", "2", "--eval-tasks", "5", "--eval-samples", "2"]


def play(model: Path, out: Path, *more: str, fault: str = "none", ranks: int = 1) -> None:
    arguments = [fault, "all", "--model-path", str(model), "--out", str(out), *SETTINGS, *more]
    log = out.with_suffix(".log")
    if ranks == 1:
        assert faulty_run.main(arguments) == 0
    else:
        assert run_ranks(ranks, "tests.train.faulty_run", arguments, log, timeout=60) == [0] * ranks, log.read_text()


def rewards(out: Path) -> list[tuple[int, int, float | None, int]]:
    return [(e.step, e.episodes, e.reward, e.failed) for e in read_evaluations(out)]


def test_a_run_evaluates_and_trains_as_without(
    policy_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    play(policy_folder, tmp_path / "plain")
    play(policy_folder, tmp_path / "run", *EVALUATED)
    out = tmp_path / "run"
    # The player's reward is 0 or 1, by the sampling seed: 1 for the tasks 1 and 3 of 5.
    assert rewards(out) == [(0, 10, 0.4, 0), (2, 10, 0.4, 0), (4, 10, 0.4, 0)]
    plain, evaluated = (load_file(tmp_path / name / "model/model.safetensors") for name in ("plain", "run"))
    assert all(torch.equal(plain[name], evaluated[name]) for name in plain)
    events = list(read_events(out))
    begun = [event for event in events if isinstance(event, EvaluationBegan)]
    ended = [event for event in events if isinstance(event, EvaluationEnded)]
    for begin, end, step in zip(begun, ended, (0, 2, 4), strict=True):
        assert begin.step == end.step == step and begin.version == end.version and end.reward == 0.4
        before = events[: events.index(end)]
        assert begin in before and f"checkpoint-{step}" in [e.name for e in before if isinstance(e, CheckpointSaved)]
    assert len({event.version for event in events if isinstance(event, EvaluationEnded)}) == 3
    assert "evaluation at step 4  reward 0.400  success 0.40  10 episodes" in capsys.readouterr().out
    lines = [json.loads(line) for line in (out / "held-out-rank0.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0] * 10 + [2] * 10 + [4] * 10
    trained = [json.loads(line) for line in (out / "trajectories-rank0.jsonl").read_text().splitlines()]
    assert len(trained) == STEPS * 8 and all(line["task"]["seed"] < HELD_OUT for line in trained)


def test_two_ranks_evaluate_the_same_tasks(policy_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    play(policy_folder, out, *EVALUATED, ranks=2)
    assert rewards(out) == [(0, 10, 0.4, 0), (2, 10, 0.4, 0), (4, 10, 0.4, 0)]
    counts = [len((out / f"held-out-rank{rank}.jsonl").read_text().splitlines()) for rank in range(2)]
    assert counts == [3 * 6, 3 * 4]


def test_no_later_checkpoint_is_saved_while_an_evaluation_plays(policy_folder: Path, tmp_path: Path) -> None:
    """No push waits for it after a step with nothing to train on: a kill would lose it for good."""
    arguments = ["--model-path", str(policy_folder), "--out", str(tmp_path / "run"), *SETTINGS, *EVALUATED]
    assert async_ranks.main(["equal", *arguments, "--save-every", "1", "--max-skipped-steps", "9"]) == 0
    kinds = (CheckpointSaved, EvaluationBegan, EvaluationEnded)
    events = [event for event in read_events(tmp_path / "run") if isinstance(event, kinds)]
    names = [e.name if isinstance(e, CheckpointSaved) else f"{type(e).__name__} {e.step}" for e in events]
    order = [
        "checkpoint-0",
        "EvaluationEnded 0",
        "checkpoint-1",
        "EvaluationBegan 2",
        "EvaluationEnded 2",
        "checkpoint-3",
    ]
    assert [name for name in names if name in order] == order


def test_a_run_that_goes_on_evaluates_what_is_not_evaluated(policy_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    play(policy_folder, out, *EVALUATED)
    play(policy_folder, out, *EVALUATED, "--resume")
    assert [e.step for e in read_evaluations(out)] == [0, 2, 4]
    file = out / "evaluations.jsonl"
    *lines, last = file.read_text().splitlines()
    file.write_text("\n".join([*lines, json.dumps(json.loads(last) | {"incomplete": "timeout"})]) + "\n")
    play(policy_folder, out, *EVALUATED, "--resume")
    assert [(e.step, e.incomplete) for e in read_evaluations(out)] == [(0, None), (2, None), (4, "timeout"), (4, None)]
    play(policy_folder, out, *EVALUATED, "--resume", "--steps", "5")
    assert [e.step for e in read_evaluations(out)] == [0, 2, 4, 4, 5]
    assert sum(isinstance(event, RunResumed) for event in read_events(out)) == 3


@pytest.fixture(autouse=True)
def _no_ranks_are_left() -> Iterator[None]:
    yield
    assert not dist.is_initialized() and "RANK" not in os.environ

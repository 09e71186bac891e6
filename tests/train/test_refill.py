"""Further groups play in place of those without spread: the next tasks, up to the bound, also after a kill."""

from __future__ import annotations

import json
import random
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.torchrun import run_ranks
from tests.train import test_async_grpo
from tests.train.conftest import make_report, make_trajectory, save_at_once
from tests.train.played_groups import PlayedGroups, ScriptedGroups
from tests.train.refill_ranks import is_solved
from tests.train.test_async_grpo import Run, SpellingGame, facts, playing, rarely, same, trainer_of, weights
from verl_server.errors import BadRequestError
from verl_server.rollout.agent_loop import Rollout
from verl_server.rollout.environment import StepResult
from verl_server.rollout.trajectory import Trajectory
from verl_server.train import async_grpo
from verl_server.train.async_grpo import AsyncGRPO
from verl_server.train.batches import Sample
from verl_server.train.checkpoints import check_checkpoint, latest_checkpoint
from verl_server.train.grpo import GRPO
from verl_server.train.journal import GroupJournal, read_groups
from verl_server.train.metrics import describe_step
from verl_server.train.options import GRPOConfig
from verl_server.train.ppo_options import PPOConfig
from verl_server.train.ranks import all_ranks
from verl_server.train.refill import Round, join_rounds, lacks_spread, share
from verl_server.train.run import Step

INCARNATION = "5f2c9a1e"
GROUPS, SIZE = 3, 4


# -- by hand -----------------------------------------------------------------------------------------------------------


def test_a_group_lacks_spread_if_the_rewards_to_train_on_are_equal() -> None:
    def group(*rewards: float | None) -> Rollout:
        return Rollout(trajectories=[make_trajectory(7, reward) for reward in rewards], seconds=0.0)

    assert lacks_spread(group(1.0, 1.0, 1.0)) and lacks_spread(group(0.0, None, 0.0)) and lacks_spread(group(0.0))
    assert not lacks_spread(group(1.0, 0.0)) and not lacks_spread(group(None, None))


def test_the_ranks_share_a_round() -> None:
    assert [share(range(4, 8), rank, 2) for rank in range(2)] == [range(4, 6), range(6, 8)]
    for count in range(9):
        shares = [share(range(5, 5 + count), rank, 3) for rank in range(3)]
        assert [group for each in shares for group in each] == list(range(5, 5 + count))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_rounds_are_joined() -> None:
    def played(groups: range, reward: float, seconds: float) -> Round:
        trajectories = [make_trajectory(group, reward * member) for group in groups for member in range(2)]
        samples = [Sample(trajectory, 1.0) for trajectory in trajectories]
        rollout = Rollout(trajectories=trajectories, seconds=seconds)
        return Round(len(groups), rollout, samples, make_report(trajectories, len(samples), seconds=seconds))

    one = join_rounds([played(range(3), 0.0, 2.0), played(range(3, 5), 0.0, 1.0), played(range(5, 6), 4.0, 0.5)])
    assert (one.groups, one.report.refilled_groups, one.report.seconds, one.rollout.seconds) == (6, 3, 3.5, 3.5)
    assert [t.task.group for t in one.rollout.trajectories] == [g for g in range(6) for _ in range(2)]
    assert [sample.trajectory for sample in one.samples] == one.rollout.trajectories
    counts = one.report.counts
    assert (counts.groups, counts.without_spread, counts.solved, counts.unsolved) == (6, 5, 0, 5)


def test_what_cannot_be_refilled_is_refused() -> None:
    with pytest.raises(BadRequestError, match="a group of one episode"):
        GRPOConfig(refill=1, group_size=1)
    with pytest.raises(BadRequestError, match=r"--grpo\.refill must not be negative, not -1"):
        GRPOConfig(refill=-1)
    for size in (1, 4):
        with pytest.raises(BadRequestError, match=r"--ppo\.refill replaces groups .* remove the option"):
            PPOConfig(refill=1, group_size=size)


# -- with a policy that samples from the pushed weights ----------------------------------------------------------------


class HalfSolvedGame(SpellingGame):
    """`SpellingGame` with tasks in which all rewards are equal (`is_solved`), 0 or 1."""

    async def reset(self, seed: int | None = None, **options: Any) -> StepResult:
        self._seed = seed or 0
        return await super().reset(seed, **options)

    async def step(self, action: Any) -> StepResult:
        result = await super().step(action)
        return StepResult(result.observation, self.reward(result.reward), result.done)

    def reward(self, reward: float | None) -> float | None:
        return float(self._seed % 2) if is_solved(self._seed) else reward


class SolvedGame(HalfSolvedGame):
    def reward(self, reward: float | None) -> float | None:
        return 1.0


@pytest.fixture(autouse=True)
def _half_solved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_grpo, "_LOOK_SECONDS", 60.0)  # scripted groups end in the calls that wait for them
    monkeypatch.setattr(test_async_grpo, "SpellingGame", HalfSolvedGame)


def has_spread(step: Step) -> list[int]:
    """Return the numbers in the step of the groups that its rewards tell apart."""
    rewards: dict[int, list[float | None]] = {}
    for trajectory in step.rollout.trajectories:
        rewards.setdefault(trajectory.task.group, []).append(trajectory.reward)
    return sorted(group for group, found in rewards.items() if len(set(found)) > 1)


def run_grpo(folder: Path, steps: int, refill: int, **more: Any) -> tuple[GRPO, list[Step]]:
    with playing(folder) as (servers, loop):
        trainer = trainer_of(folder, steps, refill=refill)
        run = GRPO(trainer, servers, loop, all_ranks(), incarnation=INCARNATION, **more)  # type: ignore[arg-type]
        run.push()
        return run, [run.step() for _ in range(steps)]


@pytest.mark.usefixtures("one_rank")
def test_steps_are_full_with_a_refill_and_the_tasks_are_in_order(policy_folder: Path) -> None:
    """Three of five tasks teach nothing. Without a refill, 2 of 5 groups of a step are trained."""
    (_, without), (run, refilled) = (run_grpo(policy_folder, 5, refill) for refill in (0, 9))
    trained = {"without": 0, "refilled": 0}
    episodes = dict(trained)
    for name, steps in (("without", without), ("refilled", refilled)):
        seeds = [t.task.seed for step in steps for t in step.rollout.trajectories[::SIZE]]
        assert seeds == list(range(len(seeds)))  # the next tasks, and none twice
        for step in steps:
            metrics, groups = step.metrics, has_spread(step)
            assert metrics.groups == len(step.rollout.trajectories) // SIZE == GROUPS + metrics.refilled_groups
            assert metrics.groups - metrics.groups_without_spread == len(groups) == metrics.kept // SIZE
            assert metrics.groups_solved + metrics.groups_unsolved == metrics.groups_without_spread
            trained[name] += len(groups)
            episodes[name] += metrics.trajectories
    assert [len(has_spread(step)) for step in refilled] == [GROUPS] * 5
    # The cost: 10 episodes for each trained group, with and without a refill.
    assert (trained, episodes) == ({"without": 6, "refilled": 15}, {"without": 60, "refilled": 152})
    assert run._order.stored(5) == 38 and refilled[0].metrics.refilled_groups > 0
    assert "groups refilled" in describe_step(refilled[0].metrics) and "bound" not in describe_step(refilled[0].metrics)


@pytest.mark.usefixtures("one_rank")
def test_at_the_bound_a_step_trains_on_what_it_has(
    policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, steps = run_grpo(policy_folder, 4, 1)
    short = [step.metrics for step in steps if len(has_spread(step)) < GROUPS]
    assert short and all(m.refilled_groups <= GROUPS for m in short)
    trained = [m for m in short if m.skipped is None]
    assert trained and all("without spread left at the bound of refills" in describe_step(m) for m in trained)
    # No group has spread: the rounds end, the step is skipped, and the next one plays the tasks behind.
    monkeypatch.setattr(test_async_grpo, "SpellingGame", SolvedGame)
    run, steps = run_grpo(policy_folder, 2, 2)
    for step in steps:
        assert (step.metrics.groups, step.metrics.refilled_groups, step.metrics.kept) == (9, 6, 0)
        assert "in no group did the rewards differ (36 episodes" in str(step.metrics.skipped)
        assert "nor in 6 further groups that replaced them" in str(step.metrics.skipped)
    assert {t.task.seed for t in steps[1].rollout.trajectories} == set(range(9, 18))
    save_at_once(run, tmp_path)
    assert check_checkpoint(tmp_path / "checkpoint-2").next_group == 18


@pytest.mark.usefixtures("one_rank")
def test_without_staleness_the_asynchronous_run_refills_alike(policy_folder: Path) -> None:
    """Bit for bit, as long as no bound is reached: the asynchronous one counts groups, not rounds."""
    steps, refill = 3, 9
    sync, expected = run_grpo(policy_folder, steps, refill)
    with playing(policy_folder) as (servers, loop):
        rollouts, trainer = PlayedGroups(loop), trainer_of(policy_folder, steps, refill=refill)
        fates: list[Any] = []
        settings: dict[str, Any] = {"max_staleness": 0, "incarnation": INCARNATION, "note": fates.append}
        run = AsyncGRPO(trainer, servers, rollouts, all_ranks(), steps=steps, **settings)  # type: ignore[arg-type]
        run.push()
        found = [run.step() for _ in range(steps)]
        rollouts.close()
    for step, other in zip(expected, found, strict=True):
        assert other.metrics.refilled_groups == step.metrics.refilled_groups > 0

        def in_order(step: Step) -> list[Any]:
            return sorted((t.task.seed, t.task.member, facts(t)[2:]) for t in step.rollout.trajectories)

        assert in_order(step) == in_order(other)
        for name in ("losses", "kept", "trained_tokens", "groups_without_spread", "groups_solved"):
            assert getattr(other.metrics, name) == getattr(step.metrics, name), name
    assert same(weights(sync.trainer), weights(trainer))
    assert sorted(fate.group for fate in fates) == list(range(run._buffer.next_group)) and not run._buffer.undone
    assert run._buffer.next_group == sum(step.metrics.groups for step in expected)
    assert sum(fate.fate == "no_spread" for fate in fates) == sum(step.metrics.refilled_groups for step in expected)


# -- asynchronous, scripted: also in test_async_grpo.py ----------------------------------------------------------------


def is_flat(group: int, member: int) -> float:
    return 1.0 if is_solved(group) else float(member % 2)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_asynchronous_steps_are_full_too(policy_folder: Path, staleness: int) -> None:
    rollouts = ScriptedGroups(rarely(random.Random(staleness)))
    rollouts.rewards = is_flat
    run = Run(policy_folder, rollouts, steps=8, refill=3, max_staleness=staleness)
    run.begin()
    metrics = [step.metrics for step in run.steps(8)]
    assert all(m.kept == 3 * 4 and m.groups == 3 + m.refilled_groups for m in metrics)
    assert all(m.groups_without_spread == m.groups_solved == m.refilled_groups for m in metrics)
    assert all(m.age_max is not None and m.age_max <= staleness and sum(m.ages.values()) == 12 for m in metrics)
    assert sorted(fate.group for fate in run.fates) == list(range(len(run.fates))) and not run.rollouts.playing
    assert {fate.fate: is_solved(fate.group) for fate in run.fates} == {"trained": False, "no_spread": True}
    for m in metrics:
        assert Counter(fate.fate for fate in run.fates if fate.step == m.step) == {
            name: count for name, count in (("trained", 3), ("no_spread", m.refilled_groups)) if count
        }
    assert max(m.refilled_groups for m in metrics) > 3


@pytest.mark.usefixtures("one_rank")
def test_asynchronous_steps_end_although_no_group_has_spread(policy_folder: Path) -> None:
    rollouts = ScriptedGroups(rarely(random.Random(1)))
    rollouts.rewards = lambda group, member: 0.0
    run = Run(policy_folder, rollouts, steps=4, refill=2, max_staleness=1)
    run.begin()
    before = weights(run.trainer)
    metrics = [step.metrics for step in run.steps(4)]
    assert all("nor in 6 further groups that replaced them" in str(m.skipped) for m in metrics[1:])
    assert [m.refilled_groups for m in metrics] == [12, 6, 6, 6]  # the first one is ahead by a step
    assert [m.groups for m in metrics] == [15, 9, 9, 9] and same(before, weights(run.trainer))
    assert Counter(fate.fate for fate in run.fates) == {"skipped": 12, "no_spread": 30}
    assert sorted(fate.group for fate in run.fates) == list(range(42))


# -- killed and resumed ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("steps_before", [0, 2])
def test_a_run_that_was_killed_in_a_refill_continues_bit_for_bit(
    policy_folder: Path, tmp_path: Path, steps_before: int
) -> None:
    """It dies in its second step after the checkpoint, in the second round. The resumed run plays neither the first
    step nor the first round of the second one for nothing, and trains what it would have trained."""
    straight, expected = run_grpo(policy_folder, 5, 9)

    class KilledError(Exception):
        pass

    with playing(policy_folder) as (servers, loop):
        journal = GroupJournal(tmp_path)
        settings: dict[str, Any] = {"journal": journal}
        run = GRPO(trainer_of(policy_folder, 5, refill=9), servers, loop, all_ranks(), **settings)  # type: ignore[arg-type]
        run.push()
        for _ in range(steps_before):
            run.step()
        save_at_once(run, tmp_path)
        play = run._play

        def dies(groups: range, on_finish: Callable[[Trajectory], None] | None) -> Round:
            if groups.start > 0:
                raise KilledError
            return play(groups, on_finish)

        run._play = dies  # type: ignore[method-assign]
        with pytest.raises(KilledError):
            run.step()
        journal.close()
    first = sum(step.metrics.groups for step in expected[:steps_before])
    assert [group.number for group in read_groups(tmp_path, lambda head: True)] == list(range(first, first + GROUPS))
    progress = check_checkpoint(tmp_path / f"checkpoint-{steps_before}")
    assert progress.next_group == (first if steps_before else None) and progress.undone_groups is None
    with playing(policy_folder) as (servers, loop):
        settings = {"journal": GroupJournal(tmp_path)}
        again = GRPO(trainer_of(policy_folder, 5, refill=9), servers, loop, all_ranks(), **settings)  # type: ignore[arg-type]
        again.load(tmp_path / f"checkpoint-{steps_before}")
        again.push()
        steps = [again.step() for _ in range(5 - steps_before)]
        save_at_once(again, tmp_path)
        settings["journal"].close()
    assert [step.metrics.kept_groups for step in steps] == [GROUPS, *[0] * (4 - steps_before)]
    for step, other in zip(expected[steps_before:], steps, strict=True):
        assert [facts(t) for t in step.rollout.trajectories] == [facts(t) for t in other.rollout.trajectories]
        assert other.metrics.losses == step.metrics.losses
        assert other.metrics.refilled_groups == step.metrics.refilled_groups
    assert same(weights(straight.trainer), weights(again.trainer))
    assert not list(read_groups(tmp_path, lambda head: True))


@pytest.mark.usefixtures("one_rank")
def test_an_error_after_an_optimizer_step_leaves_the_refilled_groups_behind(
    policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step counts as trained, so the checkpoint's position is behind all of its groups."""
    with playing(policy_folder) as (servers, loop):
        run = GRPO(trainer_of(policy_folder, 3, refill=9), servers, loop, all_ranks())  # type: ignore[arg-type]
        run.push()
        played = run.step().metrics.groups
        update = run.trainer.update

        def fails(samples: Any, step: int) -> Any:
            update(samples, step)
            raise ZeroDivisionError("a bug")

        monkeypatch.setattr(run.trainer, "update", fails)
        with pytest.raises(ZeroDivisionError):
            run.step()
        reached = run.progress()
        assert reached.next_step == 2
        save_at_once(run, tmp_path)
    _, expected = run_grpo(policy_folder, 2, 9)
    assert [step.metrics.groups for step in expected][:1] == [played]
    assert check_checkpoint(tmp_path / "checkpoint-2").next_group == sum(s.metrics.groups for s in expected)


STEPS = 4
SETTINGS = ["--env-url", "http://nowhere", "--no-chat", "--device", "cpu", "--retry-pause", "0", "--steps", str(STEPS)]
SETTINGS += ["--grpo.groups", "4", "--grpo.group-size", "4", "--grpo.minibatches", "2", "--grpo.epochs", "1"]
SETTINGS += ["--grpo.learning-rate", "0.01", "--grpo.warmup-steps", "1", "--grpo.refill", "9", "--save-every", "1"]
SETTINGS += ["--stop-on", "none", "--save-timeout", "20", "--no-save-in-background"]


def play(fault: str, ranks: int, model: Path, out: Path, *more: str) -> list[int | None]:
    """Return the exit status of each rank. The fault is that of the last one."""
    arguments = [fault, str(ranks - 1), "--model-path", str(model), "--out", str(out), *SETTINGS, *more]
    return run_ranks(ranks, "tests.train.refill_ranks", arguments, out.with_suffix(".log"), timeout=60)


def steps_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def seeds(out: Path, ranks: int) -> list[set[int]]:
    """Return the seeds that each rank played."""
    files = [out / f"trajectories-rank{rank}.jsonl" for rank in range(ranks)]
    return [{json.loads(line)["task"]["seed"] for line in file.read_text().splitlines()} for file in files]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_ranks_refill_together_and_continue_after_a_kill(policy_folder: Path, tmp_path: Path, ranks: int) -> None:
    """A rank dies between two rounds of step 2. The resumed run ends with the weights of the run without the kill."""
    straight, out = tmp_path / "straight", tmp_path / "killed"
    assert play("none", ranks, policy_folder, straight) == [0] * ranks, (tmp_path / "straight.log").read_text()[-6000:]
    steps = steps_of(straight)
    assert all(step["kept"] == 16 and step["groups"] - step["groups_without_spread"] == 4 for step in steps)
    total = sum(step["groups"] for step in steps)
    played = seeds(straight, ranks)
    assert sorted(seed for own in played for seed in own) == list(range(total)) and all(played)
    assert sum(step["groups_without_spread"] for step in steps) == sum(map(is_solved, range(total)))
    assert play("SIGKILL in a refill", ranks, policy_folder, out)[-1] == -signal.SIGKILL
    checkpoint = latest_checkpoint(out)
    assert checkpoint is not None
    progress = check_checkpoint(checkpoint)
    assert (progress.next_step, progress.next_group) == (2, sum(step["groups"] for step in steps[:2]))
    assert play("none", ranks, policy_folder, out, "--resume") == [0] * ranks, out.with_suffix(".log").read_text()[
        -6000:
    ]
    assert [step["groups"] for step in steps_of(out)] == [step["groups"] for step in steps]
    expected, found = (load_file(folder / "model/model.safetensors") for folder in (straight, out))
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())

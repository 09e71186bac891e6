"""Asynchronous GRPO trains each group once and in time; without staleness it is GRPO, bit for bit."""

from __future__ import annotations

import contextlib
import random
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from tests.train.conftest import save_at_once
from tests.train.played_groups import OneServer, PlayedGroups, PolicyEngine, Pushes, ScriptedGroups
from verl_server.logprob_gap import LogprobGapError
from verl_server.rollout.agent_loop import AgentLoop
from verl_server.rollout.environment import StepResult
from verl_server.rollout.episode import Limits
from verl_server.rollout.renderer import TextRenderer
from verl_server.rollout.trajectory import Trajectory
from verl_server.train import async_grpo
from verl_server.train.async_grpo import AsyncGRPO
from verl_server.train.checkpoints import check_checkpoint, latest_checkpoint
from verl_server.train.grpo import GRPO, PolicyTrainer
from verl_server.train.journal import GroupJournal
from verl_server.train.options import GRPOConfig
from verl_server.train.policy import load_policy
from verl_server.train.ranks import all_ranks
from verl_server.train.run import Step
from verl_server.train.run_advisor import RunAdvisor
from verl_server.train.stopping import RunStoppedError, StopRequest
from verl_server.watch.advisories import Advisor
from verl_server.watch.run_records import GroupDone

CPU = torch.device("cpu")
INCARNATION = "5f2c9a1e"
SETTINGS: dict[str, Any] = {"epochs": 1, "minibatches": 2, "learning_rate": 1e-2, "warmup_steps": 1}

pytestmark = pytest.mark.usefixtures("one_rank")


def trainer_of(folder: Path, steps: int, **settings: Any) -> PolicyTrainer:
    config = GRPOConfig(**(SETTINGS | {"groups": 3, "group_size": 4} | settings))
    return PolicyTrainer(load_policy(str(folder), CPU, compute_dtype=torch.float32), config, steps, CPU)


def weights(trainer: PolicyTrainer) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in trainer.policy.named_weights()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


# -- played by the group player, with a policy that samples from the pushed weights ----------------------------------


class SpellingGame:
    """Three turns, with a reward that is a function of the letters of the answers: few are equal."""

    def __init__(self) -> None:
        self._answers: list[str] = []

    async def reset(self, seed: int | None = None, **options: Any) -> StepResult:
        return StepResult({"text": "guess 1 to 3"}, None, False)

    async def step(self, action: Any) -> StepResult:
        self._answers.append(action["text"])
        reward = sum(map(ord, "".join(self._answers))) % 7 / 7
        return StepResult({"text": "higher"}, reward, len(self._answers) == 3)

    async def close(self) -> None:
        pass


@contextlib.contextmanager
def playing(folder: Path) -> Iterator[tuple[OneServer, AgentLoop]]:
    engine = PolicyEngine(str(folder))
    renderer = TextRenderer(AutoTokenizer.from_pretrained(folder))
    limits = Limits(max_turns=5, max_new_tokens=2)
    with AgentLoop(engine, SpellingGame, renderer, limits=limits, sampling_params={"temperature": 1.0}) as loop:
        yield OneServer(engine), loop


def facts(t: Trajectory) -> tuple[Any, ...]:
    task = t.task
    return (task.seed, task.episode_id, task.sampling_seed, t.tokens, t.loss_mask, t.logprobs, t.reward, t.stop_reason)


def test_without_staleness_it_is_grpo_bit_for_bit(policy_folder: Path) -> None:
    steps = 4
    with playing(policy_folder) as (servers, loop):
        sync = GRPO(trainer_of(policy_folder, steps), servers, loop, all_ranks(), incarnation=INCARNATION)  # type: ignore[arg-type]
        sync.push()
        expected = [sync.step() for _ in range(steps)]
    with playing(policy_folder) as (servers, loop):
        rollouts = PlayedGroups(loop)
        trainer = trainer_of(policy_folder, steps)
        run = AsyncGRPO(
            trainer,
            servers,  # type: ignore[arg-type]
            rollouts,
            all_ranks(),
            steps=steps,
            max_staleness=0,
            advisor=RunAdvisor(Advisor("float32"), all_ranks()),
            incarnation=INCARNATION,
        )
        run.push()
        found = [run.step() for _ in range(steps)]
        rollouts.close()
    trained = [step.metrics.skipped is None for step in expected]
    assert sum(trained) >= 3
    pushes = 0
    for step, other in zip(expected, found, strict=True):
        assert [facts(t) for t in step.rollout.trajectories] == [facts(t) for t in other.rollout.trajectories]
        assert other.metrics.losses == step.metrics.losses and other.metrics.reward == step.metrics.reward
        for name in ("skipped", "kept", "trainable", "failed", "stop_reasons", "sampled_tokens", "trained_tokens"):
            assert getattr(other.metrics, name) == getattr(step.metrics, name), name
        assert {v for t in other.rollout.trajectories for v in t.weight_versions if v} == {f"{pushes}@{INCARNATION}"}
        assert other.metrics.weight_version == f"{pushes}@{INCARNATION}"
        pushes += step.metrics.skipped is None
        assert (other.metrics.age, other.metrics.age_max) == (0.0, 0)
        assert set(other.metrics.version_spans) == {"1"}
        gap = other.metrics.logprob_gap
        assert step.metrics.skipped is not None or (gap is not None and gap < 1e-5)
    assert same(weights(sync.trainer), weights(trainer)) and not same(
        weights(trainer), weights(trainer_of(policy_folder, 1))
    )
    numbers = [[t.task.group for t in step.rollout.trajectories[::4]] for step in found]
    assert numbers == [[3 * step + place for place in range(3)] for step in range(steps)]
    assert len(rollouts.lines) == steps * 12 and len(rollouts.started) == steps * 3


# -- scripted ----------------------------------------------------------------------------------------------------------


class Run:
    """An `AsyncGRPO` on scripted groups, with the fates that it noted."""

    def __init__(
        self, folder: Path, rollouts: ScriptedGroups, steps: int = 6, refill: int = 0, **settings: Any
    ) -> None:
        self.servers, self.rollouts, self.fates = Pushes(), rollouts, list[GroupDone]()
        self.trainer = trainer_of(folder, steps, refill=refill)
        self.stop = StopRequest()
        given = {"max_staleness": 2, "stop": self.stop, "incarnation": INCARNATION} | settings
        self.algorithm = AsyncGRPO(
            self.trainer,
            self.servers,  # type: ignore[arg-type]
            rollouts,
            all_ranks(),
            steps=steps,
            note=self._note,
            **given,
        )
        rollouts.served = lambda: str(self.algorithm.weight_version)

    def _note(self, event: Any) -> None:
        if isinstance(event, GroupDone):
            self.fates.append(event)

    def begin(self) -> None:
        self.algorithm.push()

    def step(self) -> Step:
        return self.algorithm.step()

    def steps(self, count: int) -> list[Step]:
        return [self.step() for _ in range(count)]

    def save(self, folder: Path) -> Path:
        reached = self.algorithm.progress()
        folder.mkdir(exist_ok=True)
        save_at_once(self.algorithm, folder)
        checkpoint = latest_checkpoint(folder)
        assert checkpoint is not None and checkpoint.name == f"checkpoint-{reached.next_step}"
        return checkpoint


@pytest.fixture(autouse=True)
def _looks_until_it_has_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripted groups end in the calls that wait for them, so nobody really waits."""
    monkeypatch.setattr(async_grpo, "_LOOK_SECONDS", 60.0)


def rarely(draw: random.Random, slow: int = 1) -> Any:
    """Return a `choose` that ends some random group at a time; group `slow` only if no other one plays."""

    def choose(playing: list[int]) -> list[int]:
        others = [number for number in playing if number != slow]
        chosen = others or playing
        return [draw.choice(chosen)] if chosen and draw.random() < 0.7 else []

    return choose


@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_slow_groups_are_trained_in_time(policy_folder: Path, staleness: int) -> None:
    run = Run(policy_folder, ScriptedGroups(rarely(random.Random(3))), steps=8, max_staleness=staleness)
    run.begin()
    metrics = [step.metrics for step in run.steps(8)]
    assert sorted(fate.group for fate in run.fates) == list(range(3 * 8)) and not run.rollouts.playing
    assert {fate.fate for fate in run.fates} == {"trained"}
    assert max(fate.step - fate.start_version for fate in run.fates) == staleness
    assert all(m.age_max is not None and m.age_max <= staleness for m in metrics)
    assert max(m.age_max or 0 for m in metrics) == staleness and sum(m.failed for m in metrics) == 0
    spans = sum((Counter(m.version_spans) for m in metrics), Counter[str]())
    assert sum(spans.values()) == 3 * 8 * 4 and sum(n for span, n in spans.items() if int(span) > 1) > 0
    assert any("deadline" in m.waits for m in metrics) and any("episodes" in m.waits for m in metrics)
    assert run.servers.pushed == [f"{number}@{INCARNATION}" for number in range(9)]


def test_the_servers_are_looked_after_while_no_batch_is_ready(
    policy_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_grpo, "_LOOK_SECONDS", 0.0)
    rollouts = ScriptedGroups()
    run = Run(policy_folder, rollouts)
    rollouts.choose = lambda playing: playing if run.servers.ensured == 3 else []
    run.begin()
    step = run.step()
    assert run.servers.ensured == 3 and set(step.metrics.waits) == {"servers"}


def test_dropping_leaves_out_the_slow_group_and_counts_it(policy_folder: Path) -> None:
    run = Run(policy_folder, ScriptedGroups(rarely(random.Random(3))), steps=8, max_staleness=1, drops=True)
    run.begin()
    metrics = [step.metrics for step in run.steps(8)]
    counts = Counter(fate.fate for fate in run.fates)
    assert counts["trained"] == 3 * 8 and counts["dropped"] == sum(m.dropped_groups for m in metrics) > 0
    assert sorted(fate.group for fate in run.fates) == sorted(run.rollouts.starts)
    dropped = {fate.group: fate for fate in run.fates if fate.fate == "dropped"}
    assert 1 in dropped and list(dropped) == run.rollouts.cancelled
    assert all(m.age_max is not None and m.age_max <= 1 and "deadline" not in m.waits for m in metrics)


def test_steps_with_nothing_to_train_on_consume_their_groups(policy_folder: Path) -> None:
    rollouts = ScriptedGroups()
    rollouts.rewards = lambda group, member: None if group < 3 else 1.0 if group < 6 else float(member % 2)
    run = Run(policy_folder, rollouts, steps=4, max_staleness=1)
    run.begin()
    before = weights(run.trainer)
    metrics = [run.step().metrics for _ in range(2)]
    assert same(before, weights(run.trainer)) and run.servers.pushed == [f"0@{INCARNATION}"]
    assert "12 of 12 episodes failed: 12 x http://nowhere: the sandbox is down" in str(metrics[0].skipped)
    assert "in no group did the rewards differ" in str(metrics[1].skipped)
    metrics += [run.step().metrics for _ in range(2)]
    assert [m.weight_version for m in metrics] == [f"{number}@{INCARNATION}" for number in (0, 0, 0, 1)]
    assert not same(before, weights(run.trainer))
    fates = {fate.group: (fate.fate, fate.step) for fate in run.fates}
    assert fates == {number: ("skipped" if number < 6 else "trained", number // 3) for number in range(12)}


def test_a_step_whose_optimizer_steps_were_all_skipped_is_done(
    policy_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(policy_folder, ScriptedGroups(), steps=3, max_staleness=1)
    run.begin()
    before = weights(run.trainer)
    lowered: list[int] = []

    def overflows(optimizer: torch.optim.Optimizer) -> None:
        optimizer.param_groups[0]["params"][0].grad[:] = float("inf")

    def lower() -> bool:
        lowered.append(1)
        return True

    with monkeypatch.context() as patch:
        patch.setattr(run.trainer.scaling, "unscale", overflows)
        patch.setattr(run.trainer.scaling, "lower", lower)
        step = run.step()
    assert len(lowered) == step.metrics.skipped_optimizer_steps == 2 and same(before, weights(run.trainer))
    assert run.servers.pushed == [f"0@{INCARNATION}"]
    progress = run.algorithm.progress()
    assert (progress.next_step, progress.version) == (1, 0)
    later = run.steps(2)
    assert [s.metrics.weight_version for s in later] == [f"0@{INCARNATION}", f"1@{INCARNATION}"]
    assert sorted(fate.group for fate in run.fates) == list(range(9))
    assert {fate.fate for fate in run.fates if fate.step == 0} == {"skipped"}


def test_a_stop_is_obeyed_also_when_a_batch_is_ready(policy_folder: Path) -> None:
    for choose in (lambda playing: playing, lambda playing: []):
        run = Run(policy_folder, ScriptedGroups(choose))
        run.begin()
        run.stop.signal_number = signal.SIGTERM
        with pytest.raises(RunStoppedError, match="SIGTERM") as stopped:
            run.step()
        assert stopped.value.exit_status == 143
        assert run.algorithm.progress().next_step == 0 and not run.fates


def test_a_long_wait_is_told(
    policy_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(async_grpo, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(async_grpo, "_TELL_SECONDS", 0.0)
    looks: list[int] = []

    def choose(playing: list[int]) -> list[int]:
        looks.append(1)
        return playing[:1] if len(looks) == 1 else playing if len(looks) > 3 else []

    run = Run(policy_folder, ScriptedGroups(choose))
    run.begin()
    assert run.step().metrics.skipped is None
    told = [record.getMessage() for record in caplog.records if "has waited" in record.getMessage()]
    assert told and all(text.startswith("Step 0 has waited 0 s for enough groups to finish. 1 groups") for text in told)
    assert "play, 0 wait for a place" in told[0] and "--trajectory-timeout" in told[0]


def test_an_error_of_the_rollouts_comes_after_the_step_that_is_complete(policy_folder: Path) -> None:
    rollouts = ScriptedGroups()
    run = Run(policy_folder, rollouts)
    run.begin()
    broken: list[bool] = []

    def choose(playing: list[int]) -> list[int]:
        if broken:
            raise OSError("No space left on device")
        return playing[:3]

    rollouts.choose = choose
    push = run.servers.push

    def push_and_break(weights: Any, version: str) -> None:
        push(weights, version)
        broken.append(True)

    run.servers.push = push_and_break  # type: ignore[method-assign]
    assert run.step().metrics.skipped is None
    with pytest.raises(OSError, match="No space"):
        run.step()
    assert run.algorithm.progress().next_step == 1


@pytest.mark.parametrize("drops", [False, True])
def test_a_resumed_run_plays_the_undone_groups_again(policy_folder: Path, tmp_path: Path, drops: bool) -> None:
    """The run ends after steps 2 and 5. Each group has one fate in all starts together."""
    draw = random.Random(8)
    fates, undone, version = list[GroupDone](), list[int](), 0
    for start, (until, incarnation) in enumerate([(2, "aaaaaaaa"), (5, "bbbbbbbb"), (8, "cccccccc")]):
        run = Run(policy_folder, ScriptedGroups(rarely(draw)), steps=8, incarnation=incarnation, drops=drops)
        if start:
            checkpoint = latest_checkpoint(tmp_path)
            assert checkpoint is not None
            run.algorithm.load(checkpoint)
        run.begin()
        assert run.servers.pushed == [f"{version}@{incarnation}"]
        steps = run.steps(until - run.algorithm.next_step)
        assert run.rollouts.starts[: len(undone)] == undone[: len(run.rollouts.starts)]
        assert all(step.metrics.weight_version.endswith(incarnation) for step in steps)
        # A group that was dropped after the last step is undone in the checkpoint: its event is of a step that is lost.
        fates += [fate for fate in run.fates if fate.step < until]
        progress = check_checkpoint(run.save(tmp_path))
        undone, version = progress.undone_groups or [], progress.version
        assert (progress.next_step, version) == (until, until)
        assert sorted([*(fate.group for fate in fates), *undone]) == list(range(progress.next_group or 0))
    assert sum(fate.fate == "trained" for fate in fates) == 3 * 8
    if not drops:
        assert progress.next_group == 3 * 8 and not undone


@pytest.mark.parametrize("moment", ["before", "torn between", "push"])
def test_what_an_optimizer_step_used_counts_as_trained(
    policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Step 1 fails before its first optimizer step, between its two ones, or in its push."""
    run = Run(policy_folder, ScriptedGroups(rarely(random.Random(1))), steps=6)
    run.begin()
    run.step()
    passes: list[int] = []
    forward = type(run.trainer.policy).forward

    def broken(policy: Any, *arguments: Any, **settings: Any) -> Any:
        passes.append(1)
        if len(passes) > (0 if moment == "before" else 1):
            raise ZeroDivisionError("a bug")
        return forward(policy, *arguments, **settings)

    def no_push(*_: Any) -> None:
        raise ZeroDivisionError("a bug")

    with monkeypatch.context() as patch:
        if moment == "push":
            patch.setattr(run.servers, "push", no_push)
        else:
            patch.setattr(type(run.trainer.policy), "forward", broken)
        with pytest.raises(ZeroDivisionError):
            run.step()
    progress = check_checkpoint(run.save(tmp_path))
    is_trained = moment != "before"
    assert (progress.next_step, progress.version) == ((2, 2) if is_trained else (1, 1))
    trained = {fate.group for fate in run.fates}
    assert len(trained) == 3
    lost = set(range(progress.next_group or 0)) - trained - set(progress.undone_groups or [])
    used = {number for number, step in run.algorithm._buffer._fates.items() if step == 1}
    assert lost == (used if is_trained else set()) and len(used) == 3
    again = Run(policy_folder, ScriptedGroups(), steps=6, incarnation="bbbbbbbb")
    checkpoint = latest_checkpoint(tmp_path)
    assert checkpoint is not None
    again.algorithm.load(checkpoint)
    again.begin()
    again.steps(6 - progress.next_step)
    assert sorted([*trained, *lost, *(fate.group for fate in again.fates)]) == list(range(18))


def test_tokens_of_other_weights_are_left_out(policy_folder: Path) -> None:
    run = Run(policy_folder, ScriptedGroups(), steps=2, max_staleness=0)
    run.begin()
    run.rollouts.served = lambda: f"0@{INCARNATION}" if len(run.rollouts.playing) != 1 else "0@aaaaaaaa"
    end = run.rollouts._end

    def label(number: int) -> Any:
        ended = end(number)
        if number == 1:
            assert ended.rollout is not None
            first = ended.rollout.trajectories[0]
            first.weight_versions = [v and "0@aaaaaaaa" for v in first.weight_versions]
        return ended

    run.rollouts.served = lambda: str(run.algorithm.weight_version)
    run.rollouts._end = label  # type: ignore[method-assign]
    step = run.step()
    assert step.metrics.failed == 1 and "0@aaaaaaaa" in step.failures[0].error
    assert step.metrics.ages == {"0": 11}


def test_a_server_with_other_weights_raises_the_alarm(policy_folder: Path) -> None:
    """The engine has the right label, and weights that nobody pushed under it."""
    with playing(policy_folder) as (servers, loop):
        rollouts = PlayedGroups(loop)
        trainer = trainer_of(policy_folder, 2)
        run = AsyncGRPO(
            trainer, servers, rollouts, all_ranks(), steps=2, advisor=RunAdvisor(Advisor("float32"), all_ranks())
        )  # type: ignore[arg-type]
        run.push()
        other = [(name, weight * 1.5) for name, weight in trainer.policy.named_weights()]
        servers.engine.push(other, str(run.weight_version))
        with pytest.raises(LogprobGapError, match="Step 0: log-probabilities of server and trainer differ"):
            run.step()
        rollouts.close()


@pytest.mark.parametrize(("staleness", "refill"), [(0, 0), (1, 0), (2, 0), (0, 2), (2, 2)])
def test_groups_in_the_journal_are_not_played_again_while_they_are_young(
    policy_folder: Path, tmp_path: Path, staleness: int, refill: int
) -> None:
    """The run is killed again and again, one or two steps after its checkpoint. Each group has one fate.

    With a refill, every other group lacks spread.
    """
    draw = random.Random(4 + staleness)
    fates, kept, played = list[GroupDone](), list[int](), Counter[int]()
    saved, start = 0, 0
    while saved < 8:
        incarnation = f"{start:08x}"
        journal = GroupJournal(tmp_path)
        recorded: list[int] = []
        rollouts = ScriptedGroups(rarely(draw))
        run = Run(
            policy_folder,
            rollouts,
            steps=8,
            refill=refill,
            incarnation=incarnation,
            max_staleness=staleness,
            journal=journal,
            record=lambda step, episodes, to=recorded: to.extend(t.task.group for t in episodes),
        )
        rollouts.finished = journal.put
        if refill:
            rollouts.rewards = lambda group, member: 1.0 if group % 2 else float(member % 2)
        if (checkpoint := latest_checkpoint(tmp_path)) is not None:
            run.algorithm.load(checkpoint)
        run.begin()
        metrics = [step.metrics for step in run.steps(min(8 - saved, draw.choice([1, 2])))]
        if draw.random() < 0.6 or not saved or saved + len(metrics) == 8:
            saved += len(metrics)
            fates += [fate for fate in run.fates if fate.step < saved]
            progress = check_checkpoint(run.save(tmp_path))
            kept += recorded[::4]
        if draw.random() < 0.6:  # killed in a later step
            more = min(8 - run.algorithm.next_step, 1)
            metrics += [step.metrics for step in run.steps(more)]
        journal.close()
        played.update(rollouts.starts)
        assert all(m.age_max is not None and m.age_max <= staleness and m.failed == 0 for m in metrics)
        assert sum(m.kept_groups for m in metrics) == len(recorded) // 4
        undone = progress.undone_groups or []
        assert sorted([*(fate.group for fate in fates), *undone]) == list(range(progress.next_group or 0))
        start += 1
    counts = Counter(fate.fate for fate in fates)
    assert sorted(fate.group for fate in fates) == list(range(24 + counts["no_spread"])) and counts["trained"] == 24
    assert len(counts) == (2 if refill else 1)
    assert kept and len(set(kept)) == len(kept)
    assert (tmp_path / "journal-rank0.msgpack").stat().st_size == 0

"""An evaluation of an asynchronous run plays one version beside the training, and holds the next push for a while."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.train.played_groups import PlayedGroups, ScriptedGroups
from tests.train.test_async_grpo import INCARNATION, Run, facts, playing, trainer_of
from verl_server.rollout.agent_loop import Rollout
from verl_server.rollout.trajectory import Task, Trajectory
from verl_server.train.async_grpo import AsyncGRPO
from verl_server.train.evaluation import Evaluated
from verl_server.train.grpo import GRPO
from verl_server.train.held_out import HELD_OUT, HeldOut
from verl_server.train.ranks import all_ranks
from verl_server.train.rollouts import held_out_play
from verl_server.train.rollouts.group_messages import FromPlayer, GroupBegan, GroupEnded, NowServed, PlayGroup
from verl_server.train.rollouts.group_player import GroupPlayer
from verl_server.watch.run_records import Evaluation

HELD = HeldOut(tasks=3, samples=2, timeout=60.0, success=1.0)

pytestmark = pytest.mark.usefixtures("one_rank")


class Held:
    """A run whose evaluations are played when `may_end` says so; its trained groups always end."""

    def __init__(self, folder: Path, held_out: HeldOut = HELD, **settings: Any) -> None:
        self.rollouts = ScriptedGroups(self._choose)
        self.may_end: Callable[[int], bool] = lambda number: True
        self.run = Run(folder, self.rollouts, max_staleness=1, **settings)
        self.held_out = held_out
        self.results: list[tuple[Evaluation, list[str]]] = []
        """Each record, with the versions that were pushed when it was handed on."""
        self.looks = 0
        self.run.begin()

    def _choose(self, playing: list[int]) -> list[int]:
        self.looks += 1
        return [number for number in playing if number < HELD_OUT or self.may_end(number)]

    def evaluate(self) -> None:
        self.run.algorithm.evaluate(self.held_out, self._note)

    def _note(self, result: Evaluated) -> None:
        assert not result.trajectories
        self.results.append((result.record, list(self.run.servers.pushed)))

    @property
    def playing(self) -> list[int]:
        return [number for number in self.rollouts.playing if number >= HELD_OUT]


def counts(record: Evaluation) -> tuple[Any, ...]:
    return record.step, record.version, record.episodes, record.failed, record.unfinished, record.incomplete


def test_an_evaluation_that_ends_in_time_holds_no_push(policy_folder: Path) -> None:
    held = Held(policy_folder)
    held.evaluate()
    assert len(held.playing) == 6
    metrics = held.run.step().metrics
    ((record, _),) = held.results
    assert counts(record) == (0, f"0@{INCARNATION}", 6, 0, 0, None) and record.push_delay == 0.0
    assert record.reward == record.success == 0.5  # the script's reward is the number of the member
    assert metrics.held_seconds == 0.0 and "held" not in metrics.phases
    assert metrics.trajectories == 12 and all(fate.group < HELD_OUT for fate in held.run.fates)
    held.evaluate()
    held.run.algorithm.end_evaluation()
    assert counts(held.results[1][0]) == (1, f"1@{INCARNATION}", 6, 0, 0, None)
    assert {number for number in held.rollouts.starts if number >= HELD_OUT} == {HELD_OUT + n for n in range(12)}


def test_the_push_waits_for_the_last_episode(policy_folder: Path) -> None:
    held = Held(policy_folder)
    held.evaluate()
    # The trained groups have ended and were trained when the last episode may end.
    held.may_end = lambda number: held.run.trainer.steps.last_step == 0
    metrics = held.run.step().metrics
    ((record, pushed),) = held.results
    assert counts(record) == (0, f"0@{INCARNATION}", 6, 0, 0, None)
    assert pushed == [f"0@{INCARNATION}"] and held.run.servers.pushed == [
        f"{number}@{INCARNATION}" for number in (0, 1)
    ]
    assert 0 < record.push_delay <= metrics.held_seconds and list(metrics.phases) == [
        "rollout",
        "train",
        "held",
        "sync",
    ]


def test_a_push_is_held_until_the_deadline_only(policy_folder: Path) -> None:
    held = Held(policy_folder, HeldOut(tasks=3, samples=2, timeout=0.2, success=1.0))
    held.may_end = lambda number: number < HELD_OUT + 4
    held.evaluate()
    assert held.run.step().metrics.weight_version == f"0@{INCARNATION}"
    ((record, pushed),) = held.results
    assert counts(record) == (0, f"0@{INCARNATION}", 4, 0, 2, "timeout") and pushed == [f"0@{INCARNATION}"]
    assert held.rollouts.cancelled == [HELD_OUT + 4, HELD_OUT + 5] and not held.playing
    assert held.run.servers.pushed[-1] == f"1@{INCARNATION}"
    assert held.run.step().metrics.skipped is None


def test_what_ends_a_wait(policy_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits after a request to stop, and for servers of which none has the version any more."""
    monkeypatch.setattr(held_out_play, "_LOOK_SECONDS", 0.0)
    held = Held(policy_folder)
    held.may_end = lambda number: False
    monkeypatch.setattr(held.run.servers, "are_lost", lambda: True)
    held.evaluate()
    assert held.run.step().metrics.skipped is None
    assert counts(held.results[0][0]) == (0, f"0@{INCARNATION}", 0, 0, 6, "server")
    monkeypatch.setattr(held.run.servers, "are_lost", lambda: False)
    held.evaluate()
    held.run.stop.signal_number = signal.SIGTERM
    held.run.algorithm.end_evaluation()
    assert counts(held.results[1][0]) == (1, f"1@{INCARNATION}", 0, 0, 6, "stopped")


def test_a_stop_in_the_wait_for_a_batch_ends_the_evaluation(policy_folder: Path) -> None:
    held = Held(policy_folder)
    held.may_end = lambda number: False
    held.evaluate()
    held.run.stop.signal_number = signal.SIGTERM
    with pytest.raises(Exception, match="SIGTERM"):
        held.run.step()
    assert counts(held.results[0][0]) == (0, f"0@{INCARNATION}", 0, 0, 6, "stopped")


def test_the_next_evaluation_waits_for_the_one_before(policy_folder: Path) -> None:
    """No push comes after a step with nothing to train on."""
    held = Held(policy_folder)
    held.rollouts.rewards = lambda group, member: 1.0
    held.may_end = lambda number: held.run.algorithm.next_step == 1
    held.evaluate()
    held.may_end, ready = (lambda number: False), held.may_end
    assert held.run.step().metrics.skipped is not None and not held.results
    held.may_end = ready
    held.evaluate()
    held.run.algorithm.end_evaluation()
    assert [counts(record)[:3] for record, _ in held.results] == [(step, f"0@{INCARNATION}", 6) for step in (0, 1)]


def test_an_error_and_another_version_are_counted_and_end_no_run(
    policy_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(policy_folder)
    end = held.rollouts._end

    def ends(number: int) -> GroupEnded:
        ended = end(number)
        if number == HELD_OUT:
            return GroupEnded(group=number, error="the agent is wrong")
        if number == HELD_OUT + 1:
            assert ended.rollout is not None
            ended.rollout.trajectories[0].weight_versions[-1] = f"7@{INCARNATION}"
        return ended

    monkeypatch.setattr(held.rollouts, "_end", ends)
    held.evaluate()
    assert held.run.step().metrics.skipped is None
    assert counts(held.results[0][0]) == (0, f"0@{INCARNATION}", 4, 1, 1, "the agent is wrong")


def test_both_trainers_find_the_same(policy_folder: Path) -> None:
    """One policy, played between two steps and beside the training, has the same episodes."""
    found: list[Evaluated] = []
    with playing(policy_folder) as (servers, loop):
        trainer = trainer_of(policy_folder, 2)
        sync = GRPO(trainer, servers, loop, all_ranks(), incarnation=INCARNATION)  # type: ignore[arg-type]
        sync.push()
        for _ in range(2):
            sync.evaluate(HELD, found.append)
        sync.step()
        sync.evaluate(HELD, found.append)
    with playing(policy_folder) as (servers, loop):
        rollouts = PlayedGroups(loop)
        trainer = trainer_of(policy_folder, 2)
        run = AsyncGRPO(
            trainer,
            servers,  # type: ignore[arg-type]
            rollouts,
            all_ranks(),
            steps=2,
            incarnation=INCARNATION,
        )
        run.push()
        run.evaluate(HELD, found.append)
        run.step()
        rollouts.close()
    first, again, trained, beside = (result.record for result in found)
    for other in (again, beside):
        assert counts(other) == counts(first) and other.reward == first.reward
    assert trained.version == f"1@{INCARNATION}" and trained.reward != first.reward
    lines = [json.loads(line) for line in rollouts.lines]
    held = [line for line in lines if line["task"]["seed"] >= HELD_OUT]
    assert [line["step"] for line in held] == [0] * 6
    played = {t.task.episode_id: t.tokens for t in found[0].trajectories}
    assert {line["task"]["episode_id"]: line["tokens"] for line in held} == played
    assert facts(found[0].trajectories[0]) == facts(found[1].trajectories[0])


# -- places ----------------------------------------------------------------------------------------------------------


class Gated:
    """A player whose groups end when `release` names them."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.replaces: list[bool] = []
        self._gates: dict[int, asyncio.Event] = {}

    async def arun(
        self,
        tasks: list[Task],
        on_finish: Callable[[Trajectory], None] | None = None,
        *,
        version: str | None = None,
        slots: Any = None,
        replaces: bool = True,
        recording: None = None,
    ) -> Rollout:
        gate = self._gates.setdefault(tasks[0].group, asyncio.Event())
        self.replaces.append(replaces)

        async def play() -> None:
            async with slots:
                if tasks[0].group not in self.begun:
                    self.begun.append(tasks[0].group)
                await gate.wait()

        await asyncio.gather(*(play() for _ in tasks))
        return Rollout(trajectories=[], seconds=0.1)

    async def release(self, *groups: int) -> None:
        for group in groups:
            self._gates[group].set()
        await settled()


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def group(number: int, size: int) -> PlayGroup:
    tasks = [Task(seed=number, group=number, member=member) for member in range(size)]
    return PlayGroup(group=number, tasks=tasks, held_out=0 if number >= HELD_OUT else None)


def play_of(player: Gated, places: int | None) -> tuple[GroupPlayer, list[FromPlayer]]:
    sent: list[FromPlayer] = []
    groups = GroupPlayer(player, sent.append, INCARNATION, places)
    groups.handle(NowServed(version=f"0@{INCARNATION}", step=0))
    return groups, sent


def test_held_out_episodes_get_a_quarter_of_the_places_first() -> None:
    async def check() -> None:
        player = Gated()
        groups, sent = play_of(player, 8)
        for number in range(6):
            groups.handle(group(number, 2))
        await settled()
        assert player.begun == [0, 1, 2, 3]  # all places are taken, and two groups wait
        for number in range(5):
            groups.handle(group(HELD_OUT + number, 1))
        await settled()
        assert player.begun == [0, 1, 2, 3]
        await player.release(0)
        assert player.begun[4:] == [HELD_OUT, HELD_OUT + 1]  # not the groups that waited before
        await player.release(1)
        assert player.begun[6:] == [4]  # and no more than their part
        await player.release(HELD_OUT)
        assert player.begun[7:] == [HELD_OUT + 2]
        await player.release(HELD_OUT + 1, HELD_OUT + 2, 2)
        assert player.begun[8:] == [HELD_OUT + 3, HELD_OUT + 4, 5]
        assert player.replaces == [number < HELD_OUT for number in player.begun]
        assert [m.group for m in sent if isinstance(m, GroupBegan)] == player.begun
        await groups.close()

    asyncio.run(check())


def test_without_a_bound_all_play_at_once() -> None:
    async def check() -> None:
        player = Gated()
        groups, _ = play_of(player, None)
        groups.handle(group(0, 2))
        for number in range(3):
            groups.handle(group(HELD_OUT + number, 1))
        await settled()
        assert len(player.begun) == 4
        await groups.close()

    asyncio.run(check())


def test_a_group_that_needs_all_places_is_not_shut_out() -> None:
    async def check() -> None:
        player = Gated()
        groups, _ = play_of(player, 2)
        for number in range(3):
            groups.handle(group(HELD_OUT + number, 1))
        groups.handle(group(0, 2))
        await settled()
        assert player.begun == [HELD_OUT, 0]  # one of its episodes plays, the other one waits for a place
        await player.release(0, HELD_OUT)
        assert player.begun == [HELD_OUT, 0, HELD_OUT + 1]
        await groups.close()

    asyncio.run(check())

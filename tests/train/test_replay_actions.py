"""`--replay-actions`: after a kill in the middle of episodes, they go on from their last turns, or begin again."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.train.conftest import save_at_once
from tests.train.played_groups import PlayedGroups
from tests.train.test_async_grpo import SpellingGame, facts, playing, same, trainer_of, weights
from verl_server.errors import BadRequestError
from verl_server.rollout.agent_loop import AgentLoop
from verl_server.rollout.environment import StepResult
from verl_server.rollout.environments.env_server import EnvServer
from verl_server.rollout.trajectory import Trajectory
from verl_server.train.async_grpo import AsyncGRPO
from verl_server.train.grpo import GRPO
from verl_server.train.journal import GroupJournal
from verl_server.train.options import AsyncTrainArgs, TrainArgs
from verl_server.train.ranks import all_ranks
from verl_server.train.turn_journal import read_turns
from verl_server.watch.run_files import read_events, read_lineage
from verl_server.watch.run_records import GroupDone

WAIT, PROCESS_WAIT = 60.0, 180.0
"""Most seconds until episodes have come to their places, and until a process has."""


class Held(SpellingGame):
    """A game in which episodes of seeds from `first` on wait for the kill: member m in the step m, and 3 in none."""

    def __init__(self, first: int, held: threading.Semaphore) -> None:
        super().__init__()
        self._first, self._held = first, held
        self._member: int | None = None

    async def reset(self, seed: int | None = None, **options: Any) -> StepResult:
        if seed is not None and seed >= self._first:
            self._member = int(options["episode_id"].rpartition("-")[2])
        return await super().reset(seed, **options)

    async def step(self, action: Any) -> StepResult:
        if len(self._answers) == self._member:
            self._held.release()
            await _never()
        return await super().step(action)


async def _never() -> None:
    await asyncio.Event().wait()


class Forgetful(SpellingGame):
    """A game that numbers its resets: no observation comes twice."""

    numbers = itertools.count()

    async def reset(self, seed: int | None = None, **options: Any) -> StepResult:
        result = await super().reset(seed, **options)
        return StepResult(result.observation | {"number": next(self.numbers)}, None, False)


def held(count: int) -> tuple[threading.Semaphore, Callable[[], None]]:
    """Return what counts the episodes that wait, and a function that returns when `count` of them do."""
    semaphore = threading.Semaphore(0)

    def wait() -> None:
        for _ in range(count):
            assert semaphore.acquire(timeout=WAIT), "an episode did not come to its place"

    return semaphore, wait


def plays(loop: AgentLoop, game: Callable[[], Any]) -> None:
    """Let a loop play another environment."""
    loop._setups = {None: replace(loop._setups[None], environment=game)}


def recorded(folder: Path) -> dict[tuple[int, int], list[int]]:
    """Return (group, member) -> the sampled tokens that are recorded of an episode that goes on."""
    found: dict[tuple[int, int], list[int]] = {}
    for record in read_turns(folder, lambda head: True):
        if record.progress.turn is not None:
            found.setdefault((record.number, record.progress.member), []).extend(record.progress.turn.action_tokens)
    return found


def sampled(trajectory: Trajectory) -> list[int]:
    return [token for token, mask in zip(trajectory.tokens, trajectory.loss_mask, strict=True) if mask]


def grpo(folder: Path, servers: Any, loop: Any, journal: GroupJournal | None = None) -> GRPO:
    return GRPO(trainer_of(folder, 4), servers, loop, all_ranks(), journal=journal)


def kill_in_a_rollout(policy_folder: Path, out: Path, steps_before: int, game: type[Held] = Held) -> None:
    """Play a run of `grpo` until the episodes of a step wait, and end it there."""
    semaphore, wait = held(9)
    with playing(policy_folder) as (servers, loop):
        plays(loop, lambda: game(3 * steps_before, semaphore))
        journal = GroupJournal(out, records_turns=True)
        run = grpo(policy_folder, servers, loop, journal)
        run.push()
        for _ in range(steps_before):
            run.step()
        save_at_once(run, out)
        start = loop.start

        def killed(*arguments: Any, **settings: Any) -> Any:
            running = start(*arguments, **settings)
            wait()
            running.cancel()
            raise KeyboardInterrupt

        loop.start = killed  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            run.step()
        journal.close()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("steps_before", [0, 2])
def test_grpo_goes_on_in_the_middle_of_episodes_bit_for_bit(
    policy_folder: Path, tmp_path: Path, steps_before: int
) -> None:
    with playing(policy_folder) as (servers, loop):
        straight = grpo(policy_folder, servers, loop)
        straight.push()
        expected = [straight.step() for _ in range(4)]
    kill_in_a_rollout(policy_folder, tmp_path, steps_before)
    turns = recorded(tmp_path)
    assert {place: len(tokens) for place, tokens in turns.items()} == {
        (group, member): count
        for group in range(3 * steps_before, 3 * steps_before + 3)
        for member, count in ((1, 2), (2, 4), (3, 4))
    }
    with playing(policy_folder) as (servers, loop):
        journal = GroupJournal(tmp_path, records_turns=True)
        again = grpo(policy_folder, servers, loop, journal)
        again.load(tmp_path / f"checkpoint-{steps_before}")
        again.push()
        steps = [again.step() for _ in range(4 - steps_before)]
        save_at_once(again, tmp_path)
        journal.close()
    first = steps[0].metrics
    assert (first.kept_episodes, first.replayed_episodes, first.replay_refused) == (3, 6, 0)
    assert not any(step.metrics.kept_episodes or step.metrics.replayed_episodes for step in steps[1:])
    assert {t.task.member: t.kept_turns for t in steps[0].rollout.trajectories} == {0: None, 1: 1, 2: 2, 3: 3}
    for step, other in zip(expected[steps_before:], steps, strict=True):
        assert [facts(t) for t in step.rollout.trajectories] == [facts(t) for t in other.rollout.trajectories]
        assert other.metrics.losses == step.metrics.losses and other.metrics.logprob_gap == step.metrics.logprob_gap
    assert same(weights(straight.trainer), weights(again.trainer))
    assert recorded(tmp_path) == {}


@pytest.mark.usefixtures("one_rank")
def test_grpo_plays_episodes_again_whose_environment_does_not_repeat_itself(
    policy_folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class HeldForgetful(Held, Forgetful):
        pass

    with playing(policy_folder) as (servers, loop):
        straight = grpo(policy_folder, servers, loop)
        straight.push()
        expected = straight.step()
    kill_in_a_rollout(policy_folder, tmp_path, 0, HeldForgetful)
    with playing(policy_folder) as (servers, loop):
        plays(loop, Forgetful)
        again = grpo(policy_folder, servers, loop, GroupJournal(tmp_path, records_turns=True))
        again.load(tmp_path / "checkpoint-0")
        again.push()
        step = again.step()
    assert (step.metrics.kept_episodes, step.metrics.replayed_episodes, step.metrics.replay_refused) == (3, 0, 6)
    assert len(step.rollout.trajectories) == 12
    assert [facts(t) for t in expected.rollout.trajectories] == [facts(t) for t in step.rollout.trajectories]
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len([text for text in warnings if "the first observation differs" in text]) == 1


@pytest.mark.usefixtures("one_rank")
def test_without_the_option_episodes_begin_again(policy_folder: Path, tmp_path: Path) -> None:
    kill_in_a_rollout(policy_folder, tmp_path, 0)
    with playing(policy_folder) as (servers, loop):
        again = grpo(policy_folder, servers, loop, GroupJournal(tmp_path))
        again.load(tmp_path / "checkpoint-0")
        again.push()
        step = again.step()
    assert {t.kept_turns for t in step.rollout.trajectories} == {None} and step.metrics.kept_episodes == 0


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("lost_steps", [0, 1])
@pytest.mark.parametrize("game", [SpellingGame, Forgetful])
def test_asynchronous_episodes_go_on_while_they_are_young(
    policy_folder: Path, tmp_path: Path, game: type[SpellingGame], lost_steps: int
) -> None:
    """The run is killed `lost_steps` steps after its checkpoint of step 2. Each group has one fate."""
    fates: list[GroupDone] = []
    first, last = 6 + 3 * lost_steps, 4 + lost_steps
    semaphore, wait = held(18)

    class HeldGame(Held, game):  # type: ignore[misc, valid-type]
        pass

    def open_run(loop: Any, servers: Any, incarnation: str) -> tuple[AsyncGRPO, PlayedGroups, GroupJournal]:
        journal = GroupJournal(tmp_path, records_turns=True)
        rollouts = PlayedGroups(loop, journal)
        settings: dict[str, Any] = {"steps": last, "max_staleness": 1, "incarnation": incarnation, "journal": journal}
        trainer = trainer_of(policy_folder, last)
        return AsyncGRPO(trainer, servers, rollouts, all_ranks(), note=note, **settings), rollouts, journal

    def note(event: Any) -> None:
        if isinstance(event, GroupDone):
            fates.append(event)

    with playing(policy_folder) as (servers, loop):
        plays(loop, lambda: HeldGame(first, semaphore))
        run, rollouts, journal = open_run(loop, servers, "aaaaaaaa")
        run.push()
        for _ in range(2):
            run.step()
        save_at_once(run, tmp_path)
        for _ in range(lost_steps):
            run.step()
        wait()
        rollouts.close()
        journal.close()
    turns = recorded(tmp_path)
    fates = [fate for fate in fates if fate.step < 2]
    with playing(policy_folder) as (servers, loop):
        plays(loop, game)
        run, rollouts, journal = open_run(loop, servers, "bbbbbbbb")
        run.load(tmp_path / "checkpoint-2")
        run.push()
        steps = [run.step() for _ in range(2, last)]
        rollouts.close()
        journal.close()
    assert sorted(fate.group for fate in fates) == list(range(3 * last))
    assert all(step.metrics.age_max is not None and step.metrics.age_max <= 1 for step in steps)
    assert all(step.metrics.failed == 0 for step in steps)
    metrics = [step.metrics for step in steps]
    # Groups 12 to 14 are of version 3 of the lost start. It is as far away as version 1, when they can start.
    groups = 6 - 3 * lost_steps
    assert sum(m.kept_groups for m in metrics) == 3 * lost_steps
    assert sum(m.kept_episodes for m in metrics) == groups
    replayed = sum(m.replayed_episodes for m in metrics)
    assert (replayed, sum(m.replay_refused for m in metrics)) == (
        (2 * groups, 0) if game is SpellingGame else (0, 2 * groups)
    )
    for trajectory in (t for step in steps for t in step.rollout.trajectories if t.kept_turns):
        tokens = turns[trajectory.task.group, trajectory.member] if trajectory.task.group >= first else []
        assert sampled(trajectory)[: len(tokens)] == tokens
        labels = [label for label in trajectory.weight_versions if label]
        assert all(label.endswith("@aaaaaaaa") for label in labels[: len(tokens)])


# -- real processes ----------------------------------------------------------------------------------------------------


def command(trainer: str, policy_folder: Path, server_url: str, env_url: str, out: Path, *more: str) -> list[str]:
    settings = ["--model-path", str(policy_folder), "--server", server_url, "--env-url", env_url, "--out", str(out)]
    settings += ["--no-chat", "--max-turns", "5", "--max-new-tokens", "2", "--device", "cpu", "--retry-pause", "0"]
    settings += ["--grpo.groups", "2", "--grpo.group-size", "4", "--grpo.minibatches", "1", "--grpo.epochs", "1"]
    settings += ["--grpo.learning-rate", "0.003", "--grpo.warmup-steps", "1", "--max-skipped-steps", "100"]
    settings += ["--steps", "2", "--save-every", "1", "--replay-actions", *more]
    return [sys.executable, "-m", f"verl_server.train.{trainer}", *settings]


def kill_when(process: subprocess.Popen[bytes], is_so: Callable[[], bool]) -> None:
    """Kill a trainer when a condition holds. The wait is bounded. Its rollout process ends with it."""
    deadline = time.monotonic() + PROCESS_WAIT
    try:
        while not is_so():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        process.kill()
    process.wait(WAIT)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("trainer", ["grpo", "async_grpo"])
def test_a_trainer_that_was_killed_in_long_episodes_keeps_their_turns(
    policy_folder: Path, server_url: str, tmp_path: Path, trainer: str
) -> None:
    """The episodes of step 1 wait in their fourth turn. `grpo` then has the weights of a run without the kill."""
    gate, logs = tmp_path / "gate", tmp_path / "log"
    game = {"numbers": 12, "guesses": 5, "held": [2, 3], "gate": str(gate), "after": 3}
    with EnvServer("tests.train.environments:HeldGame", kwargs=game) as environment, logs.open("wb") as log:

        def start(out: str, *more: str) -> subprocess.Popen[bytes]:
            words = command(trainer, policy_folder, server_url, environment.url, tmp_path / out, *more)
            return subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)

        gate.touch()
        if trainer == "grpo":
            assert start("straight").wait(PROCESS_WAIT) == 0, logs.read_text()[-5000:]
        gate.unlink()
        out = tmp_path / "run"

        def have_played() -> bool:
            """Return True if each episode of step 1 has played three turns, or has ended."""
            turns = Counter((r.number, r.progress.member) for r in read_turns(out, lambda head: head.number in (2, 3)))
            ends = {(r.number, r.progress.member) for r in read_turns(out, bool) if r.progress.ended is not None}
            places = [(group, member) for group in (2, 3) for member in range(4)]
            has_come = all(turns[place] == 3 or place in ends for place in places)
            return (out / "checkpoint-1").exists() and has_come

        kill_when(start("run"), have_played)
        turns = recorded(out)
        gate.touch()
        assert start("run", "--resume").wait(PROCESS_WAIT) == 0, logs.read_text()[-5000:]
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    last = metrics[-1]
    assert (last["step"], last["replayed_episodes"], last["replay_refused"], last["failed"]) == (1, 8, 0, 0)
    lines = [json.loads(line) for line in (out / "trajectories-rank0.jsonl").read_text().splitlines()]
    before = 0 if trainer == "async_grpo" else 2  # groups of the steps before, if a step counts its groups from 0
    found = [line for line in lines if line["kept_turns"]]
    assert len(found) == 8 and {line["kept_turns"] for line in found} == {3}
    for line in found:
        known = turns[before + line["task"]["group"], line["task"]["member"]]
        tokens = [token for token, mask in zip(line["tokens"], line["loss_mask"], strict=True) if mask]
        assert tokens[: len(known)] == known and len(known) >= 3
    if trainer == "async_grpo":
        lineage = read_lineage(out)
        fates = [e for e in read_events(out) if isinstance(e, GroupDone) and lineage.has(e.step, e.incarnation)]
        assert sorted(fate.group for fate in fates) == [0, 1, 2, 3]
    else:
        straight, resumed = (load_file(tmp_path / name / "model/model.safetensors") for name in ("straight", "run"))
        assert all(torch.equal(straight[name], resumed[name]) for name in straight)


# -- options -----------------------------------------------------------------------------------------------------------


def test_an_agent_is_refused() -> None:
    with pytest.raises(
        BadRequestError, match=r"--replay-actions is for the built-in loop: .* Remove the option, or --a"
    ):
        TrainArgs("model", "http://env:1", agent="agent.py:play", replay_actions=True)


def test_the_rank_timeout_is_twice_that_of_an_episode() -> None:
    assert AsyncTrainArgs("model", "http://env:1", replay_actions=True).replay_actions
    with pytest.raises(BadRequestError, match="must be at least twice --trajectory-timeout 3600 with --replay-actions"):
        TrainArgs("model", "http://env:1", replay_actions=True, rank_timeout=7000)

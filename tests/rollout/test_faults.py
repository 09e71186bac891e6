"""Each end of an episode has a fault; `AgentLoop` scores the policy's and replaces the infrastructure's only."""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.rollout.fakes import FakeEnvironment, WordRenderer, generated, says
from tests.rollout.test_agent_loop import FakeEngine
from verl_server.errors import BadRequestError, ControlTimeoutError, ServerUnavailableError
from verl_server.rollout import episode as episodes
from verl_server.rollout.agent_loop import AgentLoop, Rollout
from verl_server.rollout.environment import ActionRefusedError, EnvError, EnvTimeoutError
from verl_server.rollout.episode import Limits
from verl_server.rollout.faults import FAULTS, FaultRules, describe_ends
from verl_server.rollout.replacements import attempt_seed
from verl_server.rollout.trajectory import Fault, StopReason, Task, Trajectory, append_jsonl, read_jsonl

_DOCS = Path(__file__).parents[2] / "docs" / "debugging.md"


class ScriptedEngine(FakeEngine):
    """Returns or raises the next of `outputs`, and answers as `FakeEngine` when there are no more."""

    def __init__(self, *outputs: Any) -> None:
        super().__init__()
        self.outputs = list(outputs)
        self.seeds: list[Any] = []

    async def async_generate(self, *arguments: Any, **options: Any) -> Any:  # type: ignore[override]
        self.seeds.append(arguments[1].get("sampling_seed"))
        output = self.outputs.pop(0) if self.outputs else await super().async_generate(*arguments, **options)
        if isinstance(output, Exception):
            raise output
        if isinstance(output, asyncio.Event):
            await output.wait()
        return output


def play(
    environments: list[list[Any]], tasks: int | list[Task] = 1, *, engine: FakeEngine | None = None, **options: Any
) -> Rollout:
    """Play tasks. Each attempt has the next environment; the last one is repeated."""
    made = [FakeEnvironment(*answers) for answers in environments[:-1]]

    def make() -> FakeEnvironment:
        return made.pop(0) if made else FakeEnvironment(*environments[-1])

    played = [Task(seed=i, group=i, sampling_seed=100 + i) for i in range(tasks)] if isinstance(tasks, int) else tasks
    with AgentLoop(engine or FakeEngine(), make, WordRenderer(), **{"replacements": 3} | options) as loop:
        return loop.run(played)


WON = [says("a"), says("z", 1.0, True)]


def test_the_table_has_each_reason_and_so_has_the_page() -> None:
    assert FAULTS.keys() == set(StopReason)
    rows = re.findall(r"^\| `(\w+)` \| (policy|infrastructure|unknown) \| [^|]{20,} \|$", _DOCS.read_text(), re.M)
    assert dict(rows) == {str(reason): str(fault) for reason, fault in FAULTS.items()}


@pytest.mark.parametrize("reason", list(StopReason))
def test_only_ends_of_the_policy_have_a_reward(reason: StopReason) -> None:
    for reward, expected in ((2.0, 2.0), (None, -1.0)):
        trajectory = Trajectory(task=Task(seed=0))
        trajectory.append_observation({}, [1])
        trajectory.append_output([2], [-1.0], ["0"])
        trajectory.turns[0].reward = reward
        trajectory.finish(reason)
        FaultRules(score_failed=-1.0).settle(trajectory)
        if reason is StopReason.DONE and reward is None:
            expected = None  # nothing failed, and the environment returned no reward
        assert trajectory.fault is FAULTS[reason]
        assert trajectory.reward == (expected if trajectory.fault is Fault.POLICY else None)


@pytest.mark.parametrize(
    ("first", "outputs", "limits", "reason", "reward"),
    [
        ([says("a"), says("z", 1.0, True)], [], {}, StopReason.DONE, 1.0),
        ([says("a"), says("b")], [], {"max_turns": 1}, StopReason.MAX_TURNS, 0.0),
        ([says("a"), says("b", 0.5)], [], {"max_tokens": 3}, StopReason.MAX_TOKENS, 0.5),
        ([says("a"), says("b" * 2000)], [], {}, StopReason.CONTEXT_FULL, 0.0),
        ([says("a"), asyncio.Event()], [], {"trajectory_timeout": 0.1}, StopReason.TIME_LIMIT, 0.0),
        ([says("a"), ActionRefusedError("no")], [], {}, StopReason.ACTION_REFUSED, 0.0),
        ([says("a"), says("b", 0.5), ActionRefusedError("no")], [], {}, StopReason.ACTION_REFUSED, 0.5),
        ([says("a"), EnvTimeoutError("late")], [], {}, StopReason.ENV_TIMEOUT, None),
        ([says("a"), EnvError("gone")], [], {}, StopReason.ENV_ERROR, None),
        ([says("a")], [BadRequestError("x")], {}, StopReason.GENERATION_ERROR, None),
        ([says("a")], [generated([], "abort")] * 2, {}, StopReason.ABORTED, None),
    ],
)
def test_ends_of_the_built_in_loop(
    monkeypatch: pytest.MonkeyPatch,
    first: list[Any],
    outputs: list[Any],
    limits: dict[str, Any],
    reason: StopReason,
    reward: float | None,
) -> None:
    monkeypatch.setattr(episodes, "_MAX_RESUMES", 1)
    rollout = play([first, WON], engine=ScriptedEngine(*outputs), limits=Limits(**limits))
    (last,) = rollout.trajectories
    if FAULTS[reason] is Fault.INFRASTRUCTURE:
        (lost,) = rollout.replaced
        assert (lost.stop_reason, lost.fault, lost.reward, lost.attempt) == (reason, Fault.INFRASTRUCTURE, None, 0)
        assert (last.stop_reason, last.reward, last.attempt) == (StopReason.DONE, 1.0, 1)
    else:
        assert (last.stop_reason, last.fault, last.reward, last.attempt) == (reason, FAULTS[reason], reward, 0)
        assert rollout.replaced == []


@pytest.mark.parametrize("broken", [math.nan, -math.inf, None])
def test_an_answer_without_finite_logprobs_is_replaced(tmp_path: Path, broken: float | None) -> None:
    """JSON has null for such a number. A file with it could not be read, and a trainer could not use the episode."""
    output = generated([1, 2], output_token_logprobs=[[-0.5, 1, None], [broken, 2, None]])
    rollout = play([WON], engine=ScriptedEngine(output))
    (lost,), (again,) = rollout.replaced, rollout.trajectories
    assert (lost.stop_reason, again.stop_reason) == (StopReason.GENERATION_ERROR, StopReason.DONE)
    assert "not finite" in str(lost.error)
    append_jsonl(tmp_path / "trajectories.jsonl", [lost, again])
    assert read_jsonl(tmp_path / "trajectories.jsonl") == [lost, again]


def test_a_late_generation_is_neither_replaced_nor_scored() -> None:
    late, won = play([WON], 2, engine=ScriptedEngine(ControlTimeoutError("late"))).trajectories
    assert (late.stop_reason, late.fault, late.reward) == (StopReason.GENERATION_TIMEOUT, Fault.UNKNOWN, None)
    assert (late.attempt, won.reward) == (0, 1.0)


def test_a_replacement_has_the_place_and_another_seed() -> None:
    engine = ScriptedEngine()
    finished: list[Trajectory] = []
    answers = [[says("a"), EnvError("gone")], [says("a"), EnvError("gone")], WON]
    made = [FakeEnvironment(*each) for each in answers]
    resets = list(made)
    task = Task(seed=7, group=4, member=2, sampling_seed=100, episode_id="x")
    with AgentLoop(engine, lambda: made.pop(0), WordRenderer(), replacements=2) as loop:
        rollout = loop.run([task], finished.append)
    assert [t.attempt for t in finished] == [0, 1, 2] and finished == [*rollout.replaced, *rollout.trajectories]
    assert {(t.task.seed, t.task.group, t.member, t.task.episode_id) for t in finished} == {(7, 4, 2, "x")}
    assert [each.reset_with for each in resets] == [{"seed": 7, "episode_id": "x"}] * 3
    assert engine.seeds == [100, attempt_seed(100, 1), attempt_seed(100, 2)] == [t.task.sampling_seed for t in finished]
    assert len(set(engine.seeds)) == 3


def test_replacements_are_bounded_in_each_group() -> None:
    tasks = [Task(seed=i // 2, group=i // 2, member=i % 2) for i in range(4)]
    rollout = play([[EnvError("gone")]], tasks, replacements=3)
    assert [(t.task.group, t.member) for t in rollout.trajectories] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert Counter(t.task.group for t in rollout.replaced) == {0: 3, 1: 3}
    assert all(t.reward is None and t.fault is Fault.INFRASTRUCTURE for t in rollout.trajectories)
    assert play([[EnvError("gone")]], replacements=0).replaced == []


def test_a_replacement_takes_the_place_of_the_lost_episode_and_waits_since_its_end() -> None:
    """With one place, no other episode begins between a lost episode and the one that replaces it."""
    rollout = play([[says("a"), EnvError("gone")], WON], 2, max_concurrency=1)
    (lost,), (again, other) = rollout.replaced, rollout.trajectories
    assert (lost.task.group, again.task.group, again.attempt, other.attempt) == (0, 0, 1, 0)
    waits = [each.events[0] for each in (lost, again, other)]
    assert [event.kind for event in waits] == ["queue"] * 3 and waits[0].start == waits[2].start == 0.0
    assert waits[1].start == lost.events[-1].end < waits[1].end, "it did not wait while the lost episode played"
    assert waits[2].end >= again.events[-1].end


def test_two_faults_of_one_group_share_what_it_has_left() -> None:
    """Both episodes are lost at the same time, and one replacement is left. Each place has one final episode."""
    tasks = [Task(seed=0, group=5, member=member) for member in range(3)]
    gone = [says("a"), EnvError("gone")]
    rollout = play([gone, gone, WON], tasks, replacements=1)
    assert [t.member for t in rollout.trajectories] == [0, 1, 2]
    assert sorted((t.attempt, str(t.fault)) for t in rollout.trajectories) == [
        (0, "infrastructure"),
        (0, "policy"),
        (1, "policy"),
    ]
    (lost,) = rollout.replaced
    assert rollout.trajectories[lost.member].attempt == 1


def test_an_option_moves_a_reason() -> None:
    hung = [says("a"), EnvTimeoutError("late")]
    (blamed,) = play([hung, WON], faults=FaultRules(("env_timeout=policy",), -2.0)).trajectories
    assert (blamed.fault, blamed.reward, blamed.attempt) == (Fault.POLICY, -2.0, 0)
    (left_out,) = play([hung, WON], faults=FaultRules(("env_timeout=policy",), None)).trajectories
    assert left_out.reward is None
    limit = Limits(max_turns=1)
    rollout = play([[says("a"), says("b", 0.5)], WON], limits=limit, faults=FaultRules(("max_turns=infrastructure",)))
    assert [t.reward for t in [*rollout.replaced, *rollout.trajectories]] == [None, 1.0]
    (unknown,) = play([[EnvError("x")], WON], faults=FaultRules(("env_error=unknown",))).trajectories
    assert (unknown.fault, unknown.reward, unknown.attempt) == (Fault.UNKNOWN, None, 0)


def test_a_failure_without_a_sampled_token_has_no_score() -> None:
    (trajectory,) = play([[asyncio.Event()]], limits=Limits(trajectory_timeout=0.05)).trajectories
    assert (trajectory.stop_reason, trajectory.reward) == (StopReason.TIME_LIMIT, None)


@pytest.mark.parametrize(
    "option", ["nothing=policy", "env_error", "env_error=mine", "done=unknown", "=", "idle=policy"]
)
def test_wrong_options_are_refused(option: str) -> None:
    with pytest.raises(BadRequestError, match=r"fault|policy's"):
        FaultRules((option, "idle=unknown"))
    with pytest.raises(BadRequestError, match="finite"):
        FaultRules(score_failed=float("nan"))


def test_a_straggler_is_neither_replaced_nor_scored_and_a_replacement_may_be_one() -> None:
    """The first task's episode is lost, and the one that replaces it hangs."""
    limits = Limits(straggler_timeout=0.1, straggler_fraction=0.5, trajectory_timeout=5)
    environments = [[says("a"), EnvError("gone")], WON, [says("a"), says("b", 1.0), asyncio.Event()]]
    rollout = play(environments, 2, limits=limits)
    straggler, won = rollout.trajectories
    assert (straggler.stop_reason, straggler.fault, straggler.reward) == (StopReason.STRAGGLER, Fault.UNKNOWN, None)
    assert (straggler.attempt, won.reward, len(rollout.replaced)) == (1, 1.0, 1)
    assert str(straggler.error).startswith("1 of the batch's 2 episodes had ended"), "the lost one is not counted"


def test_a_server_that_fails_every_generation_is_still_an_error() -> None:
    with pytest.raises(ServerUnavailableError, match="No generation succeeded"):
        play([WON], 2, engine=ScriptedEngine(*[BadRequestError("x")] * 20), replacements=1)


def test_ends_are_described_by_fault() -> None:
    ends = [(StopReason.DONE, None), (StopReason.DONE, Fault.POLICY), (StopReason.ENV_TIMEOUT, Fault.POLICY)]
    ends += [(StopReason.ENV_ERROR, None)]
    assert describe_ends(ends) == "policy 3 (done 2, env_timeout 1), infrastructure 1 (env_error 1)"

"""An episode goes on from recorded turns if the environment repeats its answers exactly, and else begins again."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec
import pytest

from tests.rollout.fakes import FakeEnvironment, WordRenderer, generated, says
from tests.rollout.test_agent_loop import FakeEngine
from verl_server.files.json_values import jsonable
from verl_server.rollout.agent_loop import AgentLoop, Rollout
from verl_server.rollout.environment import EnvAwayError, EnvError, StepResult
from verl_server.rollout.episode import Limits
from verl_server.rollout.recorded_turns import EpisodeProgress, RecordedEpisode, RecordedTurn, Recording, restore
from verl_server.rollout.renderer import ActionError
from verl_server.rollout.trajectory import StopReason, Task, Trajectory

ANSWERS = [says("ab"), says("cd", 0.25), says("ef"), says("gh", 0.5), says("end", 1.0, True)]
TASK = Task(seed=1, group=4, member=2, sampling_seed=7)


class Sampler(FakeEngine):
    """Samples two tokens, which are a function of the prompt. Its reports about the policy differ from turn to turn."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts: list[int] = []

    async def async_generate(
        self, prompt: Any = None, sampling_params: Any = None, input_ids: Any = None, session_id: Any = None, **_: Any
    ) -> Any:  # type: ignore[override]
        self.prompts.append(len(input_ids))
        meta: dict[str, Any] = {}
        if len(input_ids) in (6, 10):  # the second and the third turn
            meta = {"policy_logprobs": "given", "output_token_policy_logprobs": [-3.0, -4.0]}
        if len(input_ids) == 10:
            meta |= {"output_token_has_choice": [0, 1]}
        return generated([97 + sum(input_ids) % 20, 98], version=f"{len(input_ids)}@aaaaaaaa", **meta)


class Played:
    """The episodes of one call, with what it recorded."""

    def __init__(
        self, *answers: Any, earlier: RecordedEpisode | None = None, renderer: Any = None, **settings: Any
    ) -> None:
        self.environments: list[FakeEnvironment] = []
        self.progress: list[EpisodeProgress] = []
        self.finished: list[Trajectory] = []
        self.groups: list[Rollout] = []
        plays = list(answers)

        def environment() -> FakeEnvironment:
            self.environments.append(FakeEnvironment(*plays.pop(0)))
            return self.environments[-1]

        self.engine = Sampler()
        recording = Recording(
            lambda group, progress: self.progress.append(copied(progress)),
            {} if earlier is None else {(4, 2): copied(earlier)},
        )
        with AgentLoop(self.engine, environment, renderer or WordRenderer(), **settings) as loop:
            play = loop.arun([TASK], self.finished.append, on_group=self.groups.append, recording=recording)
            (self.trajectory,) = loop.run_async(asyncio.wait_for(play, 10)).trajectories

    @property
    def turns(self) -> list[RecordedTurn]:
        return [progress.turn for progress in self.progress if progress.turn is not None]

    def until(self, turn: int) -> RecordedEpisode:
        return RecordedEpisode(member=2, turns=self.turns[:turn])


def copied(value: Any) -> Any:
    """Return a value as the trainer's journal returns it."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value, enc_hook=jsonable), type=type(value))


def facts(trajectory: Trajectory) -> dict[str, Any]:
    """Return all of a trajectory except its waits."""
    values = msgspec.structs.asdict(trajectory)
    return {name: value for name, value in values.items() if name not in ("events", "began", "kept_turns")}


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_an_episode_goes_on_from_every_turn_with_the_same_tokens(turns: int) -> None:
    whole = Played(ANSWERS)
    assert len(whole.turns) == 3 and [t.answer["text"] for t in whole.turns] == ["cd", "ef", "gh"]
    assert whole.progress[-1].ended == whole.trajectory and whole.trajectory.reward == 1.75
    later = Played(ANSWERS, earlier=whole.until(turns))
    assert facts(later.trajectory) == facts(whole.trajectory) and later.trajectory.kept_turns == turns
    assert later.engine.prompts == whole.engine.prompts[turns:]
    assert later.environments[0].actions == whole.environments[0].actions and later.environments[0].closed == 1
    assert [t.number for t in later.turns] == list(range(turns, 3)) and later.turns == whole.turns[turns:]
    assert later.groups[0].trajectories == [later.trajectory] == later.finished
    assert whole.trajectory.kept_turns is None


DIFFERENT: dict[str, tuple[int, Any, str]] = {
    "first observation": (0, says("ax"), "the first observation differs: recorded "),
    "observation": (2, says("ex"), "the answer in turn 1 differs: recorded "),
    "type of a number": (1, StepResult({"text": "cd", "n": 1.0}, 0.25, False), "the answer in turn 0 differs"),
    "reward": (1, says("cd", 0.5), "the answer in turn 0 has another reward: recorded 0.25, now 0.5"),
    "no reward": (1, says("cd"), "recorded 0.25, now None"),
    "end": (2, says("ef", None, True), "the answer in turn 1 has another end: recorded False, now True"),
    "failure": (2, EnvError("the sandbox is down"), "the environment failed in turn 1: the sandbox is down"),
    "away": (0, EnvAwayError("nobody listens"), "the environment failed in the reset: nobody listens"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_an_episode_whose_environment_does_not_repeat_itself_begins_again(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    place, other, message = DIFFERENT[name]
    whole = Played(ANSWERS)
    again = Played([*ANSWERS[:place], other, *ANSWERS[place + 1 :]], ANSWERS, earlier=whole.until(3))
    assert facts(again.trajectory) == facts(whole.trajectory) and again.trajectory.kept_turns == 0
    assert [t.number for t in again.turns] == [0, 1, 2] and len(again.finished) == 1
    assert [environment.closed for environment in again.environments] == [1, 1]
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "of which 3 turns were recorded, begins again" in record.getMessage() and message in record.getMessage()


def test_only_the_first_refusal_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    turns = Played(ANSWERS).until(2)
    tasks = [msgspec.structs.replace(TASK, member=member) for member in range(3)]
    episodes = iter([[says("ax")], ANSWERS, [says("ay")], ANSWERS, ANSWERS])
    earlier = {(4, member): msgspec.structs.replace(turns, member=member) for member in (0, 1)}
    with AgentLoop(Sampler(), lambda: FakeEnvironment(*next(episodes)), WordRenderer(), max_concurrency=1) as loop:
        rollout = loop.run_async(loop.arun(tasks, recording=Recording(None, earlier)))
    assert [t.kept_turns for t in rollout.trajectories] == [0, 0, None]
    assert sum(r.levelno == logging.WARNING for r in caplog.records) == 1


def test_the_order_of_keys_does_not_matter() -> None:
    first = [StepResult({"text": "ab", "n": {"x": 1, "y": [2.5]}}, None, False), *ANSWERS[1:]]
    other = [StepResult({"n": {"y": [2.5], "x": 1}, "text": "ab"}, None, False), *ANSWERS[1:]]
    assert Played(other, earlier=Played(first).until(2)).trajectory.kept_turns == 2


def test_a_turn_without_an_action_is_not_sent() -> None:
    class Strict(WordRenderer):
        def action(self, token_ids: list[int], prompt_ids: list[int]) -> dict[str, Any]:
            if len(prompt_ids) == 6:
                raise ActionError("no JSON", {"text": "no"})
            return super().action(token_ids, prompt_ids)

    answers = [ANSWERS[0], ANSWERS[1], ANSWERS[3], ANSWERS[4]]
    whole = Played(answers, renderer=Strict())
    assert [turn.turn.action is None for turn in whole.turns] == [False, True, False]
    later = Played(answers, earlier=whole.until(3), renderer=Strict())
    assert facts(later.trajectory) == facts(whole.trajectory) and len(later.environments[0].actions) == 3


def test_an_episode_that_had_ended_is_not_played() -> None:
    whole = Played(ANSWERS)
    kept = Played(earlier=RecordedEpisode(member=2, ended=whole.trajectory))
    assert facts(kept.trajectory) == facts(whole.trajectory) and kept.trajectory.kept_turns == 4
    assert kept.environments == [] and kept.progress == [] and kept.finished == [kept.trajectory]
    assert kept.groups[0].trajectories == [kept.trajectory]


def test_a_failed_episode_is_not_recorded_as_ended_and_its_replacement_goes_on() -> None:
    failed = [*ANSWERS[:2], EnvError("the sandbox is down")]
    whole = Played(failed, ANSWERS, replacements=1)
    assert [(p.attempt, p.turn and p.turn.number) for p in whole.progress] == [
        (0, 0),
        (1, 0),
        (1, 1),
        (1, 2),
        (1, None),
    ]
    begun = RecordedEpisode(member=2, attempt=1, turns=whole.turns[1:3])
    later = Played(ANSWERS, earlier=begun, replacements=1)
    assert facts(later.trajectory) == facts(whole.trajectory) and later.trajectory.attempt == 1
    lost = Played(failed, earlier=RecordedEpisode(member=2, attempt=1), replacements=1)
    assert lost.trajectory.stop_reason is StopReason.ENV_ERROR  # its replacement was used before the kill
    assert [p.ended for p in lost.progress] == [None]


def test_a_replay_has_a_bound_and_the_episode_then_all_of_its_time(caplog: pytest.LogCaptureFixture) -> None:
    turns = Played(ANSWERS).until(2)
    again = Played([ANSWERS[0], asyncio.Event()], ANSWERS, earlier=turns, limits=Limits(trajectory_timeout=0.2))
    assert again.trajectory.stop_reason is StopReason.DONE and again.trajectory.kept_turns == 0
    assert "the replay took longer than 0.2 s" in caplog.text


def test_recorded_turns_that_exceed_the_limits_begin_again(caplog: pytest.LogCaptureFixture) -> None:
    turns = Played(ANSWERS).until(3)
    for limits in (Limits(max_tokens=12), Limits(max_turns=3)):
        again = Played(ANSWERS, ANSWERS, earlier=turns, limits=limits)
        assert again.trajectory.kept_turns == 0
        assert again.trajectory.stop_reason in (StopReason.MAX_TOKENS, StopReason.MAX_TURNS)
    assert "its 12 tokens and 3 turns exceed the limits" in caplog.text


def test_restored_tokens_are_those_of_the_whole_episode() -> None:
    whole = Played(ANSWERS)
    trajectory = Trajectory(task=TASK)
    assert restore(trajectory, whole.turns) == {"text": "gh"}
    assert trajectory.turns == whole.trajectory.turns[:3]
    count = len(trajectory.tokens)
    assert trajectory.policy_logprobs == whole.trajectory.policy_logprobs[:count] != []
    assert trajectory.has_choice == whole.trajectory.has_choice[:count] != []

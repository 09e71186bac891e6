"""One episode keeps sampled tokens unchanged, states the reason of its end, and never scores a failure."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.rollout.fakes import FakeEnvironment, FakePolicy, WordRenderer, generated, says
from verl_server.errors import BadRequestError, ContextLengthError, ControlTimeoutError
from verl_server.rollout.environment import EnvError, EnvTimeoutError, EnvTimeouts
from verl_server.rollout.episode import Episode, Limits
from verl_server.rollout.renderer import ActionReader
from verl_server.rollout.trajectory import StopReason, Task, Trajectory, append_jsonl, read_jsonl, summarize


def episode_of(environment: FakeEnvironment, limits: Limits | None = None, context: int = 1000, **task: Any) -> Episode:
    return Episode(Task(seed=1, **task), environment, WordRenderer(), {"temperature": 0.7}, limits or Limits(), context)


def play(episode: Episode, policy: FakePolicy) -> Trajectory:
    return asyncio.run(asyncio.wait_for(episode.play(policy), 10))


def codes(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def test_tokens_masks_logprobs_and_versions() -> None:
    environment = FakeEnvironment(says("ab"), says("c", 0.25), says("end", 1.0, True))
    spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}]
    policy = FakePolicy(
        [generated(codes("xy"), version="4", weight_versions=spans), generated(codes("z"), version="5")]
    )
    trajectory = play(episode_of(environment, episode_id="e7", sampling_seed=9), policy)

    assert trajectory.tokens == codes("abxycz")
    assert trajectory.loss_mask == [0, 0, 1, 1, 0, 1]
    assert trajectory.logprobs == [0, 0, -0.5, -1.0, 0, -0.5]
    assert trajectory.weight_versions == ["", "", "3", "4", "", "5"]
    assert (trajectory.reward, trajectory.stop_reason, trajectory.error) == (1.25, StopReason.DONE, None)
    assert [turn.action for turn in trajectory.turns] == [{"text": "xy"}, {"text": "z"}] == environment.actions
    assert [turn.reward for turn in trajectory.turns] == [0.25, 1.0]
    assert trajectory.turns[1].observation_span == (4, 5)
    assert trajectory.turns[1].action_span == (5, 6)
    assert trajectory.final_observation == {"text": "end"}
    assert environment.reset_with == {"seed": 1, "episode_id": "e7"}
    assert environment.closed == 1
    # The policy receives all tokens so far, unchanged.
    assert [request["input_ids"] for request in policy.requests] == [codes("ab"), codes("abxyc")]
    sampling = {"temperature": 0.7, "max_new_tokens": 256, "sampling_seed": 9}
    assert policy.requests[0]["sampling_params"] == sampling
    assert [event.kind for event in trajectory.events] == ["env", "generate", "env", "generate", "env"]


def test_a_turn_says_how_it_was_sampled() -> None:
    """Servers of other projects say nothing: what was asked for decides."""

    def turn(asked: dict[str, Any], **meta: Any) -> tuple[Any, Trajectory]:
        environment = FakeEnvironment(says("ab"), says("end", 1.0, True))
        answer = generated(codes("xy"))
        answer["meta_info"] |= meta
        episode = Episode(Task(seed=1), environment, WordRenderer(), asked, Limits(), 1000)
        trajectory = play(episode, FakePolicy([answer]))
        return trajectory.turns[0], trajectory

    given = {"output_token_policy_logprobs": [-3.0, -4.0], "output_token_has_choice": [0, 1]}
    found, trajectory = turn({"temperature": 0.7, "regex": "x."}, policy_logprobs="given", **given)
    assert found.policy_logprobs == "given" and found.sampling == {"temperature": 0.7, "regex": "x."}
    assert trajectory.policy_logprobs == [0.0, 0.0, -3.0, -4.0] and trajectory.trained_mask == [0, 0, 0, 1]
    for asked, known in (({}, "same"), ({"temperature": 0.7}, "same"), ({"top_p": 0.9}, "unknown")):
        found, trajectory = turn(asked)
        assert (found.policy_logprobs, bool(trajectory.policy_logprobs)) == (known, known == "unknown")
    found, trajectory = turn({"top_p": 0.9}, policy_logprobs="same")
    assert found.policy_logprobs == "same" and found.sampling == {"temperature": 1.0, "top_p": 0.9}
    found, trajectory = turn({}, policy_logprobs="given")  # a server that breaks its word
    assert (trajectory.stop_reason, trajectory.reward) == (StopReason.GENERATION_ERROR, None)


def test_a_wrong_json_action_is_a_turn_that_the_environment_does_not_see() -> None:
    class JsonRenderer(WordRenderer):
        def action(self, token_ids: list[int], prompt_ids: list[int]) -> dict[str, Any]:
            schema = {"type": "object", "required": ["n"]}
            return ActionReader("json", "text", "text", schema).read("".join(map(chr, token_ids)))

    environment = FakeEnvironment(says("ab"), says("end", 1.0, True))
    policy = FakePolicy([generated(codes(text)) for text in ("{", '{"m":1}', '{"n":1}')])
    episode = Episode(Task(seed=1), environment, JsonRenderer(), {}, Limits(), 1000)
    trajectory = play(episode, policy)
    assert environment.actions == [{"n": 1}]
    assert [turn.action for turn in trajectory.turns] == [None, None, {"n": 1}]
    assert [turn.reward for turn in trajectory.turns] == [None, None, 1.0]
    assert "The action is not JSON" in trajectory.turns[1].observation["text"]
    assert "'n' is a required property" in trajectory.turns[2].observation["text"]
    assert (trajectory.reward, trajectory.stop_reason, trajectory.error) == (1.0, StopReason.DONE, None)

    # A policy that never writes an action is responsible for it: the episode has a reward.
    episode = Episode(Task(seed=1), FakeEnvironment(says("ab")), JsonRenderer(), {}, Limits(max_turns=1), 1000)
    trajectory = play(episode, FakePolicy([generated(codes("{"))]))
    assert (trajectory.reward, trajectory.stop_reason) == (0.0, StopReason.MAX_TURNS)


def test_an_aborted_generation_is_resumed_from_its_tokens() -> None:
    environment = FakeEnvironment(says("ab"), says("end", 1.0, True))
    policy = FakePolicy(
        [
            generated(codes("x"), "abort", "1"),
            generated([], "abort", "1"),
            generated(codes("yz"), "stop", "2"),
        ]
    )
    trajectory = play(episode_of(environment, Limits(max_new_tokens=5)), policy)

    assert trajectory.tokens == codes("abxyz")
    assert trajectory.weight_versions == ["", "", "1", "2", "2"]
    assert trajectory.resumes == 2
    assert environment.actions == [{"text": "xyz"}]
    assert [request["input_ids"] for request in policy.requests] == [codes("ab"), codes("abx"), codes("abx")]
    assert [request["sampling_params"]["max_new_tokens"] for request in policy.requests] == [5, 4, 4]


def test_a_server_that_only_aborts_ends_the_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl_server.rollout.episode._MAX_RESUMES", 3)
    policy = FakePolicy([generated([], "abort")] * 10)
    trajectory = play(episode_of(FakeEnvironment(says("ab"))), policy)
    assert (trajectory.stop_reason, trajectory.reward) == (StopReason.ABORTED, None)
    assert len(policy.requests) == 4


@pytest.mark.parametrize(
    ("limits", "context", "reason", "turns", "tokens"),
    [
        (Limits(max_turns=2), 1000, StopReason.MAX_TURNS, 2, "abxcx"),
        (Limits(max_tokens=6), 1000, StopReason.MAX_TOKENS, 2, "abxcx"),  # the next observation does not fit
        (Limits(), 6, StopReason.CONTEXT_FULL, 2, "abxcx"),
    ],
)
def test_limits_that_the_policy_is_answerable_for(
    limits: Limits, context: int, reason: StopReason, turns: int, tokens: str
) -> None:
    environment = FakeEnvironment(says("ab"), says("c", 0.5), says("d", 0.25), says("e", 0.25))
    policy = FakePolicy([generated(codes("x"))] * 5)
    trajectory = play(episode_of(environment, limits, context), policy)
    assert (trajectory.stop_reason, len(trajectory.turns)) == (reason, turns)
    assert trajectory.tokens == codes(tokens)
    assert trajectory.reward == 0.75
    assert trajectory.is_trainable


def test_a_generation_cut_by_the_context_is_not_given_to_the_environment() -> None:
    environment = FakeEnvironment(says("ab"))
    policy = FakePolicy([generated(codes("xyz"), "length")])
    trajectory = play(episode_of(environment, Limits(max_new_tokens=8), context=5), policy)
    assert policy.requests[0]["sampling_params"]["max_new_tokens"] == 3
    assert (trajectory.stop_reason, trajectory.reward) == (StopReason.CONTEXT_FULL, 0.0)
    assert environment.actions == []


def test_an_action_cut_by_the_turns_limit_is_played() -> None:
    environment = FakeEnvironment(says("ab"), says("end", 1.0, True))
    trajectory = play(episode_of(environment, Limits(max_new_tokens=2)), FakePolicy([generated(codes("xy"), "length")]))
    assert trajectory.stop_reason is StopReason.DONE
    assert environment.actions == [{"text": "xy"}]


def test_a_length_that_the_server_refuses_is_a_full_context() -> None:
    trajectory = play(episode_of(FakeEnvironment(says("ab"))), FakePolicy([ContextLengthError.of(2, 9, 8)]))
    assert (trajectory.stop_reason, trajectory.reward) == (StopReason.CONTEXT_FULL, 0.0)
    assert "length is 8 tokens" in (trajectory.error or "")


@pytest.mark.parametrize(
    ("answers", "outputs", "reason"),
    [
        ([EnvTimeoutError("slow")], [], StopReason.ENV_TIMEOUT),
        ([EnvError("gone")], [], StopReason.ENV_ERROR),
        ([says("ab", done=True)], [], StopReason.ENV_ERROR),
        ([says("ab"), EnvTimeoutError("slow")], [generated([1])], StopReason.ENV_TIMEOUT),
        ([says("ab"), says("c", 1.0), EnvError("gone")], [generated([1])] * 2, StopReason.ENV_ERROR),
        ([says("ab")], [ControlTimeoutError("late")], StopReason.GENERATION_TIMEOUT),
        ([says("ab")], [{"output_ids": [1]}], StopReason.GENERATION_ERROR),
        ([says("ab")], [generated([1, 2], output_token_logprobs=[[-1.0, 1, None]])], StopReason.GENERATION_ERROR),
    ],
)
def test_a_failure_is_not_a_score(answers: list[Any], outputs: list[Any], reason: StopReason) -> None:
    environment = FakeEnvironment(*answers)
    trajectory = play(episode_of(environment), FakePolicy(outputs))
    assert trajectory.stop_reason is reason
    assert trajectory.error
    assert trajectory.reward is None
    assert not trajectory.is_trainable
    assert environment.closed == 1


def test_an_environment_that_never_judged_gives_no_score() -> None:
    trajectory = play(episode_of(FakeEnvironment(says("ab"), says("c", None, True))), FakePolicy([generated([1])]))
    assert (trajectory.stop_reason, trajectory.reward) == (StopReason.DONE, None)


def test_the_time_limit_ends_a_hung_environment() -> None:
    environment = FakeEnvironment(says("ab"), asyncio.Event())
    trajectory = play(episode_of(environment, Limits(trajectory_timeout=0.05)), FakePolicy([generated([1])]))
    assert (trajectory.stop_reason, trajectory.reward) == (StopReason.TIME_LIMIT, None)
    assert environment.closed == 1


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (Limits, "max_turns", 0),
        (Limits, "max_tokens", 0),
        (Limits, "trajectory_timeout", 0.0),
        (Limits, "straggler_timeout", -1.0),
        (Limits, "straggler_fraction", 1.5),
        (EnvTimeouts, "step", 0.0),
        (EnvTimeouts, "capacity", float("nan")),
    ],
)
def test_bounds_that_make_no_sense_are_refused_by_name(kind: Any, field: str, value: float) -> None:
    with pytest.raises(BadRequestError, match=rf"{kind.__name__}\.{field} must be .*{value}"):
        kind(**{field: value})


def test_an_abort_at_the_last_token_that_fits_ends_the_episode() -> None:
    environment = FakeEnvironment(says("ab"))
    trajectory = play(episode_of(environment, context=4), FakePolicy([generated(codes("xy"), "abort")]))
    assert (trajectory.stop_reason, trajectory.tokens) == (StopReason.CONTEXT_FULL, codes("abxy"))
    assert environment.actions == []


def test_cancelling_closes_the_environment() -> None:
    async def main() -> Trajectory:
        environment = FakeEnvironment(asyncio.Event())
        episode = episode_of(environment)
        task = asyncio.create_task(episode.play(FakePolicy([])))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert environment.closed == 1
        return episode.trajectory

    assert asyncio.run(main()).stop_reason is StopReason.ABORTED


def test_trajectories_survive_a_file(tmp_path: Any) -> None:
    trajectory = play(episode_of(FakeEnvironment(says("ab"), says("c", 1.0, True))), FakePolicy([generated([1])]))
    failed = play(episode_of(FakeEnvironment(EnvError("gone"))), FakePolicy([]))
    append_jsonl(tmp_path / "t.jsonl", [trajectory])
    append_jsonl(tmp_path / "t.jsonl", [failed])
    assert read_jsonl(tmp_path / "t.jsonl") == [trajectory, failed]
    stats = summarize([trajectory, failed])
    assert (stats.trajectories, stats.trainable, stats.mean_reward) == (2, 1, 1.0)
    assert stats.stop_reasons == {"done": 1, "env_error": 1}

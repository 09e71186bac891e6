"""The groups without spread, the cut episodes and the reusable prompts of a step, by hand and summed over ranks."""

from __future__ import annotations

from tests.train.conftest import make_trajectory
from verl_server.rollout.trajectory import StopReason, Task, Trajectory, by_episode
from verl_server.train.episode_counts import EpisodeCounts


def played(turns: int, answer: int, *, group: int = 0, finish: str = "stop") -> Trajectory:
    """Return an episode whose prompts grow by two tokens and an answer of `answer` tokens in each turn."""
    t = Trajectory(task=Task(seed=0, group=group))
    for _ in range(turns):
        t.append_observation({}, [1, 2])
        t.append_output([3] * answer, [-1.0] * answer, ["0"] * answer)
        t.turns[-1].finish_reason, t.turns[-1].reward = finish, 1.0
    t.finish(StopReason.DONE)
    return t


def counts(*trajectories: Trajectory) -> EpisodeCounts:
    return EpisodeCounts.of(by_episode(trajectories))


def test_groups_with_equal_rewards_have_no_spread() -> None:
    found = counts(
        *(make_trajectory(0, 0.5, seed=i) for i in range(3)),
        *(make_trajectory(1, float(i), seed=i) for i in range(3)),
        make_trajectory(2, None),  # failed: no group to learn from
        make_trajectory(3, 0.25),  # the only survivor of its group
    )
    assert (found.groups, found.without_spread, found.lowest, found.highest) == (3, 2, 0.0, 2.0)
    assert counts(make_trajectory(0, None)).groups == 0


def test_an_episode_that_a_limit_cut_is_truncated() -> None:
    at_limits = [played(1, 2) for _ in range(4)]
    ends = (StopReason.MAX_TURNS, StopReason.MAX_TOKENS, StopReason.CONTEXT_FULL, StopReason.TIME_LIMIT)
    for trajectory, reason in zip(at_limits, ends, strict=True):
        trajectory.stop_reason = reason
    assert counts(*at_limits).truncated == 3
    assert counts(played(2, 8, finish="length"), played(2, 8)).truncated == 1
    assert counts(played(2, 7, finish="length")).truncated == 0, "an action of fixed length"


def test_a_prompt_can_reuse_what_the_episode_and_its_group_had() -> None:
    one = counts(played(3, 4))
    assert (one.prompt_tokens, one.reusable_tokens) == (2 + 8 + 14, 0 + 6 + 12)
    two = counts(played(3, 4), played(3, 4))
    assert (two.prompt_tokens, two.reusable_tokens) == (48, 18 + 20)
    assert counts(played(3, 4), played(3, 4, group=1)).reusable_tokens == 36


def test_turns_that_branches_share_count_once() -> None:
    first, second = played(2, 4), played(2, 4)
    for number, branch in enumerate((first, second)):
        branch.session, branch.branch = "s", number
    second.loss_mask[:6] = [0] * 6
    found = counts(first, second)
    assert (found.prompt_tokens, found.reusable_tokens) == (2 + 8 + 8, 6 + 6)


def test_ranks_are_added() -> None:
    first, second = counts(played(2, 8, finish="length")), counts(make_trajectory(1, -1.0), make_trajectory(1, 4.0))
    total = first + second + EpisodeCounts()
    assert total == EpisodeCounts(
        groups=2,
        equal_rewards=[2.0],
        lowest=-1.0,
        highest=4.0,
        truncated=1,
        prompt_tokens=2 + 12 + 4,
        reusable_tokens=12,
    )

"""Counts of tokens that are trained once, more than once and never: exact ones of built sessions, and any tree's."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

import msgspec
import pytest

from tests.server.sessions.trees import Tree, random_tree
from verl_server.messages.session_types import SessionTrajectory
from verl_server.rollout.agents.branches import episode_trajectories
from verl_server.rollout.agents.types import AgentEpisode, AgentTask
from verl_server.rollout.token_counts import TokenCounts, count_tokens
from verl_server.rollout.trajectory import Trajectory
from verl_server.server.sessions.trajectory import left_out


def exported(tree: Tree, reward: float | None = 1.0, mask: Literal["once", "every"] = "once") -> list[Trajectory]:
    """Return the trajectories of a session with these turns, as a run gets them."""
    named = [
        msgspec.structs.replace(branch, session="ses" if child is None else f"ses.{child}")
        for branch in tree.branches(mask)
        for child in [tree.turns[branch.turns[-1].turn].child]
    ]
    trajectory = SessionTrajectory(
        session="ses",
        state="finished",
        reason="done",
        reward=reward,
        group="",
        metadata={},
        sampled_tokens=sum(turn.output_tokens for turn in tree.turns),
        retry_tokens=left_out(tree.turns),  # type: ignore[arg-type]
        unrecorded_turns=0,
        branches=named,
    )
    episode = AgentEpisode(AgentTask(), 0, 0, 0, 7, trajectory=trajectory, reward=reward)
    return episode_trajectories(episode)


def counted(tree: Tree, reward: float | None = 1.0) -> TokenCounts:
    return count_tokens(exported(tree, reward))


def conversation() -> Tree:
    """Return two turns of one conversation: 4 tokens read and 6 sampled."""
    tree = Tree()
    tree.add(began="root")
    tree.add(0)
    return tree


def test_one_conversation_is_trained_once() -> None:
    assert counted(conversation()) == TokenCounts(episodes=1, sampled=6, once=6, branches={"root": 1}, context=4)


def test_a_compaction_begins_a_branch_that_shares_its_head() -> None:
    tree = conversation()
    tree.add(0, shared=1, new=4, began="edited")  # one token of the system message stays
    tree.add(2)
    assert counted(tree) == TokenCounts(
        episodes=1, sampled=12, once=12, branches={"root": 1, "edited": 1}, context=4 + 7, shared=1
    )


def test_a_moved_reminder_repeats_the_conversation_before_it() -> None:
    tree = Tree()
    tree.add(new=3, began="root")  # the last of the three is the reminder
    tree.add(0, shared=2, new=6, began="edited")  # the reply of the first turn is read here, as four other tokens
    tree.add(1, shared=7, new=6, began="edited")
    assert counted(tree) == TokenCounts(
        episodes=1, sampled=9, once=9, branches={"root": 1, "edited": 2}, context=3 + 8 + 13, shared=2 + 7
    )


def test_a_result_that_is_cut_keeps_the_sampled_tokens_before_it() -> None:
    tree = conversation()
    tree.add(0, began="edited")  # continues the call with another result
    assert counted(tree) == TokenCounts(
        episodes=1, sampled=9, once=9, branches={"root": 1, "edited": 1}, context=4 + 2 + 5, shared=5
    )


def test_sub_agents_are_conversations() -> None:
    tree = conversation()
    tree.add(new=5, child="auto-1", began="child")
    tree.add(2, child="auto-1")
    tree.add(new=1, child="auto-2", began="child")
    assert counted(tree) == TokenCounts(
        episodes=1, sampled=15, once=15, branches={"root": 1, "child": 2}, context=4 + 7 + 1
    )


def test_a_reply_that_reached_nobody_is_never_trained() -> None:
    tree = conversation()
    lost = tree.add(1, sampled=7, is_delivered=False)
    tree.add(1, prompt=lost.prompt, began="retry")
    assert counted(tree) == TokenCounts(
        episodes=1, sampled=16, once=9, never={"retry": 7}, branches={"root": 1}, context=6
    )


def test_the_first_reply_may_be_lost() -> None:
    tree = Tree()
    lost = tree.add(is_delivered=False, began="root")
    tree.add(prompt=lost.prompt, began="retry")
    assert counted(tree).branches == {"root": 1}


def test_a_repeated_request_whose_reply_was_received_is_trained() -> None:
    tree = conversation()
    again = tree.turns[1].prompt
    tree.add(0, prompt=again, began="retry")
    tree.add(0, prompt=again)  # another sample of one request (`n`)
    assert counted(tree) == TokenCounts(
        episodes=1, sampled=12, once=12, branches={"root": 1, "retry": 1, "beside": 1}, context=4 + 7 + 7, shared=14
    )


def test_a_token_without_a_choice_is_never_trained() -> None:
    tree = Tree()
    tree.add(choices=[0, 1, 0], began="root")
    tree.add(0)
    assert counted(tree) == TokenCounts(
        episodes=1, sampled=6, once=4, never={"forced": 2}, branches={"root": 1}, context=6
    )


def test_a_branch_without_a_trained_token_is_not_computed() -> None:
    tree = Tree()
    tree.add(choices=[0, 0, 0], began="root")
    assert counted(tree) == TokenCounts(episodes=1, sampled=3, never={"forced": 3}, branches={"root": 1})


def test_an_episode_without_a_reward_trains_nothing() -> None:
    tree = conversation()
    lost = tree.add(1, is_delivered=False)
    tree.add(1, prompt=lost.prompt, began="retry")
    found = counted(tree, reward=None)
    assert found == TokenCounts(episodes=1, sampled=12, never={"retry": 3, "no_reward": 9}, branches={"root": 1})
    assert counted(tree).left_out("replaced").never == {"retry": 3, "replaced": 9}


def test_an_older_server_does_not_name_kinds() -> None:
    tree = Tree()
    tree.add()
    tree.add(0)
    tree.add(0)
    assert counted(tree).branches == {"root": 1, "unknown": 1}


def test_an_export_of_every_mask_trains_shared_tokens_twice() -> None:
    tree = conversation()
    tree.add(0, began="edited")
    found = count_tokens(exported(tree, mask="every"))
    assert (found.sampled, found.once, found.repeatedly, found.never) == (9, 6, 3, {})


def test_a_file_that_has_an_episode_twice_trains_it_twice() -> None:
    found = count_tokens([*exported(conversation()), *exported(conversation())])
    assert (found.sampled, found.once, found.repeatedly, found.never) == (6, 0, 6, {})


def test_a_token_that_only_a_later_branch_masks_is_trained_once() -> None:
    tree = conversation()
    tree.add(0, began="edited")
    main, fork = exported(tree)
    main.loss_mask, fork.loss_mask = [0] * 10, [0, 0, 1, 1, 1, 0, 0, 1, 1, 1]
    found = count_tokens([main, fork])
    assert (found.sampled, found.once, found.repeatedly, found.never) == (9, 6, 0, {"unmasked": 3})


def test_sums_of_episodes() -> None:
    tree = conversation()
    tree.add(0, began="edited")
    found = counted(tree) + counted(conversation(), reward=None) + TokenCounts()
    assert found == TokenCounts(
        episodes=2,
        sampled=15,
        once=9,
        never={"no_reward": 6},
        branches={"root": 2, "edited": 1},
        context=11,
        shared=5,
    )
    assert found.branches_per_episode == 1.5
    assert found.rows()["never trained"] == "6 (no_reward 6)"
    assert found.rows()["context tokens"] == "11, 45.5% of them again"
    assert TokenCounts().rows()["trained once"] == "0"


@pytest.mark.parametrize("seed", range(60))
def test_each_sampled_token_of_any_tree_is_counted_once(seed: int) -> None:
    rng = random.Random(seed)
    tree = random_tree(rng)
    for turn in tree.turns:
        if rng.random() < 0.3:
            turn.choices = [rng.randrange(2) for _ in turn.output]
    for mask in ("once", "every"):
        played = exported(tree, mask=mask)
        found = count_tokens(played)
        assert found.sampled == sum(turn.output_tokens for turn in tree.turns)
        assert found.once + found.repeatedly + sum(found.never.values()) == found.sampled
        assert found.never.keys() <= {"retry", "forced"}
        trained = _trained(played)
        assert (found.once, found.repeatedly) == (
            sum(times == 1 for times in trained.values()),
            sum(times > 1 for times in trained.values()),
        )
        assert mask == "every" or not found.repeatedly
        assert found.context == sum(len(t.tokens) - sum(t.trained_mask) for t in played if any(t.trained_mask))
        assert sum(found.branches.values()) == len(played)


def _trained(played: Sequence[Trajectory]) -> dict[int, int]:
    """Return token -> number of branches that train it. All tokens of a tree differ."""
    times: dict[int, int] = {}
    for t in played:
        for token, is_trained in zip(t.tokens, t.trained_mask, strict=True):
            if is_trained:
                times[token] = times.get(token, 0) + 1
    return times

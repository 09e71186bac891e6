"""Branches hold each sampled token with its log-probability, and train each of them once."""

from __future__ import annotations

import json
import random

import pytest

from tests.server.sessions.trees import Tree, logprob, random_tree
from verl_server.messages.session_types import Branch, VersionSpan
from verl_server.server.sessions.trajectory import branches, left_out


def masked(branch: Branch) -> list[int]:
    return [token for token, one in zip(branch.ids, branch.loss_mask, strict=True) if one]


def test_one_conversation_is_one_branch() -> None:
    tree = Tree()
    calls = [{"id": "c", "name": "add", "arguments": "{}"}]
    first = tree.add(calls=json.dumps(calls).encode())
    second = tree.add(0, spans=[("v1", 0), ("v2", 2)], finish=("length", None))
    (branch,) = tree.branches()
    assert branch.kind == "main" and branch.shared_tokens == 0
    assert branch.ids == second.sequence
    assert branch.loss_mask == [0, 0, 1, 1, 1, 0, 0, 1, 1, 1]
    assert masked(branch) == first.output + second.output
    assert branch.logprobs == [logprob(t) if one else 0.0 for t, one in zip(branch.ids, branch.loss_mask, strict=True)]
    assert branch.weight_versions == [VersionSpan("v1", 2, 5), VersionSpan("v1", 7, 9), VersionSpan("v2", 9, 10)]
    places = [(each.turn, each.start, each.prompt_end, each.end, each.finish_reason) for each in branch.turns]
    assert places == [(0, 0, 2, 5, "stop"), (1, 5, 7, 10, "length")]
    assert branch.turns[0].calls == calls and branch.turns[1].calls == []


def test_a_fork_trains_a_shared_token_once() -> None:
    tree = Tree()
    first = tree.add()
    second, third = tree.add(0), tree.add(0)
    main, fork = tree.branches()
    assert (main.kind, fork.kind) == ("main", "fork")
    assert masked(main) == first.output + second.output
    assert masked(fork) == third.output
    assert fork.shared_tokens == len(first.sequence)
    assert fork.logprobs[2:5] == [logprob(token) for token in first.output]  # sampled, though not trained here
    every = tree.branches("every")
    assert masked(every[1]) == first.output + third.output
    assert every[1].shared_tokens == len(first.sequence)


def test_a_branch_may_begin_inside_of_a_turn() -> None:
    tree = Tree()
    first = tree.add(sampled=4, spans=[("v1", 0), ("v2", 1), ("v3", 3)])
    tree.add(0)
    third = tree.add(0, shared=4)  # the first two of the four sampled tokens
    _, fork = tree.branches()
    assert [(each.turn, each.start, each.prompt_end, each.end) for each in fork.turns] == [(0, 0, 2, 4), (2, 4, 6, 9)]
    assert fork.turns[0].finish_reason == "cut"
    assert fork.weight_versions[:2] == [VersionSpan("v1", 2, 3), VersionSpan("v2", 3, 4)]
    assert fork.shared_tokens == 4 and masked(fork) == third.output
    alone = [turn for turn in tree.turns if turn.turn != 1]
    # Without the turn between, the first turn is a leaf. The rest of its output is in no other branch.
    kept = list(branches(alone, "once", False))
    assert [masked(each) for each in kept] == [first.output, third.output]


def test_a_lost_reply_that_was_sampled_again_is_left_out() -> None:
    tree = Tree()
    first = tree.add()
    lost = tree.add(0, is_delivered=False)
    again = tree.add(0, prompt=lost.prompt)
    (branch,) = tree.branches()
    # The turn before is trained in the branch that is exported, although the retry was there first.
    assert branch.kind == "main" and masked(branch) == first.output + again.output
    main, retry = tree.branches(retries=True)
    assert (main.kind, retry.kind) == ("main", "retry")
    assert masked(main) == first.output + again.output and masked(retry) == lost.output
    assert retry.shared_tokens == len(lost.prompt)


@pytest.mark.parametrize("why", ["delivered", "continued", "not sampled again", "other prompt"])
def test_other_turns_are_no_retries(why: str) -> None:
    tree = Tree()
    tree.add()
    lost = tree.add(0, is_delivered=why == "delivered")
    if why == "continued":
        tree.add(1)
    if why != "not sampled again":
        tree.add(0, **({} if why == "other prompt" else {"prompt": lost.prompt}))
    assert "retry" not in [each.kind for each in tree.branches(retries=True)]
    assert sum(len(masked(each)) for each in tree.branches()) == sum(turn.output_tokens for turn in tree.turns)


def test_each_conversation_has_a_main_branch() -> None:
    tree = Tree()
    tree.add()
    tree.add(child="agent-1")
    tree.add(0)
    tree.add(1, child="agent-1")
    tree.add(1, child="agent-1")
    kinds = [(each.kind, each.turns[-1].turn) for each in tree.branches()]
    assert kinds == [("main", 2), ("main", 3), ("fork", 4)]


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("retries", [True, False])
def test_any_tree_trains_each_exported_token_once(seed: int, retries: bool) -> None:
    tree = random_tree(random.Random(seed))
    of = {token: turn for turn in tree.turns for token in turn.output}
    exported = tree.branches(retries=retries)
    trained = [token for branch in exported for token in masked(branch)]
    assert len(trained) == len(set(trained))
    assert set(trained) == {token for branch in exported for token in branch.ids if token in of}
    if retries:
        assert set(trained) == set(of)
    else:
        assert left_out(tree.turns) == len(of) - len(trained)
    for i, branch in enumerate(exported):
        assert branch.branch == i
        sampled_here = [token in of for token in branch.ids]
        assert branch.logprobs == [logprob(t) if s else 0.0 for t, s in zip(branch.ids, sampled_here, strict=True)]
        edges = [edge for each in branch.turns for edge in (each.start, each.prompt_end, each.end)]
        assert edges == sorted(edges) and edges[-1] == len(branch.ids)
        spans = [at for span in branch.weight_versions for at in range(span.start, span.end)]
        assert spans == [at for at, sampled in enumerate(sampled_here) if sampled]
        head, shared = branch.ids[: branch.shared_tokens], branch.shared_tokens
        assert not any(branch.loss_mask[:shared])
        assert not shared or any(other.ids[:shared] == head for other in exported[:i])


def test_plain_turns_have_one_column() -> None:
    tree = Tree()
    tree.add()
    tree.add(parent=0)
    (branch,) = tree.branches()
    assert branch.policy_logprobs is None and branch.has_choice is None
    assert [turn.policy_logprobs for turn in branch.turns] == ["same", "same"]


def test_turns_that_were_sampled_differently_share_the_policys_column() -> None:
    tree = Tree()
    plain = tree.add(new=1, sampled=2)
    tree.add(parent=0, new=1, sampled=2, policy_logprobs="given", policy=[-3.0, -4.0], choices=[0, 1])
    tree.add(parent=1, new=1, sampled=2, policy_logprobs="unknown", overridden={"top_p": 0.1})
    (branch,) = tree.branches()
    own = plain.output_logprobs()
    assert branch.policy_logprobs == [0.0, *own, 0.0, -3.0, -4.0, 0.0, None, None]
    assert branch.has_choice == [0, 1, 1, 0, 0, 1, 0, 1, 1]
    assert [turn.policy_logprobs for turn in branch.turns] == ["same", "given", "unknown"]
    assert [turn.overridden for turn in branch.turns] == [{}, {}, {"top_p": 0.1}]

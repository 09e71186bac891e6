"""`TokenCounts`: how often a trainer trains on the sampled tokens of an episode, and why it leaves others out.

`rollout.agents.output` writes the counts of each attempt of an agent. `cli.trajectories` makes them of recorded
trajectories, and the run's report shows their sums. The branches of an episode share tokens: a token is the same in two
branches if both have it in the part that `Trajectory.shared` counts. A trainer computes each branch anew and trains on
the tokens of `Trajectory.trained_mask`, once in each epoch, if the episode has a reward. In addition, GRPO leaves out
groups whose rewards are equal: `StepMetrics.kept` counts the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from operator import or_

import msgspec

from verl_server.rollout.trajectory import Trajectory

RETRY = "retry"
"""Reason for tokens that are not trained on: their reply reached nobody, and was sampled again."""
FORCED = "forced"
"""A mask (a forced call, a grammar) allowed no other token, so the token says nothing about the policy."""
UNMASKED = "unmasked"
"""The token is in a branch, and in no loss mask."""
NO_REWARD = "no_reward"
"""The episode has no reward."""
REPLACED = "replaced"
"""Another attempt replaced the one that sampled the token."""
ROOT, CHILD = "root", "child"
"""Kinds of the first branch of a conversation: the agent's own one, or one with a context of its own, such as that of a
sub-agent."""
_BESIDE, _UNKNOWN = "beside", "unknown"


class TokenCounts(msgspec.Struct, kw_only=True):
    """Counts of one episode, or their sums over several."""

    episodes: int = 0
    """Number of episodes, with attempts that others replaced."""
    sampled: int = 0
    """Sampled tokens: the sum of `once`, `repeatedly` and `never`."""
    once: int = 0
    """Number of sampled tokens that are trained on in one branch."""
    repeatedly: int = 0
    """Number of sampled tokens that are trained on in several branches. 0 unless the session was exported with
    `mask=every`, or a file has an episode twice."""
    never: dict[str, int] = {}
    """Reason -> number of sampled tokens that are not trained on: retry, forced, unmasked, no_reward or replaced."""
    branches: dict[str, int] = {}
    """Kind -> number of branches. root and child are conversations; the others depart from one: edited, head, retry,
    template (docs/sessions.md), beside (another sample of the same prompt), unknown (in a record of an earlier
    version)."""
    context: int = 0
    """Number of tokens that a trainer computes and does not train on, over all branches with a token to train on."""
    shared: int = 0
    """Number of `context` that an earlier branch has at its beginning, too. A trainer computes these again."""
    unrecorded_turns: int = 0
    """Generations that began and of which no token is recorded: refused, cancelled, failed, or lost with the server."""

    def __add__(self, other: TokenCounts) -> TokenCounts:
        return TokenCounts(
            episodes=self.episodes + other.episodes,
            sampled=self.sampled + other.sampled,
            once=self.once + other.once,
            repeatedly=self.repeatedly + other.repeatedly,
            never=dict(Counter(self.never) + Counter(other.never)),
            branches=dict(Counter(self.branches) + Counter(other.branches)),
            context=self.context + other.context,
            shared=self.shared + other.shared,
            unrecorded_turns=self.unrecorded_turns + other.unrecorded_turns,
        )

    @property
    def branches_per_episode(self) -> float:
        return sum(self.branches.values()) / self.episodes if self.episodes else 0.0

    def left_out(self, reason: str) -> TokenCounts:
        """Return the counts of an episode of which nothing is trained, for this reason."""
        never = {name: count for name, count in self.never.items() if name == RETRY}
        rest = self.sampled - sum(never.values())
        return msgspec.structs.replace(
            self, once=0, repeatedly=0, never=never | ({reason: rest} if rest else {}), context=0, shared=0
        )

    def rows(self) -> dict[str, str]:
        """Return name -> text of each figure, for people."""
        share = f" ({self.once / self.sampled:.1%})" if self.sampled else ""
        again = f", {self.shared / self.context:.1%} of them again" if self.context else ""
        return {
            "all sampled tokens": f"{self.sampled:,}",
            "trained once": f"{self.once:,}{share}",
            "trained more than once": f"{self.repeatedly:,}",
            "never trained": f"{sum(self.never.values()):,}{_listed(self.never)}",
            "branches": f"{sum(self.branches.values()):,}, {self.branches_per_episode:.3g} an episode"
            f"{_listed(self.branches)}",
            "context tokens": f"{self.context:,}{again}",
            "unrecorded generations": f"{self.unrecorded_turns:,}",
        }


def _listed(counts: Mapping[str, int]) -> str:
    """Return the counts in brackets, the largest first, or "" without any."""
    found = ", ".join(f"{name} {count:,}" for name, count in Counter(counts).most_common())
    return found and f" ({found})"


def count_tokens(branches: Sequence[Trajectory]) -> TokenCounts:
    """Return the counts of one episode of these branches, which are in the order of their numbers."""
    counts = Counter[str]()
    first: dict[int, Trajectory] = {}
    again = Counter[tuple[int, int]]()  # (branch, position) of a token -> number of later places that train it, too
    for t in branches:
        own = t.shared if first.setdefault(t.branch, t) is t else len(t.tokens)
        trained = t.trained_mask
        marked = sum(t.loss_mask[own:])
        once = sum(trained[own:])
        sampled = sum(map(or_, _in_actions(t)[own:], t.loss_mask[own:]))
        counts.update(sampled=sampled, once=once, forced=marked - once, unmasked=sampled - marked)
        again.update(_place(first, t, at) for at, is_trained in enumerate(trained[:own]) if is_trained)
    for (number, at), times in again.items():
        holder = first[number]
        if holder.trained_mask[at]:
            counts.update(once=-1, repeatedly=1)
        else:
            counts[FORCED if holder.loss_mask[at] else UNMASKED] -= 1
            counts["once" if times == 1 else "repeatedly"] += 1
    retried = sum(t.retry_tokens or 0 for t in first.values())
    never = {RETRY: retried, FORCED: counts[FORCED], UNMASKED: counts[UNMASKED]}
    computed = [t for t in branches if t.is_trainable]
    found = TokenCounts(
        episodes=1,
        sampled=counts["sampled"] + retried,
        once=counts["once"],
        repeatedly=counts["repeatedly"],
        never={reason: count for reason, count in never.items() if count},
        branches=dict(Counter(branch_kinds(branches))),
        context=sum(len(t.tokens) - sum(t.trained_mask) for t in computed),
        shared=sum(t.shared for t in computed),
        unrecorded_turns=sum(t.unrecorded_turns or 0 for t in first.values()),
    )
    return found if branches and branches[0].reward is not None else found.left_out(NO_REWARD)


def branch_kind(t: Trajectory) -> str | None:
    """Return why a branch departs from another one: `began` of its first turn that is not shared, or None."""
    own = (turn for turn in t.turns if turn.action_span[1] > t.shared)
    return next((turn.began for turn in own), None)


def branch_kinds(branches: Sequence[Trajectory]) -> list[str]:
    """Return the kind of each branch of an episode (`TokenCounts.branches`)."""
    is_known = any(turn.began is not None for t in branches for turn in t.turns)
    kinds: list[str] = []
    conversations: set[str] = set()
    for t in branches:
        if t.session not in conversations:
            conversations.add(t.session)
            kinds.append(CHILD if t.parent else ROOT)
        else:
            kinds.append(branch_kind(t) or (_BESIDE if is_known else _UNKNOWN))
    return kinds


def _in_actions(t: Trajectory) -> bytearray:
    """Return 1 for each token of an action, and 0 for the others."""
    found = bytearray(len(t.tokens))
    for turn in t.turns:
        start, end = turn.action_span
        found[start:end] = b"\1" * (end - start)
    return found


def _place(first: Mapping[int, Trajectory], t: Trajectory, at: int) -> tuple[int, int]:
    """Return (branch, position) of a token in the first branch that has it."""
    t = first[t.branch]
    while at < t.shared and t.fork_of is not None and t.fork_of in first:
        t = first[t.fork_of]
    return t.branch, at

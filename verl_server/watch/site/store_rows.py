"""Rows of sessions as `index.rows` describes them: episodes, groups, the one step, and the conditions of a filter.

`StoreIndex` makes them. A session is an episode, and each of its branches a row SESSION:BRANCH.
"""

from __future__ import annotations

from collections.abc import Sequence

from verl_server.watch.index import rows
from verl_server.watch.index.session_store import SessionRow, StoredBranch

PLACE = "-"
"""`StepRow.name` of a run without steps."""


def episode_row(session: SessionRow, group: int) -> rows.EpisodeRow:
    """Return the row of a session. `group` is the number of its group."""
    return rows.EpisodeRow(
        row=f"{session.session}:0",
        place=PLACE,
        step=None,
        start_step=None,
        rank=None,
        incarnation=None,
        group=group,
        member=0,
        attempt=0,
        seed="",
        episode_id=session.group or None,
        task="",
        phase=None,
        fate="",
        is_lost=False,
        is_replaced=False,
        is_unsampled=not session.sampled,
        reward=session.reward,
        stop_reason=str(session.state),
        fault=None,
        error=session.reason or None,
        branches=1,
        turns=session.turns,
        tokens=session.tokens,
        sampled=session.sampled,
        generate_seconds=session.generate_seconds,
        env_seconds=0.0,
        queue_seconds=0.0,
        began=session.created,
        ended=end_of(session),
        time=session.active,
        oldest_version=session.oldest_version,
        newest_version=session.newest_version,
        versions=len({session.oldest_version, session.newest_version} - {""}),
        tools=[],
        logprob=None,
        is_trained=False,
        trained_step=None,
        advantage=None,
        age=None,
        gap_mean=None,
        gap_max=None,
        entropy=None,
    )


def branch_row(session: SessionRow, branch: StoredBranch) -> rows.BranchRow:
    """Return the row of a branch of a session."""
    return rows.BranchRow(
        row=f"{session.session}:{branch.branch}",
        session=session.session,
        parent=session.parent,
        branch=branch.branch,
        fork_of=branch.fork_of,
        shared=branch.shared,
        turns=len(branch.turns),
        tokens=branch.tokens,
        sampled=branch.sampled,
        logprob=None,
        is_trained=False,
    )


def group_row(number: int, members: list[rows.EpisodeRow]) -> rows.GroupRow:
    """Return the group of some episodes, which are all of it, and number them."""
    for member, row in enumerate(members):
        row.group, row.member = number, member
    rewards = [row.reward for row in members if row.reward is not None and not row.is_unsampled]
    mean = _mean(rewards)
    spread = None if mean is None else (sum((each - mean) ** 2 for each in rewards) / len(rewards)) ** 0.5
    ends: dict[str, int] = {}
    for row in members:
        ends[str(row.stop_reason)] = ends.get(str(row.stop_reason), 0) + 1
    return rows.GroupRow(
        place=PLACE,
        step=None,
        start_step=None,
        incarnation=None,
        rank=None,
        group=number,
        seed="",
        task=members[0].episode_id or members[0].row,
        fate="",
        is_lost=False,
        episodes=len(members),
        scored=len(rewards),
        mean_reward=mean,
        spread=spread,
        least_reward=min(rewards, default=None),
        most_reward=max(rewards, default=None),
        failed=0,
        replaced=0,
        mean_tokens=_mean([row.tokens for row in members]) or 0.0,
        most_tokens=max(row.tokens for row in members),
        mean_turns=_mean([row.turns for row in members]) or 0.0,
        ends=ends,
        members=members,
    )


def step_row(sessions: Sequence[SessionRow], groups: Sequence[rows.GroupRow]) -> rows.StepRow:
    """Return the row of a store's one place, which has all its sessions and their groups."""
    rewards = [each.reward for each in sessions if each.reward is not None and each.sampled]
    return rows.StepRow(
        name=PLACE,
        step=None,
        episodes=len(sessions),
        groups=len(groups),
        scored=len(rewards),
        mean_reward=_mean(rewards),
        without_spread=sum(group.scored > 1 and group.spread == 0 for group in groups),
        failed=0,
        replaced=0,
        unsampled=sum(not each.sampled for each in sessions),
        mean_tokens=_mean([each.sampled for each in sessions]) or 0.0,
        most_tokens=max(each.tokens for each in sessions),
        mean_turns=_mean([each.turns for each in sessions]) or 0.0,
        sampled=sum(each.sampled for each in sessions),
        began=min(each.created for each in sessions),
        ended=max(each.active for each in sessions),
    )


def lane_row(session: SessionRow) -> rows.LaneRow:
    """Return a session over time. What it waited for is not known."""
    return rows.LaneRow(
        row=f"{session.session}:0",
        label=f"{PLACE} {session.session}",
        began=session.created,
        ended=end_of(session),
        stop_reason=str(session.state),
        fault=None,
        parts=[],
    )


def fits(row: rows.EpisodeRow, found: rows.EpisodeFilter) -> bool:
    """Return True if a session has what a filter wants. A store has neither steps nor faults."""
    reward, tokens = row.reward, row.tokens
    return all(
        (
            found.place in (None, PLACE),
            found.first_step is None and found.last_step is None,
            found.stop_reason in (None, row.stop_reason),
            found.fault is None and found.tool is None,
            found.least_reward is None or (reward is not None and reward >= found.least_reward),
            found.most_reward is None or (reward is not None and reward <= found.most_reward),
            found.least_tokens is None or tokens >= found.least_tokens,
            found.most_tokens is None or tokens <= found.most_tokens,
            found.has_error is None or found.has_error == bool(row.error),
            found.group in (None, row.group),
            found.version in (None, row.oldest_version, row.newest_version),
        )
    )


def end_of(session: SessionRow) -> float:
    """Return the end of a session, or of its last turn while it is open."""
    return session.active if session.ended is None else session.ended


def group_name(session: SessionRow) -> str:
    """Return the group of a session. A session without a group is one of its own."""
    return session.group or session.session


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None

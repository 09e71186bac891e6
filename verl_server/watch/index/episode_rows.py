"""Rows of the database as `rows` describes them: the conditions of a filter, episodes, groups and steps."""

from __future__ import annotations

import sqlite3
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from verl_server.watch.index.line_rows import TOOL_NAMES
from verl_server.watch.index.row_ids import row_id
from verl_server.watch.index.rows import BranchRow, EpisodeFilter, EpisodeRow, GroupRow, StepRow, evaluated_step
from verl_server.weight_version import WeightVersion

_TRAINED = """SELECT count(*) AS n, max(step) AS step, avg(advantage) AS advantage, max(age) AS age,
    avg(gap_mean) AS gap_mean, max(gap_max) AS gap_max, avg(entropy) AS entropy FROM trained
    WHERE grp = ? AND member = ? AND sampled_step = ? AND incarnation = ? AND sampled_rank IS ? AND attempt = ?"""
STEPS = """SELECT place, min(used) AS step, sum(episodes) AS episodes, count(*) AS groups, sum(scored) AS scored,
    sum(reward) AS reward, sum(scored > 1 AND least = most) AS without_spread, sum(failed) AS failed,
    sum(replaced) AS replaced, sum(unsampled) AS unsampled, sum(tokens) AS tokens, max(most_tokens) AS most_tokens,
    sum(turns) AS turns, sum(sampled) AS sampled, min(began) AS began, max(ended) AS ended
    FROM (SELECT place, used, sum(NOT is_replaced) AS episodes, sum(is_scored AND NOT is_replaced) AS scored,
        sum(CASE WHEN is_scored AND NOT is_replaced THEN reward ELSE 0.0 END) AS reward,
        min(CASE WHEN is_scored AND NOT is_replaced THEN reward END) AS least,
        max(CASE WHEN is_scored AND NOT is_replaced THEN reward END) AS most,
        sum(is_failed AND NOT is_replaced) AS failed, sum(is_replaced) AS replaced,
        sum(is_unsampled AND NOT is_replaced) AS unsampled,
        sum(CASE WHEN is_replaced THEN 0 ELSE tokens END) AS tokens, max(tokens) AS most_tokens,
        sum(CASE WHEN is_replaced THEN 0 ELSE turns END) AS turns,
        sum(CASE WHEN is_replaced THEN 0 ELSE sampled END) AS sampled, min(began) AS began, max(ended) AS ended
        FROM episodes WHERE is_lost <= ? GROUP BY place, grp, incarnation, step, phase)
    GROUP BY place"""
"""The steps of a run. The parameter is 1 if lost episodes are counted."""
_PLACES = ("before", "-", "", "playing", "dropped", "untrained", "held-out", "after")
"""The order of the places; "" stands for the steps."""


def conditions(only: EpisodeFilter) -> tuple[str, list[Any]]:
    """Return the condition of a filter on the table episodes, and its parameters."""
    found: list[tuple[str, Any]] = [
        ("place = ?", only.place),
        ("used >= ?", only.first_step),
        ("used <= ?", only.last_step),
        ("stop_reason = ?", only.stop_reason),
        ("fault = ?", only.fault),
        ("reward >= ?", only.least_reward),
        ("reward <= ?", only.most_reward),
        ("tokens >= ?", only.least_tokens),
        ("tokens <= ?", only.most_tokens),
        ("instr(char(10) || tools || char(10), char(10) || ? || char(10)) > 0", only.tool),
        ("(error IS NOT NULL) = ?", only.has_error),
        ("grp = ?", only.group),
        ("incarnation = ?", only.incarnation),
        ("task = ?", only.task),
    ]
    parts = [text for text, value in found if value is not None]
    values = [value for _, value in found if value is not None]
    if only.version is not None:
        version = WeightVersion.parse(only.version)
        if version is None:
            parts.append("? IN (oldest, newest)")
            values.append(only.version)
        else:
            parts.append(
                "substr(oldest, instr(oldest, '@') + 1) = ? AND CAST(oldest AS INTEGER) <= ? "
                "AND CAST(newest AS INTEGER) >= ?"
            )
            values += [version.incarnation, version.number, version.number]
    if not only.lost:
        parts.append("is_lost = 0")
    if not only.replaced:
        parts.append("is_replaced = 0")
    return " AND ".join(parts) or "1", values


def episode_row(connection: sqlite3.Connection, row: sqlite3.Row) -> EpisodeRow:
    """Return a row of the table episodes with what the trainer recorded."""
    keys = (row["grp"], row["member"], row["step"], row["incarnation"], row["rank"], row["attempt"])
    trained = connection.execute(_TRAINED, keys).fetchone()
    return EpisodeRow(
        row=row_id(row),
        place=row["place"],
        step=row["used"],
        start_step=row["step"],
        rank=row["rank"],
        incarnation=row["incarnation"],
        group=row["grp"],
        member=row["member"],
        attempt=row["attempt"],
        seed=row["seed"],
        episode_id=row["episode_id"],
        task=row["task"],
        phase=row["phase"],
        fate=row["fate"],
        is_lost=bool(row["is_lost"]),
        is_replaced=bool(row["is_replaced"]),
        is_unsampled=bool(row["is_unsampled"]),
        reward=row["reward"],
        stop_reason=row["stop_reason"],
        fault=row["fault"],
        error=row["error"],
        branches=row["branches"],
        turns=row["turns"],
        tokens=row["tokens"],
        sampled=row["sampled"],
        generate_seconds=row["generate_s"],
        env_seconds=row["env_s"],
        queue_seconds=row["queue_s"],
        began=row["began"],
        ended=row["ended"],
        time=row["time"],
        oldest_version=row["oldest"] or "",
        newest_version=row["newest"] or "",
        versions=row["versions"],
        tools=sorted(set((row["tools"] or "").split("\n")) - {""})[:TOOL_NAMES],
        logprob=row["logprob"],
        is_trained=trained["n"] > 0,
        trained_step=trained["step"],
        advantage=trained["advantage"],
        age=trained["age"],
        gap_mean=trained["gap_mean"],
        gap_max=trained["gap_max"],
        entropy=trained["entropy"],
        answer=row["answer"],
    )


def branch_row(connection: sqlite3.Connection, row: sqlite3.Row) -> BranchRow:
    """Return a row of the table lines."""
    keys = (row["grp"], row["member"], row["step"], row["incarnation"], row["rank"], row["attempt"])
    trained = connection.execute(f"{_TRAINED} AND session = ? AND branch = ?", (*keys, row["session"], row["branch"]))
    return BranchRow(
        row=row_id(row),
        session=row["session"],
        parent=row["parent"],
        branch=row["branch"],
        fork_of=row["fork_of"],
        shared=row["shared"],
        turns=row["turns"],
        tokens=row["tokens"],
        sampled=row["sampled"],
        logprob=row["logprob"],
        is_trained=trained.fetchone()["n"] > 0,
    )


def group_row(members: Sequence[EpisodeRow]) -> GroupRow:
    """Return the group of some episodes, which are all of it."""
    first = members[0]
    counted = [member for member in members if not member.is_replaced]
    scored = [member.reward for member in counted if member.reward is not None and not member.is_unsampled]
    return GroupRow(
        place=first.place,
        step=first.step,
        start_step=first.start_step,
        incarnation=first.incarnation,
        rank=first.rank,
        group=first.group,
        seed=first.seed,
        task=first.task,
        fate=first.fate,
        is_lost=first.is_lost,
        episodes=len(counted),
        scored=len(scored),
        mean_reward=statistics.fmean(scored) if scored else None,
        spread=statistics.pstdev(scored) if scored else None,
        least_reward=min(scored, default=None),
        most_reward=max(scored, default=None),
        failed=sum(has_failed(member) for member in counted),
        replaced=len(members) - len(counted),
        mean_tokens=statistics.fmean(member.tokens for member in counted) if counted else 0.0,
        most_tokens=max((member.tokens for member in members), default=0),
        mean_turns=statistics.fmean(member.turns for member in counted) if counted else 0.0,
        ends=dict(Counter(str(member.stop_reason) for member in counted).most_common()),
        members=list(members),
    )


def has_failed(member: EpisodeRow) -> bool:
    """Return True if an episode counts in `StepMetrics.failed`."""
    is_regular = member.stop_reason in ("done", "max_turns", "max_tokens", "context_full")
    return member.error is not None and (member.reward is None or not is_regular)


def step_row(row: sqlite3.Row) -> StepRow:
    """Return a row of `STEPS`."""
    episodes = row["episodes"]
    return StepRow(
        name=row["place"],
        step=row["step"],
        episodes=episodes,
        groups=row["groups"],
        scored=row["scored"],
        mean_reward=row["reward"] / row["scored"] if row["scored"] else None,
        without_spread=row["without_spread"],
        failed=row["failed"],
        replaced=row["replaced"],
        unsampled=row["unsampled"],
        mean_tokens=row["tokens"] / episodes if episodes else 0.0,
        most_tokens=row["most_tokens"],
        mean_turns=row["turns"] / episodes if episodes else 0.0,
        sampled=row["sampled"],
        began=row["began"],
        ended=row["ended"],
    )


def step_place(row: StepRow) -> tuple[int, int]:
    """Return the place of a step among the others."""
    if row.step is not None:
        return _PLACES.index(""), row.step
    evaluated = evaluated_step(row.name)
    return (_PLACES.index(row.name), 0) if evaluated is None else (_PLACES.index("held-out"), evaluated)

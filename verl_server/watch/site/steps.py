"""Views of steps: their list, the groups of one, two compared, and the search of episodes. `app` serves them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

from verl_server.watch.index import rows
from verl_server.watch.site.answers import steps as answers
from verl_server.watch.site.encoding import encoded_page
from verl_server.watch.site.page_errors import PageError
from verl_server.watch.site.queries import Query
from verl_server.watch.site.runs import WatchedRun
from verl_server.watch.site.texts import head, number

_MEMBERS = 64
"""Most episodes of a group in an answer."""
_TOOLS = 32
_LONGEST_TOOL = 100
_TOOLS_TEXT = 1500
"""Most characters of all names of tools of a row: 100 rows must fit into an answer."""
_EPISODES = 100
"""Most rows of an answer with episodes."""
SEARCH_SECONDS = 1.0
_SORTS = ("spread", "flat", "mean", "tokens", "failed", "number")


def steps_answer(run: WatchedRun, query: Query) -> bytes:
    first, last = query.integer("from", 0), query.integer("to", 0)
    after = query.integer("after", 0) or 0
    query.finish()
    played = _played(run)
    found = [
        step_row(row, played)
        for row in run.index.steps()
        if row.step is None or ((first is None or row.step >= first) and (last is None or row.step <= last))
    ]
    answer = answers.Steps(steps=found[after:])
    return encoded_page(answer, "steps", lambda place: str(after + place))


def step_row(row: rows.StepRow, played: dict[int, int]) -> answers.StepRow:
    return answers.StepRow(
        step=head(row.name, 50) if row.step is None else row.step,
        episodes=row.episodes,
        groups=row.groups,
        reward=number(row.mean_reward),
        flat=row.without_spread,
        failed=row.failed,
        tokens=number(row.sampled / row.episodes if row.episodes else None),
        played=None if row.step is None else played.get(row.step),
    )


def _played(run: WatchedRun) -> dict[int, int]:
    """Return step -> episodes that were played in it."""
    columns = run.tail.metrics(["trajectories"])
    pairs = zip(columns["step"], columns["trajectories"], strict=True)
    return {step: int(count) for step, count in pairs if isinstance(count, int | float) and count == count}


def groups_answer(run: WatchedRun, step: str, query: Query) -> bytes:
    sort = query.choice("sort", _SORTS, "spread")
    after = query.integer("after", 0) or 0
    if query.text("step") is not None:
        raise PageError(400, "The URL names the step already.", "Leave the parameter step out.")
    filters = query.filters(step)
    query.finish()
    row, before, behind = _find_step(run, step, lost=filters.lost)
    found = sorted(run.index.groups(row.name, filters), key=_sort_key(sort))
    answer = answers.StepGroups(
        step=step_row(row, _played(run)),
        groups=[group(each) for each in found[after : after + 200]],
        next=str(after + 200) if len(found) > after + 200 else None,
        previous_step=before,
        next_step=behind,
    )
    return encoded_page(answer, "groups", lambda place: str(after + place))


def _find_step(run: WatchedRun, name: str, *, lost: bool = False) -> tuple[rows.StepRow, Any, Any]:
    """Return a step and the names of its neighbours. Raise PageError if the run has no such step.

    The neighbours of an evaluation are evaluations.
    """
    found = run.index.steps(lost=lost)
    is_evaluation = rows.evaluated_step(name) is not None
    alike = [row for row in found if (rows.evaluated_step(row.name) is not None) == is_evaluation]
    names = [row.name if row.step is None else row.step for row in alike]
    for place, row in enumerate(alike):
        if row.name == name:
            before = names[place - 1] if place else None
            return row, before, names[place + 1] if place + 1 < len(names) else None
    numbers = [row.step for row in found if row.step is not None]
    progress = run.index.progress()
    is_behind = progress.bytes_indexed < progress.bytes_total
    remedy = (
        "Its episodes may not be indexed yet."
        if is_behind
        else f"It has the steps {numbers[0]} to {numbers[-1]}."
        if numbers
        else "It has no steps with episodes."
    )
    raise PageError(404, f"The run has no episodes of the step {name:.50}.", remedy)


def _sort_key(sort: str) -> Callable[[rows.GroupRow], Any]:
    def value(row: rows.GroupRow) -> float | None:
        figures = {
            "spread": row.spread,
            "flat": None if row.spread is None else -row.spread,
            "mean": row.mean_reward,
            "tokens": row.mean_tokens,
            "failed": float(row.failed),
            "number": -float(row.group),
        }
        return figures[sort]

    def key(row: rows.GroupRow) -> tuple[bool, float, int]:
        found = value(row)
        return found is None, 0.0 if found is None else -found, row.group

    return key


def group(row: rows.GroupRow) -> answers.Group:
    members = [each for each in row.members if not each.is_replaced]
    first = row.members[0] if row.members else None
    return answers.Group(
        group=str(row.group),
        number=rows.group_number(row.group),
        task=row.task,
        seed=row.seed,
        episode_id=None if first is None or first.episode_id is None else head(first.episode_id, 200),
        count=row.episodes,
        scored=row.scored,
        mean=number(row.mean_reward),
        spread=number(row.spread),
        tokens=number(sum(each.sampled for each in members) / len(members) if members else None),
        failed=row.failed,
        ends={head(name, 50): count for name, count in row.ends.items()},
        episodes=[episode_row(each) for each in row.members[:_MEMBERS]],
        left_out=max(0, len(row.members) - _MEMBERS),
    )


def episode_row(row: rows.EpisodeRow) -> answers.Row:
    return answers.Row(
        row=row.row,
        name=f"{rows.group_number(row.group)}-{row.member}",
        step=head(row.place, 50) if row.step is None else row.step,
        group=str(row.group),
        member=row.member,
        attempt=row.attempt,
        session="",
        branch=0,
        branches=row.branches,
        reward=number(row.reward),
        stop_reason=row.stop_reason,
        fault=row.fault,
        error=head(row.error or "", 200),
        turns=row.turns,
        tokens=row.tokens,
        sampled=row.sampled,
        generate_s=round(row.generate_seconds, 4),
        env_s=round(row.env_seconds, 4),
        queue_s=round(row.queue_seconds, 4),
        began=row.began,
        ended=row.ended,
        versions=row.versions,
        oldest_version=head(row.oldest_version, 100),
        newest_version=head(row.newest_version, 100),
        tools=_tool_names(row.tools),
        seed=row.seed,
        episode_id=None if row.episode_id is None else head(row.episode_id, 200),
        kind=row.fate if row.fate in ("untrained", "held-out") else "trajectory",
        phase=row.phase,
        lost=row.is_lost,
        replaced=row.is_replaced,
        logprob=number(row.logprob),
        advantage=number(row.advantage),
        answer=head(row.answer or "", 120),
        age=row.age,
        gap=number(row.gap_mean),
        entropy=number(row.entropy),
    )


def _tool_names(tools: list[str]) -> list[str]:
    names, rest = [], _TOOLS_TEXT
    for name in tools[:_TOOLS]:
        names.append(head(name, min(rest, _LONGEST_TOOL)))
        rest -= len(names[-1])
        if rest <= 0:
            break
    return names


def compare_answer(run: WatchedRun, other: WatchedRun, query: Query) -> bytes:
    """Compare the step `a` of a run with the step `b` of another one, or of the same."""
    first, second = query.text("a"), query.text("b")
    after = query.integer("after", 0) or 0
    query.finish()
    if first is None or second is None:
        raise PageError(400, "A comparison needs two steps.", "Set the parameters a and b to steps.")
    a, b = _find_step(run, first)[0], _find_step(other, second)[0]
    left = {row.task: row for row in run.index.groups(a.name)}
    right = {row.task: row for row in other.index.groups(b.name)}
    tasks = [task for task in left if task in right] + [task for task in left if task not in right]
    tasks += [task for task in right if task not in left]
    pairs = sorted(((left.get(task), right.get(task)) for task in tasks), key=_change)
    answer = answers.Comparison(
        a=step_row(a, _played(run)),
        b=step_row(b, _played(other)),
        pairs=[_pair(*pair) for pair in pairs[after : after + 100]],
        common=sum(task in right for task in left),
        next=str(after + 100) if len(pairs) > after + 100 else None,
    )
    return encoded_page(answer, "pairs", lambda place: str(after + place))


def _change(pair: tuple[rows.GroupRow | None, rows.GroupRow | None]) -> tuple[int, float]:
    """Return the place of a pair in the order: common tasks first, the largest change of the reward before."""
    a, b = pair
    if a is None or b is None:
        return 2, 0.0
    if a.mean_reward is None or b.mean_reward is None:
        return 1, 0.0
    return 0, -abs(a.mean_reward - b.mean_reward)


def _pair(a: rows.GroupRow | None, b: rows.GroupRow | None) -> answers.Pair:
    groups = [None if row is None else group(row) for row in (a, b)]
    shown = groups[0] or groups[1]
    assert shown is not None
    return answers.Pair(task=shown.task, seed=shown.seed, episode_id=shown.episode_id, a=groups[0], b=groups[1])


def episodes_answer(run: WatchedRun, query: Query) -> bytes:
    order = query.choice("order", get_args(rows.Order), "newest")
    after, text = query.text("after"), query.text("q")
    filters = query.filters()
    query.finish()
    if text is not None:
        return _search(run, filters, text, after)
    page = run.index.episodes(filters, order=order, limit=_EPISODES, after=after)
    # Rows are bounded, so that 100 of them always fit: a cursor of the index lies at the end of its page only.
    return encoded_page(
        answers.Episodes(rows=[episode_row(row) for row in page.rows], next=page.cursor, total=page.total),
        "rows",
        lambda _: page.cursor,
    )


def _search(run: WatchedRun, filters: rows.EpisodeFilter, text: str, after: str | None) -> bytes:
    page = run.index.search(filters, text, cursor=after, seconds=SEARCH_SECONDS, limit=_EPISODES)
    answer = answers.Episodes(
        rows=[episode_row(row) for row in page.rows],
        next=page.cursor,
        searched=answers.Searched(bytes=page.searched_bytes, total=page.total_bytes),
        excerpts=[head(place, 400) for place in page.places],
    )
    return encoded_page(answer, "rows", lambda _: page.cursor)

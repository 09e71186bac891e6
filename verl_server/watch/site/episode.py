"""Views of one episode: its head and turns, the rest of a long text, its tokens. `app` serves them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl_server.rollout.trajectory import Trajectory
from verl_server.rollout.trajectory import Turn as RecordedTurn
from verl_server.watch.index import rows
from verl_server.watch.run_records import TrainedTrajectory
from verl_server.watch.site.answers import episode as answers
from verl_server.watch.site.answers.values import Number, Span
from verl_server.watch.site.encoding import encoded, encoded_page
from verl_server.watch.site.page_errors import PageError
from verl_server.watch.site.parts import RawPart, parts_of, source_of
from verl_server.watch.site.queries import Query
from verl_server.watch.site.runs import WatchedRun
from verl_server.watch.site.steps import episode_row
from verl_server.watch.site.texts import bounded, head, number, visible

WINDOW = 2000
"""Tokens of an answer."""
_TEXT = 4000
"""Most characters of a part, and of an error."""
_TURN_TEXT = 100_000
"""Most characters of a turn's parts together: a turn must fit into an answer."""
_PARTS = 500
_LONG_TEXT = 100_000
_TURNS = 200
_LIST = 500


def episode_answer(run: WatchedRun, row: str, query: Query) -> bytes:
    after = query.integer("after", 0) or 0
    query.finish()
    found = run.index.episode(row)
    group = run.index.group(row)
    trajectory, trained = run.trajectory(row)
    texts, _ = run.tokens()
    turns = (
        _turn(trajectory, place, parts_of(trajectory, place, texts))
        for place in range(after, min(after + _TURNS, len(trajectory.turns)))
    )
    branch = next((each for each in found.branches if each.row == row), None)
    shown = episode_row(found.head)
    shown.row, shown.session, shown.branch = row, head(trajectory.session, 200), trajectory.branch
    shown.turns, shown.tokens = len(trajectory.turns), len(trajectory.tokens)
    if branch is not None:
        shown.sampled, shown.logprob = branch.sampled, number(branch.logprob)
    settings = run.tail.settings
    environment = trajectory.task.environment or settings.get("environment") or settings.get("env_url")
    answer = answers.Episode(
        row=shown,
        error=head(trajectory.error or "", _TEXT),
        environment=head(environment, 500) if isinstance(environment, str) else None,
        sampling_seed=None if trajectory.task.sampling_seed is None else str(trajectory.task.sampling_seed),
        resumes=trajectory.resumes,
        turns=[],
        next=after + _TURNS if after + _TURNS < len(trajectory.turns) else None,
        source=source_of(trajectory, texts),
        tree=_tree(found),
        versions=[head(version, 100) for version in _versions(trajectory)[:_LIST]],
        siblings=_siblings(group, found.head),
        attempts=_attempts(group, found.head),
        trained=None if trained is None else _trained(trained, found.head),
        waits=_waits(trajectory),
    )
    return encoded_page(answer, "turns", lambda place: after + place, turns)


def _turn(trajectory: Trajectory, place: int, parts: Sequence[RawPart]) -> answers.Turn:
    turn = trajectory.turns[place]
    start, end = turn.action_span
    sampled = [trajectory.logprobs[i] for i in range(start, end) if trajectory.loss_mask[i]]
    versions = dict.fromkeys(version for version in trajectory.weight_versions[start:end] if version)
    most = min(_TEXT, _TURN_TEXT // max(1, min(len(parts), _PARTS)))
    return answers.Turn(
        number=place,
        parts=[
            answers.Part(
                number=number,
                role=head(part.role, 100),
                kind=part.kind,
                name=None if part.name is None else head(part.name, 200),
                text=visible(part.text[:most]),
                length=len(part.text),
                next=most if len(part.text) > most else None,
            )
            for number, part in enumerate(parts[:_PARTS])
        ],
        read=turn.observation_span,
        wrote=turn.action_span,
        reward=number(turn.reward),
        finish_reason=turn.finish_reason,
        spans=_turn_waits(trajectory, place),
        logprob=number(sum(sampled) / len(sampled) if sampled else None),
        versions=[head(version, 100) for version in list(versions)[:20]],
        sampling=_short(turn.sampling),
        overridden=_short(turn.overridden),
    )


def _short(value: dict[str, Any]) -> dict[str, Any]:
    """Return sampling parameters; those that are long, such as schemas, as the beginning of their text."""
    found = list(bounded(value).items())[:50]
    return {head(name, 100): each if len(str(each)) <= 500 else head(str(each), 500) for name, each in found}


def _waits(trajectory: Trajectory) -> list[Span]:
    return [(head(event.kind, 30), event.start, event.end) for event in trajectory.events[:1000]]


def _turn_waits(trajectory: Trajectory, place: int) -> list[Span]:
    """Return the waits of a turn: its generation, and what the episode waited for since the one before.

    A generation that the server aborted and the episode continued has several events; then no turn has its waits.
    """
    generations = [i for i, event in enumerate(trajectory.events) if event.kind == "generate"]
    if len(generations) != len(trajectory.turns):
        return []
    start = generations[place - 1] + 1 if place else 0
    events = trajectory.events[start : generations[place] + 1]
    return [(head(event.kind, 30), event.start, event.end) for event in events]


def _versions(trajectory: Trajectory) -> list[str]:
    return list(dict.fromkeys(version for version in trajectory.weight_versions if version))


def _tree(found: rows.Episode) -> list[answers.Branch]:
    """Return the branches, parents before children."""
    places = {(branch.session, branch.branch): branch for branch in found.branches}
    roots: dict[str, rows.BranchRow] = {}
    for branch in found.branches:
        roots.setdefault(branch.session, branch)
    children: dict[str | None, list[tuple[answers.Branch, str]]] = {}
    for branch in found.branches:
        parent, kind = _parent(branch, places, roots)
        shown = answers.Branch(
            row=branch.row,
            session=head(branch.session, 200),
            branch=branch.branch,
            parent=parent,
            kind=kind,
            shared=branch.shared,
            tokens=branch.tokens,
            sampled=branch.sampled,
            turns=branch.turns,
            reward=number(found.head.reward),
            stop_reason=found.head.stop_reason,
        )
        children.setdefault(parent, []).append((shown, branch.row))
    ordered: list[answers.Branch] = []
    waiting = list(reversed(children.pop(None, [])))
    while waiting:
        shown, row = waiting.pop()
        ordered.append(shown)
        waiting += reversed(children.pop(row, []))
    for rest in children.values():  # a circle of parents: no root leads there
        ordered += [shown for shown, _ in rest]
    return ordered[:_LIST]


def _parent(
    branch: rows.BranchRow, places: dict[tuple[str, int], rows.BranchRow], roots: dict[str, rows.BranchRow]
) -> tuple[str | None, Any]:
    """Return the row of a branch's parent, and what the branch is to it."""
    if branch.fork_of is not None:
        fork = places.get((branch.session, branch.fork_of))
        if fork is not None and fork.row != branch.row:
            return fork.row, "branch"
    if branch.parent and (starter := roots.get(branch.parent)) is not None and starter.row != branch.row:
        return starter.row, "sub-agent"
    return None, "root"


def _siblings(group: rows.GroupRow, row: rows.EpisodeRow) -> list[str]:
    """Return the rows of the group's episodes; of the attempts in a place, the last one or this one."""
    by_member: dict[int, str] = {}
    for each in group.members:
        by_member[each.member] = each.row
    by_member[row.member] = row.row
    return [by_member[member] for member in sorted(by_member)][:_LIST]


def _attempts(group: rows.GroupRow, row: rows.EpisodeRow) -> list[str]:
    same = [each for each in group.members if each.member == row.member]
    return [each.row for each in sorted(same, key=lambda each: each.attempt)][:_LIST]


def _trained(trained: TrainedTrajectory, row: rows.EpisodeRow) -> answers.Trained:
    entropies = [value for value in trained.entropy if value is not None]
    return answers.Trained(
        step=trained.step,
        rank=trained.rank,
        advantage=number(trained.advantage),
        age=trained.age,
        tokens=len(trained.positions),
        gap_mean=number(row.gap_mean if trained.gap_mean is None else trained.gap_mean),
        gap_max=number(row.gap_max if trained.gap_max is None else trained.gap_max),
        entropy=number(sum(entropies) / len(entropies) if entropies else None),
    )


def text_answer(run: WatchedRun, row: str, query: Query) -> bytes:
    turn, part = query.integer("turn", 0), query.integer("part", 0)
    start = query.integer("start", 0) or 0
    query.finish()
    trajectory, _ = run.trajectory(row)
    if turn is None or part is None or turn >= len(trajectory.turns):
        raise PageError(404, f"The episode has no turn {turn}.", f"It has {len(trajectory.turns)} turns, from 0 on.")
    parts = parts_of(trajectory, turn, run.tokens()[0])
    if part >= len(parts):
        raise PageError(404, f"The turn has no part {part}.", f"It has {len(parts)} parts, from 0 on.")
    text = parts[part].text
    end = min(len(text), start + _LONG_TEXT)
    answer = answers.TextPart(
        text=visible(text[start:end]), start=start, length=len(text), next=end if end < len(text) else None
    )
    return encoded(answer)


def tokens_answer(run: WatchedRun, row: str, query: Query) -> bytes:
    start = query.integer("start", 0) or 0
    query.finish()
    if start % WINDOW:
        raise PageError(400, f"start={start} is no multiple of {WINDOW}.", "Windows of tokens are fixed.")
    t, trained = run.trajectory(row)
    if start and start >= len(t.tokens):
        raise PageError(404, f"The episode has {len(t.tokens)} tokens, none at {start}.")
    end = min(len(t.tokens), start + WINDOW)
    window = range(start, end)
    texts, _ = run.tokens()
    ids = t.tokens[start:end]
    mask = t.trained_mask
    used = list(dict.fromkeys(version for version in t.weight_versions[start:end] if version))
    places = {version: place for place, version in enumerate(used)}
    columns = _trained_columns(trained, start, end)
    has_policy = bool(t.policy_logprobs)
    answer = answers.Tokens(
        start=start,
        total=len(t.tokens),
        id=ids,
        text=None if texts is None else texts.texts(ids),
        special=[0] * len(ids) if texts is None else [int(texts.is_special(token)) for token in ids],
        mask=[1 if mask[i] else 2 if t.loss_mask[i] else 0 for i in window],
        logprob=[number(t.logprobs[i], 5) if t.loss_mask[i] else None for i in window],
        policy=[number(t.policy_logprobs[i], 5) if t.loss_mask[i] else None for i in window] if has_policy else None,
        trainer=columns["logprobs"],
        entropy=columns["entropy"],
        weight=columns["loss_weights"],
        versions=[head(version, 100) for version in used],
        version=[places.get(t.weight_versions[i], -1) for i in window],
        turn=_turn_of(t.turns, start, end),
    )
    return encoded(answer)


def _trained_columns(trained: TrainedTrajectory | None, start: int, end: int) -> dict[str, list[Number] | None]:
    """Return the trainer's numbers for each token of a window, None for a column that it did not record."""
    found: dict[str, list[Number] | None] = {}
    for name in ("logprobs", "entropy", "loss_weights"):
        values: list[float | None] = [] if trained is None else getattr(trained, name)
        if trained is None or not values:
            found[name] = None
            continue
        column: list[Number] = [None] * (end - start)
        for position, value in zip(trained.positions, values, strict=False):
            if start <= position < end:
                column[position - start] = number(value, 5)
        found[name] = column
    return found


def _turn_of(turns: Sequence[RecordedTurn], start: int, end: int) -> list[int]:
    column = [-1] * (end - start)
    for place, turn in enumerate(turns):
        for i in range(max(start, turn.observation_span[0]), min(end, turn.action_span[1])):
            column[i - start] = place
    return column

"""The branches of a session: linear paths through its tree of turns, as ids, loss mask and log-probabilities.

The route of a session's trajectory calls `branches` for each session, and writes the branches. Nothing is rendered or
tokenized here: the ids are the ids of the prompts and the sampled ids.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from verl_server.messages.session_types import Branch, BranchKind, BranchTurn, VersionSpan
from verl_server.server.sessions.stored_turn import StoredTurn
from verl_server.server.sessions.turn import common_prefix


def branches(turns: Sequence[StoredTurn], mask: Literal["once", "every"], retries: bool) -> Iterator[Branch]:
    """Yield the branches of the finished turns of a session: first the main ones, then forks, then retries.

    A branch ends with a turn that no other turn continues. The first branch of each conversation is its main one. If no
    client received the reply of a turn, and the turn was sampled again, the turn is a retry. Retries are omitted unless
    `retries` is True.

    With `mask` "once", a sampled token has loss mask 1 in the first yielded branch that contains it, and 0 in later
    branches. With `mask` "every", it has loss mask 1 in all branches. The caller sets `session` and `rewards`, and may
    add texts (`turn_texts`).
    """
    tree = _Tree(turns)
    found = [(tree.kind(path), path) for path in tree.paths()]
    kinds: tuple[BranchKind, ...] = ("main", "fork", "retry") if retries else ("main", "fork")
    named: set[str | None] = set()
    chosen: list[tuple[BranchKind, list[_Part]]] = []
    for kind, path in found:
        child = path[-1].turn.stored.child
        if kind == "main" and child in named:
            kind = "fork"
        elif kind == "main":
            named.add(child)
        if kind in kinds:
            chosen.append((kind, path))
    masked: dict[int, int] = defaultdict(int)  # turn -> number of its first sampled tokens that a branch has masked
    earlier: list[bytes] = []
    for i, (kind, path) in enumerate(sorted(chosen, key=lambda each: kinds.index(each[0]))):
        yield _branch(i, kind, path, masked, earlier, every=mask == "every")


def left_out(turns: Sequence[StoredTurn]) -> int:
    """Return the number of sampled tokens of finished turns that no branch but those of kind retry has."""
    tree = _Tree(turns)
    held: dict[int, int] = defaultdict(int)  # turn -> number of its first sampled tokens that a branch has
    for path in tree.paths():
        if tree.kind(path) != "retry":
            for part in path:
                held[part.turn.turn] = max(held[part.turn.turn], part.sampled)
    return sum(turn.stored.output_tokens - held[turn.turn] for turn in turns)


class _Part:
    """The part of a turn that belongs to a branch: the turn's own tokens up to position `end` of the branch."""

    def __init__(self, turn: StoredTurn, end: int) -> None:
        self.turn = turn
        self.start = turn.stored.shared
        self.prompt_end = min(turn.stored.prompt_tokens, end)
        self.end = end
        self.is_whole = end == turn.stored.tokens

    @property
    def sampled(self) -> int:
        return self.end - self.prompt_end


class _Tree:
    """The turns of a session by id."""

    def __init__(self, turns: Sequence[StoredTurn]) -> None:
        self._turns = {turn.turn: turn for turn in turns}
        self._children: dict[int, list[StoredTurn]] = defaultdict(list)
        for turn in turns:
            self._children[turn.stored.parent].append(turn)

    def paths(self) -> list[list[_Part]]:
        """Return the path of each branch, in the order in which a walk from the roots finds them."""
        paths = [self._path(turn) for turn in self._turns.values() if not self._is_continued(turn)]
        return sorted(paths, key=lambda path: [part.turn.turn for part in path])

    def _is_continued(self, turn: StoredTurn) -> bool:
        return any(child.stored.shared == turn.stored.tokens for child in self._children[turn.turn])

    def _path(self, last: StoredTurn) -> list[_Part]:
        path: list[_Part] = []
        turn: StoredTurn | None = last
        end = last.stored.tokens
        while turn is not None:
            if turn is last or end > turn.stored.shared:  # a fork may begin before the turn's own tokens
                path.append(_Part(turn, end))
            end = min(end, turn.stored.shared)
            turn = self._turns.get(turn.stored.parent)
        return path[::-1]

    def kind(self, path: list[_Part]) -> BranchKind:
        """Return "retry" for a turn that was sampled again because its reply was lost, otherwise "main"."""
        turn = path[-1].turn
        stored = turn.stored
        if stored.is_delivered or self._children[turn.turn]:
            return "main"
        same = (stored.shared, stored.prompt_tokens)
        for other in self._children[stored.parent]:
            is_later = other.turn > turn.turn and (other.stored.shared, other.stored.prompt_tokens) == same
            if is_later and other.prompt_ids() == turn.prompt_ids():
                return "retry"
        return "main"


def _branch(
    index: int,
    kind: BranchKind,
    path: Sequence[_Part],
    masked: dict[int, int],
    earlier: list[bytes],
    *,
    every: bool,
) -> Branch:
    """Return one branch. Add its sampled tokens to `masked`, and its ids to `earlier`, for the branches after it."""
    last = path[-1]
    ids = [*last.turn.prompt_ids(), *last.turn.output_ids()]
    mask, logprobs = [0] * len(ids), [0.0] * len(ids)
    policy: list[float | None] = [0.0] * len(ids)
    choices = [0] * len(ids)
    spans: list[VersionSpan] = []
    first_own = len(ids)
    for part in path:
        count, before = part.sampled, masked[part.turn.turn]
        if not count:
            continue
        logprobs[part.prompt_end : part.end] = part.turn.output_logprobs()[:count]
        policy[part.prompt_end : part.end] = _policy(part.turn)[:count]
        choices[part.prompt_end : part.end] = (part.turn.output_choices() or [1] * count)[:count]
        new = 0 if every else min(before, count)
        mask[part.prompt_end + new : part.end] = [1] * (count - new)
        if count > before:
            first_own = min(first_own, part.prompt_end + before)
            masked[part.turn.turn] = count
        spans += _spans(part)
    sequence = array("i", ids).tobytes()
    prefixes = [common_prefix(sequence, other) for other in earlier]
    shared = min(max(prefixes, default=0), first_own)
    earlier.append(sequence)
    return Branch(
        branch=index,
        kind=kind,
        session="",
        turns=[_place(part) for part in path],
        shared_tokens=shared,
        ids=ids,
        loss_mask=mask,
        logprobs=logprobs,
        weight_versions=spans,
        policy_logprobs=policy if any(part.turn.policy_logprobs != "same" for part in path) else None,
        has_choice=choices if any(part.turn.output_choices() for part in path) else None,
        fork_of=prefixes.index(max(prefixes)) if shared else None,
    )


def _policy(turn: StoredTurn) -> Sequence[float | None]:
    """Return the policy's log-probabilities of a turn's output, None where they are unknown."""
    match turn.policy_logprobs:
        case "same":
            return turn.output_logprobs()
        case "given":
            return turn.output_policy()
    return [None] * turn.stored.output_tokens


def _place(part: _Part) -> BranchTurn:
    turn = part.turn
    return BranchTurn(
        turn=turn.turn,
        start=part.start,
        prompt_end=part.prompt_end,
        end=part.end,
        finish_reason=turn.stored.finish[0] if part.is_whole else "cut",
        calls=msgspec.json.decode(turn.stored.calls) if turn.stored.calls and part.is_whole else [],
        sampling=turn.conditions,
        policy_logprobs=turn.policy_logprobs,
        overridden=turn.overridden,
        times=turn.stored.times,
        began=turn.stored.began,
    )


def _spans(part: _Part) -> list[VersionSpan]:
    """Return the spans of the sampled tokens that the branch has of a turn."""
    stored = part.turn.stored
    ends = [*(start for _, start in stored.spans[1:]), stored.output_tokens]
    return [
        VersionSpan(version, part.prompt_end + start, part.prompt_end + min(end, part.sampled))
        for (version, start), end in zip(stored.spans, ends, strict=True)
        if start < part.sampled
    ]

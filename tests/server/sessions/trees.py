"""Trees of turns without a ledger, for tests of what is made of them: branches, and counts of their tokens."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from typing import Any, Literal

from verl_server.messages.session_types import Branch, PolicyLogprobs
from verl_server.server.sessions.trajectory import branches


@dataclass
class FakeTurn:
    turn: int
    parent: int
    shared: int
    prompt: list[int]
    output: list[int]
    spans: list[tuple[str, int]] = field(default_factory=lambda: [("v1", 0)])
    finish: tuple[str, str | int | None] = ("stop", 2)
    calls: bytes | None = None
    is_delivered: bool = True
    child: str | None = None
    began: str | None = None
    rid: str = ""
    conditions: dict[str, Any] = field(default_factory=dict)
    policy_logprobs: PolicyLogprobs = "same"
    policy: list[float] = field(default_factory=list)
    choices: list[int] = field(default_factory=list)
    overridden: dict[str, Any] = field(default_factory=dict)
    times: tuple[float, float, float] = (1.0, 2.0, 3.0)

    @property
    def stored(self) -> FakeTurn:
        return self

    @property
    def tokens(self) -> int:
        return len(self.sequence)

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt)

    @property
    def output_tokens(self) -> int:
        return len(self.output)

    @property
    def sequence(self) -> list[int]:
        return self.prompt + self.output

    def prompt_ids(self) -> list[int]:
        return self.prompt

    def output_ids(self) -> list[int]:
        return self.output

    def output_logprobs(self) -> list[float]:
        return [logprob(token) for token in self.output]

    def output_policy(self) -> list[float]:
        return self.policy

    def output_choices(self) -> list[int]:
        return self.choices


def logprob(token: int) -> float:
    return -float(token)


class Tree:
    """Builds turns whose tokens are all different, so that each says where it came from."""

    def __init__(self) -> None:
        self.turns: list[FakeTurn] = []
        self._next = itertools.count(1)

    def tokens(self, count: int) -> list[int]:
        return [next(self._next) for _ in range(count)]

    def add(self, parent: int = -1, shared: int | None = None, new: int = 2, sampled: int = 3, **more: Any) -> FakeTurn:
        before = self.turns[parent].sequence if parent >= 0 else []
        shared = len(before) if shared is None else shared
        prompt = more.pop("prompt", None) or before[:shared] + self.tokens(new)
        turn = FakeTurn(len(self.turns), parent, shared, prompt, self.tokens(sampled), **more)
        self.turns.append(turn)
        return turn

    def branches(self, mask: Literal["once", "every"] = "once", retries: bool = False) -> list[Branch]:
        return list(branches(self.turns, mask, retries))


def random_tree(rng: random.Random) -> Tree:
    """Return a tree of 1 to 24 turns: continuations, forks at any token, repeated prompts and lost replies."""
    tree = Tree()
    for _ in range(rng.randrange(1, 25)):
        parent = rng.randrange(-1, len(tree.turns))
        whole = len(tree.turns[parent].sequence) if parent >= 0 else 0
        shared = whole if rng.random() < 0.6 else rng.randrange(whole + 1)
        repeats = [turn.prompt for turn in tree.turns if (turn.parent, turn.shared) == (parent, shared)]
        prompt = rng.choice(repeats) if repeats and rng.random() < 0.5 else None
        sampled, delivered = rng.randrange(4), rng.random() < 0.6
        tree.add(parent, shared, rng.randrange(3), sampled, prompt=prompt, is_delivered=delivered)
    return tree

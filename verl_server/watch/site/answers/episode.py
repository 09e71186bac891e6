"""One episode with its turns, and its tokens. `watch.site.episode` fills these answers."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from verl_server.watch.site.answers.steps import Row
from verl_server.watch.site.answers.values import Number, Span


class Branch(msgspec.Struct, kw_only=True):
    """One branch of the tree of an episode."""

    row: str
    session: str
    branch: int
    parent: str | None
    """Row of the branch from which it forked, or of the session that started a sub-agent. Null: a root."""
    kind: Literal["root", "branch", "sub-agent"]
    shared: int
    """Tokens that it has in common with its parent, from the beginning."""
    tokens: int
    sampled: int
    turns: int
    reward: Number
    stop_reason: str | None


class Part(msgspec.Struct, kw_only=True):
    """One piece of a turn: a message, a part of it, or a call."""

    number: int
    """Number of the part in its turn, for the URL of the text."""
    role: str
    """Who speaks: environment, policy, or the role of an agent's message (system, user, assistant, tool)."""
    kind: Literal["text", "reasoning", "call", "result", "data"]
    """`call`: a tool call, `text` are its arguments as JSON. `data`: a JSON value that is no text."""
    name: str | None
    """Name of the tool."""
    text: str
    """The first 4,000 characters."""
    length: int
    """Characters of the whole text, with an invisible one as one."""
    next: int | None = None
    """`start` of the rest at the URL of the text, null if `text` is the whole."""


class Turn(msgspec.Struct, kw_only=True):
    number: int
    parts: list[Part]
    """What the policy read, then what it wrote."""
    read: tuple[int, int]
    """[start, end) of the tokens that the policy read."""
    wrote: tuple[int, int]
    """[start, end) of the tokens that the policy sampled."""
    reward: Number
    finish_reason: str | None
    spans: list[Span]
    """Waits of the turn, in seconds since the episode began; [] if unknown."""
    logprob: Number
    """Mean log-probability of the sampled tokens."""
    versions: list[str]
    """Weight versions that sampled the turn."""
    sampling: dict[str, Any]
    """Parameters that shaped the distribution."""
    overridden: dict[str, Any]
    """Parameters of the agent for which its session forces other values."""


class Trained(msgspec.Struct, kw_only=True):
    """What the trainer computed for the trajectory."""

    step: int
    rank: int
    advantage: Number
    age: int | None
    tokens: int
    """Trained tokens."""
    gap_mean: Number
    gap_max: Number
    entropy: Number


class Episode(msgspec.Struct, kw_only=True):
    """One trajectory with its turns. `turns` begins at `after` and goes on at `next`."""

    row: Row
    error: str
    """The whole error, up to 4,000 characters."""
    environment: str | None
    """What was played: the name in a mixture, or what the settings of the run say. None if they do not say."""
    sampling_seed: str | None
    resumes: int
    turns: list[Turn]
    next: int | None
    source: Literal["recorded", "decoded", "none"]
    """Where the parts come from: the messages in the file, the tokens (the file has no messages), nowhere (the file has
    no messages, and there is no tokenizer)."""
    tree: list[Branch]
    """All branches of the episode, parents before children. At most 500."""
    versions: list[str]
    """All weight versions, the oldest first. At most 500."""
    siblings: list[str]
    """Rows of the group's episodes in the order of the members, with this one. At most 500."""
    attempts: list[str]
    """Rows of the attempts in this place of the group, the oldest first."""
    trained: Trained | None
    waits: list[Span]
    """Waits of the episode, in seconds since it began. At most 1,000."""


class TextPart(msgspec.Struct, kw_only=True):
    """The text of a part from `start` on, at most 100,000 characters."""

    text: str
    start: int
    length: int
    """Characters of the whole text."""
    next: int | None
    """`start` of the next request."""


class Tokens(msgspec.Struct, kw_only=True):
    """Columns of tokens. `start` is a multiple of 2,000, and an answer has 2,000 tokens but the last."""

    start: int
    total: int
    id: list[int]
    text: list[str] | None
    """Text of each token; bytes that are no UTF-8 alone are written as <0xE2>. Null: there is no tokenizer."""
    special: list[int]
    """1 for special tokens."""
    mask: list[int]
    """1: sampled and trained on. 2: sampled, but the only allowed token. 0: read, or sampled in another branch."""
    logprob: list[Number]
    """The server's log-probability of sampled tokens, null for tokens that were read."""
    policy: list[Number] | None
    """The policy's log-probability, if it differs from `logprob` because of a mask, a penalty or a bias."""
    trainer: list[Number] | None
    """The trainer's log-probability of trained tokens. Null: the trajectory was not trained."""
    entropy: list[Number] | None
    """Entropy of the policy at trained tokens, in nats."""
    weight: list[Number] | None
    """Weight of the token in the loss."""
    versions: list[str]
    version: list[int]
    """Index into `versions` for each token, -1 for tokens that were read."""
    turn: list[int]
    """Number of the turn of each token, -1 outside of all turns."""

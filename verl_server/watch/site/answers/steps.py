"""Steps, their groups and episodes, two steps side by side, and the search. `watch.site.steps` fills these answers."""

from __future__ import annotations

from typing import Literal

import msgspec

from verl_server.watch.index.rows import EpisodeColumns
from verl_server.watch.site.answers.values import Number, Step


class StepRow(msgspec.Struct, kw_only=True):
    """The recorded episodes of a step. Means are over scored episodes, as in metrics.jsonl."""

    step: Step
    episodes: int
    groups: int
    reward: Number
    """Mean reward."""
    flat: int
    """Groups in which all rewards are alike: nothing to learn from."""
    failed: int
    """Episodes that failed and were not replaced."""
    tokens: Number
    """Mean number of sampled tokens."""
    played: int | None = None
    """Episodes of the step by metrics.jsonl, None if unknown. More than `episodes`: only some are recorded."""


class Steps(msgspec.Struct, kw_only=True):
    steps: list[StepRow]
    """In the order of their numbers, then the names."""
    next: str | None = None


class Row(EpisodeColumns, kw_only=True):
    """One trajectory: an episode, or one branch of an agent's episode, whose turns and tokens are then its own.

    `row` is encoded with encodeURIComponent in URLs. `tools` are at most 32 names of at most 100 characters.
    """

    name: str
    """GROUP-MEMBER."""
    step: Step
    group: str
    """Id of the group, for the filter `group`."""
    session: str
    branch: int
    reward: Number
    error: str
    """The first 200 characters, "" without an error."""
    generate_s: float
    env_s: float
    queue_s: float
    kind: Literal["trajectory", "untrained", "held-out"]
    """untrained: the run did not complete the step. held-out: an evaluation played it."""
    lost: bool
    """True if the step was lost when the run was killed, and ran again."""
    replaced: bool
    """True if another attempt took its place."""
    logprob: Number = None
    """Mean log-probability of the sampled tokens."""
    advantage: Number = None
    """Advantage, if it was trained."""
    answer: str = ""
    """The first 120 characters of what the environment said at last, "" without a text."""
    age: int | None = None
    gap: Number = None
    """Mean |trainer - server| of its log-probabilities, if it was trained."""
    entropy: Number = None


class Group(msgspec.Struct, kw_only=True):
    """The episodes of one task in one step."""

    group: str
    """Id of the group, for the filter `group`."""
    number: int
    """`task.group`; held-out tasks count from 0."""
    task: str
    """Digest of the task: equal in two steps that played the same task."""
    seed: str
    episode_id: str | None
    count: int
    """Episodes, without replaced ones."""
    scored: int
    mean: Number
    spread: Number
    """Standard deviation of the rewards."""
    tokens: Number
    """Mean number of sampled tokens."""
    failed: int
    ends: dict[str, int]
    """Stop reason -> episodes."""
    episodes: list[Row]
    """Rows of first branches, in the order of the members, at most 64."""
    left_out: int = 0
    """Episodes beyond these."""


class StepGroups(msgspec.Struct, kw_only=True):
    """The groups of a step that have an episode which the filters let through, sorted by `sort`.

    `sort`: spread (the default), mean, tokens, failed (largest first), flat (least spread first), number.
    """

    step: StepRow
    groups: list[Group]
    next: str | None = None
    previous_step: Step | None = None
    next_step: Step | None = None


class Pair(msgspec.Struct, kw_only=True):
    task: str
    seed: str
    episode_id: str | None
    a: Group | None
    b: Group | None


class Comparison(msgspec.Struct, kw_only=True):
    """Two steps by task. Tasks that both played come first, those with the largest change of the mean reward before.

    `a` is a step of the run, `b` one of the run `with`, or of the same.
    """

    a: StepRow
    b: StepRow
    pairs: list[Pair]
    common: int
    """Tasks that both steps played."""
    next: str | None = None


class Searched(msgspec.Struct, kw_only=True):
    bytes: int
    """Bytes that were searched, from the first request with this text on."""
    total: int


class Episodes(msgspec.Struct, kw_only=True):
    """Rows that the filters let through and, with `q`, whose texts contain `q` (case is ignored for ASCII letters).

    One request searches for about a second: it may find nothing and have a `next`. `order`: newest (the default),
    oldest, reward, -reward, tokens, -tokens, turns, -turns, seconds, -seconds. A search has the order of the files.
    """

    rows: list[Row]
    next: str | None = None
    total: int | None = None
    """Rows that the filters let through, on the first page; null on others, and if they were not counted."""
    searched: Searched | None = None
    """Null without `q`."""
    excerpts: list[str] = []
    """With `q`: the text around the first place found, one for each row."""

"""What the index of a run is asked, and what it answers: filters and rows.

`RunIndex` returns these to the page's server and to the commands. Figures are of episodes: the branches of an agent's
episode, with its sub-agents' sessions, are one `EpisodeRow`. A *step* is the one that used an episode: in an
asynchronous run, not the one in which its group started.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from verl_server.errors import VerlServerError
from verl_server.watch.run_records import HELD_OUT

Order = Literal["newest", "oldest", "reward", "-reward", "tokens", "-tokens", "turns", "-turns", "seconds", "-seconds"]
"""Orders of episodes. With "-", the largest is the first. Episodes without a reward are the last ones."""

GroupOrder = Literal["spread", "reward", "tokens", "failed", "group"]
"""Orders of groups: the largest spread of rewards first, the smallest mean reward, the longest, the most failures."""

Fate = Literal["", "trained", "skipped", "dropped", "no_spread", "playing", "untrained", "held-out"]
"""What became of an episode's group. "": the run is synchronous, or has no steps. playing: the group played or waited
when the files were read. untrained: the run did not complete the step. held-out: an evaluation played it. The others
are those of `GroupDone`."""


HELD_OUT_PLACE = "held-out-"
"""Begin of the names of places with the episodes of an evaluation. The rest is `Evaluation.step`."""


def evaluated_step(place: str) -> int | None:
    """Return the step of an evaluation's place (`StepRow.name`); None for another place."""
    number = place.removeprefix(HELD_OUT_PLACE)
    return int(number) if number != place and number.isascii() and number.isdecimal() else None


def group_number(group: int) -> int:
    """Return the number of a group for people: held-out tasks count from 0, too."""
    return group - HELD_OUT if group >= HELD_OUT else group


class RowUnknownError(VerlServerError):
    """No row has this id."""

    status_code = 404


class RowGoneError(VerlServerError):
    """The line of this row was removed or replaced. The message has the reason."""

    status_code = 410


class EpisodeFilter(msgspec.Struct, kw_only=True, frozen=True):
    """Conditions that all hold. None is no condition."""

    place: str | None = None
    """`StepRow.name`."""
    first_step: int | None = None
    last_step: int | None = None
    """The last step, included."""
    stop_reason: str | None = None
    fault: str | None = None
    least_reward: float | None = None
    most_reward: float | None = None
    least_tokens: int | None = None
    most_tokens: int | None = None
    """Bounds of the tokens of the episode's longest branch."""
    tool: str | None = None
    """Name of a tool that the policy called."""
    has_error: bool | None = None
    group: int | None = None
    version: str | None = None
    """Label of a weight version that sampled tokens of the episode. A version between the oldest and the newest one
    counts as one of them."""
    incarnation: str | None = None
    task: str | None = None
    """`EpisodeRow.task`."""
    lost: bool = False
    """True: also those that a resumed run played again."""
    replaced: bool = True
    """False: without episodes that others replaced."""


class EpisodeColumns(msgspec.Struct, kw_only=True):
    """What an index and the answers of the page say alike about an episode."""

    row: str
    """Id of the episode's first line: FILE:OFFSET:DIGEST."""
    member: int
    attempt: int
    seed: str
    """Decimal digits: seeds may exceed what a browser's numbers hold."""
    episode_id: str | None
    phase: str | None
    """before, training or after in the demo's file; None in others."""
    stop_reason: str | None
    fault: str | None
    branches: int
    """Number of the episode's lines."""
    turns: int
    """Turns of all branches."""
    tokens: int
    """Tokens of the longest branch."""
    sampled: int
    """Sampled tokens of all branches."""
    began: float | None
    """Wall time in seconds since 1970; None if it is unknown."""
    ended: float | None
    oldest_version: str
    newest_version: str
    versions: int
    """Number of weight versions that sampled tokens."""
    tools: list[str]
    """Names of the tools that the policy called, sorted."""


class EpisodeRow(EpisodeColumns, kw_only=True):
    """One episode."""

    place: str
    """`StepRow.name` of its step."""
    step: int | None
    """Step that used the episode; None if there is none."""
    start_step: int | None
    """Step of the line: in an asynchronous run, the one in which the group started."""
    rank: int | None
    incarnation: str | None
    group: int
    task: str
    """Digest of what the episode was asked: two episodes with the same one are comparable."""
    fate: Fate
    is_lost: bool
    """True if a resumed run played the episode's group again."""
    is_replaced: bool
    """True if another attempt took its place. It is in no figure."""
    is_unsampled: bool
    """True if the policy sampled no token in it. It is in no mean reward."""
    reward: float | None
    error: str | None
    """The first 200 characters."""
    generate_seconds: float
    env_seconds: float
    queue_seconds: float
    time: float | None
    """Wall time of the line."""
    logprob: float | None
    """Mean log-probability of the sampled tokens."""
    is_trained: bool
    """True if the trainer recorded figures of it. The next five are None otherwise, and where they are unknown."""
    trained_step: int | None
    advantage: float | None
    age: int | None
    gap_mean: float | None
    """Mean absolute difference between the trainer's and the server's log-probabilities of the trained tokens."""
    gap_max: float | None
    entropy: float | None
    """Mean entropy of the policy at the trained tokens."""
    answer: str | None = None
    """The first 120 characters of what the environment said at last. None without a text."""


class BranchRow(msgspec.Struct, kw_only=True):
    """One line of an episode."""

    row: str
    session: str
    """Id of the agent's session. "" without an agent."""
    parent: str
    """Session that this one was started by; "" if there is none, or it is unknown."""
    branch: int
    fork_of: int | None
    """Branch of the same session from which this one departs; None if it begins a conversation."""
    shared: int
    """Leading tokens that the branch `fork_of` has, too."""
    turns: int
    tokens: int
    sampled: int
    logprob: float | None
    is_trained: bool


class Episode(msgspec.Struct, kw_only=True):
    """An episode with its branches, in the order of sessions and branches."""

    head: EpisodeRow
    branches: list[BranchRow]


class GroupRow(msgspec.Struct, kw_only=True):
    """The episodes of one group, which GRPO compares. Figures are without those that others replaced."""

    place: str
    step: int | None
    start_step: int | None
    incarnation: str | None
    rank: int | None
    group: int
    seed: str
    task: str
    fate: Fate
    is_lost: bool
    episodes: int
    scored: int
    """Episodes with a reward and a sampled token."""
    mean_reward: float | None
    spread: float | None
    """Standard deviation of the rewards; None if none is known."""
    least_reward: float | None
    most_reward: float | None
    failed: int
    """Episodes with an error that have no reward, or an end that is not regular, as `StepMetrics.failed`."""
    replaced: int
    mean_tokens: float
    most_tokens: int
    mean_turns: float
    ends: dict[str, int]
    """Stop reason -> number of episodes."""
    members: list[EpisodeRow]
    """In the order of member and attempt, with those that others replaced."""


class StepRow(msgspec.Struct, kw_only=True):
    """The episodes of one step, or of another place of the run."""

    name: str
    """The step in decimal digits; or "-" (a run without steps), playing, dropped or untrained (see `Fate`), held-out-N
    (the evaluation at step N), before or after (the demo's evaluations)."""
    step: int | None
    episodes: int
    """Episodes without those that others replaced."""
    groups: int
    scored: int
    mean_reward: float | None
    without_spread: int
    """Groups with at least two scored episodes, all with the same reward."""
    failed: int
    replaced: int
    unsampled: int
    mean_tokens: float
    most_tokens: int
    mean_turns: float
    sampled: int
    began: float | None
    ended: float | None


class EpisodePage(msgspec.Struct, kw_only=True):
    rows: list[EpisodeRow]
    cursor: str | None
    """The argument `after` of the next page; None if this is the last one."""
    total: int | None = None
    """Number of episodes that fit, on the first page. None on others, and if they were not counted."""


class SearchPage(msgspec.Struct, kw_only=True):
    rows: list[EpisodeRow]
    """Episodes that have the text, in the order of the files, the newest first."""
    places: list[str]
    """For each row, where the text was found, with a few characters around it."""
    cursor: str | None
    """The argument `cursor` of the next call, which goes on; None if all was searched."""
    searched_bytes: int
    """Bytes of the lines that this search has read so far, with the calls before."""
    total_bytes: int
    """Bytes of all lines that fit the filter."""


class Progress(msgspec.Struct, kw_only=True):
    bytes_indexed: int
    bytes_total: int
    episodes: int
    """Lines of trajectories that are in the index."""
    damaged: int
    """Lines that could not be read."""
    generation: int
    """Grows when the index has changed."""
    error: str | None = None
    """The reason if the files cannot be read now."""


class LaneRow(msgspec.Struct, kw_only=True):
    """An episode over time. All times are wall times in seconds since 1970."""

    row: str
    label: str
    """STEP GROUP-MEMBER."""
    began: float
    ended: float
    stop_reason: str | None
    fault: str | None
    parts: list[tuple[str, float, float]]
    """(kind, begin, end) of its waits: queue, env or generate."""


class Lanes(msgspec.Struct, kw_only=True):
    rows: list[LaneRow]
    episodes: int
    """Episodes that overlap the window. If they are more than `rows`, these are evenly chosen."""
    unknown: int
    """Episodes of the run whose times are unknown."""


class Activity(msgspec.Struct, kw_only=True):
    """What the episodes waited for over time: for each of the equal parts of a window, the mean number of episodes."""

    begin: float
    end: float
    generate: list[float]
    env: list[float]
    queue: list[float]
    share: float
    """Share of the window's episodes that were counted, evenly chosen; the numbers are scaled to all of them."""

"""Who did what in a window of time. `watch.site.lanes` fills these answers."""

from __future__ import annotations

import msgspec

from verl_server.watch.site.answers.values import Number, Span, Step


class ServerLane(msgspec.Struct, kw_only=True):
    url: str
    spans: list[Span]
    """Kinds: up, lost (it had ended or had no weights)."""


class EvaluationSpan(msgspec.Struct, kw_only=True):
    """The time in which the held-out tasks played."""

    step: int
    """Number of the steps before."""
    begin: float
    end: float
    reward: Number
    """Mean reward; null while it plays, and without a scored episode."""
    push_delay: Number
    """Seconds for which it held a push; null while it plays."""
    incomplete: str | None
    """The reason if its figures cannot be compared with others."""


class EpisodeLane(msgspec.Struct, kw_only=True):
    row: str
    """Row of the episode's first branch: opens it."""
    label: str
    """GROUP-MEMBER."""
    step: Step
    stop_reason: str | None
    begin: float
    end: float
    parts: list[Span]
    """Kinds: generate, env, queue. Time in no part is the agent's own, or unknown."""


class Counts(msgspec.Struct, kw_only=True):
    """How many episodes did what over time: the mean of each interval [time[i], time[i] + `interval`)."""

    time: list[float] = []
    interval: float = 0.0
    generate: list[float] = []
    env: list[float] = []
    queue: list[float] = []
    other: list[float] = []
    """Episodes that ran and did none of these. [] if unknown."""
    share: float = 1.0
    """Share of the episodes in the window that were counted: with very many, an even choice is scaled up."""


class Lanes(msgspec.Struct, kw_only=True):
    """Who did what in a window of time."""

    begin: float | None
    """Begin of the window; null if no times are known."""
    end: float | None
    first: float | None
    """Begin of the whole run."""
    last: float | None
    """Newest time of the run."""
    trainer: list[tuple[str, float, float, int]] = []
    """Phase, begin, end, step. Phases lie one after the other and end with the step; those that ran side by side with
    others (an asynchronous rollout) are in none. In "held", the push of the step waited for an evaluation. In
    "evaluation", which lies between two steps, the trainer waited for one; its step is that of the evaluation."""
    pushes: list[tuple[str, float, float, str | None]] = []
    """Weight version, begin, end, error."""
    evaluations: list[EvaluationSpan] = []
    servers: list[ServerLane] = []
    episodes: list[EpisodeLane] = []
    total: int = 0
    """Episodes that overlap the window. `episodes` are an even choice if there are more than `rows`."""
    counts: Counts = msgspec.field(default_factory=Counts)
    idle: dict[str, Number] = {}
    """Who (trainer, generation, environments) -> share of the window in which nothing of it was at work."""
    notes: list[str] = []
    """What the lanes lack, such as episodes whose times are unknown."""

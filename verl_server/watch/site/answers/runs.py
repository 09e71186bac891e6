"""What whole runs answer: their list, settings, metrics and events, and the live stream. `overview` fills them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from verl_server.watch.site.answers.values import Number


class Progress(msgspec.Struct, kw_only=True):
    """How far the episodes of a run are indexed. Queries answer from what is indexed."""

    bytes: int
    """Bytes of the run's files that are indexed."""
    total: int
    """Bytes of these files now."""


class Run(msgspec.Struct, kw_only=True):
    """One run, as the list shows it."""

    id: str
    """Part of the URLs: the folder's name and four hexadecimal digits."""
    name: str
    """Name of the folder or file."""
    path: str
    """Path of the folder or file."""
    kind: Literal["training", "rollout", "agents", "demo", "store"]
    """What wrote it: a trainer, `rollout`, `rollout --agent`, the demo, or a server's session store."""
    state: Literal["new", "running", "ended", "failed", "unknown"]
    """new: nothing is recorded yet. unknown: no process writes it, and it has no end (it was killed)."""
    generation: int
    """Grows when the run has something new: metrics, events or episodes."""
    started: float | None = None
    """Time of the first event."""
    last: float | None = None
    """Time of the newest line."""
    steps: int = 0
    """Number of steps that have metrics."""
    last_step: int | None = None
    """The newest of them."""
    episodes: int = 0
    """Trajectories that are indexed: one for each episode, or for each branch of an agent's."""
    progress: Progress = msgspec.field(default_factory=lambda: Progress(bytes=0, total=0))
    exit_status: int | None = None
    """Exit status, None unless the run has ended."""
    error: str | None = None
    """Error that ended the run."""
    tokenizer: str | None = None
    """Folder of the tokenizer that decodes tokens, None if there is none."""
    tokenizer_problem: str | None = None
    """Why there is no tokenizer, and what helps."""
    warnings: list[str] = []
    """What is wrong with the files, such as damaged lines."""


class Runs(msgspec.Struct, kw_only=True):
    """All runs that the command opened."""

    runs: list[Run]
    version: str
    """Version of this package."""
    left_out: int = 0
    """Runs that do not fit into the answer."""
    exported: float | None = None
    """Time at which this page was exported, null if a server answers."""
    notes: list[str] = []
    """What an exported page lacks."""


class RunSettings(msgspec.Struct, kw_only=True):
    """A run with the settings of its run.json."""

    run: Run
    settings: dict[str, Any]
    """Long values are cut, numbers that JSON cannot hold are texts."""


class Metrics(msgspec.Struct, kw_only=True):
    """Columns of metrics.jsonl, and the seconds of each phase as `phases.NAME`.

    Nested figures have names with dots (`losses.kl`). With more steps than `points`, each entry stands for a bucket of
    neighbouring steps: `step` is the last of them, `values` the mean, `low` and `high` the least and the largest value.
    """

    run: str
    names: list[str]
    """All columns that the run has."""
    step: list[int]
    values: dict[str, list[Number]]
    """Column -> one entry for each entry of `step`."""
    low: dict[str, list[Number]] = {}
    """{} unless thinned."""
    high: dict[str, list[Number]] = {}
    """{} unless thinned."""
    thinned: int = 1
    """Steps of one entry. 1: not thinned."""
    first: int | None = None
    """First step of the run, whatever `from` asked for."""
    last: int | None = None
    """Last step of the run."""


class Event(msgspec.Struct, kw_only=True):
    number: int
    """Place among the events of the run."""
    kind: str
    time: float
    incarnation: str
    step: int | None
    """Step that the event is about, None if about none."""
    facts: dict[str, Any]
    """The other fields of the event."""


class Events(msgspec.Struct, kw_only=True):
    """Events, the oldest first."""

    events: list[Event]
    next: int | None = None


class Live(msgspec.Struct, kw_only=True):
    """Something has grown. The page asks again for what it shows."""

    run: str
    generation: int
    state: str
    steps: int
    last_step: int | None
    episodes: int
    progress: Progress

"""The answers of the page's server, as JSON. `views` make them, `app` sends them, the page's scripts read them.

Rules for all of them:

- `Number` is a finite number, one of the texts "NaN", "Infinity" and "-Infinity", or null if there is none.
- Seeds and ids are texts, because a script's numbers have 53 bits. Times are wall times, in seconds since 1970, unless
  the field says otherwise.
- A text of a model, an environment or an error has control characters, lone surrogates and marks of the writing
  direction as visible characters. It is never HTML.
- `Step` is the number of the step that used an episode, or the name of another place: "-" (a run without steps),
  "playing" and "dropped" (groups of an asynchronous run that no step used), "untrained" (of a step that the run did not
  complete), "before" and "after" (the demo's evaluations).
- An answer has at most 1 MB. A list that does not fit goes on at `next`: the same URL with `after` set to its value. A
  null `next` is the end.
- An error has a status of 400 or more, and `ErrorAnswer` as its body.

The URLs have their parameters in alphabetical order, without those that have their default. A script that builds them
so finds the answers of an export, which are stored by URL.

    /api/runs                                       Runs
    /api/runs/RUN                                   RunSettings
    /api/runs/RUN/metrics?from&names&points&to      Metrics
    /api/runs/RUN/events?after&kinds                Events
    /api/runs/RUN/advisories                        Advisories
    /api/runs/RUN/lanes?from&rows&to                Lanes
    /api/runs/RUN/steps?after&from&to               Steps
    /api/runs/RUN/steps/STEP?after&sort&FILTERS     StepGroups
    /api/runs/RUN/compare?a&after&b                 Comparison
    /api/runs/RUN/episodes?after&order&q&FILTERS    Episodes
    /api/runs/RUN/episodes/ROW?after                Episode
    /api/runs/RUN/episodes/ROW/text?part&start&turn TextPart
    /api/runs/RUN/episodes/ROW/tokens?start         Tokens
    /api/live                                       a stream of server-sent events; the data of each is a `Live`

FILTERS, each of which may be left out: `error=1` (with an error), `fault`, `from` and `to` (steps), `group`, `lost=1`
(lost steps, too), `reward_from`, `reward_to`, `step` (a Step; not where the path has one), `stop` (stop reason),
`tokens_from`, `tokens_to`, `tool`, `version`.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import msgspec

Number: TypeAlias = float | str | None
Step: TypeAlias = int | str


class ErrorAnswer(msgspec.Struct, kw_only=True):
    """The body of every answer with a status of 400 or more."""

    error: str
    """What is wrong."""
    remedy: str = ""
    """What helps, "" if nothing is known."""


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


class Advisory(msgspec.Struct, kw_only=True):
    """What is wrong with a run, over all steps that said so."""

    name: str
    severity: Literal["notice", "warning", "error"]
    """error: the run learns little or nothing, or trains another policy than the one that is sampled."""
    step: int
    """The newest step."""
    first_step: int
    count: int
    """Number of times that it was said."""
    figure: dict[str, Number]
    """The measured numbers of the newest step, by name."""
    bound: Number
    """The bound that one of them crossed."""
    message: str
    cause: str
    remedy: str
    ended: int | None = None
    """Step at which it stopped being true, None if it still is, or if nobody noted the end."""
    computed: bool = False
    """True if the run's files have no advisories, and this server judged the metrics now."""


class Advisories(msgspec.Struct, kw_only=True):
    """Those that are true now come first, the most severe before, then the newest."""

    advisories: list[Advisory]
    judged: bool = True
    """False if the run has nothing to judge, such as a rollout without a trainer, or cannot be judged."""
    problem: str | None = None
    """Why it cannot be judged."""


Span: TypeAlias = tuple[str, float, float]
"""Kind, begin, end."""


class ServerLane(msgspec.Struct, kw_only=True):
    url: str
    spans: list[Span]
    """Kinds: up, lost (it had ended or had no weights)."""


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
    others (an asynchronous rollout) are in none."""
    pushes: list[tuple[str, float, float, str | None]] = []
    """Weight version, begin, end, error."""
    servers: list[ServerLane] = []
    episodes: list[EpisodeLane] = []
    total: int = 0
    """Episodes that overlap the window. `episodes` are an even choice if there are more than `rows`."""
    counts: Counts = msgspec.field(default_factory=Counts)
    idle: dict[str, Number] = {}
    """Who (trainer, generation, environments) -> share of the window in which nothing of it was at work."""
    notes: list[str] = []
    """What the lanes lack, such as episodes whose times are unknown."""


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


class Row(msgspec.Struct, kw_only=True):
    """One trajectory: an episode, or one branch of an agent's episode."""

    row: str
    """Id of the row: FILE:OFFSET:DIGEST. Encode it with encodeURIComponent in URLs."""
    name: str
    """GROUP-MEMBER."""
    step: Step
    group: str
    """Id of the group, for the filter `group`."""
    member: int
    attempt: int
    session: str
    branch: int
    branches: int = 1
    """Branches of the episode, in lists of episodes."""
    reward: Number
    stop_reason: str | None
    fault: str | None
    error: str
    """The first 200 characters, "" without an error."""
    turns: int
    tokens: int
    sampled: int
    generate_s: float
    env_s: float
    queue_s: float
    began: float | None
    ended: float | None
    versions: int
    """Number of weight versions that sampled tokens."""
    oldest_version: str
    newest_version: str
    tools: list[str]
    """Names of the tools that the policy called, at most 32 of at most 100 characters."""
    seed: str
    episode_id: str | None
    kind: Literal["trajectory", "untrained"]
    """untrained: the run did not complete the step."""
    phase: str | None
    """before, training or after: the demo's. None elsewhere."""
    lost: bool
    """True if the step was lost when the run was killed, and ran again."""
    replaced: bool
    """True if another attempt took its place."""
    logprob: Number = None
    """Mean log-probability of the sampled tokens."""
    advantage: Number = None
    """Advantage, if it was trained."""
    age: int | None = None
    gap: Number = None
    """Mean |trainer - server| of its log-probabilities, if it was trained."""
    entropy: Number = None


class Group(msgspec.Struct, kw_only=True):
    """The episodes of one task in one step."""

    group: str
    """Id of the group, for the filter `group`."""
    number: int
    """`task.group`."""
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

    `sort`: spread (the default; largest first), mean, tokens, failed (largest first), number.
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
    """Two steps by task. Tasks that both played come first, those with the largest change of the mean reward before."""

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
    """Rows that the filters let through; null if they were not counted."""
    searched: Searched | None = None
    """Null without `q`."""
    excerpts: list[str] = []
    """With `q`: the text around the first place found, one for each row."""


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
    """What the run played, if its settings say so."""
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


class Live(msgspec.Struct, kw_only=True):
    """Something has grown. The page asks again for what it shows."""

    run: str
    generation: int
    state: str
    steps: int
    last_step: int | None
    episodes: int
    progress: Progress

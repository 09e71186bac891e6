"""The records in the files of a training run, one a line. `run_files` reads them, `train.run_writer` writes them.

Each line is a JSON object. Keys that a reader does not know are to be ignored: later versions add some.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

HELD_OUT = 2**30
"""First seed of the held-out tasks, and first number of their groups. Those of training are smaller."""


class Label(msgspec.Struct, kw_only=True):
    """The first keys of each line of metrics.jsonl and errors.jsonl, and of the files with trajectories: those of
    training, untrained-rankN.jsonl and held-out-rankN.jsonl.

    A step that was lost and runs again has lines of two incarnations.
    """

    step: int | None = None
    """Training step. In a line of a trajectory, it is the step in which the episode was used; in an asynchronous run,
    the step in which its group started. In held-out-rankN.jsonl, it is `Evaluation.step`."""
    rank: int | None = None
    """Rank that wrote the line."""
    incarnation: str | None = None
    """Incarnation of the start of the run that wrote the line. None in files of earlier versions."""
    time: float | None = None
    """Wall time of the line, in seconds since 1970."""


class TrainedTrajectory(msgspec.Struct, kw_only=True):
    """A line of trained-rankN.jsonl: what the trainer computed for a trajectory in the first pass over it.

    The trajectory is the line of `sampled_rank` and the same incarnation in trajectories-rankN.jsonl that has
    `sampled_step`, `group`, `member`, `attempt`, `session` and `branch`. Lists have one number for each token in
    `positions`, rounded to 6 decimals.
    """

    step: int
    """Step that trained the trajectory."""
    rank: int = 0
    """Rank that trained the trajectory."""
    incarnation: str = ""
    """Incarnation that trained the trajectory."""
    time: float = 0.0
    """Wall time of the line, in seconds since 1970."""
    sampled_step: int
    """`step` of the trajectory's line."""
    group: int
    """`task.group` of the trajectory."""
    member: int
    """Number of the episode in its group."""
    attempt: int = 0
    """Number of episodes that this one and others replaced before it: their lines have the other keys in common."""
    session: str = ""
    """Id of the agent's session. "" without an agent."""
    branch: int = 0
    """Number of the branch in the session."""
    advantage: float
    """Advantage of the trajectory."""
    sampled_rank: int | None = None
    """Rank that wrote the trajectory's line. None: `rank`."""
    age: int | None
    """Number of the trained version - that of the oldest sampled token. None if the versions have no order."""
    positions: list[int]
    """Positions of the trained tokens in `Trajectory.tokens`."""
    logprobs: list[float | None]
    """The trainer's log-probability of each trained token. None if it is not finite."""
    entropy: list[float | None] = []
    """Entropy of the policy at each trained token, in nats. [] if the trainer did not compute it."""
    loss_weights: list[float | None] = []
    """Factor of each token in the loss, beside the advantage and the ratio of the policies: the importance weight of
    the losses tis and decoupled, times the correction of a token that was drawn under a mask, a penalty or a bias
    (`correction_bound`); 0 if a mask of the loss leaves the token out. None if it is not finite. [] if all are 1."""
    gap_mean: float | None = None
    """Mean over `positions` of |trainer's log-probability - the policy's at sampling time|. Above `age` 0 the weights
    differ, too. None if a number is not finite, without `positions`, and in files of an earlier version."""
    gap_max: float | None = None
    """Largest of these differences. None as `gap_mean`."""


class HeldOutFigures(msgspec.Struct, kw_only=True):
    """The figures of one environment of a mixture in an evaluation. Each is as the field of the whole evaluation."""

    episodes: int
    """Episodes that were scored."""
    failed: int
    """Episodes that ended without a score."""
    reward: float | None
    """Mean reward. None if no episode was scored."""
    success: float | None
    """Share of the scored episodes whose reward is at least the environment's `success`, or `--eval-success`."""


class Evaluation(msgspec.Struct, kw_only=True):
    """A line of evaluations.jsonl: the rewards of held-out episodes, which one version played."""

    step: int
    """Number of the steps before: the weights are those of checkpoint-STEP. They are lost if the step before this one
    runs again."""
    version: str
    """Version of the weights."""
    episodes: int
    """Episodes that were scored. `reward` and `success` are means over them; of a mixture, they are the means of the
    environments' figures, weighed with the weights of the mixture."""
    failed: int
    """Episodes that ended without a score. The infrastructure ended them, weights of another version sampled one of
    their tokens, or the policy sampled no token. No other episode replaces them."""
    unfinished: int = 0
    """Episodes that had not ended with the evaluation, and were cancelled."""
    reward: float | None
    """Mean reward. None if no episode was scored."""
    success: float | None
    """Share of the episodes whose reward is at least `--eval-success`. None as `reward`."""
    seconds: float
    """Time from the begin of the evaluation to the end of its last episode."""
    push_delay: float
    """Seconds for which the evaluation held a push. In a synchronous run, nothing goes on beside an evaluation, so they
    are all of its seconds."""
    incomplete: str | None = None
    """The reason if the weights cannot be compared with others: timeout (`--eval-timeout`), stopped (by a signal),
    server (none was left that had the version), unscored (no episode has a score; or none of an environment, which is
    named), or an error."""
    environments: dict[str, HeldOutFigures] = {}
    """Environment of a mixture -> its figures. Absent without a mixture."""
    episode_metrics: dict[str, float] = {}
    """Name -> mean of a metric, as in a line of metrics.jsonl."""
    incarnation: str = ""
    """Incarnation of the start of the run that evaluated."""
    time: float = 0.0
    """Wall time of the line, in seconds since 1970."""


class RunEvent(msgspec.Struct, kw_only=True):
    """A line of events.jsonl. `kind` says which of the events below it is."""

    time: float = 0.0
    """Wall time, in seconds since 1970."""
    incarnation: str = ""
    """Incarnation of the start of the run that wrote the event."""


class RunStarted(RunEvent, tag_field="kind", tag="run_started"):
    """A new run begins."""

    ranks: int
    """Number of trainer ranks."""
    version: str
    """Version of this package."""
    next_step: int = 0
    """The first step. Not 0 if the run is a fork of another one."""
    advises: bool = False
    """True if this start writes an `Alarm` for each advisory. Earlier versions wrote those about the gap only."""
    forked_from: str | None = None
    """Folder of the checkpoint of another run from which this one begins. None: it begins from the initial weights."""
    forked_version: str | None = None
    """Version of its weights in the other run."""


class RunResumed(RunEvent, tag_field="kind", tag="run_resumed"):
    """The run goes on from a checkpoint. Lines of earlier incarnations about `next_step` and later are lost steps."""

    ranks: int
    """Number of trainer ranks."""
    version: str
    """Version of this package."""
    next_step: int
    """The first step that runs again."""
    checkpoint: str
    """Name of the checkpoint's folder."""
    advises: bool = False
    """True if this start writes an `Alarm` for each advisory, as in `RunStarted`."""


class RunEnded(RunEvent, tag_field="kind", tag="run_ended"):
    """The run has ended. A run that was killed has no such event."""

    exit_status: int
    """Exit status of rank 0."""
    error: str | None = None
    """Type and message of the error that ended the run; None if the run is complete."""


class SignalReceived(RunEvent, tag_field="kind", tag="signal"):
    """A signal stops the run."""

    signal: str
    """Name of the signal, such as SIGTERM."""


class ServerLaunched(RunEvent, tag_field="kind", tag="server_launched"):
    """A rollout server is ready, which the run launched or attached to."""

    url: str
    """URL of the server."""
    attached: bool = False
    """True if somebody else started the server."""


class ServerLost(RunEvent, tag_field="kind", tag="server_lost"):
    """A server has ended, or was started again, and does not have the trainer's weights any more."""

    url: str
    """URL of the server."""
    error: str
    """What the trainer found."""


class ServerRelaunched(RunEvent, tag_field="kind", tag="server_relaunched"):
    """The run has launched its server again."""

    url: str
    """URL of the server."""
    launches_left: int
    """Launches that are left until the next push."""


class ServerHealed(RunEvent, tag_field="kind", tag="server_healed"):
    """A server that was lost has the newest weights again."""

    url: str
    """URL of the server."""
    version: str
    """Version of the weights."""


class PushBegan(RunEvent, tag_field="kind", tag="push_began"):
    """The trainer begins to copy its weights into the servers."""

    version: str
    """Version of the weights."""


class PushEnded(RunEvent, tag_field="kind", tag="push_ended"):
    """The servers have the weights, or the push failed."""

    version: str
    """Version of the weights."""
    seconds: float
    """Time since the push began."""
    error: str | None = None
    """Type and message of the error; None if at least one server has the weights."""


class StepBegan(RunEvent, tag_field="kind", tag="step_began"):
    """A training step begins."""

    step: int
    """Number of the step."""


class StepEnded(RunEvent, tag_field="kind", tag="step_ended"):
    """A training step has ended."""

    step: int
    """Number of the step."""
    phases: dict[str, float]
    """Phase (rollout, train, sync, record) -> its seconds, in the order of the phases. Before the push, `held` is the
    time for which it waited for an evaluation.

    The rollout is that of the slowest rank, the others are those of rank 0. `record` is the writing of these files.
    """
    skipped: str | None = None
    """The reason if the step had nothing to train on."""


GroupFate = Literal["trained", "skipped", "dropped", "no_spread"]
"""The fate of a group of an asynchronous run: a step trained it; a step used it and the weights stayed; it was too
old and was left out; all its rewards are equal, and another one played in its place (`--grpo.refill`). A group without
a fate was playing or waiting when the run ended, and a resumed run plays it again."""


class GroupDone(RunEvent, tag_field="kind", tag="group_done"):
    """A group of an asynchronous run has its fate."""

    group: int
    """Number of the group in the run, `task.group` of its episodes."""
    fate: GroupFate
    """trained, skipped (a step used it, and the weights stayed), dropped (it became too old) or no_spread (its rewards
    are equal, and another group played in its place)."""
    step: int
    """Step that used the group, or for which another one replaced it, or at which it was dropped."""
    start_step: int
    """Step in which the group started, `step` of its episodes' lines."""
    start_version: int
    """Number of the version that was served when the group started."""


class CheckpointSaved(RunEvent, tag_field="kind", tag="checkpoint_saved"):
    """A checkpoint is on the disk."""

    name: str
    """Name of the checkpoint's folder."""
    seconds: float
    """Seconds that writing it took. The steps went on meanwhile, except at the end of the run and with
    `--no-save-in-background`."""
    held_seconds: float | None = None
    """Seconds for which the run waited: for the checkpoint before, if that was still being written, for a copy of
    weights and optimizer in memory, and for the write where the steps did not go on. None in runs of earlier versions,
    which waited for all of `seconds`."""


class EvaluationBegan(RunEvent, tag_field="kind", tag="evaluation_began"):
    """The held-out tasks begin to play."""

    step: int
    """`Evaluation.step`."""
    version: str
    """Version of the weights that play them."""


class EvaluationEnded(RunEvent, tag_field="kind", tag="evaluation_ended"):
    """An evaluation has ended, and has a line in evaluations.jsonl."""

    step: int
    """`Evaluation.step`."""
    version: str
    """Version of the weights that played."""
    seconds: float
    """Time from the begin of the evaluation to the end of its last episode."""
    push_delay: float
    """Seconds for which the evaluation held a push."""
    reward: float | None
    """Mean reward of the episodes that were scored."""
    incomplete: str | None = None
    """The reason if the reward cannot be compared with others, as in `Evaluation`."""


Severity = Literal["info", "warning", "error"]
"""info: worth to know, and no fault. error: the run learns little or nothing, or trains another policy than the one
that is sampled."""


class Alarm(RunEvent, tag_field="kind", tag="alarm"):
    """An advisory: a figure of the run is beyond its bound, or much further beyond it than before.

    Alarms of earlier versions are about `logprob_gap`, and have neither figure nor severity.
    """

    name: str
    """What is judged: a name of `--stop-on`."""
    step: int
    """Number of the step."""
    message: str
    """The figures. In alarms of earlier versions, with the likely causes."""
    stops: bool
    """True if the alarm ends the run."""
    figure: float | None = None
    """The figure that is judged. None if it is not finite."""
    bound: float | None = None
    """Its bound."""
    cause: str = ""
    """The likely causes."""
    remedy: str = ""
    """What to do."""
    severity: Severity | None = None
    """info (worth to know, and no fault), warning, or error: the run learns little or nothing, or trains another policy
    than the one that is sampled. None in alarms of earlier versions."""


class AlarmEnded(RunEvent, tag_field="kind", tag="alarm_ended"):
    """The figure of an alarm was clearly within its bound for five steps in a row: below 80 % of it."""

    name: str
    """Name of the alarm."""
    step: int
    """Number of the last of the five steps."""


class SegmentRemoved(RunEvent, tag_field="kind", tag="segment_removed"):
    """The oldest trajectories of a rank were removed, because the files exceed `--keep-trajectories`."""

    rank: int
    """Rank that wrote the file."""
    file: str
    """Name of the file."""
    bytes: int
    """Size of the file."""


class JournalFailed(RunEvent, tag_field="kind", tag="journal_failed"):
    """A group that had finished, or turns of one that goes on, could not be written to the journal. The run goes on.

    If it is killed, it plays the group again when it is resumed, or the episode from an earlier turn. Later ones are
    tried again, and only the first of several failures in a row has an event.
    """

    rank: int
    """Rank of the journal."""
    file: str
    """Name of the file."""
    error: str
    """Reason, such as a full disk."""


AnyEvent: TypeAlias = (
    RunStarted
    | RunResumed
    | RunEnded
    | SignalReceived
    | ServerLaunched
    | ServerLost
    | ServerRelaunched
    | ServerHealed
    | PushBegan
    | PushEnded
    | StepBegan
    | StepEnded
    | GroupDone
    | CheckpointSaved
    | EvaluationBegan
    | EvaluationEnded
    | Alarm
    | AlarmEnded
    | SegmentRemoved
    | JournalFailed
)

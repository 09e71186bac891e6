"""Evaluations: the held-out tasks are played at one version, and their rewards recorded.

`run` begins one when `Evaluations` says that it is due: before the first step, every `--eval-every` steps, and after
the last step. The algorithm plays it. `grpo` plays it between two steps, each rank its share (`play_held_out`). In
`async_grpo`, the rollout process plays it beside the groups of the training (`rollouts.held_out_play`), and the next
push waits until it has ended. Either way it ends after `--eval-timeout` seconds, with the episodes that have ended. An
error of an evaluation is recorded, and does not end the run.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from verl_server.engine.rank_group import RankGroup
from verl_server.errors import BadRequestError
from verl_server.rollout.agent_loop import Rollout
from verl_server.rollout.loop_thread import Running
from verl_server.rollout.trajectory import Trajectory, by_episode, is_unsampled
from verl_server.train.environment_figures import mean_over_mixture
from verl_server.train.episode_metrics import metric_means
from verl_server.train.evaluations import best_evaluated_step
from verl_server.train.held_out import HeldOut
from verl_server.train.metrics import describe_environments
from verl_server.train.options import TrainArgs
from verl_server.train.players import Player
from verl_server.train.rollout_report import RolloutReport, count_errors, merge_reports, report_rollout
from verl_server.train.run_writer import RunWriter
from verl_server.train.sampled_versions import leave_out_other_versions
from verl_server.train.servers import NamedWeights, RolloutServers
from verl_server.train.stopping import RunStoppedError, StopRequest
from verl_server.watch.run_files import read_evaluations
from verl_server.watch.run_records import Evaluation, EvaluationBegan, EvaluationEnded
from verl_server.weight_version import WeightVersion

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
"""Seconds between two looks at the servers while episodes play."""


@dataclass
class Evaluated:
    """The result of an evaluation."""

    record: Evaluation
    report: RolloutReport
    """About the episodes of all ranks."""
    trajectories: list[Trajectory] = field(default_factory=list)
    """The episodes of this rank that were not recorded when they ended."""


OnEvaluated = Callable[[Evaluated], None]


class Evaluations:
    """When a run evaluates, and what becomes of the results."""

    def __init__(self, args: TrainArgs, files: RunWriter, ranks: RankGroup) -> None:
        """Every rank makes one. `files` is the rank's writer."""
        bounds = args.eval_timeout, args.eval_success
        self.held_out = HeldOut(args.eval_tasks, args.eval_samples, *bounds, args.judged_mixture)
        self._every, self._steps = args.eval_every, args.steps
        self._files = files
        self._ranks = ranks

    def is_due(self, next_step: int) -> bool:
        """Return True if the weights are to be evaluated after the step before `next_step`."""
        return self._every > 0 and (next_step % self._every == 0 or next_step == self._steps)

    def is_due_at_start(self, next_step: int) -> bool:
        """Return True if the weights are to be evaluated with which this start begins. All ranks call it.

        An evaluation that an earlier start of the run has completed is not repeated.
        """
        return self.is_due(next_step) and not self._ranks.call("evaluations", lambda _: self._is_done(next_step))

    def note_begin(self, step: int, version: WeightVersion) -> None:
        """Note that the evaluation at `step` begins. All ranks call it."""
        self._files.note(EvaluationBegan(step=step, version=str(version)))

    def record(self, result: Evaluated) -> None:
        """Write the rank's part of an evaluation. Rank 0 writes its result, and prints it."""
        record = result.record
        self._files.record_held_out(record.step, result.trajectories)
        if self._ranks.rank > 0:
            return
        self._files.record_evaluation(record)
        self._files.note(
            EvaluationEnded(
                step=record.step,
                version=record.version,
                seconds=record.seconds,
                push_delay=record.push_delay,
                reward=record.reward,
                incomplete=record.incomplete,
            )
        )
        print(describe_evaluation(record, self._best()), flush=True)
        if record.failed:
            errors = count_errors(result.report.failures) or "the policy sampled no token"
            count = record.failed + record.episodes
            logger.warning(
                "Evaluation at step %d: %d of %d episodes failed: %s", *(record.step, record.failed, count, errors)
            )

    def _is_done(self, step: int) -> bool:
        try:
            found = list(read_evaluations(self._files.folder))
        except BadRequestError as error:
            logger.warning("The evaluations of the run cannot be read, so this one is played: %s", error)
            return False
        return any(evaluation.step == step and evaluation.incomplete is None for evaluation in found)

    def _best(self) -> int | None:
        try:
            return best_evaluated_step(self._files.folder)
        except BadRequestError as error:
            logger.warning("The best evaluation is unknown: %s", error)
            return None


def describe_evaluation(record: Evaluation, best: int | None) -> str:
    """Return a line of text for the log. `best` is the step of the best evaluation so far."""
    parts = [f"evaluation at step {record.step}"]
    if record.reward is not None:
        parts += [f"reward {record.reward:.3f}", f"success {record.success:.2f}"]
    if record.environments:
        parts.append(describe_environments({name: f.reward for name, f in record.environments.items()}))
    parts.append(f"{record.episodes} episodes in {record.seconds:.1f} s")
    parts += [f"{record.failed} failed"] if record.failed else []
    parts += [f"{record.unfinished} unfinished"] if record.unfinished else []
    parts.append(f"push held {record.push_delay:.1f} s")
    parts += [f"incomplete: {record.incomplete}"] if record.incomplete is not None else []
    parts += [f"best so far: step {best}"] if best is not None else []
    return "  ".join(parts)


# -- what was played -----------------------------------------------------------------------------------------------


class Playing(Protocol):
    """The party that plays, as reports of failures name it: a `Player`, or the rollouts of `async_grpo`."""

    @property
    def environment_url(self) -> str:
        """URL or name of the environment."""

    @property
    def is_agent(self) -> bool:
        """True if an agent of the user plays."""


class Share(msgspec.Struct, kw_only=True):
    """The episodes of an evaluation that one rank has played."""

    report: RolloutReport
    solved: int = 0
    """Scored episodes whose reward is at least `HeldOut.success`."""
    unfinished: int = 0
    incomplete: str | None = None


def score(
    held_out: HeldOut,
    ended: Sequence[Trajectory],
    asked: int,
    version: WeightVersion,
    *,
    rank: int,
    playing: Playing,
    server_urls: Sequence[str],
) -> Share:
    """Return the share of a rank that was asked for `asked` episodes.

    An episode with a token that other weights than `version` sampled becomes a failed one.
    """
    leave_out_other_versions(ended, version)
    report = report_rollout(
        ended,
        0,
        0.0,
        step=0,
        rank=rank,
        env_url=playing.environment_url,
        server_url=", ".join(server_urls),
        by_agent=playing.is_agent,
        mixture=held_out.mixture,
    )
    scored = [b for b in by_episode(ended) if b[0].reward is not None and not is_unsampled(b)]
    solved = sum((branches[0].reward or 0.0) >= held_out.success for branches in scored)
    return Share(report=report, solved=solved, unfinished=asked - report.episodes)


def merge_shares(
    held_out: HeldOut,
    shares: Sequence[Share],
    step: int,
    version: WeightVersion,
    *,
    seconds: float,
    push_delay: float,
) -> Evaluated:
    """Return the result of all ranks' shares.

    Reward and success of a mixture are the means of the environments' figures, weighed with the weights of the mixture:
    they do not depend on how many episodes of each environment were scored.
    """
    report = merge_reports([share.report for share in shares])
    incomplete = next((share.incomplete for share in shares if share.incomplete is not None), None)
    reward = report.mean_reward
    success = sum(share.solved for share in shares) / report.scored if report.scored else None
    unscored = None if report.scored else "unscored"
    environments = {name: sums.held_out_figures() for name, sums in report.environments.items()}
    if held_out.mixture is not None:
        reward = mean_over_mixture(held_out.mixture, {name: f.reward for name, f in environments.items()})
        success = mean_over_mixture(held_out.mixture, {name: f.success for name, f in environments.items()})
        if unscored is None and (lacking := [name for name, f in environments.items() if not f.episodes]):
            unscored = f"unscored: {', '.join(lacking)}"
    record = Evaluation(
        step=step,
        version=str(version),
        episodes=report.scored,
        failed=report.episodes - report.scored,
        unfinished=sum(share.unfinished for share in shares),
        reward=reward,
        success=success,
        seconds=seconds,
        push_delay=push_delay,
        incomplete=incomplete or unscored,
        environments=environments,
        episode_metrics=metric_means(report.metrics),
    )
    return Evaluated(record, report)


def describe_error(error: Exception) -> str:
    """Return type and message of an error, for `Evaluation.incomplete`."""
    return f"{type(error).__name__}: {error}"[:1000]


# -- between two steps ---------------------------------------------------------------------------------------------


def play_held_out(
    held_out: HeldOut,
    step: int,
    version: WeightVersion,
    player: Player,
    servers: RolloutServers,
    named_weights: NamedWeights,
    ranks: RankGroup,
    stop: StopRequest,
) -> Evaluated:
    """Play the held-out tasks, each rank its share, while no rank does anything else. All ranks call it together.

    `named_weights` are those of `version`, which the servers have. When no server is left, the ranks meet and bring one
    back, and the episodes go on, as in a step of the training. Raise RunStoppedError if a stop is requested, and
    the errors of `RolloutServers.ensure`.
    """
    start = time.monotonic()
    deadline = start + held_out.timeout
    tasks, ended = held_out.share(ranks.rank, ranks.size), list[Trajectory]()
    running: Running[Rollout] | None = None
    mine: list[Trajectory] = []

    def play() -> bytes:
        """Return this rank's share when it has ended; b"" if its episodes need a server."""
        nonlocal running
        incomplete = None
        try:
            if tasks:
                running = running or player.start(tasks, ended.append, version=str(version), replaces=False)
                with stop.interruptible():
                    while not running.wait(min(_LOOK_SECONDS, max(0.0, deadline - time.monotonic()))):
                        if time.monotonic() >= deadline:
                            incomplete = "timeout"
                            break
                        if player.stranded(str(version)):
                            return b""
                    else:
                        running.result()
        except RunStoppedError:
            raise
        except Exception as error:
            incomplete = describe_error(error)
        mine[:] = ended
        share = score(held_out, mine, len(tasks), version, rank=ranks.rank, playing=player, server_urls=servers.urls)
        share.incomplete = incomplete
        return msgspec.msgpack.encode(share)

    try:
        servers.ensure(named_weights)
        while not all(shares := ranks.gather("evaluation", play)):
            servers.ensure(named_weights)
    finally:
        if running is not None:
            running.cancel()  # after an error or the deadline; a rollout that has ended stays as it is
    decoded = [msgspec.msgpack.decode(share, type=Share) for share in shares]
    seconds = time.monotonic() - start
    result = merge_shares(held_out, decoded, step, version, seconds=seconds, push_delay=seconds)
    result.trajectories = mine
    return result

"""A training run from the command line: everything around the steps of an algorithm.

`grpo` calls `main`. `train` loads the model, launches the rollout server or attaches to it, continues from a checkpoint
with `--resume` or `--fork`, runs the steps, and saves the run.

Exit status:

    0           the run is complete
    1           an error, or the run could not be saved (the message says what was saved)
    2           wrong options
    3           several steps in a row had nothing to train on
    4           server and trainer disagree about log-probabilities (`logprob_gap`)
    5           another advisory of `--stop-on` (`run_advisor`)
    128 + N     signal N: 130 for SIGINT (Ctrl-C), 143 for SIGTERM, 129 for SIGHUP

Whatever ends the steps of a run, everything is saved before the process ends, and `--resume` continues the run
(`run_end` says how ranks agree). The last checkpoint stays if a rank has died, if the disk is full, or after an error
in the middle of an optimizer step. Episodes of a step that was not completed are in untrained-rankN.jsonl. A signal is
obeyed at the next rollout, which it interrupts. A second signal ends the process at once.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
import torch
import torch.distributed as dist

from verl_server import lora
from verl_server._version import __version__
from verl_server.engine.rank_group import RankGroup
from verl_server.errors import UnansweredError, VerlServerError
from verl_server.files.command_options import parse_options
from verl_server.files.model_folder import config_folder, load_tokenizer
from verl_server.files.run_output import settings_of
from verl_server.rollout.agent_loop import Rollout
from verl_server.rollout.trajectory import Trajectory
from verl_server.train.agent_groups import AgentGroups
from verl_server.train.checkpoint_writer import CheckpointWriter, SavedRun
from verl_server.train.checkpoints import check_fits
from verl_server.train.dtypes import check_dtype_options, dtype_name
from verl_server.train.evaluation import Evaluated, Evaluations, OnEvaluated
from verl_server.train.forks import fork_checkpoint
from verl_server.train.held_out import HeldOut
from verl_server.train.metrics import StepMetrics, describe_step
from verl_server.train.options import TrainArgs
from verl_server.train.players import Prepared, check_environments, prepare
from verl_server.train.policy import Policy, load_policy, save_policy
from verl_server.train.ranks import SaveGroup, all_ranks, setup_ranks
from verl_server.train.reference import Reference, load_reference
from verl_server.train.rollout_report import Failure, count_errors
from verl_server.train.run_advisor import RunAdvisor, check_names
from verl_server.train.run_end import Progressing, RunEnd, RunState, StepCounter, exit_status, notes_of
from verl_server.train.run_folder import RunFolder
from verl_server.train.run_servers import check_servers, router_of, serving, with_routed_servers
from verl_server.train.run_settings import run_settings
from verl_server.train.run_writer import GIB, RunWriter
from verl_server.train.servers import RolloutServers
from verl_server.train.skipped_steps import SkippedSteps
from verl_server.train.stopping import StopRequest
from verl_server.train.trackers.tracked_run import TrackedRun
from verl_server.train.trackers.trackers import Trackers
from verl_server.watch.advisories import Advisor
from verl_server.watch.advisory_rules.figures import Past, RunSettings
from verl_server.watch.run_records import (
    RunEnded,
    RunResumed,
    RunStarted,
    ServerLaunched,
    SignalReceived,
    StepBegan,
    StepEnded,
    TrainedTrajectory,
)
from verl_server.weight_version import WeightVersion, new_incarnation

logger = logging.getLogger(__name__)


@dataclass
class Step:
    """The result of a training step."""

    metrics: StepMetrics
    """Metrics over all ranks, equal on each rank."""
    rollout: Rollout
    """The episodes of this rank."""
    failures: list[Failure]
    """The failed episodes of all ranks, with those that were replaced."""
    trained: list[TrainedTrajectory] = field(default_factory=list)
    """The values that the trainer computed for the trajectories that this rank trained."""
    is_recorded: bool = False
    """True if the episodes were written when they ended."""


class Algorithm(SavedRun, Protocol):
    """The interface of a run's algorithm. `grpo.GRPO` implements it."""

    next_step: int
    steps: StepCounter
    """The optimizer steps of this rank."""

    @property
    def weight_version(self) -> WeightVersion:
        """Version of the served weights."""

    def push(self) -> None:
        """Copy the trainer's weights into the server."""

    def step(self, on_finish: Callable[[Trajectory], None] | None = None) -> Step:
        """Run one training step. `on_finish` is called with each trajectory when it ends."""

    def evaluate(self, held_out: HeldOut, done: OnEvaluated) -> None:
        """Play the held-out tasks with the served weights, or begin to. All ranks call it, between two steps.

        `done` takes the result when the evaluation has ended, at least on rank 0.
        """

    def end_evaluation(self) -> object:
        """Wait for an evaluation that still plays. All ranks call it."""

    def progress(self) -> Progressing:
        """Return the progress of this rank, after an error inside of a step, too."""

    def load(self, checkpoint: Path) -> None:
        """Continue from a checkpoint. All ranks call it."""


@dataclass
class RunParts:
    """The objects that a run has prepared for its algorithm on this rank."""

    policy: Policy
    device: torch.device
    servers: RolloutServers
    urls: list[str]
    """URLs at which episodes are played: of the servers, or of their router."""
    keys: list[str | None]
    """API key for each of `urls`."""
    prepared: Prepared
    """What `players.open_player` needs beside the servers."""
    files: RunWriter
    """This rank's writer of the run's files."""
    ranks: RankGroup
    stop: StopRequest
    """A request to stop, which interrupts rollouts."""
    advisor: RunAdvisor
    """Judges the gap of log-probabilities, and the steps."""
    incarnation: str
    """Incarnation of the weight versions of this start of the run, equal on all ranks (`weight_version`)."""
    reference: Reference | None = None
    """The reference policy, if the algorithm needs one."""


Args = TypeVar("Args", bound=TrainArgs)
Make = Callable[[Args, RunParts], AbstractContextManager[Algorithm]]
"""Opens the algorithm of a run with these options."""


def train(args: Args, make: Make[Args], stop: StopRequest) -> None:
    """Run the training on this rank. Every rank calls it under torchrun.

    `make` opens the algorithm. `stop` is a request to stop the run.
    """
    dtype = check_dtype_options(args)
    device = setup_ranks(args.device, args.rank_timeout)
    ranks = all_ranks(args.rank_timeout)
    args = with_routed_servers(args, ranks)
    incarnation = ranks.call("incarnation", lambda _: new_incarnation())
    if ranks.rank > 0:  # the messages are the same on all ranks, so only rank 0 logs them
        logging.getLogger("verl_server.train").setLevel(logging.ERROR)
    fork = None
    if args.fork is not None:
        fork = functools.partial(fork_checkpoint, args.fork, args.fork_step, args.out, args.command)
    folder = RunFolder(args.out, functools.partial(run_settings, args), fork)
    kept_bytes = int(args.keep_trajectories * GIB)
    files = RunWriter(args.out, incarnation, rank=ranks.rank, ranks=ranks.size, kept_bytes=kept_bytes)
    with contextlib.closing(folder), contextlib.closing(files):
        checkpoint = ranks.call("RunFolder", lambda _: folder.open(args.resume))
        config_folder(args.model_path, setting="--model-path")
        tokenizer = load_tokenizer(args.model_path, "--model-path")
        prepared = prepare(args)
        ranks.call("check_servers", lambda _: check_servers(args))
        ranks.call("check_environments", lambda _: check_environments(args, prepared))
        policy = load_policy(
            args.model_path,
            device,
            compute_dtype=dtype,
            gradient_checkpointing=args.gradient_checkpointing,
            logprob_chunk=args.logprob_chunk,
        )
        reference = load_reference(args, policy, tokenizer, device)
        if checkpoint is not None:
            ranks.call("check_fits", lambda _: check_fits(Path(checkpoint), policy))
        beside, final = SaveGroup.of_all_ranks(args.save_timeout), SaveGroup.of_all_ranks(args.save_timeout)
        with (
            RunEnd(stop, final, device) as end,
            serving(args, device, dtype, ranks) as (engines, urls, keys),
            contextlib.ExitStack() as stack,
        ):
            # With two dtypes, the bounds are those of the coarsest one.
            coarsest = "bfloat16" if args.allow_dtype_mismatch else dtype_name(dtype)
            advised = Advisor(coarsest, Past(RunSettings.of(settings_of(args.command, args))))
            advisor = RunAdvisor(advised, ranks, stop_on=check_names(args.stop_on), note=files.note)
            servers = RolloutServers(
                engines,
                ranks,
                restart_timeout=args.limits.restart_timeout,
                max_relaunches=args.max_relaunches,
                stop=stop,
                note=files.note,
                mode=args.update_mode(),
                router=router_of(args, stack),
            )
            parts = RunParts(
                policy, device, servers, urls, keys, prepared, files, ranks, stop, advisor, incarnation, reference
            )
            algorithm = stack.enter_context(make(args, parts))
            if checkpoint is not None:
                algorithm.load(Path(checkpoint))
                ranks.call("RunAdvisor.recall", lambda _: advisor.recall(args.out, algorithm.next_step))
            described = prepared.described if isinstance(prepared, AgentGroups) else {}
            next_step, size = algorithm.next_step, ranks.size
            ranks.call("RunFolder.begin", lambda _: _begin(folder, described, files, checkpoint, next_step, size))
            tracked = TrackedRun(str(args.out), run_settings(args), algorithm.next_step, checkpoint is not None)
            trackers = Trackers(() if ranks.rank else args.logger, tracked)
            for engine in engines:
                files.note(ServerLaunched(url=str(engine.url), attached=args.attaches))

            writer = CheckpointWriter(
                args.out,
                algorithm,
                ranks,
                beside,
                final,
                keep=args.keep_checkpoints,
                timeout=args.save_timeout,
                in_background=args.save_in_background,
                note=files.note,
            )

            def save(reached: Progressing) -> None:
                writer.finish(reached)
                save_policy(policy, args.out / "model", tokenizer, final)

            def ended(status: int, error: str | None) -> None:
                writer.close()  # if the end could not be saved, the last checkpoint is the result
                if stop.signal_number is not None:
                    files.note(SignalReceived(signal=signal.Signals(stop.signal_number).name))
                files.note(RunEnded(exit_status=status, error=error))
                trackers.close(status)

            end.protect(RunState(algorithm.steps, algorithm.progress, save, str(args.out), ended))
            failure: BaseException | None = None
            try:
                algorithm.push()
                _run_steps(args, algorithm, files, stop, writer, advisor, Evaluations(args, files, ranks), trackers)
            except BaseException as error:
                failure = error
            end.finish(failure)


def _begin(
    folder: RunFolder,
    described: Mapping[str, Any],
    files: RunWriter,
    checkpoint: str | None,
    next_step: int,
    ranks: int,
) -> None:
    """Store the settings of a new run, and write the event of this start. Rank 0 calls it."""
    folder.begin(described)
    forked = folder.forked
    source, version = (None, None) if forked is None else (str(forked.source), forked.version)
    if checkpoint is None or forked is not None:
        files.begin(
            RunStarted(
                ranks=ranks,
                version=__version__,
                next_step=next_step,
                advises=True,
                forked_from=source,
                forked_version=version,
            )
        )
    else:
        name = Path(checkpoint).name
        files.begin(RunResumed(ranks=ranks, version=__version__, next_step=next_step, checkpoint=name, advises=True))


def _run_steps(
    args: TrainArgs,
    run: Algorithm,
    files: RunWriter,
    stop: StopRequest,
    writer: CheckpointWriter,
    advisor: RunAdvisor,
    evaluations: Evaluations,
    trackers: Trackers,
) -> None:
    skipped = SkippedSteps(args.max_skipped_steps, args.retry_pause)

    def record_evaluation(result: Evaluated) -> None:
        evaluations.record(result)
        trackers.log_evaluation(msgspec.to_builtins(result.record))

    def save_and_evaluate(saves: bool, evaluates: bool) -> None:
        if saves or evaluates:
            # After a step without a push, an evaluation may still play. No later checkpoint may take it for complete.
            run.end_evaluation()
            writer.begin(run.progress())
        if evaluates:  # the result is recorded when the weights that it judges are on the disk
            evaluations.note_begin(run.next_step, run.weight_version)
            run.evaluate(evaluations.held_out, lambda result: writer.when_saved(lambda: record_evaluation(result)))
        writer.settle()

    save_and_evaluate(False, evaluations.is_due_at_start(run.next_step))
    while run.next_step < args.steps:
        torch.manual_seed(args.grpo.seed * 1_000_003 + run.next_step)  # dropout draws from this generator
        number, finished = run.next_step, list[Trajectory]()
        files.note(StepBegan(step=number))
        try:
            step = run.step(finished.append)
        except BaseException:
            _keep_finished(files, number, finished, is_trained=run.next_step > number)
            raise
        phases = _record(files, step)
        trackers.log_step(step.metrics)
        advisor.check_step(step.metrics, phases)
        with stop.interruptible():
            skipped.note(step.metrics)
        is_due = args.save_every > 0 and run.next_step % args.save_every == 0
        save_and_evaluate(is_due, evaluations.is_due(run.next_step))
    run.end_evaluation()


def _record(files: RunWriter, step: Step) -> dict[str, float]:
    """Write this rank's part of a step. Rank 0 writes its metrics, too, and prints them. Return its phases."""
    metrics, start = step.metrics, time.monotonic()
    if not step.is_recorded:
        files.record_trajectories(metrics.step, [*step.rollout.trajectories, *step.rollout.replaced])
    files.record_trained(step.trained)
    if dist.get_rank() > 0:
        return {}
    files.record(metrics, step.failures)
    phases = metrics.phases | {"record": time.monotonic() - start}
    files.note(StepEnded(step=metrics.step, phases=phases, skipped=metrics.skipped))
    print(describe_step(metrics), flush=True)
    if step.failures and metrics.skipped is None:
        m, errors = metrics, count_errors(step.failures)
        replaced = f", {m.replaced} more were replaced" if m.replaced else ""
        logger.warning("Step %d: %d of %d episodes failed%s: %s", m.step, m.failed, m.trajectories, replaced, errors)
    return phases


def _keep_finished(files: RunWriter, step: int, finished: Sequence[Trajectory], *, is_trained: bool) -> None:
    """Write this rank's trajectories of a step that ended with an error. A full disk must not hide the error."""
    try:
        if is_trained:
            files.record_trajectories(step, finished)
        else:
            files.record_untrained(step, finished)
    except OSError as error:
        logger.error("%d episodes of step %d are lost: %s", len(finished), step, error)


def main(prog: str, kind: type[Args], make: Make[Args], argv: Sequence[str] | None = None) -> int:
    """Run the command `prog`, whose options are `kind`, with the algorithm that `make` opens. Return the exit status.

    A `VerlServerError` is printed as a message without a traceback. `argv` defaults to the arguments of the process.
    """
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        lora.refuse_options(sys.argv[1:] if argv is None else argv)
        args = parse_options(kind, argv, prog)
    except VerlServerError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    try:
        with StopRequest().installed() as stop:
            train(args, make, stop)
    except (Exception, KeyboardInterrupt) as error:
        _report(prog, error)
        return exit_status(error)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


def _report(prog: str, error: BaseException) -> None:
    """Print the error. Every rank prints an unexpected error of its own with a traceback."""
    if not isinstance(error, VerlServerError | KeyboardInterrupt):
        traceback.print_exception(error)  # with its notes
        return
    # Every rank has the same error, so rank 0 prints it. But rank 0 may not know that another rank is gone, so every
    # rank that does know prints that error.
    if not dist.is_initialized() or dist.get_rank() == 0 or isinstance(error, UnansweredError):
        text = str(error) or type(error).__name__
        print(" ".join([f"{prog}: {text}", *notes_of(error)]), file=sys.stderr, flush=True)

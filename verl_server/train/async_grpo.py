"""Asynchronous GRPO in one file: groups play all the time, the trainer takes what has finished, nobody waits.

    python -m verl_server.train.async_grpo --model-path MODEL --env-url http://HOST:PORT --max-staleness 2

`grpo` plays all episodes of a step, trains on them, and pushes; one slow environment holds everybody. Here the episodes
play in a process of their own (`rollouts.rollout_process`) and go on while the trainer trains and pushes. A push does
not wait for them: an episode goes on under the new weights, and each of its tokens names the version that sampled it.

The price is age. A group that starts under version s may be trained when the trainer has version v > s. Three rules
bound v - s by `max_staleness`, and lose nothing (`rollouts.group_buffer`): few groups start, the oldest go first, and
the trainer waits for a group that would become too old. The losses correct what remains (`losses`). With
`--max-staleness 0`, the run is that of `grpo`.

All decisions are those of rank 0, which sends them to the others between two steps (`RankGroup`); no rank waits for an
episode inside a collective of NCCL. The ranks get about equally many tokens. From `grpo` come the tasks, the advantages
and the optimizer steps (`PolicyTrainer`). To change the algorithm, copy this file.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from verl_server.engine.rank_group import RankGroup
from verl_server.rollout.agent_loop import Rollout
from verl_server.rollout.trajectory import Task, Trajectory, by_episode
from verl_server.train import run
from verl_server.train.ages import describe_ages
from verl_server.train.batches import Sample
from verl_server.train.checkpoints import Progress
from verl_server.train.environment_draw import EnvironmentDraw, draw_of
from verl_server.train.evaluation import OnEvaluated
from verl_server.train.gap_probe import GapProbe
from verl_server.train.grpo import PolicyTrainer
from verl_server.train.held_out import HeldOut
from verl_server.train.journal import GroupJournal
from verl_server.train.kept_groups import KeptGroups
from verl_server.train.metrics import describe_rollout, note_learned
from verl_server.train.options import AsyncTrainArgs
from verl_server.train.refill import lacks_spread
from verl_server.train.rollout_report import RolloutReport, report_rollout
from verl_server.train.rollouts.group_buffer import Group, GroupBuffer, Wait
from verl_server.train.rollouts.group_messages import GroupBegan, NowServed, PlayGroup, Rollouts
from verl_server.train.rollouts.held_out_play import HeldOutPlay
from verl_server.train.rollouts.rollout_process import open_rollouts
from verl_server.train.run import RunParts, Step
from verl_server.train.run_advisor import RunAdvisor
from verl_server.train.run_end import Progressing
from verl_server.train.run_tasks import make_tasks
from verl_server.train.sampled_versions import leave_out_other_versions
from verl_server.train.server_use import ServerUse
from verl_server.train.servers import RolloutServers
from verl_server.train.step_batch import StepBatch, divide, encode_share
from verl_server.train.stopping import RunStoppedError, StopRequest
from verl_server.watch.run_records import GroupDone, GroupFate, RunEvent
from verl_server.weight_version import WeightVersion, new_incarnation

logger = logging.getLogger(__name__)

_TELL_SECONDS = 60.0
"""Seconds of a wait after which it is logged."""
_LOOK_SECONDS = 1.0
"""Seconds for which rank 0 waits for episodes before all ranks look at the servers."""


class AsyncGRPO:
    """A training run on one rank. Rank 0 has the rollouts, and decides which groups start and which are trained."""

    def __init__(
        self,
        trainer: PolicyTrainer,
        servers: RolloutServers,
        rollouts: Rollouts | None,
        ranks: RankGroup,
        *,
        steps: int,
        max_staleness: int = 1,
        drops: bool = False,
        stop: StopRequest | None = None,
        advisor: RunAdvisor | None = None,
        incarnation: str | None = None,
        note: Callable[[RunEvent], None] = lambda event: None,
        record: Callable[[int, Sequence[Trajectory]], None] = lambda step, trajectories: None,
        journal: GroupJournal | None = None,
        draw: EnvironmentDraw | None = None,
    ) -> None:
        """Prepare the run. All ranks call it together; `rollouts` is None on all but rank 0.

        `steps` is the number of steps of the whole run: towards its end, no group starts that no step would use.
        `drops`: do not wait for a group that becomes too old, but leave it out. `note` takes the fate of each group.
        `record` takes the episodes of groups that an earlier start of the run played, and that are trained. `journal`
        has the groups that have finished; the rollouts write them. The others are those of `grpo.GRPO`.
        """
        self.trainer = trainer
        self.servers = servers
        self.steps = trainer.steps
        self.state = trainer.state
        self.next_step = 0
        self.version = 0
        """Number of the served version: the number of pushes since version 0."""
        self._rollouts = rollouts
        self._ranks = ranks
        self._steps = steps
        groups, refill = trainer.config.groups, trainer.config.refill
        self._buffer: GroupBuffer[Rollout] = GroupBuffer(
            groups, max_staleness, drops=drops, refill=refill * groups, lacks_spread=lacks_spread
        )
        self._stop = stop or StopRequest()
        self._advisor = advisor
        self._probe = GapProbe(trainer.policy, trainer.device, servers, ranks)
        self._incarnation = incarnation or ranks.call("incarnation", lambda _: new_incarnation())
        self._note = note
        self._record = record
        self._journal = journal
        self._draw = draw
        self._kept = KeptGroups()
        """The groups that an earlier start of the run played. Ranks > 0 have the ancestors only."""
        self._waits: dict[str, float] = defaultdict(float)
        self._told: float = 0
        """Seconds of the present wait after which it was logged last."""
        self._dropped = 0
        self._evaluation = HeldOutPlay(rollouts, servers, ranks, self._collect, self._stop_signal)
        self._served: NowServed | None = None
        self._use = ServerUse(servers.counters)
        self._last_batch = time.monotonic()

    @property
    def weight_version(self) -> WeightVersion:
        """Version of the served weights. No other start of the run has versions of this incarnation."""
        return WeightVersion(self.version, self._incarnation)

    def step(self, on_finish: Callable[[Trajectory], None] | None = None) -> Step:
        """Take the finished groups that started first, train on them, and push the new weights in place.

        `on_finish` is not called: the rollouts hand on their episodes themselves. If no rank has an episode to train
        on, weights and version stay, and `metrics.skipped` is the reason. Raise errors as `grpo.GRPO.step` does.
        """
        step, version = self.next_step, self.weight_version
        batch = self._await_batch()
        start = time.monotonic()
        sequences = [sample.trajectory.tokens for sample in batch.samples]
        gap = self._probe.gap(sequences, str(version), self.trainer.config.micro_batch_tokens)
        if self._advisor is not None:
            self._advisor.check_gap(gap, step)
        metrics = describe_rollout(batch.report, step=step, version=str(version), ranks=self._ranks.size, gap=gap)
        metrics.rollout_seconds, metrics.waits = sum(batch.waits.values()), batch.waits
        metrics.age, metrics.age_max = batch.ages.mean, batch.ages.largest
        metrics.ages, metrics.version_spans, metrics.idle = batch.ages.ages, batch.ages.spans, batch.idle
        metrics.dropped_groups, metrics.cache_hit_rate = batch.dropped, batch.cache_hit_rate
        is_trained = False
        if metrics.skipped is not None:
            self.next_step += 1
        else:
            learned = self.trainer.update(batch.samples, step)
            is_trained = learned.optimizer_steps > 0
            trained = time.monotonic()
            note_learned(metrics, learned, self.trainer.scaling.scale, trained - start)
            if is_trained:  # an evaluation plays the old version, which the servers have until the push
                metrics.held_seconds = self._evaluation.wait(before_push=True)
            self.next_step += 1
            self.version += int(is_trained)
            if is_trained:
                self.push()
                metrics.sync_seconds = time.monotonic() - trained - metrics.held_seconds
        self._end(batch, "trained" if is_trained else "skipped")
        failures = batch.report.failures + batch.report.replaced
        records = self.trainer.trained.take(step, str(version))
        return Step(metrics, batch.rollout, failures, records, is_recorded=True)

    def push(self) -> None:
        """Copy the trainer's weights into the servers, as version `self.weight_version`. Episodes go on."""
        self.servers.push(self.trainer.policy.named_weights, str(self.weight_version))

    def evaluate(self, held_out: HeldOut, done: OnEvaluated) -> None:
        """Begin to play the held-out tasks with the served weights, beside the groups. The next push waits for them.

        All ranks call it together, between two steps. `done` takes the result on rank 0.
        """
        self._evaluation.wait()
        if self._rollouts is not None:
            self._start_groups()  # it tells the rollouts what is served
        self._evaluation.begin(held_out, self.next_step, self.weight_version, done)

    def end_evaluation(self) -> None:
        """Wait for an evaluation that still plays. All ranks call it together."""
        self._evaluation.wait()

    # -- from groups to a batch ------------------------------------------------------------------------------

    def _await_batch(self) -> StepBatch:
        """Return this rank's part of the next batch. All ranks meet about once a second until rank 0 has one.

        At each meeting they bring servers back that are lost, and obey a request to stop. Otherwise a wait ends by the
        limits of the episodes.
        """
        while True:
            shares = self._ranks.call("AsyncGRPO.step", self._shares, self._stop_signal)
            if isinstance(shares, int):
                self._stop.check()
                name = signal.Signals(shares).name
                raise RunStoppedError(f"The run was stopped by {name}, which another rank received.", shares)
            if shares is not None:
                break
            start = time.monotonic()
            self.servers.ensure(self.trainer.policy.named_weights)
            self._waits["servers"] += time.monotonic() - start
        if self._ranks.rank == 0:
            return self._batch
        return StepBatch.decode(shares[self._ranks.rank])

    def _stop_signal(self) -> bytes:
        return str(self._stop.signal_number or "").encode()

    def _shares(self, signals: list[bytes]) -> list[bytes] | int | None:
        """Return the encoded part (`StepBatch`) of each rank but 0, which keeps its own; None if no batch is ready yet.

        Return the number of a signal that stops the run. Rank 0 calls it.
        """
        if stopped := [int(signal) for signal in signals if signal]:
            self._evaluation.end("stopped")
            return stopped[0]
        deadline, version = time.monotonic() + _LOOK_SECONDS, self.version
        self._collect(0.0)
        while isinstance(groups := self._buffer.batch(version), str):
            start = time.monotonic()
            if start >= deadline:
                self._tell_of_long_wait(groups)
                return None
            self._collect(deadline - start)
            self._waits[groups] += time.monotonic() - start
        used = [*self._buffer.left_out, *groups]
        samples = self._samples(used)
        shares = divide(samples, self._ranks.size)
        now = time.monotonic()
        results = [group.result for group in used if group.result is not None]
        report = self._report(results, samples, now - self._last_batch)
        report.kept_groups = sum(group.is_kept for group in used)
        report.refilled_groups = len(used) - len(groups)
        self._last_batch = now
        trained = [group.result.trajectories for group in groups if group.result is not None]
        ages = describe_ages(trained, self.weight_version, self._kept.ancestors)
        waits = dict(self._waits)
        seconds = max(report.seconds, 1e-9)
        self._use.read()
        idle = {"trainer": sum(waits.values()) / seconds} | self._use.idle(seconds)
        hits = self._use.cache_hit_rate()
        self._batch = StepBatch(report, shares[0], used, ages, waits, idle, hits, self._dropped)
        self._buffer.use(groups, self.next_step)
        self._waits.clear()
        self._told = self._dropped = 0
        return [b"", *(encode_share(report, share) for share in shares[1:])]

    def _tell_of_long_wait(self, cause: Wait) -> None:
        """Log every `_TELL_SECONDS` of a wait what the step waits for, so that a slow run does not look like a hang."""
        waited = sum(self._waits.values())
        if waited < self._told + _TELL_SECONDS:
            return
        self._told = waited
        what = "enough groups to finish" if cause == "episodes" else "a group that would become too old"
        logger.warning(
            "Step %d has waited %.0f s for %s. %s. An episode ends by its limits (--trajectory-timeout).",
            *(self.next_step, waited, what, self._buffer.describe()),
        )

    def _collect(self, timeout: float) -> None:
        """Start the groups that may start. Take those that have finished; wait at most `timeout` seconds for one."""
        assert self._rollouts is not None
        self._start_groups()
        for group in self._rollouts.news(timeout):
            if self._evaluation.take(group):
                continue
            if isinstance(group, GroupBegan):
                version = WeightVersion.parse(group.version)
                assert version is not None
                self._buffer.begin(group.group, version.number, group.step)
            elif group.rollout is not None:
                self._buffer.finish(group.group, group.rollout)
        self._start_groups()  # in the places of groups without spread

    def _start_groups(self) -> None:
        """Leave out the groups that are too old or lack spread, and start those that may start.

        It neither waits nor raises.
        """
        assert self._rollouts is not None
        for group in self._buffer.take_stale(self.version, self.next_step):
            self._rollouts.cancel(group.number)
            self._dropped += 1
            self._note_fate(group, "dropped", self.next_step)
        served = NowServed(version=str(self.weight_version), step=self.next_step)
        if served != self._served:
            self._rollouts.serve(served)
            self._served = served
        self._buffer.leave_out()
        while started := self._buffer.start(self._steps - self.next_step):
            for group in started:
                kept = self._kept.take(group.number)
                if kept is None or not self._buffer.keep(group, *kept, self.version, self.next_step):
                    self._rollouts.play(self._to_play(group))
            self._buffer.leave_out()  # groups that an earlier start of the run played

    def _to_play(self, group: Group[Rollout]) -> PlayGroup:
        """Return what the rollouts play of a group: all of it, or what an earlier start of the run has left."""
        play = PlayGroup(group=group.number, tasks=self._tasks(group.number))
        found = self._kept.open.take(group.number, self.version - self._buffer.max_staleness)
        if found is not None and self._buffer.go_on(group, found.start, self.version):
            play.earlier = found.episodes
        return play

    def _tasks(self, number: int) -> list[Task]:
        """Return the tasks of a group: those of the synchronous run, which counts its groups in each step."""
        step, place = divmod(number, self._buffer.groups)
        tasks = make_tasks(step, self.trainer.config, place, 1, self._draw)
        return [msgspec.structs.replace(task, group=number) for task in tasks]

    def _samples(self, groups: Sequence[Group[Rollout]]) -> list[Sample]:
        """Return the samples of finished groups. Tokens must be of weights that were served since the group began."""
        samples = []
        for group in groups:
            assert group.result is not None and group.start is not None
            is_older = group.is_kept or group.oldest is not None
            ancestors = self._kept.ancestors if is_older else None
            if group.is_kept:  # its lines are those of a start that has ended
                self._record(group.step, [*group.result.trajectories, *group.result.replaced])
            leave_out_other_versions(group.result.trajectories, self.weight_version, group.start, ancestors)
            for sample in self.trainer.samples(group.result.trajectories):
                samples.append(replace(sample, sampled_step=group.step))
        return samples

    def _report(self, results: Sequence[Rollout], samples: Sequence[Sample], seconds: float) -> RolloutReport:
        assert self._rollouts is not None
        return report_rollout(
            [trajectory for result in results for trajectory in result.trajectories],
            len(by_episode(sample.trajectory for sample in samples)),
            seconds,
            step=self.next_step,
            rank=0,
            env_url=self._rollouts.environment_url,
            server_url=", ".join(self.servers.urls),
            by_agent=self._rollouts.is_agent,
            replaced=[trajectory for result in results for trajectory in result.replaced],
            mixture=None if self._draw is None else self._draw.mixture,
        )

    def _end(self, batch: StepBatch, fate: GroupFate) -> None:
        """Note on rank 0 that the groups of a step are done, and start others."""
        if self._rollouts is None:
            return
        self._buffer.done(batch.groups)
        for group in batch.groups:
            self._note_fate(group, "no_spread" if group.is_left_out else fate, self.next_step - 1)
        # An error of the rollouts is raised by the next step, on all ranks: this one is complete, and must be recorded.
        self._start_groups()
        if self._journal is not None:
            self._journal.keep(self._buffer.needed(self.next_step, self._incarnation))

    def _note_fate(self, group: Group[Rollout], fate: GroupFate, step: int) -> None:
        start = group.start or 0
        self._note(GroupDone(group=group.number, fate=fate, step=step, start_step=group.step, start_version=start))

    # -- the run ---------------------------------------------------------------------------------------------

    def progress(self) -> Progressing:
        """Return the progress of this rank, also after an error inside a step.

        A step counts as trained once one of its optimizer steps was applied, because the weights have changed.
        """
        trained = -1 if self.steps.last_step is None else self.steps.last_step
        if trained < self.next_step:
            return Progressing(self.next_step, self.version)
        return Progressing(trained + 1, self.version + 1)

    def checkpoint(self, reached: Progressing) -> Progress:
        """Return the progress of a checkpoint of the state `reached`, which is written now.

        It has the groups that are not trained, so that a resumed run trains each of them, and none twice.
        """
        next_group, undone = self._buffer.next_group, self._buffer.undone_at(reached.next_step)
        self._buffer.note_saving(reached.version, next_group, undone)
        progress = self.state.progress(reached, self._incarnation, self._kept.ancestors)
        draw = None if self._draw is None else self._draw.state()
        return replace(progress, next_group=next_group, undone_groups=undone, draw=draw)

    def saved(self, progress: Progress) -> None:
        """Remove the finished groups that the checkpoint of `progress`, which is on the disk, counts as done."""
        self._buffer.note_saved()
        if self._journal is not None:
            next_step = max(self.next_step, progress.next_step)  # a step that ended with an error counts
            self._journal.keep(self._buffer.needed(next_step, self._incarnation), at_once=True)

    def load(self, checkpoint: Path) -> None:
        """Continue from the folder of a checkpoint, as a new incarnation. All ranks call it."""
        progress = self.state.load(checkpoint)
        self.next_step, self.version = progress.next_step, progress.version
        # A synchronous run, of which this one may be a fork, has trained its groups in their order.
        next_group = progress.first_group(self._buffer.groups)
        undone = frozenset(progress.undone_groups or [])
        self._buffer.resume(next_group, undone, progress.version)
        self._kept = KeptGroups.on_first_rank(
            self._ranks,
            checkpoint.parent,
            progress,
            lambda head: head.number >= next_group or head.number in undone,
            replays=self._journal is not None and self._journal.records_turns,
        )
        self.trainer.trained.ancestors = self._kept.ancestors
        if self._draw is not None:
            self._draw.resume(progress)
        if self._journal is not None:
            self._journal.base = progress.label
            self._journal.go_on(self._kept.open.plays)


def open_async_grpo(args: AsyncTrainArgs, parts: RunParts) -> contextlib.AbstractContextManager[AsyncGRPO]:
    """Return the algorithm of a run with the options `args`, to be opened."""
    trainer = PolicyTrainer(parts.policy, args.grpo, args.steps, parts.device, parts.reference)
    return open_asynchronous(args, parts, trainer)


@contextlib.contextmanager
def open_asynchronous(args: AsyncTrainArgs, parts: RunParts, trainer: PolicyTrainer) -> Iterator[AsyncGRPO]:
    """Yield the run of `trainer` with the options `args`, and end its rollouts afterwards."""
    with contextlib.ExitStack() as stack:
        rollouts, journals = list[Rollouts](), list[GroupJournal]()

        def open_them(_: list[bytes]) -> None:
            journal = GroupJournal(args.out, note=parts.files.note, records_turns=args.replay_actions)
            journals.append(stack.enter_context(contextlib.closing(journal)))
            rollouts.append(stack.enter_context(open_rollouts(args, parts, journal)))

        parts.ranks.call("open_rollouts", open_them)  # a wrong agent, say, is raised on all ranks
        yield AsyncGRPO(
            trainer,
            parts.servers,
            rollouts[0] if rollouts else None,
            parts.ranks,
            steps=args.steps,
            max_staleness=args.max_staleness,
            drops=args.stale == "drop",
            stop=parts.stop,
            advisor=parts.advisor,
            incarnation=parts.incarnation,
            note=parts.files.note,
            record=parts.files.record_trajectories,
            journal=journals[0] if journals else None,
            draw=draw_of(args),
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status."""
    return run.main("python -m verl_server.train.async_grpo", AsyncTrainArgs, open_async_grpo, argv)


if __name__ == "__main__":
    sys.exit(main())

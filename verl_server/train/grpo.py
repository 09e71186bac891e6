"""GRPO in one file: roll out groups, compare within each group, take clipped policy steps, push the weights.

    python -m verl_server.train.grpo --model-path MODEL --env-url http://HOST:PORT

trains a policy on any OpenEnv environment whose observations and actions are text. With `--agent`, an agent of your own
plays the episodes through sessions of the rollout server (`agent_groups`). Under `torchrun --nproc-per-node N` the
model is sharded over the ranks (FSDP2). Every rank plays and trains on its own groups against one rollout server.
The log-probabilities that the server returns with each token are those of the behaviour policy. To change the
algorithm, copy this file. `losses` has the losses. The other modules of this folder are not part of the algorithm:
`run` (what surrounds the steps, and the exit statuses), `policy` (the model), `batches` (packing), `metrics`,
`checkpoints`, `ranks` (processes).
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from verl_server.engine.rank_group import RankGroup
from verl_server.errors import BadRequestError
from verl_server.logprob_gap import LogprobGap
from verl_server.rollout.agent_loop import Rollout
from verl_server.rollout.loop_thread import Running
from verl_server.rollout.trajectory import Trajectory, by_episode
from verl_server.train import run
from verl_server.train.batches import MicroBatch, Sample, pack_alike, sampled_positions
from verl_server.train.checkpoints import POLICY, Progress
from verl_server.train.environment_draw import EnvironmentDraw, draw_of
from verl_server.train.evaluation import OnEvaluated, play_held_out
from verl_server.train.finite_check import gradients_error, logprobs_error, loss_error
from verl_server.train.held_out import HeldOut
from verl_server.train.journal import GroupJournal
from verl_server.train.kl import with_penalties
from verl_server.train.loss_scaling import LossScaling
from verl_server.train.losses import mean_losses, policy_loss
from verl_server.train.metrics import Learned, describe_rollout, note_learned
from verl_server.train.options import GRPOConfig, TrainArgs
from verl_server.train.players import Player, open_player
from verl_server.train.policy import Policy
from verl_server.train.ranks import full, over_ranks
from verl_server.train.reference import Reference
from verl_server.train.refill import Round, join_rounds, share
from verl_server.train.rollout_report import RolloutReport, merge_reports, report_rollout
from verl_server.train.run import RunParts, Step
from verl_server.train.run_advisor import RunAdvisor
from verl_server.train.run_end import Progressing, StepCounter
from verl_server.train.run_tasks import make_tasks
from verl_server.train.sampled_versions import leave_out_other_versions
from verl_server.train.schedules import learning_rate
from verl_server.train.scoring import gap_of_sampled, logprobs_of
from verl_server.train.server_use import ServerUse
from verl_server.train.servers import RolloutServers
from verl_server.train.step_journal import StepJournal, joined
from verl_server.train.stopping import StopRequest
from verl_server.train.task_order import TaskOrder
from verl_server.train.trained_record import TrainedRecord
from verl_server.train.trainer_state import TrainerState
from verl_server.weight_version import WeightVersion, new_incarnation

_PROBE_SECONDS = 1.0
"""Seconds between two looks at the servers while episodes play."""


def group_advantages(
    trajectories: Sequence[Trajectory], normalize_std: bool, keeps_equal: bool = False
) -> list[Sample]:
    """Return the trajectories to train on.

    The advantage of a trajectory is its reward minus the mean reward of its group.

    An episode of an agent may have several branches. The episode counts once in its group, and each of its branches
    gets the episode's advantage. Tokens that branches share are in the loss mask of one of them only.

    Two kinds are omitted: episodes without a reward (their end is not the policy's, see `rollout.faults`), and groups
    with equal rewards, because their advantages are 0 (`refill` plays others), unless `keeps_equal` is set.
    `normalize_std` divides by the standard deviation of the group.
    """
    groups: dict[int, list[list[Trajectory]]] = {}
    for branches in by_episode(t for t in trajectories if t.is_trainable):
        groups.setdefault(branches[0].task.group, []).append(branches)
    samples: list[Sample] = []
    for group in groups.values():
        rewards = torch.tensor([branches[0].reward for branches in group], dtype=torch.float64)
        centered = rewards - rewards.mean()
        is_equal = bool(centered.abs().max() < 1e-9)
        if is_equal and not keeps_equal:
            continue
        scale = rewards.std(correction=0) if normalize_std and not is_equal else 1.0
        for branches, advantage in zip(group, (centered / scale).tolist(), strict=True):
            samples += [Sample(branch, advantage) for branch in branches]
    return samples


class PolicyTrainer:
    """The policy and its optimizer; under torchrun, the shards of one rank."""

    def __init__(
        self,
        policy: Policy,
        config: GRPOConfig,
        steps: int,
        device: torch.device,
        reference: Reference | None = None,
    ) -> None:
        """Take `steps`, the number of steps of the whole run, over which the learning rate falls.

        `reference` is the reference policy, which a `config` with `kl_coef` above 0 needs.
        """
        assert config.kl_coef == 0 or reference is not None
        self.policy = policy
        self.config = config
        self.device = device
        self.optimizer = torch.optim.AdamW(
            policy.parameters(), config.learning_rate, (0.9, 0.95), weight_decay=0.0, fused=device.type == "cuda"
        )
        self.scaling = LossScaling(policy.compute_dtype, device)
        self.state = TrainerState({POLICY: (policy, self.optimizer)}, self.scaling)
        self.steps = StepCounter()
        self.trained = TrainedRecord(config)
        self.reference = reference
        self._run_steps = steps

    def samples(self, trajectories: Sequence[Trajectory]) -> list[Sample]:
        """Return the trajectories to train on, with their advantages. The groups among `trajectories` are whole.

        With a reference policy, groups with equal rewards are among them: the KL holds the policy there, too. A refill
        plays others in their places.
        """
        keeps_equal = self.config.kl_coef > 0 and not self.config.refill
        return group_advantages(trajectories, self.config.normalize_std, keeps_equal=keeps_equal)

    def compare_logprobs(self, trajectories: Sequence[Trajectory], version: str) -> LogprobGap | None:
        """Return the gap between server and trainer for tokens sampled under `version` (`scoring.gap_of_sampled`).

        All ranks call it while this model holds that version.
        """
        return gap_of_sampled(self.policy, trajectories, version, self.config, self.device)

    def update(self, samples: Sequence[Sample], step: int) -> Learned:
        """Train on this rank's samples of a step. All ranks call it, and at least one rank has a sample.

        Raise NonFiniteError or LossScaleError on all ranks, before an optimizer step that would break the weights.
        """
        samples, figures = self.compare_with_reference(samples)
        if self.config.has_kl_reward:
            samples = with_penalties(samples, self.config.kl_coef)
        learned = self.optimize(samples, step)
        learned.losses |= figures
        return learned

    def compare_with_reference(self, samples: Sequence[Sample]) -> tuple[Sequence[Sample], dict[str, float]]:
        """Return the samples with the reference's log-probabilities, and the figures, if there is a reference."""
        return (samples, {}) if self.reference is None else self.reference.score(samples, self.config)

    def optimize(self, samples: Sequence[Sample], step: int) -> Learned:
        """Train on samples whose advantages are known, as `update` does."""
        config = self.config
        self.trained.clear()
        most = int(over_ranks(torch.tensor(len(samples)), dist.ReduceOp.MAX))
        minibatches = min(config.minibatches, most)
        progress = step / max(1, self._run_steps)
        rate = learning_rate(
            *(step, self._run_steps),
            peak=config.learning_rate,
            schedule=config.schedule,
            final=config.final_learning_rate,
            warmup_steps=config.warmup_steps,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        # The order is a function of the step, so that a resumed run trains in the same order.
        shuffle = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
        # The proximal policy is the one before the first optimizer step. A single step computes it anyway.
        if config.needs_proximal and config.epochs * minibatches > 1:
            proximal = logprobs_of(self.policy, samples, config, self.device)
            samples = [replace(s, proximal_logprobs=own) for s, own in zip(samples, proximal, strict=True)]
        results = []
        for _ in range(config.epochs):
            for rows in torch.randperm(len(samples), generator=shuffle).tensor_split(minibatches):
                minibatch = [samples[row] for row in rows.tolist()]
                results.append(self._optimizer_step(minibatch, config.entropy_coef * max(0.0, 1.0 - progress), step))
        return replace(Learned.over(results), learning_rate=rate)

    def _optimizer_step(self, minibatch: Sequence[Sample], entropy_coef: float, step: int) -> Learned:
        """Take one optimizer step on the mean loss over the sampled tokens of all ranks.

        The division into micro-batches does not change the gradient. If float16 gradients overflow on any rank, all
        ranks skip the optimizer step.
        """
        config = self.config
        packed = pack_alike(minibatch, config.micro_batch_tokens)
        lengths = [len(sample.trajectory.tokens) for sample in minibatch]
        padded = sum(len(rows) * len(rows[0].trajectory.tokens) for rows in packed if rows)
        sampled = sum(len(sampled_positions(sample.trajectory)) for sample in minibatch)
        counts = over_ranks(torch.tensor([sampled, sum(lengths), padded], dtype=torch.int64)).tolist()
        mean = 1 / max(1, counts[0])
        broken: list[torch.Tensor] = []
        sums: dict[str, torch.Tensor] = {}
        for rows in packed:
            batch = MicroBatch.of(rows, self.device, config.correction_bound)
            want_entropy = config.track_entropy or entropy_coef > 0
            logprobs, entropy = self.policy(batch.tokens, batch.positions, config.temperature, entropy=want_entropy)
            self.trained.note(rows, batch, logprobs, entropy)
            loss, parts = policy_loss(logprobs, entropy, batch, config, entropy_coef)
            # FSDP averages gradients over ranks; the loss is a mean over the tokens of all ranks.
            self.scaling.backward(loss * (dist.get_world_size() * mean))
            broken.append(~logprobs.detach().isfinite().all())
            sums = {name: sums.get(name, 0) + value for name, value in parts.items()}
        self.scaling.unscale(self.optimizer)
        norm = get_total_norm([p.grad for p in self.policy.parameters() if p.grad is not None])
        # One copy to the host waits for the passes. It comes before the optimizer step, so that no rank writes weights
        # that are not finite, and the sums over the ranks let all ranks decide alike.
        values = [value.float() for value in (*broken, *sums.values(), full(norm) / dist.get_world_size())]
        totals = over_ranks(torch.stack(values).cpu()).tolist()
        losses = mean_losses(dict(zip(sums, totals[len(packed) : -1], strict=True)), mean)
        if any(totals[: len(packed)]):
            first = next(i for i, count in enumerate(totals) if count)
            raise logprobs_error(self.policy, MicroBatch.of(packed[first], self.device), config)
        if not math.isfinite(losses["loss"]):
            raise loss_error([MicroBatch.of(rows, self.device, config.correction_bound) for rows in packed], config)
        is_finite = math.isfinite(totals[-1])
        if is_finite:
            losses["grad_norm"] = totals[-1]
            clip_grads_with_norm_(self.policy.parameters(), config.max_grad_norm, norm)
            with self.steps.step(step):
                self.optimizer.step()
                self.scaling.update()
        elif not self.scaling.lower():
            raise gradients_error(self.policy, config)
        self.optimizer.zero_grad()
        return Learned(losses, counts[1], counts[2], int(is_finite), int(not is_finite))


class GRPO:
    """A training run on one rank: its share of the groups, its shards of the model, and the servers of all ranks."""

    def __init__(
        self,
        trainer: PolicyTrainer,
        servers: RolloutServers,
        player: Player,
        ranks: RankGroup,
        stop: StopRequest | None = None,
        advisor: RunAdvisor | None = None,
        incarnation: str | None = None,
        journal: GroupJournal | None = None,
        draw: EnvironmentDraw | None = None,
    ) -> None:
        """Prepare the run. All ranks call it together.

        `stop` is a request to stop, which interrupts rollouts. `advisor` judges the gap of log-probabilities.
        `incarnation` is that of this start of the run, equal on all ranks; by default rank 0 draws one. `journal` takes
        the groups that have finished. `draw` says which environment of a mixture a group plays.
        """
        self.trainer = trainer
        self.servers = servers
        self.player = player
        self.steps = trainer.steps
        self.state = trainer.state
        self.next_step = 0
        self.version = 0
        """Number of the served version: one more than the number of the step that trained it; 0 before training."""
        self._ranks = ranks
        self._stop = stop or StopRequest()
        self._advisor = advisor
        if trainer.config.groups % ranks.size:
            option = trainer.config.flag("groups")
            raise BadRequestError(f"{option} {trainer.config.groups} does not divide over {ranks.size} ranks.")
        self._incarnation = incarnation or ranks.call("incarnation", lambda _: new_incarnation())
        self._use = ServerUse(servers.counters)
        self._order = TaskOrder(trainer.config.groups)
        self._journal = StepJournal(self._order, journal)
        self._draw = draw

    @property
    def weight_version(self) -> WeightVersion:
        """Version of the served weights. No other start of the run has versions of this incarnation."""
        return WeightVersion(self.version, self._incarnation)

    def step(self, on_finish: Callable[[Trajectory], None] | None = None) -> Step:
        """Roll out with the current weights, train on the episodes, and push the new weights.

        If no rank has an episode to train on, weights and version stay, and `metrics.skipped` is the reason. They also
        stay if all optimizer steps were skipped (`metrics.skipped_optimizer_steps`). Raise LogprobGapError before
        training, if the advisor finds the gap too large, and NonFiniteError before an optimizer step that would break
        the weights.
        """
        step, version = self.next_step, str(self.weight_version)
        _, rollout, samples, report = self._roll_out(on_finish)
        start = time.monotonic()
        gap = self.trainer.compare_logprobs(rollout.trajectories, version) if report.trainable else None
        if self._advisor is not None:
            self._advisor.check_gap(gap, step)
        metrics = describe_rollout(report, step=step, version=version, ranks=self._ranks.size, gap=gap)
        if self._ranks.rank == 0:
            self._use.read()
            metrics.idle, metrics.cache_hit_rate = self._use.idle(report.seconds), self._use.cache_hit_rate()
        if metrics.skipped is not None:
            self.next_step += 1
        else:
            learned = self.trainer.update(samples, step)
            self.next_step += 1
            trained = time.monotonic()
            note_learned(metrics, learned, self.trainer.scaling.scale, trained - start)
            if learned.optimizer_steps:
                self.version = self.next_step
                self.push()
                metrics.sync_seconds = time.monotonic() - trained
        self._journal.step_ended(self.next_step)
        return Step(metrics, rollout, report.failures + report.replaced, self.trainer.trained.take(step, version))

    def evaluate(self, held_out: HeldOut, done: OnEvaluated) -> None:
        """Play the held-out tasks with the served weights, and hand the result to `done`.

        All ranks call it together, between two steps.
        """
        weights, version = self.trainer.policy.named_weights, self.weight_version
        together = (self.player, self.servers, weights, self._ranks, self._stop)
        done(play_held_out(held_out, self.next_step, version, *together))

    def end_evaluation(self) -> None:
        """Do nothing: `evaluate` waits for the episodes."""

    def progress(self) -> Progressing:
        """Return the progress of this rank, also after an error inside a step.

        A step counts as trained once one of its optimizer steps was applied, because the weights have changed.
        """
        trained = -1 if self.steps.last_step is None else self.steps.last_step
        return Progressing(max(self.next_step, trained + 1), max(self.version, trained + 1))

    def checkpoint(self, reached: Progressing) -> Progress:
        """Return the progress of a checkpoint of the state `reached`, which is written now."""
        self._journal.saving(reached.next_step)
        progress = self.state.progress(reached, self._incarnation, self._journal.ancestors)
        draw = None if self._draw is None else self._draw.state()
        return replace(progress, next_group=self._order.stored(reached.next_step), draw=draw)

    def saved(self, progress: Progress) -> None:
        """Remove the finished groups that the checkpoint of `progress`, which is on the disk, counts as done."""
        self._journal.saved(progress.next_step)

    def load(self, checkpoint: Path) -> None:
        """Continue from the folder of a checkpoint, as a new incarnation. All ranks call it."""
        progress = self.state.load(checkpoint)
        self.next_step, self.version = progress.next_step, progress.version
        self._order.resume(progress)
        self._journal.resume(checkpoint.parent, progress)
        if self._draw is not None:
            self._draw.resume(progress)

    def push(self) -> None:
        """Copy the trainer's weights into the servers, as version `self.weight_version`."""
        self.servers.push(self.trainer.policy.named_weights, str(self.weight_version))

    def _roll_out(self, on_finish: Callable[[Trajectory], None] | None) -> Round:
        """Play the groups of the step, and in further rounds as many as lack spread (`refill`)."""
        config, rounds, played, lacking = self.trainer.config, list[Round](), 0, self.trainer.config.groups
        while lacking and len(rounds) <= config.refill:
            rounds.append(self._play(range(played, played + lacking), on_finish))
            played, lacking = played + lacking, rounds[-1].report.counts.without_spread
        self._order.played(self.next_step, played)
        return join_rounds(rounds)

    def _play(self, groups: range, on_finish: Callable[[Trajectory], None] | None) -> Round:
        """Play the groups of the step with these numbers, each rank its share.

        The episodes play in another thread. All ranks meet when the episodes of each have ended, or when a rank finds
        that no server is left. In that case, all ranks bring a server back together, and the episodes go on. A rank
        whose episodes have ended takes part. If the rollout of one rank fails, its error is raised on all ranks. Groups
        that had finished before the run was interrupted are not played again.
        """
        step, version, named_weights = self.next_step, self.weight_version, self.trainer.policy.named_weights
        own, first = share(groups, self._ranks.rank, self._ranks.size), self._order.first(step)
        tasks = make_tasks(step, self.trainer.config, own.start, len(own), self._draw, first)
        kept = self._journal.take(tasks, step, version, on_finish)
        left, on_group = [task for task in tasks if task.group not in kept], self._journal.writer(step, version)
        recording = self._journal.recording(left, step, version)
        running: Running[Rollout] | None = None
        mine: list[tuple[Rollout, list[Sample]]] = []

        def play() -> bytes:
            """Return this rank's report when its episodes have ended; b"" if they need a server."""
            nonlocal running
            if left:
                running = running or self.player.start(
                    left, on_finish, version=str(version), on_group=on_group, recording=recording
                )
                if not self._ends(running, str(version)):
                    return b""
            rollout = joined(None if running is None else running.result(), kept)
            leave_out_other_versions(rollout.trajectories, version)
            samples = self.trainer.samples(rollout.trajectories)
            mine[:] = [(rollout, samples)]
            report = report_rollout(
                rollout.trajectories,
                len(by_episode(sample.trajectory for sample in samples)),
                rollout.seconds,
                step=step,
                rank=self._ranks.rank,
                env_url=self.player.environment_url,
                server_url=", ".join(self.servers.urls),
                by_agent=self.player.is_agent,
                replaced=rollout.replaced,
                kept_groups=len(kept),
                mixture=None if self._draw is None else self._draw.mixture,
            )
            return msgspec.msgpack.encode(report)

        try:
            self.servers.ensure(named_weights)
            while not all(reports := self._ranks.gather("GRPO.step", play)):
                self.servers.ensure(named_weights)
        finally:
            if running is not None:
                running.cancel()  # after an error; a rollout that has ended stays as it is
        rollout, samples = mine[0]
        report = merge_reports([msgspec.msgpack.decode(r, type=RolloutReport) for r in reports])
        return Round(len(groups), rollout, samples, report)

    def _ends(self, running: Running[Rollout], version: str) -> bool:
        """Wait until the episodes have ended, and return True. Return False if no server can play them any more."""
        with self._stop.interruptible():
            while not running.wait(_PROBE_SECONDS):
                if self.player.stranded(version):
                    return False
        return True


def open_grpo(args: TrainArgs, parts: RunParts) -> contextlib.AbstractContextManager[GRPO]:
    """Return the algorithm of a run with the options `args`, to be opened."""
    trainer = PolicyTrainer(parts.policy, args.grpo, args.steps, parts.device, parts.reference)
    return open_synchronous(args, parts, trainer)


@contextlib.contextmanager
def open_synchronous(args: TrainArgs, parts: RunParts, trainer: PolicyTrainer) -> Iterator[GRPO]:
    """Yield the run of `trainer` with the options `args`. Each rank plays its groups in a thread of its own."""
    ranks, turns = parts.ranks, args.replay_actions
    journal = GroupJournal(args.out, ranks.rank, ranks.size, parts.files.note, records_turns=turns)
    with (
        contextlib.closing(journal),
        open_player(args, parts.urls, parts.keys, parts.prepared) as player,
    ):
        parties = trainer, parts.servers, player, parts.ranks, parts.stop, parts.advisor, parts.incarnation
        yield GRPO(*parties, journal, draw_of(args))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status."""
    return run.main("python -m verl_server.train.grpo", TrainArgs, open_grpo, argv)


if __name__ == "__main__":
    sys.exit(main())

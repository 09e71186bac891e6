"""GRPO in one file: roll out groups, compare within each group, take clipped policy steps, push the weights.

    python -m verl_server.train.grpo --model-path MODEL --env-url http://HOST:PORT

trains a policy on any OpenEnv environment that talks text; under `torchrun --nproc-per-node N` the model is
sharded over the ranks (FSDP2). Every rank plays and trains on its own groups against one rollout server. The
behaviour policy is what the server's log-probabilities say it was, token by token. To change the algorithm,
copy this file.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from transformers import AutoTokenizer

from verl_server.engine.verl_engine import VerlEngine
from verl_server.errors import BadRequestError
from verl_server.rollout.agent_loop import AgentLoop, Rollout
from verl_server.rollout.episode import Limits
from verl_server.rollout.renderer import ChatRenderer, Renderer, TextRenderer
from verl_server.rollout.trajectory import Task, Trajectory, append_jsonl, summarize
from verl_server.train.ranks import full, launch_engine, load_policy, over_ranks, save_policy, setup_ranks


@dataclass(frozen=True)
class GRPOConfig:
    """Settings of the algorithm."""

    groups: int = 16
    """Groups per step, over all ranks; each plays one environment seed."""
    group_size: int = 16
    """Trajectories per group."""
    epochs: int = 2
    """Passes over a step's trajectories."""
    minibatches: int = 4
    """Optimizer steps per pass."""
    micro_batch_size: int = 64
    """Trajectories per forward pass of a rank."""
    learning_rate: float = 1e-6
    final_learning_rate: float = 0.15
    """Share of the learning rate that is left at the last step; it falls linearly."""
    warmup_steps: int = 5
    clip_low: float = 0.2
    clip_high: float = 0.28
    """The probability ratio is clipped to [1 - clip_low, 1 + clip_high]."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus at the first step; it falls linearly to 0."""
    normalize_std: bool = False
    """Divide advantages by the group's standard deviation, which favours groups that are nearly solved."""
    max_grad_norm: float = 1.0
    temperature: float = 1.0
    """Of sampling, hence of the log-probabilities that are trained."""
    seed: int = 0
    """Of the environments and of sampling: the same seed repeats the run."""


@dataclass(slots=True)
class Batch:
    """Trajectories as tensors, padded on the right. Position t of the last three is about `tokens[t]`."""

    tokens: torch.Tensor  # [n, length]
    loss_mask: torch.Tensor  # [n, length] float: 1 where the policy sampled the token
    behaviour_logprobs: torch.Tensor  # [n, length]
    advantages: torch.Tensor  # [n]

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory], advantages: Sequence[float], device: torch.device) -> Batch:
        rows = (len(trajectories), max(len(t.tokens) for t in trajectories))
        tokens, mask, logprobs = torch.zeros(rows, dtype=torch.long), torch.zeros(rows), torch.zeros(rows)
        for row, trajectory in enumerate(trajectories):
            length = len(trajectory.tokens)
            tokens[row, :length] = torch.tensor(trajectory.tokens)
            mask[row, :length] = torch.tensor(trajectory.loss_mask, dtype=torch.float32)
            logprobs[row, :length] = torch.tensor(trajectory.logprobs)
        return cls(tokens.to(device), mask.to(device), logprobs.to(device), torch.tensor(advantages, device=device))

    def __getitem__(self, rows: torch.Tensor) -> Batch:
        return Batch(self.tokens[rows], self.loss_mask[rows], self.behaviour_logprobs[rows], self.advantages[rows])

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass
class StepMetrics:
    """What a step of training did; one line of metrics.jsonl."""

    step: int
    weight_version: str
    """Under which the step's trajectories were sampled."""
    reward: float | None
    trajectories: int
    trainable: int
    stop_reasons: dict[str, int]
    turns: float
    sampled_tokens: int
    tokens_per_s: float
    """Sampled tokens per second of rollout."""
    logprob_gap: float
    """Largest difference between the server's and the trainer's log-probability of a sampled token, before the
    step's first update: both hold the same weights then."""
    rollout_seconds: float
    generate_seconds: float
    """Mean over trajectories of the time spent waiting for the server."""
    env_seconds: float
    """Mean over trajectories of the time spent waiting for the environment."""
    train_seconds: float
    sync_seconds: float
    losses: dict[str, float] = field(default_factory=dict)
    success: float | None = None
    """Share of episodes that succeeded, where the caller knows what that means."""


_EMPTY = Trajectory(task=Task(seed=0), tokens=[0, 0], loss_mask=[0, 0], logprobs=[0.0, 0.0])
"""Stands in where a rank has nothing to train on."""


def group_advantages(trajectories: Sequence[Trajectory], normalize_std: bool) -> tuple[list[Trajectory], list[float]]:
    """The trajectories that can be trained on, and each one's reward less its group's mean.

    What has no reward (the environment or the server failed) is left out; so are groups in which all fared
    alike, since they tell nothing.
    """
    groups: dict[int, list[Trajectory]] = {}
    for trajectory in trajectories:
        if trajectory.is_trainable:
            groups.setdefault(trajectory.task.group, []).append(trajectory)
    kept: list[Trajectory] = []
    advantages: list[float] = []
    for group in groups.values():
        rewards = torch.tensor([t.reward for t in group], dtype=torch.float64)
        centered = rewards - rewards.mean()
        if centered.abs().max() < 1e-9:
            continue
        scale = rewards.std(correction=0) if normalize_std else 1.0
        kept += group
        advantages += (centered / scale).tolist()
    return kept, advantages


def token_logprobs(model: torch.nn.Module, tokens: torch.Tensor, temperature: float) -> tuple[torch.Tensor, ...]:
    """Log-probability of each token given those before it, and the entropy there; both [n, length], first 0."""
    logits = model(input_ids=tokens).logits[:, :-1].float() / temperature
    distribution = logits.log_softmax(-1)
    logprobs = distribution.gather(-1, tokens[:, 1:, None]).squeeze(-1)
    entropy = -(distribution.exp() * distribution).sum(-1)
    return torch.nn.functional.pad(logprobs, (1, 0)), torch.nn.functional.pad(entropy, (1, 0))


def policy_loss(
    logprobs: torch.Tensor, entropy: torch.Tensor, batch: Batch, config: GRPOConfig, entropy_coef: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Clipped surrogate, summed over the sampled tokens, and the sums that its metrics are made of."""
    ratio = (logprobs - batch.behaviour_logprobs).exp()
    advantages = batch.advantages[:, None]
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    surrogate = torch.minimum(ratio * advantages, clipped * advantages)
    loss = -((surrogate + entropy_coef * entropy) * batch.loss_mask).sum()
    sums = {
        "entropy": (entropy * batch.loss_mask).sum().detach(),
        "clip_fraction": ((ratio != clipped) * batch.loss_mask).sum().detach(),
    }
    return loss, sums


class PolicyTrainer:
    """The policy that learns and its optimizer: one rank's part of them under torchrun."""

    def __init__(self, model: torch.nn.Module, config: GRPOConfig, steps: int, device: torch.device) -> None:
        self.model = model
        self.config = config
        self.device = device
        self._steps = steps
        self._step = 0
        self._optimizer = torch.optim.AdamW(model.parameters(), config.learning_rate, (0.9, 0.95), weight_decay=0.0)
        self._shuffle = torch.Generator().manual_seed(config.seed)

    def logprob_gap(self, trajectories: Sequence[Trajectory], version: str) -> float:
        """Largest |server - trainer| log-probability of a token that was sampled under `version`.

        Called while this model holds that version, on as many trajectories as fit one forward pass.
        """
        sample = list(trajectories[: self.config.micro_batch_size]) or [_EMPTY]
        batch = Batch.of(sample, [0.0] * len(sample), self.device)
        current = torch.zeros_like(batch.loss_mask)
        for row, trajectory in enumerate(sample):
            is_current = [float(v == version) for v in trajectory.weight_versions]
            current[row, : len(is_current)] = torch.tensor(is_current)
        with torch.no_grad():
            logprobs, _ = token_logprobs(self.model, batch.tokens, self.config.temperature)
        gap = ((logprobs - batch.behaviour_logprobs).abs() * batch.loss_mask * current).max()
        return float(over_ranks(gap.cpu(), dist.ReduceOp.MAX))

    def update(self, trajectories: Sequence[Trajectory]) -> dict[str, float]:
        """One step of training on this rank's trajectories; returns means of the losses."""
        kept, advantages = group_advantages(trajectories, self.config.normalize_std)
        # Ranks must do the same number of passes; those with fewer trajectories add empty ones.
        rows = int(over_ranks(torch.tensor(len(kept)), dist.ReduceOp.MAX))
        missing = rows - len(kept)
        progress = self._step / max(1, self._steps)
        self._step += 1
        if rows == 0:
            return {}
        batch = Batch.of(kept + [_EMPTY] * missing, advantages + [0.0] * missing, self.device)
        warmup = min(1.0, self._step / max(1, self.config.warmup_steps))
        decay = max(self.config.final_learning_rate, 1.0 - progress)
        for group in self._optimizer.param_groups:
            group["lr"] = self.config.learning_rate * warmup * decay
        results = []
        for _ in range(self.config.epochs):
            for minibatch in torch.randperm(rows, generator=self._shuffle).chunk(self.config.minibatches):
                results.append(self._optimizer_step(batch[minibatch], 1.0 - progress))
        return {name: sum(result[name] for result in results) / len(results) for name in results[0]}

    def _optimizer_step(self, batch: Batch, entropy_share: float) -> dict[str, float]:
        config = self.config
        ranks = dist.get_world_size()
        tokens = float(over_ranks(batch.loss_mask.sum().cpu(), dist.ReduceOp.SUM))
        sums: dict[str, float] = {"loss": 0.0}
        for start in range(0, len(batch), config.micro_batch_size):
            micro = batch[torch.arange(start, min(start + config.micro_batch_size, len(batch)))]
            logprobs, entropy = token_logprobs(self.model, micro.tokens, config.temperature)
            loss, parts = policy_loss(logprobs, entropy, micro, config, config.entropy_coef * entropy_share)
            # FSDP averages gradients over ranks; the loss is a mean over the tokens of all ranks.
            (loss * ranks / max(tokens, 1.0)).backward()  # type: ignore[no-untyped-call]
            sums["loss"] += loss.item()
            for name, value in parts.items():
                sums[name] = sums.get(name, 0.0) + value.item()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.max_grad_norm)
        self._optimizer.step()
        self._optimizer.zero_grad()
        totals = over_ranks(torch.tensor(list(sums.values())), dist.ReduceOp.SUM) / max(tokens, 1.0)
        return dict(zip(sums, totals.tolist(), strict=True)) | {"grad_norm": float(full(norm))}

    def named_weights(self) -> list[tuple[str, torch.Tensor]]:
        """What the server is given: every parameter under its Hugging Face name, a shard of it if sharded."""
        return list(self.model.named_parameters())


def make_tasks(step: int, config: GRPOConfig, first_group: int, groups: int) -> list[Task]:
    """Groups first_group.. of a step. Seeds are below 2**30 and a function of (config.seed, step, group)."""
    tasks = []
    for group in range(first_group, first_group + groups):
        seed = (config.seed * 1_000_003 + step * config.groups + group) % 2**30
        for member in range(config.group_size):
            name = f"{step}-{group}-{member}"
            draw = (seed * config.group_size + member) % 2**62
            tasks.append(Task(seed=seed, group=group, episode_id=name, sampling_seed=draw))
    return tasks


class GRPO:
    """One rank's run: its share of the groups, its part of the model, and the engine that all ranks share."""

    def __init__(self, trainer: PolicyTrainer, engine: VerlEngine, loop: AgentLoop) -> None:
        self.trainer = trainer
        self.engine = engine
        self.loop = loop
        self.version = 0
        ranks = dist.get_world_size()
        if trainer.config.groups % ranks:
            raise BadRequestError(f"groups={trainer.config.groups} does not divide over {ranks} ranks.")
        self._groups = trainer.config.groups // ranks
        self._first_group = dist.get_rank() * self._groups

    def step(self, on_finish: Any = None) -> tuple[StepMetrics, Rollout]:
        """Roll out under the current weights, learn from it, push the result."""
        tasks = make_tasks(self.version, self.trainer.config, self._first_group, self._groups)
        rollout = self.loop.run(tasks, on_finish)
        start = time.monotonic()
        gap = self.trainer.logprob_gap(rollout.trajectories, str(self.version))
        losses = self.trainer.update(rollout.trajectories)
        trained = time.monotonic()
        step, self.version = self.version, self.version + 1
        self.push()
        stats = summarize(rollout.trajectories)
        metrics = StepMetrics(
            step=step,
            weight_version=str(step),
            reward=stats.mean_reward,
            trajectories=stats.trajectories,
            trainable=stats.trainable,
            stop_reasons=stats.stop_reasons,
            turns=stats.mean_turns,
            sampled_tokens=stats.sampled_tokens,
            tokens_per_s=stats.sampled_tokens / rollout.seconds,
            logprob_gap=gap,
            rollout_seconds=rollout.seconds,
            generate_seconds=stats.generate_seconds / max(1, stats.trajectories),
            env_seconds=stats.env_seconds / max(1, stats.trajectories),
            train_seconds=trained - start,
            sync_seconds=time.monotonic() - trained,
            losses=losses,
        )
        return metrics, rollout

    def push(self) -> None:
        """Give the server the trainer's weights, as version `self.version`."""
        weights = self.trainer.named_weights()
        self.engine.update_weights_from_tensor(weights, weight_version=str(self.version), partial=False)


# -- a run from the command line ----------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainArgs:
    """Train a policy with GRPO on an environment that is served over HTTP (OpenEnv's protocol)."""

    model_path: str
    """Folder or hub id of the policy to start from."""
    env_url: str
    """URL of the environment server."""
    steps: int = 100
    out: Path = Path("runs/grpo")
    """Gets metrics.jsonl, trajectories.jsonl and the trained model."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    chat: bool = True
    """Observations are user messages of the model's chat template; otherwise plain text."""
    observation_key: str = "text"
    """Key of the text in the environment's observations."""
    action_key: str = "text"
    """Key under which the environment wants the policy's text."""
    max_turns: int = 8
    max_new_tokens: int = 512
    """Per turn."""
    max_concurrency: int | None = None
    """Most environment sessions at one time, per rank."""
    server_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    grpo: GRPOConfig = field(default_factory=GRPOConfig)


def train(args: TrainArgs) -> None:
    """The whole run on this rank; called by every rank under torchrun."""
    device = setup_ranks(args.device)
    leader = dist.get_rank() == 0
    tokenizer = AutoTokenizer.from_pretrained(args.model_path)
    keys = {"observation_key": args.observation_key, "action_key": args.action_key}
    renderer: Renderer = ChatRenderer(tokenizer, **keys) if args.chat else TextRenderer(tokenizer, **keys)
    trainer = PolicyTrainer(load_policy(args.model_path, device), args.grpo, args.steps, device)
    with launch_engine(args.model_path, device, dtype=args.server_dtype) as engine:
        limits = Limits(max_turns=args.max_turns, max_new_tokens=args.max_new_tokens)
        sampling = {"temperature": args.grpo.temperature}
        with AgentLoop(
            str(engine.url),
            args.env_url,
            renderer,
            sampling_params=sampling,
            limits=limits,
            max_concurrency=args.max_concurrency,
        ) as loop:
            run = GRPO(trainer, engine, loop)
            run.push()
            for _ in range(args.steps):
                metrics, rollout = run.step()
                if leader:
                    _record(args.out, metrics, rollout)
        save_policy(trainer.model, args.out / "model", tokenizer)


def _record(out: Path, metrics: StepMetrics, rollout: Rollout) -> None:
    out.mkdir(parents=True, exist_ok=True)
    append_jsonl(out / "metrics.jsonl", [dataclasses.asdict(metrics)])
    append_jsonl(out / "trajectories.jsonl", rollout.trajectories[:4])
    reward = math.nan if metrics.reward is None else metrics.reward
    print(
        f"step {metrics.step:4d}  reward {reward:6.3f}  turns {metrics.turns:4.1f}  "
        f"{metrics.tokens_per_s:6.0f} tok/s  rollout {metrics.rollout_seconds:.2f} s  "
        f"train {metrics.train_seconds:.2f} s  sync {metrics.sync_seconds:.3f} s  "
        f"gap {metrics.logprob_gap:.1e}  {json.dumps(metrics.stop_reasons)}",
        flush=True,
    )


def main(argv: Sequence[str] | None = None) -> None:
    import tyro

    try:
        train(tyro.cli(TrainArgs, args=argv, prog="python -m verl_server.train.grpo"))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()

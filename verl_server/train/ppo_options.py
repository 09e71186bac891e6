"""The options of PPO: those of GRPO, other defaults where PPO needs them, and those of the critic and of GAE.

The command lines of `ppo` and `async_ppo` are generated from these classes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

import tyro

from verl_server.errors import BadRequestError
from verl_server.files.path_options import OutputPath
from verl_server.train.options import AsyncTrainArgs, GRPOConfig, TrainArgs


@dataclass(frozen=True)
class PPOConfig(GRPOConfig):
    """Settings of PPO. On the command line they are `--ppo.NAME`, also those that GRPO has."""

    option: ClassVar[str] = "ppo"
    compares_groups: ClassVar[bool] = False
    groups: int = 256
    """Environment seeds of each step, over all ranks."""
    group_size: int = 1
    """Episodes of each seed. PPO compares no episodes with each other, so one is enough."""
    normalize_std: bool = True
    """Subtract the mean of the step's advantages, over the turns of all ranks, and divide by their standard
    deviation (whitening)."""
    gamma: float = 1.0
    """Discount of what follows, for each turn. 1: a reward counts the same at any distance."""
    gae_lambda: float = 0.95
    """Weight of later turns in an advantage. 1: all rewards that follow, without bias. 0: the critic's prediction of
    the next turn alone, with the least variance."""
    value_clip: float = 0.2
    """A value that has moved by more than this towards its return is left where it is, in one step. It is in the unit
    of the rewards. 0: no bound."""
    critic_learning_rate: float = 1e-5
    """Learning rate of the critic's AdamW. It stays the same in all steps."""
    critic_warmup_steps: int = 0
    """First steps of the run, in which only the critic is trained."""

    def __post_init__(self) -> None:
        if self.refill:
            raise BadRequestError(
                f"{self.flag('refill')} replaces groups whose rewards are all equal, because GRPO learns nothing from "
                "them. PPO compares no episodes with each other, and learns from each: remove the option."
            )
        super().__post_init__()
        for name in ("gamma", "gae_lambda"):
            if not 0 <= getattr(self, name) <= 1:
                raise BadRequestError(f"{self.flag(name)} must be from 0 to 1, not {getattr(self, name):g}.")
        for name in ("value_clip", "critic_learning_rate", "critic_warmup_steps"):
            if getattr(self, name) < 0:
                raise BadRequestError(f"{self.flag(name)} must not be negative, not {getattr(self, name):g}.")


@dataclass(frozen=True)
class PPOTrainArgs(TrainArgs):
    """Train a policy with PPO and a critic on an environment that is served over HTTP (OpenEnv's protocol).

    The exit statuses and what is saved are those of verl_server.train.grpo; checkpoints have the critic, too.
    docs/ppo.md describes the algorithm.
    """

    command: ClassVar[str] = "train.ppo"
    out: OutputPath = Path("runs/ppo")
    """Folder for the files of the run: metrics, events and trajectories (docs/reference/run-folder.md), the checkpoint,
    the trained model, and run.json with the settings. Missing folders above it are created. A folder that has another
    run is refused."""
    critic_path: str | None = None
    """Model folder or hub id with the initial weights of the critic, which gets a head for values. It needs the
    tokenizer of the policy. Default: --model-path."""
    grpo: Annotated[PPOConfig, tyro.conf.arg(name="ppo")] = field(default_factory=PPOConfig)


@dataclass(frozen=True)
class AsyncPPOTrainArgs(AsyncTrainArgs):
    """Train a policy with PPO and a critic while its episodes play.

    The exit statuses and what is saved are those of verl_server.train.grpo; checkpoints have the critic, too.
    docs/ppo.md describes the algorithm, and docs/async-training.md says when not to wait pays.
    """

    command: ClassVar[str] = "train.async_ppo"
    out: OutputPath = Path("runs/async-ppo")
    """Folder for the files of the run: metrics, events and trajectories (docs/reference/run-folder.md), the checkpoint,
    the trained model, and run.json with the settings. Missing folders above it are created. A folder that has another
    run is refused."""
    critic_path: str | None = None
    """Model folder or hub id with the initial weights of the critic, which gets a head for values. It needs the
    tokenizer of the policy. Default: --model-path."""
    grpo: Annotated[PPOConfig, tyro.conf.arg(name="ppo")] = field(default_factory=lambda: PPOConfig(loss="tis"))

"""`TrainerState`: what a checkpoint has of a trainer: its models with their optimizers, and the scale of its loss.

`grpo.PolicyTrainer` has one, to which `ppo.PPOTrainer` adds its critic. `GRPO` and `AsyncGRPO` take the `Progress` of a
checkpoint from it, and add where they are in their tasks. They continue from a checkpoint through it.
`checkpoint_writer` writes the models.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from verl_server.train.ancestors import Ancestors
from verl_server.train.checkpoints import POLICY, Progress, Trained, load_checkpoint
from verl_server.train.loss_scaling import LossScaling
from verl_server.train.run_end import Progressing


@dataclass
class TrainerState:
    """The state of a trainer; under torchrun, the shards of one rank."""

    models: dict[str, Trained]
    """Name -> model and optimizer: "policy", and models beside it."""
    scaling: LossScaling

    def progress(
        self, reached: Progressing, incarnation: str | None = None, ancestors: Ancestors | None = None
    ) -> Progress:
        """Return the progress of a run at `reached`. The others are those of `Progress`."""
        has_state = {name: bool(optimizer.state) for name, (_, optimizer) in self.models.items()}
        return Progress(
            next_step=reached.next_step,
            version=reached.version,
            has_optimizer_state=has_state.pop(POLICY),
            loss_scaling=self.scaling.state_dict(),
            incarnation=incarnation,
            ancestors=(None if ancestors is None else dict(ancestors.forks)) or None,
            further=has_state or None,
        )

    def load(self, checkpoint: Path) -> Progress:
        """Restore models, optimizers and scale in place from the folder of a checkpoint, and return its progress.

        All ranks call it. Raise BadRequestError as `load_checkpoint` does.
        """
        progress = load_checkpoint(checkpoint, self.models)
        self.scaling.load_state_dict(progress.loss_scaling)
        return progress

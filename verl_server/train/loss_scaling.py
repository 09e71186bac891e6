"""`LossScaling`: compute float16 gradients of a multiple of the loss, so that small gradients do not round to 0.

`PolicyTrainer` calls `backward` for each micro-batch, `unscale` before it clips the gradients, and then either `update`
together with the optimizer step, or `lower` in its place. torch's `GradScaler` holds the scale. Without scaling (any
other dtype), `backward` is a plain backward pass, and the other methods do nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from verl_server.errors import VerlServerError

_GROWTH_INTERVAL = 400
"""Optimizer steps without an overflow after which the scale is doubled. torch's default of 2000 is more steps than most
GRPO runs have, so that an early overflow would lower the scale for good."""
_LAST_SKIPS = 5
"""Skipped optimizer steps in a row that end the run when the scale is below 1."""


class LossScaleError(VerlServerError):
    """Gradients overflow float16 even with a scale below 1."""


class LossScaling:
    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        """`dtype` is the dtype of the passes. If it is float16, the loss is scaled."""
        self.is_enabled = dtype == torch.float16
        self._scaler = torch.amp.GradScaler(device.type, growth_interval=_GROWTH_INTERVAL, enabled=self.is_enabled)
        self._state: dict[str, Any] = self._scaler.state_dict()
        self._skipped_in_a_row = 0

    @property
    def scale(self) -> float | None:
        """The factor of the next loss; None without scaling."""
        return float(self._state["scale"]) if self.is_enabled else None

    def state_dict(self) -> dict[str, Any] | None:
        """Return the state for a checkpoint, or None without scaling.

        The state is on the host, because the thread that saves a failed run must not wait for the device.
        """
        return dict(self._state) if self.is_enabled else None

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Continue from the state of a checkpoint. None, from a run without scaling, keeps the first scale."""
        if self.is_enabled and state is not None:
            self._scaler.load_state_dict(dict(state))
            self._state = dict(state)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of the scaled loss."""
        self._scaler.scale(loss).backward()  # type: ignore[no-untyped-call]

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale. All ranks learn whether a gradient of any rank is not finite."""
        self._scaler.unscale_(optimizer)

    def update(self) -> None:
        """Adapt the scale. Call it after `unscale`, in an optimizer step that is taken."""
        if self.is_enabled:
            self._scaler.update()
            self._state = self._scaler.state_dict()
            self._skipped_in_a_row = 0

    def lower(self) -> bool:
        """Lower the scale. Call it after `unscale` if gradients are not finite, and skip the optimizer step.

        Return False if the scale is not the cause: without scaling, or if only the norm of the gradients is not finite.
        Raise LossScaleError if several steps in a row were skipped and the scale is below 1.
        """
        if not self.is_enabled:
            return False
        before, skipped = float(self._state["scale"]), self._skipped_in_a_row + 1
        self.update()
        self._skipped_in_a_row = skipped
        scale = float(self._state["scale"])
        if scale >= before:
            return False
        if scale < 1 and skipped >= _LAST_SKIPS:
            raise LossScaleError(
                f"Gradients overflow float16 although the loss is multiplied by {before:g} only: {skipped} optimizer "
                "steps in a row were skipped. Train with --compute-dtype bfloat16, which has the range of float32."
            )
        return True

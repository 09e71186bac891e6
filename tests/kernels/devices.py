"""Waiting for a device, which does not matter on the CPU."""

from __future__ import annotations

import torch


def settle(device: torch.device) -> None:
    """Wait for all work on `device`, as a launch with `pdl` requires of what the kernel reads first."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)

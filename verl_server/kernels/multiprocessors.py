"""The number of multiprocessors of a device, by which kernels divide their work."""

from __future__ import annotations

import torch

_assumed: int | None = None


def count(device: torch.device, *, interpreted: int) -> int:
    """Return the multiprocessors of a GPU. On other devices: those that were assumed, else `interpreted`, which is for
    Triton's interpreter."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return _assumed or interpreted


def assume(number: int) -> None:
    """Let other devices have `number` multiprocessors, to compile for a GPU that this process does not use."""
    global _assumed
    _assumed = number

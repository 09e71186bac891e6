"""The properties of the GPU on which kernels are launched: its multiprocessors and its compute capability.

Code that compiles kernels for a GPU which its process does not use states the properties with `assumed`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch

_assumed: tuple[int, int] | None = None


def multiprocessors(device: torch.device, *, interpreted: int) -> int:
    """Return the number of multiprocessors of a GPU, among which kernels divide their work.

    On other devices, return the assumed number, or else `interpreted`, which is for Triton's interpreter.
    """
    if device.type == "cuda":
        count: int = _properties(device).multi_processor_count
        return count
    return _assumed[0] if _assumed else interpreted


def capability(device: torch.device) -> int:
    """Return the compute capability of a GPU, 10 * major + minor.

    On other devices, return the assumed one, or else 0.
    """
    if device.type == "cuda":
        properties = _properties(device)
        return 10 * properties.major + properties.minor  # type: ignore[no-any-return]
    return _assumed[1] if _assumed else 0


@contextlib.contextmanager
def assumed(number: int, compute_capability: int) -> Iterator[None]:
    """Within the block, treat devices that are no GPU as a GPU with `number` multiprocessors and this compute
    capability.

    Kernels that are launched within the block are specialized for that GPU. They can be compiled, but not run.
    """
    global _assumed
    before, _assumed = _assumed, (number, compute_capability)
    try:
        yield
    finally:
        _assumed = before


@functools.cache
def _properties(device: torch.device) -> Any:
    return torch.cuda.get_device_properties(device)

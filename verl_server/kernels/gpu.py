"""The properties of the GPU on which kernels are launched: multiprocessors, compute capability and shared memory.

Code that compiles kernels for a GPU which its process does not use states the properties with `assumed`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

_RESERVED = 1024
"""Bytes of a multiprocessor's shared memory that the system takes for each program, from capability 8.0 on. The largest
program leaves nothing else, so a multiprocessor has this much more than a program can have."""


class Limits(NamedTuple):
    """The limits of a GPU that decide the tiles of kernels."""

    shared_memory: int
    """Bytes of shared memory that a program can have."""
    operands_in_registers: bool
    """True if tensor cores read the factors of a product from registers, False if they read shared memory."""

    def programs(self, shared_bytes: int, *, most: int) -> int:
        """Return how many programs with `shared_bytes` of shared memory a multiprocessor runs at a time: 1 to `most`.

        Registers may permit fewer programs.
        """
        return max(1, min(most, (self.shared_memory + _RESERVED) // (shared_bytes + _RESERVED)))


HOPPER = Limits(227 * 1024, operands_in_registers=False)
"""The limits of the GPUs on which kernels were measured."""


class _Assumed(NamedTuple):
    multiprocessors: int
    capability: int
    shared_memory: int


_assumed: _Assumed | None = None


def multiprocessors(device: torch.device, *, interpreted: int) -> int:
    """Return the number of multiprocessors of a GPU, among which kernels divide their work.

    On other devices, return the assumed number, or else `interpreted`, which is for Triton's interpreter.
    """
    if device.type == "cuda":
        count: int = _properties(device).multi_processor_count
        return count
    return _assumed.multiprocessors if _assumed else interpreted


def capability(device: torch.device) -> int:
    """Return the compute capability of a GPU, 10 * major + minor.

    On other devices, return the assumed one, or else 0.
    """
    if device.type == "cuda":
        properties = _properties(device)
        return 10 * properties.major + properties.minor  # type: ignore[no-any-return]
    return _assumed.capability if _assumed else 0


def limits(device: torch.device) -> Limits:
    """Return the limits of a GPU. On other devices, return those of the assumed GPU, or else of Hopper.

    Tensor cores of capability 9.0, 10.x and 11.x read shared memory (wgmma, tcgen05). Older ones and those of 12.x read
    registers (mma).
    """
    if device.type == "cuda":
        shared_memory = _properties(device).shared_memory_per_block_optin
    elif _assumed:
        shared_memory = _assumed.shared_memory
    else:
        return HOPPER
    return Limits(shared_memory, operands_in_registers=not 90 <= capability(device) < 120)


@contextlib.contextmanager
def assumed(number: int, compute_capability: int, shared_bytes: int) -> Iterator[None]:
    """Within the block, treat devices that are no GPU as a GPU with `number` multiprocessors, this compute capability
    and `shared_bytes` of shared memory for a program.

    Kernels that are launched within the block are specialized for that GPU. They can be compiled, but not run.
    """
    global _assumed
    before, _assumed = _assumed, _Assumed(number, compute_capability, shared_bytes)
    try:
        yield
    finally:
        _assumed = before


@functools.cache
def _properties(device: torch.device) -> Any:
    return torch.cuda.get_device_properties(device)

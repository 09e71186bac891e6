"""Programmatic dependent launch (PDL): a kernel starts while the kernel before it still runs (Hopper).

A decode step is hundreds of kernels of a few microseconds, each of which would begin only after the last program of the
one before it has stored its results. With this kind of launch a kernel begins as soon as all programs of the one before
have begun. It first reads data that no kernel of the step writes (weights, indices of the step), and then waits.

Each kernel that is launched with `options` must keep two rules. Every program calls `wait` before it returns, before it
reads results of another kernel of the step, and before it stores anything: then "the kernel before has ended" implies
the same for all kernels before that one. Data that it reads before `wait` must have been written before the latest
launch without PDL, such as the embedding of the step's tokens. Libraries may launch with PDL themselves, so cuBLAS does
not count.

The functions that launch such a kernel have the parameter `pdl`. `worker.kernel_choice` decides for a rank.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_OFF: dict[str, Any] = {"DEPENDENT": False}
_ON: dict[str, Any] = {"DEPENDENT": True, "launch_pdl": True}


def options(pdl: bool) -> dict[str, Any]:
    """Return the keyword arguments for a launch of a kernel with the parameter DEPENDENT.

    With `pdl`, the kernel begins early.
    """
    return _ON if pdl else _OFF


@triton.jit  # type: ignore[untyped-decorator]
def let_next_begin(DEPENDENT: tl.constexpr) -> None:
    """Permit the next kernel to begin when every program of this kernel has called this function, or has ended."""
    if DEPENDENT:
        gdc_launch_dependents()


@triton.jit  # type: ignore[untyped-decorator]
def wait(DEPENDENT: tl.constexpr) -> None:
    """Wait until the preceding kernel has ended and its results are visible."""
    if DEPENDENT:
        gdc_wait()

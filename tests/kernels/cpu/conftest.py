"""The compiled kernels in every width of lanes that this processor has."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl_server.kernels.cpu.kernels import CpuKernels
from verl_server.kernels.cpu.library import KernelsUnavailableError

LEVELS = {
    "x86-64-v2": {"ssse3", "sse4_1", "sse4_2", "popcnt", "cx16"},
    "x86-64-v3": {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"},
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
}
"""Processors of 4, 8 and 16 lanes as `-march` names them, and the flags in /proc/cpuinfo that each one adds."""


def runs_here(level: str) -> bool:
    """Whether this processor runs code for `level`; False where that cannot be read."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    found = {flag for line in text.splitlines() if line.startswith("flags") for flag in line.split()}
    return all(LEVELS[name] <= found for name in LEVELS if name <= level)


@pytest.fixture(scope="session", params=["native", *filter(runs_here, LEVELS)])
def cpu_kernels(request: pytest.FixtureRequest) -> CpuKernels:
    try:
        return CpuKernels(request.param)
    except KernelsUnavailableError as error:
        pytest.skip(str(error))

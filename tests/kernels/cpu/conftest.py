"""The compiled CPU kernels, for each number of lanes that this processor supports."""

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
"""Names for `-march` of processors with 4, 8 and 16 lanes, and the flags in /proc/cpuinfo that each name adds."""


def runs_here(level: str) -> bool:
    """Return True if this processor runs code for `level`, and False if /proc/cpuinfo cannot be read."""
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

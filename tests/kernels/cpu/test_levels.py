"""The kernels compile for processors that this machine does not have."""

from __future__ import annotations

import platform

import pytest

from tests.kernels.cpu.conftest import LEVELS, runs_here
from verl_server.kernels.cpu.library import KernelsUnavailableError, load_library


@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs a compiler for x86-64")
@pytest.mark.parametrize("level", [level for level in LEVELS if not runs_here(level)])
def test_it_compiles_for_other_processors(level: str) -> None:
    """`test_kernels` compiles and runs the levels that this processor supports."""
    try:
        library = load_library(level)
    except KernelsUnavailableError as error:
        if "no C++ compiler" in str(error) or "bad value" in str(error) or "unknown target CPU" in str(error):
            pytest.skip(str(error))
        raise
    assert library.code.linear is not None

"""The environment that a child process inherits: without a launcher's variables, with settings that a server needs."""

from __future__ import annotations

import os
from collections.abc import Mapping

_LAUNCHER_PREFIXES = ("TORCHELASTIC_", "GROUP_", "ROLE_", "PET_")
_LAUNCHER_NAMES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
)


def clean_child_env(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """A copy of the environment without the launcher's rendezvous variables.

    A server started by a trainer rank forms process groups of its own; with torchrun's variables it would
    join the trainer's. torchrun also sets OMP_NUM_THREADS=1, which is meant for the trainer's ranks only.
    """
    source = dict(os.environ if env is None else env)
    launched = "TORCHELASTIC_RUN_ID" in source
    kept = {k: v for k, v in source.items() if k not in _LAUNCHER_NAMES and not k.startswith(_LAUNCHER_PREFIXES)}
    if launched and kept.get("OMP_NUM_THREADS") == "1":
        del kept["OMP_NUM_THREADS"]
    # libgomp's threads spin for milliseconds at the end of every parallel region. On cores that are shared with a
    # trainer or environments they spin on the very core that the slowest thread needs, and a step takes 20 times
    # as long (measured: 400 tokens/s instead of 4,000 beside two busy processes; no loss on idle cores).
    kept.setdefault("GOMP_SPINCOUNT", "1000")
    # glibc writes past the caches only for blocks beyond a share of the last cache, 100 MB and more on a large one.
    # Weights are never small enough to stay there: from 4 MB on, a weight copy takes two thirds of the time.
    kept.setdefault("GLIBC_TUNABLES", "glibc.cpu.x86_non_temporal_threshold=0x400000")
    return kept

"""The environment of a child process: without the variables of torchrun, and with settings that a server needs."""

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
    """Return a copy of `env` (default: os.environ) without torchrun's rendezvous variables, with settings for a server.

    A server that a trainer rank starts forms process groups of its own. With torchrun's variables it would join the
    trainer's groups. torchrun also sets OMP_NUM_THREADS=1, which is meant for the trainer's ranks only.
    """
    source = dict(os.environ if env is None else env)
    launched = "TORCHELASTIC_RUN_ID" in source
    kept = {k: v for k, v in source.items() if k not in _LAUNCHER_NAMES and not k.startswith(_LAUNCHER_PREFIXES)}
    if launched and kept.get("OMP_NUM_THREADS") == "1":
        del kept["OMP_NUM_THREADS"]
    # libgomp's threads spin for milliseconds at the end of every parallel region. If trainer or environments use the
    # same cores, they spin on the very core that the slowest thread needs, and a step takes 20 times as long
    # (measured: 400 tokens/s instead of 4,000 beside two busy processes; no loss on idle cores).
    kept.setdefault("GOMP_SPINCOUNT", "1000")
    # glibc's copies bypass the caches only for blocks larger than a share of the last-level cache, which is 100 MB and
    # more on large processors. But copied weights are too large to stay in the cache. With a threshold of 4 MB, a
    # weight copy takes two thirds of the time.
    kept.setdefault("GLIBC_TUNABLES", "glibc.cpu.x86_non_temporal_threshold=0x400000")
    return kept

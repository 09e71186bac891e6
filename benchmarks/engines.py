"""The engines that the benchmarks run, and the settings that differ between them.

`weight_sync`, `colocated`, `soak` and `engine_deaths` call `settings_of_engine`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class EngineOptions:
    """The settings and processes of one engine that other engines do not have."""

    without_graphs: dict[str, Any]
    """Fields of `ServerArgs` with which no CUDA graph is captured."""
    processes: dict[str, str]
    """Name of a process of the engine -> a part of its command line."""
    has_whole_gib: bool = False
    """The KV cache on a CPU has whole GiB."""
    releases_on_cpu: bool = False
    """Memory on a CPU can be released and resumed."""


ENGINES: dict[str, EngineOptions] = {
    "embedded": EngineOptions(
        without_graphs={"disable_cuda_graph": True},
        processes={"scheduler": "verl_server.scheduler.process"},
        releases_on_cpu=True,
    ),
    "vllm": EngineOptions(
        without_graphs={"engine_args": {"enforce_eager": True}},
        processes={"backend": "backends.vllm.main", "scheduler": "VLLM::EngineCore", "worker": "VLLM::Worker"},
        has_whole_gib=True,
    ),
    "sglang": EngineOptions(
        without_graphs={"engine_args": {"disable_cuda_graph": True}},
        processes={"backend": "backends.sglang.main", "scheduler": "sglang::scheduler"},
    ),
}
"""Value of `ServerArgs.engine` -> its options."""
HEAD_DIM = 32
"""Heads of this size run on the CPU with every engine. (vLLM's attention on a CPU needs 32 or more.)"""


def settings_of_engine(engine: str, *, kv_cache_gib: float, graphs: bool = True) -> dict[str, Any]:
    """Return the fields of `ServerArgs` that choose an engine.

    `kv_cache_gib`: GiB of the KV cache on a CPU, rounded up if the engine has whole ones only. `graphs`: whether CUDA
    graphs are captured.
    """
    options = ENGINES[engine]
    cache = math.ceil(kv_cache_gib) if options.has_whole_gib else kv_cache_gib
    return {"engine": engine, "kv_cache_gib": cache} | ({} if graphs else options.without_graphs)

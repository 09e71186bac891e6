"""`SleepingMemory`: vLLM's sleep mode as the `ReleasableMemory` of a worker.

vLLM frees the weights and the KV cache together, and allocates them one after the other at their old addresses. So a
release must name both, and a resume may name one. CUDA graphs stay: they refer to addresses.
"""

from __future__ import annotations

from typing import Any

from verl_server.errors import BadRequestError


class SleepingMemory:
    def __init__(self, worker: Any, keeps_contents: bool) -> None:
        """`worker` is vLLM's worker, started with `enable_sleep_mode`. `keeps_contents` is the server's setting."""
        self._worker, self._keeps = worker, keeps_contents
        self._kept = False

    def check_release(self, tags: list[str]) -> None:
        if not {"weights", "kv_cache"} <= set(tags):
            raise BadRequestError(
                "With engine='vllm', weights and KV cache are released together: name both tags, or none. They can be "
                "resumed one after the other."
            )

    def release_weights(self, keep_contents: bool | None = None) -> None:
        self._kept = self._keeps if keep_contents is None else keep_contents
        self._worker.sleep(1 if self._kept else 2)

    def resume_weights(self) -> bool:
        self._worker.wake_up(["weights"])
        return self._kept

    def release_kv_cache(self) -> None:
        """Do nothing: `release_weights`, which comes first, has freed the cache."""

    def resume_kv_cache(self) -> None:
        self._worker.wake_up(["kv_cache"])

    def release_cuda_graphs(self) -> None:
        """Do nothing: the graphs stay, because vLLM frees no memory of them."""

    def resume_cuda_graphs(self) -> None:
        """Do nothing: the graphs were not released."""

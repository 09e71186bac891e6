"""vLLM's sleep levels: which memory each level releases, and the pause of generation during the sleep.

`/sleep` pauses generation. When `/wake_up` has restored all memory, generation continues, unless it was paused before
the sleep.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from verl_server.errors import BadRequestError
from verl_server.messages.io_struct import ContinueGenerationReq, GetInternalStateReq, PauseGenerationReq, PauseMode
from verl_server.messages.weight_requests import ReleaseMemoryOccupationReq, ResumeMemoryOccupationReq
from verl_server.server.dialects.vllm.weight_transfer import CarryOut
from verl_server.server.tokenizer_manager import TokenizerManager

_MEMORY = {"weights": ["weights"], "kv_cache": ["kv_cache", "cuda_graph"]}
"""vLLM's tag -> this project's tags. vLLM's CUDA graphs stay valid.

This server's graphs are released with the KV cache, and captured again.
"""
_SCHEDULING = "scheduling"
"""vLLM's tag for generation itself."""


class Sleep:
    def __init__(self, manager: TokenizerManager) -> None:
        self._manager = manager
        self._paused = False
        """True if `/sleep` paused generation, which `/wake_up` continues then."""
        self._lock = asyncio.Lock()
        """Lock of the call that changes the state, so that the state does not change between its check and its action.
        """

    async def sleep(self, carry_out: CarryOut, level: int, tags: list[str] | None, mode: PauseMode) -> None:
        """Pause generation. Release the KV cache at level 1 and 2, and the weights: level 1 keeps their contents on the
        host. Memory that is released already stays released. If the release fails, generation continues."""
        wanted = _chosen(tags, {*_MEMORY}) if level else set()
        async with self._lock:
            released = await self._released(carry_out)
            paused_here = not self._manager.controls.is_paused
            names = [name for tag in sorted(wanted) for name in _MEMORY[tag] if name not in released]
            try:
                await carry_out(PauseGenerationReq(mode=mode))
                if names:
                    await carry_out(ReleaseMemoryOccupationReq(tags=names, cpu_backup=level == 1))
            except BaseException:  # also if the client is gone: nobody would continue generation
                if paused_here:
                    await self._manager.control(ContinueGenerationReq())
                raise
            self._paused |= paused_here

    async def wake_up(self, carry_out: CarryOut, tags: Iterable[Any] | None = None) -> dict[str, Any]:
        """Restore memory, and continue generation if `/sleep` paused it and all memory is there.

        Return the answer of `/wake_up`. Its status is "awake" if no memory remains released, else "sleeping".
        """
        wanted = _chosen(None if tags is None else [str(tag) for tag in tags], {*_MEMORY, _SCHEDULING})
        async with self._lock:
            released = await self._released(carry_out)
            names = [name for tag in sorted(wanted - {_SCHEDULING}) for name in _MEMORY[tag] if name in released]
            if names:
                await carry_out(ResumeMemoryOccupationReq(tags=names))
            is_awake = not set(released) - set(names)
            if is_awake and self._paused:
                await carry_out(ContinueGenerationReq())
                self._paused = False
        return {"status": "awake" if is_awake else "sleeping", "tags": tags}

    async def is_sleeping(self, carry_out: CarryOut) -> bool:
        """Return True if memory is released, or if `/sleep` paused generation and nobody continued it."""
        return bool(await self._released(carry_out)) or (self._paused and self._manager.controls.is_paused)

    @staticmethod
    async def _released(carry_out: CarryOut) -> list[str]:
        state = (await carry_out(GetInternalStateReq())).payload or {}
        return list(state.get("released", ()))


def _chosen(tags: list[str] | None, known: set[str]) -> set[str]:
    """Return the given tags, or all `known` tags if there are none. Raise BadRequestError for another tag."""
    if unknown := set(tags or ()) - known:
        raise BadRequestError(f"Unknown tags {sorted(unknown)}. The known tags are {', '.join(sorted(known))}.")
    return set(tags) if tags else known

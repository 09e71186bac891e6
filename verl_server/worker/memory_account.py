"""`MemoryAccount`: decides how many bytes of one rank's GPU each part of an engine may take.

The `ModelRunner` opens it before weights and KV pool are allocated. All sizes are computed from the model and the
settings, or measured once. So no size depends on the memory that happens to be free. The KV pool gets the static share
(`mem_fraction_static`) minus the weights, or less if the other parts need more than the rest. Parts that can use more
than their minimum (`Needs`) share the remaining bytes. `StepGraphs` reads its budget before each capture, the scheduler
reads the budget of special sampling, and `WeightGroups` reads the budget of received tensors.

The account does not include the communicators of `init_weights_update_group`: they do not exist at the start, and NCCL
does not report how much memory they take. They are counted like memory of another process.

Other processes, such as a trainer on the same GPU, are not part of the account. They may allocate after the start. So
the free memory is measured again before the KV pool is allocated, before each capture, and when memory is resumed.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Protocol

logger = logging.getLogger(__name__)

SLACK = 2**29
"""Bytes for memory that is neither computed nor measured.

This is memory of kernels that are loaded later, of libraries' workspaces, and of the allocator's rounding.
"""
LEAST_SPECIAL = 2**29
"""Fewest bytes that each of several ranks reserves for sampling that takes more than a plain draw."""
LEAST_RECEIVED = 2**28
"""Fewest bytes for tensors that a process group sends, unless `weight_receive_bytes` is smaller."""


class Memory(Protocol):
    """The parts of a `DeviceMemory` that an account uses."""

    def free(self) -> int: ...

    def reclaim(self) -> int: ...

    def reserved(self) -> int: ...

    def holders(self) -> str:
        """Return a sentence that says what other processes hold, "" if nobody else is known to hold much."""


@dataclass(frozen=True)
class Needs:
    """Bytes that the parts of one rank need, computed from the model and the settings."""

    weights: int
    tables: int
    """Buffers of constant size that steps use: rotary embedding, page table, partial results of attention."""
    step: int
    """The largest step, with plain draws."""
    graphs: int
    """All CUDA graphs, which share their memory."""
    special_least: int
    """Minimum for sampling that takes more than a plain draw."""
    special_most: int
    """The most that all requests together can use for sampling that takes more than a plain draw."""
    received_most: int
    """The most bytes of tensors that a process group sent and that are not written yet."""

    @property
    def received_least(self) -> int:
        return min(LEAST_RECEIVED, self.received_most)


@dataclass(frozen=True)
class MemoryBudget:
    """Memory that the KV pool may take, and texts for the error if it is too small."""

    bytes: int
    explanation: str
    """Sentences that explain how `bytes` was computed."""
    remedy: str
    """Sentence that says how to raise `bytes`."""


class MemoryAccount:
    """The parts of one rank's GPU in bytes. `close` completes it."""

    def __init__(self, memory: Memory, needs: Needs, fraction: float, *, free: int, collectives: int) -> None:
        """`free` is the number of free bytes at the start of the rank.

        `collectives` is the number of bytes that its communicators have taken since then. `fraction` is the share of
        `free` for weights and KV pool together (`mem_fraction_static`).
        """
        self._memory, self._fraction = memory, fraction
        self.needs = needs
        self.free_at_start, self.collectives = free, collectives
        self.kv_cache = self.special = self.received = self.others = 0

    def kv_budget(self) -> MemoryBudget:
        """Return the memory for the KV pool. Called after the weights were loaded and before the pool is allocated."""
        needs, free = self.needs, self.free_at_start
        static, rest = round(free * self._fraction), free - round(free * self._fraction)
        needed = self.collectives + _least_beside(self.needs)
        explanation = (
            f"{gib(free)} of the GPU were free at the start, and the weights take {gib(needs.weights)}. "
            f"mem_fraction_static={self._fraction:g} keeps {gib(rest)} free."
        )
        if needed > rest:
            explanation += f" The largest step, CUDA graphs and other parts need {gib(needed)}, so that is kept free."
        allowed = static - needs.weights
        budget = min(allowed, free - needed - needs.weights)
        others = self.taken_by_others(held=needs.weights)
        if others > SLACK:
            budget = min(budget, self._memory.reclaim() - _least_beside(self.needs))
            explanation += f" Other processes have taken {gib(others)} since the start. {self.holders()}".rstrip()
        if needed > rest or others > SLACK:
            logger.info("The KV cache is smaller than mem_fraction_static allows. %s", explanation)
        lower = "chunked_prefill_size, max_running_requests and cuda_graph_max_bs"
        remedy = (
            f"{'Lower' if budget < allowed else 'Raise mem_fraction_static, lower'} {lower}, free memory that other "
            "processes hold on this GPU, or use a smaller model or a larger tp_size."
        )
        return MemoryBudget(budget, explanation, remedy)

    def needed(self, needs: Needs) -> int:
        """Return the bytes that an engine with `needs` takes in addition to its KV pool."""
        return self.collectives + needs.weights + _least_beside(needs)

    def holders(self) -> str:
        """Return a sentence that says what other processes hold now, "" if nobody else is known to hold much."""
        return self._memory.holders()

    def close(self, kv_cache: int) -> None:
        """Record the bytes of the allocated KV pool, and divide the rest among the parts that can use more.

        The rest does not include the memory that other processes have taken since the start.
        """
        needs, self.kv_cache = self.needs, kv_cache
        others = self.taken_by_others()
        self.others = others if others > SLACK else 0
        left = self.free_at_start - self.needed(needs) - kv_cache - self.others
        more = min(max(left, 0), needs.special_most - needs.special_least)
        self.special = needs.special_least + max(more, 0)
        left -= max(more, 0)
        self.received = min(needs.received_most, needs.received_least + max(left, 0))

    def room_for_graphs(self, wanted: int) -> int:
        """Return the bytes that a capture may take now: the free bytes minus the parts that steps and updates need.

        The allocator's unused memory is freed only if the result would be below `wanted`, because steps need this
        memory again.
        """
        kept = self.needs.step + self.special + self.needs.received_least
        room = self._memory.free() - kept
        if room < wanted:
            room = self._memory.reclaim() - kept
        return max(room, 0)

    def free(self) -> int:
        """Return the free bytes of the GPU."""
        return self._memory.free()

    def special_now(self) -> int:
        """Return the bytes that special sampling may take now: its part, or less if other processes took some of it."""
        left = self._memory.reclaim() - self.needs.step
        return max(self.needs.special_least, min(self.special, left))

    def shortage(self) -> int:
        """Return the bytes that the largest step lacks now, 0 if there is enough memory."""
        return max(0, self.needs.step + self.needs.special_least - self._memory.reclaim())

    def taken_by_others(self, held: int | None = None) -> int:
        """Return the approximate bytes that other processes have taken since the start, 0 if they freed memory.

        `held` is the number of bytes of this engine's weights and KV pool that are allocated now, by default both.
        """
        held = self.needs.weights + self.kv_cache if held is None else held
        own = self.collectives + held + self._memory.reserved()
        return max(0, self.free_at_start - self._memory.free() - own)

    def advice(self) -> str:
        """Return sentences that say why memory is short for graphs, and a remedy that helps.

        Called while weights and KV pool are present.
        """
        others = self.taken_by_others()
        if others <= SLACK:
            return (
                "Start the engine with a smaller mem_fraction_static, cuda_graph_max_bs, chunked_prefill_size or "
                "max_running_requests."
            )
        needs = self.needs
        most_special = max(needs.special_least, needs.special_most)
        beside = self.collectives + _least_beside(self.needs) - needs.special_least + most_special + others
        fraction = math.floor(100 * (1 - beside / self.free_at_start)) / 100
        restart = "there is no mem_fraction_static with which both fit this GPU."
        if fraction * self.free_at_start > needs.weights:
            restart = f"start the engine with mem_fraction_static={fraction:g}, or while they hold their memory."
        advice = (
            f"Other processes, or process groups of weight updates, have taken {gib(others)} of this GPU since the "
            f"start. Free that memory (in a trainer: offload, then torch.cuda.empty_cache()), or {restart}"
        )
        return f"{advice} {self.holders()}".rstrip()

    def parts(self) -> dict[str, int]:
        """Return the bytes of each part, and their sum ("free_at_start").

        The result also has the bytes that other processes took while this engine started, and the bytes that no part
        has ("unassigned").
        """
        needs = self.needs
        parts = {
            "collectives": self.collectives,
            "weights": needs.weights,
            "kv_cache": self.kv_cache,
            "tables": needs.tables,
            "step": needs.step,
            "cuda_graphs": needs.graphs,
            "special_sampling": self.special,
            "received_weights": self.received,
            "slack": SLACK,
            "other_processes": self.others,
        }
        unassigned = self.free_at_start - sum(parts.values())
        return parts | {"unassigned": unassigned, "free_at_start": self.free_at_start}

    def table(self) -> str:
        """Return the parts as a table in MiB, for the log."""
        rows = [f"  {name.replace('_', ' '):<18}{nbytes / 2**20:>12,.0f} MiB" for name, nbytes in self.parts().items()]
        return "\n".join(["Memory of this GPU:", *rows])


def _least_beside(needs: Needs) -> int:
    """Return the bytes that all parts except collectives, weights and KV pool need."""
    return needs.tables + needs.step + needs.graphs + needs.special_least + needs.received_least + SLACK


def cpu_budget(gib: float) -> MemoryBudget:
    """Return the host memory for the KV pool: `gib` GiB."""
    return MemoryBudget(round(gib * 2**30), f"kv_cache_gib={gib:g}.", "Raise kv_cache_gib.")


def gib(count: int) -> str:
    """Return bytes as text in GiB."""
    return f"{count / 2**30:.2f} GiB"

"""`ServerUse`: how much the rollout servers had to do between two readings, and what their prefix caches had.

`grpo` and `async_grpo` read it once in each step, on rank 0. `RolloutServers.counters` asks the servers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class ServerCounters:
    """Counters of one server since its start. None: it does not tell."""

    busy_seconds: float | None = None
    """Seconds in which the server had a request."""
    prompt_tokens: int | None = None
    """Prompt tokens of the requests that have begun."""
    cached_tokens: int | None = None
    """Tokens of the same prompts that the prefix cache had."""


class ServerUse:
    def __init__(self, read: Callable[[], Mapping[str, ServerCounters]]) -> None:
        """`read` returns the counters of each server by its instance id. A server that was started again has a new id,
        so its counters are not compared with those of the instance before."""
        self._read = read
        self._before: Mapping[str, ServerCounters] = {}
        self._now: Mapping[str, ServerCounters] = {}

    def read(self) -> None:
        """Read the counters. The figures below are about the time since the reading before."""
        self._before, self._now = self._now, self._read()

    def idle(self, seconds: float) -> dict[str, float]:
        """Return {"servers": mean share of `seconds` in which a server had no request}, {} if none tells.

        `seconds` is the time since the last reading in which the servers could have requests.
        """
        shares = [
            1 - (now.busy_seconds - before.busy_seconds) / max(seconds, 1e-9)
            for before, now in self._pairs()
            if now.busy_seconds is not None and before.busy_seconds is not None
        ]
        return {"servers": min(1.0, max(0.0, sum(shares) / len(shares)))} if shares else {}

    def cache_hit_rate(self) -> float | None:
        """Return the share of prompt tokens that the prefix caches had, of all servers; None if none tells."""
        prompts = cached = 0
        for before, now in self._pairs():
            if None not in (now.prompt_tokens, before.prompt_tokens, now.cached_tokens, before.cached_tokens):
                prompts += (now.prompt_tokens or 0) - (before.prompt_tokens or 0)
                cached += (now.cached_tokens or 0) - (before.cached_tokens or 0)
        return cached / prompts if prompts > 0 else None

    def _pairs(self) -> list[tuple[ServerCounters, ServerCounters]]:
        return [(self._before[name], now) for name, now in self._now.items() if name in self._before]

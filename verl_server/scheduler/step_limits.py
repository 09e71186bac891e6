"""`StepLimits`: makes steps smaller after a step ran out of memory, until the request that takes too much is found.

Owned by the `BatchPlanner`. A step that ran out of memory at its launch is undone, and its requests become suspects.
Suspects run first, the newest before the others, in steps of half as many requests and half as many tokens. A step that
is computed clears its requests. A step that fails again is halved again. So after a few steps the request that cannot
be computed even alone is found. This request ends, and the other requests continue in full steps. If all suspects are
cleared, only their sum was too large. Then steps stay smaller, and grow slowly.
"""

from __future__ import annotations

from collections.abc import Sequence

from verl_server.scheduler.schedule_batch import Req, ScheduleBatch

_LEAST_TOKENS = 64
"""The lowest limit of prompt tokens in a step. One decode takes as much memory as a few prompt tokens."""
_STEPS_TO_GROW = 8
"""Successful steps after which the limits grow by one request and `_LEAST_TOKENS` tokens."""


class StepLimits:
    def __init__(self, max_rows: int, max_tokens: int) -> None:
        self._max_rows, self._max_tokens = max_rows, max_tokens
        self.rows = max_rows
        """Largest number of requests in a step."""
        self.tokens = max_tokens
        """Largest number of prompt tokens in a step."""
        self._suspects: set[Req] = set()
        self._turns = 0

    @property
    def are_active(self) -> bool:
        """True if a step may have to leave out running requests."""
        return self.rows < self._max_rows or self.tokens < self._max_tokens or self.has_suspects

    @property
    def has_suspects(self) -> bool:
        """True while a suspect runs. No waiting request should be admitted then."""
        return any(req.row >= 0 for req in self._suspects)

    def choose(self, candidates: Sequence[Req]) -> set[Req]:
        """Return the candidates that may be in the next step: the suspects, or else those that waited longest."""
        suspects = [req for req in candidates if req in self._suspects]
        if suspects:
            suspects.sort(key=lambda req: req.arrival, reverse=True)
            return set(suspects[: self.rows])
        return set(sorted(candidates, key=lambda req: req.last_turn)[: self.rows])

    def failed(self, batch: ScheduleBatch) -> Req | None:
        """Lower the limits after `batch` ran out of memory at its launch. Return the request that must end, or None."""
        tokens = sum(batch.forward.extend_lens)
        if len(batch.reqs) == 1 and tokens <= _LEAST_TOKENS:
            self.rows, self.tokens = self._max_rows, self._max_tokens
            self._suspects.clear()
            return batch.reqs[0]
        self.rows = max(1, len(batch.reqs) // 2)
        self.tokens = max(_LEAST_TOKENS, min(tokens, self._max_tokens) // 2)
        self._suspects.update(batch.reqs)
        return None

    def succeeded(self, batch: ScheduleBatch) -> None:
        """Clear the requests of a step that was computed, and raise the limits slowly."""
        if not self.are_active:
            return
        self._turns += 1
        for req in batch.reqs:
            req.last_turn = self._turns
        self._suspects = {req for req in self._suspects if req.row >= 0}.difference(batch.reqs)
        if not self._suspects and self._turns % _STEPS_TO_GROW == 0:
            self.rows = min(self._max_rows, self.rows + 1)
            self.tokens = min(self._max_tokens, self.tokens + _LEAST_TOKENS)

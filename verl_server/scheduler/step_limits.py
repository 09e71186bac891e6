"""`StepLimits`: smaller steps after one ran out of memory, until the request that takes too much is found.

Owned by the `BatchPlanner`. A step that could not be launched is undone, and its requests become suspects. They run
first, the newest ones before the others, in half as many requests and half as many tokens a step. A step that is
computed clears its requests. One that fails again is halved again, so after a few steps one request is left that
cannot be computed even alone: that one ends, and the others go on in full steps. If all suspects are cleared, only
the sum was too much: steps stay smaller, and grow slowly.
"""

from __future__ import annotations

from collections.abc import Sequence

from verl_server.scheduler.schedule_batch import Req, ScheduleBatch

_LEAST_TOKENS = 64
"""Prompt chunks are not cut further. One more decode would take as much as a few of these tokens."""
_STEPS_TO_GROW = 8
"""Steps that succeed before limits grow by one request and `_LEAST_TOKENS` tokens."""


class StepLimits:
    def __init__(self, max_rows: int, max_tokens: int) -> None:
        self._max_rows, self._max_tokens = max_rows, max_tokens
        self.rows = max_rows
        """Most requests in a step."""
        self.tokens = max_tokens
        """Most prompt tokens in a step."""
        self._suspects: set[Req] = set()
        self._turns = 0

    @property
    def are_active(self) -> bool:
        """Whether a step may have to leave out requests that run."""
        return self.rows < self._max_rows or self.tokens < self._max_tokens or self.has_suspects

    @property
    def has_suspects(self) -> bool:
        """Whether nobody new should be admitted for now."""
        return any(req.row >= 0 for req in self._suspects)

    def choose(self, candidates: Sequence[Req]) -> set[Req]:
        """The requests of `candidates` that the next step may hold: suspects, else those that waited longest."""
        suspects = [req for req in candidates if req in self._suspects]
        if suspects:
            suspects.sort(key=lambda req: req.arrival, reverse=True)
            return set(suspects[: self.rows])
        return set(sorted(candidates, key=lambda req: req.last_turn)[: self.rows])

    def failed(self, batch: ScheduleBatch) -> Req | None:
        """A step ran out of memory at its launch, and was undone. Returns the request that has to end, if known."""
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
        """A step was computed."""
        if not self.are_active:
            return
        self._turns += 1
        for req in batch.reqs:
            req.last_turn = self._turns
        self._suspects = {req for req in self._suspects if req.row >= 0}.difference(batch.reqs)
        if not self._suspects and self._turns % _STEPS_TO_GROW == 0:
            self.rows = min(self._max_rows, self.rows + 1)
            self.tokens = min(self._max_tokens, self.tokens + _LEAST_TOKENS)

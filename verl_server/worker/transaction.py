"""`Transaction`: what the calls between begin and end did to one rank's weights.

One on every rank, made, filled and settled by the `WeightUpdater`. A single update is a transaction of one call. Who
may call, and until when, rank 0 decides: see `scheduler/transaction_fence.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

State = Literal["serving", "torn", "not_loaded", "asleep"]


@dataclass
class Transaction:
    """What one transaction, or one single update, did to the weights."""

    state: State
    """State of the weights before the first write."""
    torn_by: str
    """Why they were torn then, if they were."""
    unwritten: dict[str, None]
    """Parameters that had to be written then before the weights could serve."""
    full: bool = False
    """The caller promised to push every parameter."""
    label: str | None = None
    """The newest version label that one of the calls carried."""
    touched: bool = False
    """Something was written."""
    failed: bool = False
    """A write failed: every parameter must be pushed now, also those written before the failure."""
    written: dict[str, None] = field(default_factory=dict)
    """Parameters that were written since the last failure."""

    def wrote(self, names: Iterable[str]) -> None:
        self.touched = True
        self.written.update(dict.fromkeys(names))

    def fail(self) -> None:
        self.touched = self.failed = True
        self.written = {}

    def missing(self, parameters: Iterable[str]) -> list[str]:
        """The `parameters` that must be written before the transaction can end."""
        if not (self.full or self.failed):
            return []
        return [name for name in parameters if name not in self.written]

    def still_unwritten(self) -> dict[str, None]:
        """Parameters that must be written after the transaction before the weights can serve."""
        return {name: None for name in self.unwritten if name not in self.written}

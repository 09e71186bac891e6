"""`Transaction`: records what the calls between begin and end wrote to one rank's weights.

One on every rank. The `WeightUpdater` makes, fills and settles it. A single update is a transaction of one call. Rank 0
decides which calls a transaction admits, and when it ends: see `scheduler/transaction_fence.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Literal

State = Literal["serving", "torn", "not_loaded", "asleep"]


@dataclass
class Transaction:
    """The writes of one transaction or of one single update, and the state of the weights before them."""

    state: State
    """State of the weights before the first write."""
    torn_by: str
    """Reason why the weights were torn before the first write, if they were."""
    unwritten: Collection[str]
    """Parameters that, before the first write, were missing for the weights to serve."""
    full: bool = False
    """True if the caller promised to push every parameter."""
    label: str | None = None
    """Version label of the newest call that had one."""
    touched: bool = False
    """True if something was written."""
    failed: bool = False
    """True if a write failed. Every parameter must then be pushed, also those written before the failure."""
    written: dict[str, None] = field(default_factory=dict)
    """Parameters that were written since the last failure."""

    def wrote(self, names: Iterable[str]) -> None:
        """Record that the parameters `names` were written."""
        self.touched = True
        self.written.update(dict.fromkeys(names))

    def fail(self) -> None:
        """Record that a write failed, after which no parameter counts as written."""
        self.touched = self.failed = True
        self.written = {}

    def missing(self, parameters: Iterable[str]) -> list[str]:
        """Return those of `parameters` that must be written before the transaction can end."""
        if not (self.full or self.failed):
            return []
        return [name for name in parameters if name not in self.written]

    def still_unwritten(self) -> list[str]:
        """Return the parameters that must still be written after the transaction before the weights can serve."""
        return [name for name in self.unwritten if name not in self.written]

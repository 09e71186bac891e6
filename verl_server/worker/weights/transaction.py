"""`Transaction`: records the parameters that calls between begin and end wrote on one rank.

Each rank has one. The `WeightUpdater` creates it, records the writes in it, and ends it. A single update is a
transaction of one call. Rank 0 decides which calls a transaction admits, and when it ends: see
`scheduler/control/transaction_fence.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Literal

from verl_server.errors import WeightUpdateError
from verl_server.weight_sync.receiver.names import listed

_END_AS_IT_IS = "end it with partial=True to leave them as they are, "
State = Literal["serving", "torn", "not_loaded", "asleep"]


@dataclass
class Transaction:
    """The writes of one transaction or of one single update, and the state of the weights before them."""

    state: State
    """State of the weights before the first write."""
    torn_by: str
    """Reason why the weights were torn before the first write, if they were."""
    unwritten: Collection[str]
    """Parameters that, at the start of the transaction, had to be written before the weights could serve."""
    full: bool = False
    """True if every parameter must be pushed before the transaction can end."""
    label: str | None = None
    """Version label of the newest call that had one."""
    touched: bool = False
    """True if something was written."""
    failed: bool = False
    """True if a write failed. Every parameter must then be pushed, including parameters written before the failure."""
    written: dict[str, None] = field(default_factory=dict)
    """Parameters that were written since the last failure."""

    def wrote(self, names: Iterable[str]) -> None:
        """Record that the parameters `names` were written."""
        self.touched = True
        self.written.update(dict.fromkeys(names))

    def fail(self) -> None:
        """Record that a write failed. No parameter counts as written after that."""
        self.touched = self.failed = True
        self.written = {}

    def not_covered(self, parameters: Collection[str]) -> list[str]:
        """Return those of the model's `parameters` that were not written since the last failure."""
        return [name for name in parameters if name not in self.written]

    def check_end(self, parameters: Collection[str], *, partial: bool) -> None:
        """Raise WeightUpdateError if some of the model's `parameters` must be written before the transaction can end.

        `partial` is True if parameters may be missing at the end.
        """
        must_be_whole = self.failed or (self.full and not partial)
        missing = self.not_covered(parameters) if must_be_whole else []
        if missing:
            reason, remedy = ("a write failed, and ", "") if self.failed else ("", _END_AS_IT_IS)
            raise WeightUpdateError(
                f"The transaction cannot end: {reason}{len(missing)} parameters are missing ({listed(missing)}). Push "
                f"them and end it again, {remedy}or discard it (discard=True). Generation waits until then, or until "
                "the lease ends."
            )

    def still_unwritten(self) -> list[str]:
        """Return the parameters that must still be written after the transaction before the weights can serve."""
        return [name for name in self.unwritten if name not in self.written]

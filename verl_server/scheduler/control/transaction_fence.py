"""`TransactionFence`: decides which calls may change weights while a transaction is open, and when it expires.

Rank 0's `ControlQueue` owns it, and checks each weight call with it. `worker/weights/transaction.py` records on each
rank what the calls of a transaction wrote. An SGLang client opens a transaction without an id, and its calls have no
id either. "Transactions" in docs/scheduler-states.md has the table of calls and answers.
"""

from __future__ import annotations

from collections.abc import Callable

from verl_server.errors import BadRequestError, UpdateConflictError
from verl_server.messages.io_struct import ControlReq
from verl_server.messages.weight_requests import (
    BeginWeightUpdateReq,
    EndWeightUpdateReq,
    ReleaseMemoryOccupationReq,
    UpdateReq,
    UpdateWeightVersionReq,
    WeightsCheckerReq,
)

# SGLang's texts: its clients may compare them.
_SGLANG_OPEN = "a weight-update session is already open; call end_weight_update() first"
_SGLANG_NOT_OPEN = "no weight-update session is open; call begin_weight_update() first"


class TransactionFence:
    """Admits the calls of the open transaction, refuses other calls, and has the deadline of the lease."""

    def __init__(self, clock: Callable[[], float], default_lease: float) -> None:
        self._clock, self._default_lease = clock, default_lease
        self._lease = default_lease
        self.is_open = False
        self.transaction_id: str | None = None
        self.lease_end = 0.0
        """Time (seconds of the clock) at which the transaction is discarded, unless one of its calls is in progress."""

    def open(self, req: BeginWeightUpdateReq) -> None:
        """Start the transaction that `req` requests. `check` has admitted `req`."""
        self.is_open, self.transaction_id = True, req.transaction_id
        self._lease = self._default_lease if req.lease_seconds is None else req.lease_seconds
        self.renew()

    def close(self) -> None:
        self.is_open = False

    def renew(self) -> None:
        """Renew the lease from now on."""
        self.lease_end = self._clock() + self._lease

    @property
    def lease_seconds(self) -> float:
        """Seconds without a call after which the transaction is discarded."""
        return self._lease

    @property
    def name(self) -> str:
        """The transaction's id in quotes, or "without an id", for messages."""
        return f"'{self.transaction_id}'" if self.transaction_id is not None else "without an id"

    def owns(self, req: ControlReq) -> bool:
        """Return True if `req` is a call of the open transaction."""
        mine = isinstance(req, (UpdateReq, EndWeightUpdateReq)) and req.transaction_id == self.transaction_id
        return self.is_open and mine

    def check(self, req: ControlReq) -> None:
        """Raise BadRequestError or UpdateConflictError if `req` may not be carried out now."""
        if isinstance(req, (UpdateReq, EndWeightUpdateReq)):
            self._check_call(req)
        elif not self.is_open:
            return
        elif isinstance(req, BeginWeightUpdateReq):
            if req.transaction_id is None and self.transaction_id is None:
                raise BadRequestError(_SGLANG_OPEN)
            raise self._conflict("It must end before another transaction begins.")
        elif isinstance(req, ReleaseMemoryOccupationReq):
            raise BadRequestError(
                f"Memory cannot be released: the weight-update transaction {self.name} is open. End it."
            )
        elif isinstance(req, UpdateWeightVersionReq):
            raise self._conflict("The end of the transaction sets the version: pass weight_version there.")
        elif isinstance(req, WeightsCheckerReq) and req.action == "reset_tensors":
            raise self._conflict("Reset the weights after the transaction ends.")

    def _check_call(self, req: UpdateReq | EndWeightUpdateReq) -> None:
        given = req.transaction_id
        if self.is_open and given != self.transaction_id:
            raise self._conflict(
                "This call " + (f"carries the id '{given}'." if given is not None else "carries no transaction_id.")
            )
        if not self.is_open and given is not None:
            raise UpdateConflictError(
                f"The weight-update transaction '{given}' is not open. It ended, or was discarded because it received "
                "no call for the length of its lease. Begin a new transaction and send all tensors again."
            )
        if not self.is_open and isinstance(req, EndWeightUpdateReq):
            raise BadRequestError(_SGLANG_NOT_OPEN)

    def _conflict(self, remedy: str) -> UpdateConflictError:
        left = max(0.0, self.lease_end - self._clock())
        return UpdateConflictError(
            f"The weight-update transaction {self.name} is open (the lease ends in {left:.0f} s without a call). "
            f"{remedy}"
        )

"""Weight-update sessions: many calls, one version.

Two views of one session. `UpdateSession`, one on every rank, belongs to the `WeightUpdater` and remembers what was
written. `SessionFence`, on rank 0, belongs to the `ControlQueue` and decides who may call and until when. A
session without an id is SGLang's: calls without an id belong to it. The table is in docs/scheduler-states.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from verl_server.errors import BadRequestError, UpdateConflictError
from verl_server.io_struct import (
    BeginWeightUpdateReq,
    ControlReq,
    EndWeightUpdateReq,
    ReleaseMemoryOccupationReq,
    UpdateReq,
    UpdateWeightVersionReq,
    WeightsCheckerReq,
)

State = Literal["serving", "torn", "not_loaded", "asleep"]


@dataclass
class UpdateSession:
    """What one session, or one single update, did to the weights."""

    state: State
    """Of the weights before its first write."""
    unwritten: dict[str, None]
    """Parameters that had to be written then before the weights could serve."""
    full: bool = False
    """It claims to bring every parameter."""
    label: str | None = None
    """The newest version label that a call of it brought."""
    touched: bool = False
    """It has written something."""
    failed: bool = False
    """A write failed half way: it must bring every parameter now, those before the failure again."""
    written: dict[str, None] = field(default_factory=dict)

    def wrote(self, names: Iterable[str]) -> None:
        self.touched = True
        self.written.update(dict.fromkeys(names))

    def fail(self) -> None:
        self.touched = self.failed = True
        self.written = {}

    def missing(self, parameters: Iterable[str]) -> list[str]:
        """Those that must come before it can end."""
        if not (self.full or self.failed):
            return []
        return [name for name in parameters if name not in self.written]

    def still_unwritten(self) -> dict[str, None]:
        """What must be written after it, before the weights can serve."""
        return {name: None for name in self.unwritten if name not in self.written}


class SessionFence:
    """Lets the calls of the open session through, refuses others, and watches the lease."""

    def __init__(self, clock: Callable[[], float], default_lease: float) -> None:
        self._clock, self._default_lease = clock, default_lease
        self._lease = default_lease
        self.is_open = False
        self.transaction_id: str | None = None
        self.lease_end = 0.0
        """When it is over, if no call of it is under way then."""

    def open(self, req: BeginWeightUpdateReq) -> None:
        self.is_open, self.transaction_id = True, req.transaction_id
        self._lease = self._default_lease if req.lease_seconds is None else req.lease_seconds
        self.renew()

    def close(self) -> None:
        self.is_open = False

    def renew(self) -> None:
        self.lease_end = self._clock() + self._lease

    @property
    def lease_seconds(self) -> float:
        return self._lease

    @property
    def name(self) -> str:
        return f"'{self.transaction_id}'" if self.transaction_id is not None else "without an id"

    def owns(self, req: ControlReq) -> bool:
        """Whether `req` is a call of the open session."""
        mine = isinstance(req, (UpdateReq, EndWeightUpdateReq)) and req.transaction_id == self.transaction_id
        return self.is_open and mine

    def check(self, req: ControlReq) -> None:
        """Raise why `req` may not be carried out now: BadRequestError, or UpdateConflictError naming the session."""
        if isinstance(req, (UpdateReq, EndWeightUpdateReq)):
            self._check_call(req)
        elif not self.is_open:
            return
        elif isinstance(req, BeginWeightUpdateReq):
            if req.transaction_id is None and self.transaction_id is None:
                raise BadRequestError("a weight-update session is already open; call end_weight_update() first")
            raise self._conflict("It must end before another begins.")
        elif isinstance(req, ReleaseMemoryOccupationReq):
            raise BadRequestError(f"Memory cannot be released: the weight-update session {self.name} is open. End it.")
        elif isinstance(req, UpdateWeightVersionReq):
            raise self._conflict("Its version is settled at its end: pass weight_version to end_weight_update.")
        elif isinstance(req, WeightsCheckerReq) and req.action == "reset_tensors":
            raise self._conflict("Reset the weights after its end.")

    def _check_call(self, req: UpdateReq | EndWeightUpdateReq) -> None:
        given = req.transaction_id
        if self.is_open and given != self.transaction_id:
            raise self._conflict(
                "This call " + (f"carries the id '{given}'." if given is not None else "carries no transaction_id.")
            )
        if not self.is_open and given is not None:
            raise UpdateConflictError(
                f"The weight-update session '{given}' is not open. It ended, or was silent for longer than its lease "
                "and was given up. Begin again, and bring everything again."
            )
        if not self.is_open and isinstance(req, EndWeightUpdateReq):
            raise BadRequestError("no weight-update session is open; call begin_weight_update() first")

    def _conflict(self, remedy: str) -> UpdateConflictError:
        left = max(0.0, self.lease_end - self._clock())
        return UpdateConflictError(
            f"The weight-update session {self.name} is open (its lease ends after {left:.0f} s of silence). {remedy}"
        )

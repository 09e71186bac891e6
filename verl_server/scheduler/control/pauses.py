"""`Pauses`: begins and ends pauses of generation, and keeps the pauses that wait for started requests to finish.

The `ControlQueue` owns it, calls `receive` or `end` when a request to pause or to continue arrives, and calls `watch`
between steps. A pause with `mode="wait"` drains: no further request starts until the pause begins.
docs/scheduler-states.md has the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from verl_server.messages.io_struct import ControlReply, PauseGenerationReq
from verl_server.scheduler.control.engine_loop import EngineLoop


@dataclass(slots=True)
class _Waiting:
    """A pause with `mode="wait"`, which begins when no started request is left."""

    req: PauseGenerationReq
    deadline: float


class Pauses:
    def __init__(self, scheduler: EngineLoop, timeout: float, reply: Callable[[ControlReply], None]) -> None:
        """Create the pauses. A pause that waits longer than `timeout` seconds is refused. `reply` sends an answer."""
        self._scheduler, self._timeout, self._reply = scheduler, timeout, reply
        self._waiting: list[_Waiting] = []
        self.paused = False
        """True during a pause, in which no step runs."""

    def receive(self, req: PauseGenerationReq) -> None:
        """Pause now, or, with `mode="wait"`, when started requests have finished."""
        if req.mode == "wait" and not self.paused:
            self._waiting.append(_Waiting(req, self._scheduler.clock() + self._timeout))
        else:
            self._begin(req)

    def end(self) -> None:
        """Continue generation. A pause that has not begun is refused."""
        waiting, self._waiting = self._waiting, []
        for item in waiting:
            self._refuse(item, "Generation was continued before its running requests had finished.", 409)
        self.paused = False

    def withdraw(self, request_id: int, message: str, status_code: int) -> None:
        """Refuse a pause that has not begun, because its caller gave up."""
        for item in [item for item in self._waiting if item.req.id == request_id]:
            self._waiting.remove(item)
            self._refuse(item, message, status_code)

    def watch(self) -> None:
        """Begin a waiting pause when all started requests have ended. Refuse the pause after its deadline."""
        if self.is_ready():
            self._begin(self._waiting.pop(0).req)
        for item in [item for item in self._waiting if self._scheduler.clock() >= item.deadline]:
            self._waiting.remove(item)
            message = (
                f"Generation was not paused: {len(self._scheduler.planner.running)} requests still ran after "
                f"{self._timeout:g} s (control_timeout). Use mode='in_place', 'retract' or 'abort', or raise "
                "control_timeout."
            )
            self._refuse(item, message, 504)

    @property
    def are_waiting(self) -> bool:
        """True while a pause waits for started requests."""
        return bool(self._waiting)

    def is_ready(self) -> bool:
        """Return True if a pause that waited may begin."""
        return self.are_waiting and (self.paused or not self._scheduler.planner.has_started())

    def deadlines(self) -> list[float]:
        """Return the deadlines of the waiting pauses."""
        return [item.deadline for item in self._waiting]

    def _begin(self, req: PauseGenerationReq) -> None:
        self._scheduler.settle()
        self.paused = True
        if req.mode == "abort":
            self._scheduler.abort_all("Aborted")
        elif req.mode == "retract":
            self._scheduler.planner.retract_all()
        waiting, self._waiting = self._waiting, []
        for one in (*(item.req for item in waiting), req):  # the others have the pause that they waited for
            self._reply(ControlReply(id=one.id, success=True))

    def _refuse(self, item: _Waiting, message: str, status_code: int) -> None:
        self._reply(ControlReply(id=item.req.id, success=False, message=message, status_code=status_code))

"""`UpdateTimes`: the seconds that a weight update was prepared, and for which it kept generation from running steps.

The `ControlQueue` owns it, and adds its figures to the replies of updates and of transactions' ends.
"""

from __future__ import annotations

from collections.abc import Callable

from verl_server.messages.io_struct import ControlReply
from verl_server.messages.weight_requests import EndWeightUpdateReq, UpdateReq


class UpdateTimes:
    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` returns seconds."""
        self._clock = clock
        self._held_since: float | None = None
        """Time at which the last step before the update, or before its transaction, had ended. None: the caller had
        paused generation before."""

    def hold(self, paused: bool) -> None:
        """Record that an update or a transaction begins now, after the last step. `paused`: by the caller."""
        self._held_since = None if paused else self._clock()

    def add(self, reply: ControlReply, req: UpdateReq | EndWeightUpdateReq, prepared: float, ends: bool) -> None:
        """Add the times to a reply without an error. `ends` is True if generation may continue after the reply.

        `prepare_seconds`: from the arrival of an update until all ranks have staged it (`prepared`); 0 for a push by
        id. `pause_seconds`: seconds without a step because of the update or the transaction, until now.
        """
        times = {"prepare_seconds": prepared} if isinstance(req, UpdateReq) else {}
        if ends:
            times["pause_seconds"] = 0.0 if self._held_since is None else self._clock() - self._held_since
        payload = reply.payload if isinstance(reply.payload, dict) else {}
        reply.payload = payload | times

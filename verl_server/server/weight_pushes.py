"""`WeightPushes`: how long weight pushes take, and which calls of them fail, for `/metrics`.

`ControlCalls` owns it and tells it each reply of the scheduler. A push is an update, or a transaction from the call
that opens it to the reply to its end. So the time includes the wait for running requests, which `mode` decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol

from verl_server.messages.io_struct import ControlReply, ControlReq
from verl_server.messages.weight_requests import (
    BeginWeightUpdateReq,
    EndWeightUpdateReq,
    UpdateReq,
    UpdateWeightsFromDiskReq,
    UpdateWeightsFromDistributedReq,
    UpdateWeightsFromTensorReq,
)

_SOURCES: Mapping[type[UpdateReq], str] = {
    UpdateWeightsFromTensorReq: "tensor",
    UpdateWeightsFromDistributedReq: "distributed",
    UpdateWeightsFromDiskReq: "disk",
}
_TRANSACTION = "transaction"
PUSH_SOURCES = (*_SOURCES.values(), _TRANSACTION)
"""Where the weights of a push come from. A transaction may have updates from several sources."""
PUSH_ROUTES = tuple(kind.route for kind in (*_SOURCES, BeginWeightUpdateReq, EndWeightUpdateReq))


class CountedPushes(Protocol):
    """Receives what is counted. `Metrics` implements it."""

    def weights_pushed(self, source: str, seconds: float) -> None: ...

    def weights_prepared(self, seconds: float) -> None: ...

    def generation_held(self, seconds: float) -> None: ...

    def push_failed(self, route: str) -> None: ...


class WeightPushes:
    def __init__(self, metrics: CountedPushes, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns seconds."""
        self._metrics, self._clock = metrics, clock
        self._began = 0.0
        """Time of the call that opened the last transaction."""

    def note(self, req: ControlReq, reply: ControlReply, sent: float, in_transaction: bool) -> None:
        """Count a reply to a call that was sent at `sent`. `in_transaction` is True if a transaction was open then."""
        if not isinstance(req, UpdateReq | BeginWeightUpdateReq | EndWeightUpdateReq):
            return
        if not reply.success:
            self._metrics.push_failed(req.route)
            return
        payload = reply.payload if isinstance(reply.payload, dict) else {}
        if "prepare_seconds" in payload:
            self._metrics.weights_prepared(payload["prepare_seconds"])
        if "pause_seconds" in payload:
            self._metrics.generation_held(payload["pause_seconds"])
        if isinstance(req, BeginWeightUpdateReq):
            self._began = sent
        elif isinstance(req, EndWeightUpdateReq):
            if not req.discard:
                self._metrics.weights_pushed(_TRANSACTION, self._clock() - self._began)
        elif not in_transaction:
            self._metrics.weights_pushed(_SOURCES[type(req)], self._clock() - sent)

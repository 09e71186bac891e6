"""`EngineLoop`: the interface through which `ControlQueue` and `Pauses` use the loop of an engine.

There are two implementations: the embedded `Scheduler` (with its `BatchPlanner` and `TpWorker`) and
`backends.process.Backend`. So pauses, transactions and weight updates have the same rules with every engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized
from typing import Any, Protocol

from verl_server.errors import VerlServerError
from verl_server.messages.io_struct import ControlReply, FinishReason, SchedulerOutput
from verl_server.messages.weight_requests import StagedReq, WeightReq


class Planner(Protocol):
    """The accepted requests."""

    @property
    def running(self) -> Sized:
        """Requests that were started and not retracted."""

    @property
    def waiting(self) -> Sized:
        """Accepted requests that have not started, or that were retracted."""

    def has_started(self) -> bool:
        """Return True if any request was started and has not ended. Retracted requests count."""

    def retract_all(self) -> None:
        """Drop the KV of all running requests. They continue with their tokens, whose KV is computed again."""

    def is_restarting(self) -> bool:
        """Return True if a request still recomputes the KV that an update dropped."""

    def start_version(self) -> None:
        """Prevent new requests from using pages that were computed before. Called after the weights changed."""

    def flush_cache(self) -> None:
        """Empty the prefix cache for all requests that start from now on. Called while none runs."""


class WeightState(Protocol):
    """The weights of all ranks. Their state is the same on each rank."""

    @property
    def version(self) -> str: ...

    @property
    def state(self) -> str: ...

    @property
    def epoch(self) -> int: ...

    def refusal(self) -> str | None:
        """Return the reason why generation cannot be served now, None if it can."""

    def check(self, req: WeightReq) -> None:
        """Raise VerlServerError if the fields of `req` are wrong."""


class StagingResults(Protocol):
    def finished(self) -> list[tuple[int, VerlServerError | None]]:
        """Return (request id, error or None) for each request that was staged since the last call."""


class Worker(Protocol):
    """Carries out weight and memory requests on all ranks."""

    @property
    def weights(self) -> WeightState: ...

    @property
    def stager(self) -> StagingResults: ...

    def control(self, req: WeightReq) -> ControlReply: ...

    def stage(self, req: StagedReq) -> None: ...

    def run_staged(self, req: StagedReq) -> ControlReply: ...

    def drop_staged(self, req: StagedReq) -> None: ...


class EngineLoop(Protocol):
    """The loop that owns the requests and runs the steps."""

    clock: Callable[[], float]
    send: Callable[[SchedulerOutput], None]

    @property
    def planner(self) -> Planner: ...

    @property
    def worker(self) -> Worker: ...

    @property
    def requests(self) -> Mapping[str, Any]:
        """Accepted requests without a terminal entry yet, by rid."""

    def has_runnable(self) -> bool:
        """Return True if a step may run now."""

    def settle(self) -> None:
        """Wait for the running step, and send its results. No step begins before the caller has returned."""

    def emit(self) -> None:
        """Send the results that were collected since the last message."""

    def abort_all(self, message: str, status_code: int | None = None) -> None:
        """End every live request with the output that it has so far."""

    def demands(self) -> list[tuple[str, str]]:
        """Return (rid, demand) of each live request that has a demand on the weight version."""

    def end_request(self, rid: str, reason: FinishReason) -> None:
        """End a live request with the output that it has so far."""

    def internal_state(self) -> dict[str, Any]: ...

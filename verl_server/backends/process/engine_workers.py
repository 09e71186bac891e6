"""`EngineWorkers`: the workers of another project's engine, with the interface of a `TpWorker` for `ControlQueue`.

`Backend` owns it. Each call is one remote call of the engine, which runs between two steps on all ranks. Only rank 0's
answer is used, because all ranks vote inside the call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import msgspec

from verl_server.backends.process.commands import (
    REPLIES,
    CheckCommand,
    Command,
    PollCommand,
    WeightsState,
    WorkerReply,
)
from verl_server.backends.process.driver import EngineDriver
from verl_server.errors import VerlServerError
from verl_server.messages.io_struct import ControlReply
from verl_server.messages.weight_requests import StagedReq, UpdateWeightsFromTensorReq, WeightReq
from verl_server.worker.tp_worker import DropStagedCommand, RunStagedCommand, StageCommand

WEIGHT_COMMAND = "verl_command"
"""Name of the method of the engine's workers that takes and returns bytes: `WorkerCommands.handle`."""
_POLL_SECONDS, _MOST_POLL_SECONDS, _POLL_SHARE = 0.02, 2.0, 0.125
"""Bounds on the interval between two polls, and the interval as a share of the time that the update has taken so far.

After each poll the engine's workers spin for a while (vLLM's for a second), on cores that the update may need. On Linux
6.18, with workers that were polled every 20 ms, a process that joins a trainer's group did not start within a minute.
"""


class EngineWorkers:
    """The workers of an engine of another project, and what the last reply said about their weights and staging.

    So this object is also the `weights` and the `stager` of the `Worker` protocol.
    """

    def __init__(self, driver: EngineDriver, timeout: float, clock: Callable[[], float]) -> None:
        """`timeout` is the most seconds of a call, which takes no longer than a step and a copy of the weights.

        `clock` returns seconds.
        """
        self._driver, self._timeout, self._clock = driver, timeout, clock
        self._staging: set[int] = set()
        """Ids of the requests that the workers stage now."""
        self._staged_at = self._poll_at = clock()
        """Time when the newest staging began, and time of the next poll of the workers."""
        self._finished: deque[tuple[int, VerlServerError | None]] = deque()
        self._state: WeightsState = self._call(PollCommand()).state

    @property
    def weights(self) -> EngineWorkers:
        return self

    @property
    def stager(self) -> EngineWorkers:
        return self

    # -- weights -------------------------------------------------------------------------------------------------

    @property
    def version(self) -> str:
        return self._state.version

    @property
    def state(self) -> str:
        return self._state.state

    @property
    def epoch(self) -> int:
        return self._state.epoch

    @property
    def released(self) -> list[str]:
        return self._state.released

    @property
    def num_parameters(self) -> int:
        return self._state.num_parameters

    def refusal(self) -> str | None:
        """Return the reason why generation cannot be served now, None if it can."""
        return self._state.refusal

    def check(self, req: WeightReq) -> None:
        """Raise BadRequestError if the fields of `req` are wrong.

        A push by a known id is checked with its execution, which saves a call during the engine's step.
        """
        by_id = req.registration if isinstance(req, UpdateWeightsFromTensorReq) and not req.checksums else None
        if by_id in self._state.registrations:
            return
        reply = self._call(CheckCommand(req))
        if reply.refusal is not None:
            raise reply.refusal.error()

    # -- staging -------------------------------------------------------------------------------------------------

    def finished(self) -> list[tuple[int, VerlServerError | None]]:
        if self._staging and (now := self._clock()) >= self._poll_at:
            self._call(PollCommand())
            self._poll_at = now + min(_MOST_POLL_SECONDS, _POLL_SHARE * (now - self._staged_at))
        outcomes = list(self._finished)
        self._finished.clear()
        return outcomes

    def wait_seconds(self) -> float | None:
        """Return the seconds until the next call of `finished`, None if nothing is being staged."""
        return max(_POLL_SECONDS, self._poll_at - self._clock()) if self._staging else None

    # -- commands ------------------------------------------------------------------------------------------------

    def control(self, req: WeightReq) -> ControlReply:
        return self._reply(req)

    def stage(self, req: StagedReq) -> None:
        self._staging.add(req.id)
        self._call(StageCommand(req))
        self._staged_at = self._poll_at = self._clock()

    def run_staged(self, req: StagedReq) -> ControlReply:
        return self._reply(RunStagedCommand(req.id))

    def drop_staged(self, req: StagedReq) -> None:
        self._call(DropStagedCommand(req.id))

    def _reply(self, command: Command) -> ControlReply:
        reply = self._call(command).reply
        assert reply is not None
        return reply

    def _call(self, command: Command) -> WorkerReply:
        replies = self._driver.call(WEIGHT_COMMAND, msgspec.msgpack.encode(command), self._timeout)
        reply = REPLIES.decode(replies[0])
        self._state = reply.state
        for request_id, refusal in reply.finished:
            self._staging.discard(request_id)
            self._finished.append((request_id, None if refusal is None else refusal.error()))
        return reply

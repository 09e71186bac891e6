"""The commands that `EngineWorkers` sends to `WorkerCommands` in each worker of an engine, and the replies.

Commands and replies are bytes in the engine's own remote calls, so the engine needs no serialization of this project.
"""

from __future__ import annotations

import msgspec

from verl_server.errors import VerlServerError, WeightUpdateError, error_for_status
from verl_server.messages.io_struct import ControlReply
from verl_server.messages.weight_requests import WeightReq
from verl_server.worker.tp_worker import DropStagedCommand, RunStagedCommand, StageCommand


class CheckCommand(msgspec.Struct, tag=True):
    """Check the fields of a request on arrival."""

    req: WeightReq


class PollCommand(msgspec.Struct, tag=True):
    """Return the outcomes of staging."""


class Refusal(msgspec.Struct, array_like=True):
    """A `VerlServerError` on the wire."""

    message: str
    status_code: int

    @classmethod
    def of(cls, error: VerlServerError) -> Refusal:
        return cls(str(error), error.status_code)

    def error(self) -> VerlServerError:
        return error_for_status(self.status_code, self.message, WeightUpdateError)


class WeightsState(msgspec.Struct, array_like=True):
    """The public state of a worker's `WeightUpdater`."""

    version: str
    state: str
    epoch: int
    released: list[str]
    refusal: str | None
    num_parameters: int
    registrations: list[str]
    """Ids of the descriptions that later pushes may name."""


class WorkerReply(msgspec.Struct, array_like=True):
    state: WeightsState
    reply: ControlReply | None = None
    """The reply of a command. None for commands without a reply."""
    refusal: Refusal | None = None
    """The error of a `CheckCommand`."""
    finished: list[tuple[int, Refusal | None]] = []
    """Outcomes of staging since the last reply: (request id, error or None)."""


Command = CheckCommand | StageCommand | RunStagedCommand | DropStagedCommand | PollCommand | WeightReq

COMMANDS = msgspec.msgpack.Decoder(Command)
REPLIES = msgspec.msgpack.Decoder(WorkerReply)

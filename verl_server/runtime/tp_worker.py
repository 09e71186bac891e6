"""`TpWorker`: runs commands on this tensor-parallel rank.

Rank 0's belongs to the `Scheduler`: every command is broadcast to the other ranks first, then carried out here.
The other ranks have nothing but a worker in `follow()`: they take no decision and hold no queue, so all ranks
run the same steps and the same weight updates in the same order.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

import msgspec
import torch

from verl_server.io_struct import (
    ControlReply,
    UpdateReq,
    WeightReq,
)
from verl_server.runtime.forward_batch import ForwardBatch, ForwardOutput, SampleSpec
from verl_server.runtime.tp_group import TpGroup

logger = logging.getLogger(__name__)


class StopCommand(msgspec.Struct, tag=True):
    """Rank 0 is leaving in good order."""


_COMMANDS = msgspec.msgpack.Decoder(ForwardBatch | StopCommand | WeightReq)


class Runner(Protocol):
    """What scheduling needs of a `ModelRunner`."""

    num_pages: int
    page_size: int
    max_rows: int
    context_length: int
    vocab_size: int
    device: torch.device

    def forward(self, batch: ForwardBatch, specs: list[SampleSpec] | None) -> ForwardOutput | None: ...

    def memory_figures(self) -> dict[str, Any]: ...


class Weights(Protocol):
    """What scheduling needs of a `WeightUpdater`."""

    @property
    def version(self) -> str: ...

    @property
    def state(self) -> str: ...

    def precheck(self, req: UpdateReq) -> ControlReply | None: ...

    def handle(self, req: WeightReq) -> ControlReply: ...

    def refusal(self) -> str | None: ...


class TpWorker:
    """One rank's model runner and weight updater behind one sequence of commands."""

    def __init__(self, runner: Runner, weights: Weights, tp: TpGroup) -> None:
        self.runner = runner
        self.weights = weights
        self.tp = tp

    def forward(self, batch: ForwardBatch, specs: list[SampleSpec]) -> ForwardOutput:
        """Run one step on all ranks (rank 0)."""
        self._broadcast(batch)
        output = self.runner.forward(batch, specs)
        assert output is not None, "the model runner of rank 0 gave no output"
        return output

    def control(self, req: WeightReq) -> ControlReply:
        """Carry out a weight or memory request on all ranks (rank 0)."""
        self._broadcast(req)
        return self.weights.handle(req)

    def stop(self) -> None:
        """Let the other ranks end (rank 0)."""
        self._broadcast(StopCommand())

    def follow(self) -> None:
        """Carry out rank 0's commands until it stops. Raises when rank 0 is gone without a word."""
        while True:
            try:
                data = self.tp.broadcast_command(None)
            except RuntimeError as error:
                raise ConnectionError(f"rank {self.tp.rank} lost rank 0, which decides what runs: {error}") from error
            command = _COMMANDS.decode(data)
            if isinstance(command, StopCommand):
                return
            if isinstance(command, ForwardBatch):
                self.runner.forward(command, None)
            else:
                self.weights.handle(command)

    def is_recoverable(self, error: Exception) -> bool:
        """Whether the next step can run after `error` in a step.

        Not with several ranks, which may wait for each other inside a collective, and not on CUDA, where any
        error but a failed allocation leaves the context unusable.
        """
        if self.tp.size > 1:
            return False
        return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or self.runner.device.type == "cpu"

    def _broadcast(self, command: ForwardBatch | WeightReq | StopCommand) -> None:
        if self.tp.size > 1:
            self.tp.broadcast_command(msgspec.msgpack.encode(command))

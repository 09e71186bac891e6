"""`TpWorker`: runs commands on this tensor-parallel rank.

The `Scheduler` owns the worker of rank 0, which broadcasts every command to the other ranks and then carries it out.
The other ranks run only `follow()`. They make no decisions and have no queue, so all ranks run the same steps, stage
the same requests and write the same updates in the same order.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
import torch

from verl_server.errors import VerlServerError
from verl_server.ipc.tp_group import TpGroup
from verl_server.messages.io_struct import ControlReply
from verl_server.messages.weight_requests import StagedReq, WeightReq
from verl_server.sampling.spec import ForwardOutput, MakeMasks, SampleSpec
from verl_server.worker.device import is_out_of_memory
from verl_server.worker.forward_batch import ForwardBatch
from verl_server.worker.weights.prepared import Prepared
from verl_server.worker.weights.stager import Staged


class StopCommand(msgspec.Struct, tag=True):
    """End `follow`, because rank 0 stops without an error."""


class WarmUpCommand(msgspec.Struct, tag=True):
    """Run `warm_up` of the runner while the engine is idle."""


class StageCommand(msgspec.Struct, tag=True):
    """Begin to stage a request."""

    req: StagedReq


class RunStagedCommand(msgspec.Struct, tag=True):
    """Carry out a request that every rank staged."""

    id: int


class DropStagedCommand(msgspec.Struct, tag=True):
    """Drop a request that was, or is being, staged."""

    id: int


Command = ForwardBatch | WeightReq | WarmUpCommand | StageCommand | RunStagedCommand | DropStagedCommand | StopCommand
_COMMANDS = msgspec.msgpack.Decoder(Command)


class Step(Protocol):
    """A step that was launched."""

    def result(self) -> ForwardOutput:
        """Wait until the step is computed and return its output. Called once, on rank 0 only, in launch order."""


class RunnerMemory(Protocol):
    """The parts of a `ModelMemory` that scheduling uses."""

    @property
    def step_budget(self) -> int | None:
        """Bound on the sum of `step_bytes` of the requests of a step, None for no bound."""

    def figures(self) -> dict[str, Any]: ...


class Runner(Protocol):
    """The parts of a `ModelRunner` that scheduling uses."""

    num_pages: int
    page_size: int
    max_rows: int
    context_length: int
    vocab_size: int
    device: torch.device
    overlaps: bool
    """True if `launch` returns before the step is computed, so that the next step can be planned meanwhile."""

    @property
    def memory(self) -> RunnerMemory: ...

    @property
    def can_warm_up(self) -> bool:
        """True if `warm_up` has something left to do and can do it now."""

    def launch(self, batch: ForwardBatch, specs: list[SampleSpec] | None, make_masks: MakeMasks | None = None) -> Step:
        """Launch a step. `specs` has one entry for each of `batch.sample` on rank 0, and is None on other ranks.

        With `make_masks`, sampling is launched after `make_masks` has returned.
        """

    def step_bytes(self, spec: SampleSpec) -> int:
        """Return the bytes of device memory that sampling takes for a request beyond a plain draw."""

    def warm_up(self) -> bool:
        """Do a part of the work for which later steps would wait. A call takes some ten milliseconds.

        Return False if a rank cannot do this work now.
        """
        ...


class Weights(Protocol):
    """The parts of a `WeightUpdater` that scheduling uses."""

    @property
    def version(self) -> str: ...

    @property
    def state(self) -> str: ...

    @property
    def epoch(self) -> int: ...

    @property
    def released(self) -> list[str]: ...

    def check(self, req: WeightReq) -> None: ...

    def handle(self, req: WeightReq, prepared: Prepared | None = None) -> ControlReply: ...

    def refusal(self) -> str | None: ...


class Staging(Protocol):
    """The parts of a `Stager` that scheduling uses."""

    def submit(self, req: StagedReq) -> None: ...

    def finished(self) -> list[tuple[int, VerlServerError | None]]: ...

    def take(self, request_id: int) -> Staged: ...

    def drop(self, request_id: int) -> None: ...


class TpWorker:
    """Runs one sequence of commands on one rank's model runner, weight updater and stager."""

    def __init__(self, runner: Runner, weights: Weights, stager: Staging, tp: TpGroup) -> None:
        self.runner = runner
        self.weights = weights
        self.stager = stager
        self.tp = tp

    def launch(self, batch: ForwardBatch, specs: list[SampleSpec], make_masks: MakeMasks | None = None) -> Step:
        """Launch one step on all ranks. Only rank 0 calls this, and only rank 0 uses the masks."""
        self._broadcast(batch)
        return self._launch(batch, specs, make_masks)

    def _launch(self, batch: ForwardBatch, specs: list[SampleSpec] | None, make_masks: MakeMasks | None = None) -> Step:
        try:
            return self.runner.launch(batch, specs, make_masks)
        except Exception as error:
            if self.tp.size == 1 or not is_out_of_memory(error):
                raise
            raise RuntimeError(
                f"Rank {self.tp.rank} ran out of memory in a step of {len(batch.rows)} requests and "
                f"{len(batch.input_ids)} new tokens. The other ranks wait for it in a collective, so the engine "
                f"ends: {error} Start it with a smaller mem_fraction_static, chunked_prefill_size or "
                "max_running_requests, and check whether other processes use memory of this device."
            ) from error

    def warm_up(self) -> bool:
        """Run `warm_up` on all ranks while nothing else runs. Return False if one could not. Only rank 0 calls this."""
        self._broadcast(WarmUpCommand())
        return self.runner.warm_up()

    def control(self, req: WeightReq) -> ControlReply:
        """Carry out a weight or memory request on all ranks. Only rank 0 calls this."""
        self._broadcast(req)
        return self.weights.handle(req)

    def stage(self, req: StagedReq) -> None:
        """Submit `req` to the stagers of all ranks. `stager.finished()` returns the outcome. Only rank 0 calls this."""
        self._broadcast(StageCommand(req))
        self.stager.submit(req)

    def run_staged(self, req: StagedReq) -> ControlReply:
        """Carry out a request that all ranks staged. Only rank 0 calls this."""
        self._broadcast(RunStagedCommand(req.id))
        return self._run_staged(req.id)

    def drop_staged(self, req: StagedReq) -> None:
        """Drop, on all ranks, a request that `stage` submitted. Only rank 0 calls this."""
        self._broadcast(DropStagedCommand(req.id))
        self.stager.drop(req.id)

    def stop(self) -> None:
        """End `follow` on the other ranks. Only rank 0 calls this."""
        self._broadcast(StopCommand())

    def follow(self) -> None:
        """Carry out rank 0's commands until `stop`. Raise ConnectionError if rank 0 ends without it."""
        while True:
            try:
                data = self.tp.broadcast_command(None)
            except RuntimeError as error:
                raise ConnectionError(f"rank {self.tp.rank} lost the connection to rank 0: {error}") from error
            command = _COMMANDS.decode(data)
            if isinstance(command, StopCommand):
                return
            match command:
                case ForwardBatch():
                    self._launch(command, None)
                case WarmUpCommand():
                    self.runner.warm_up()
                case StageCommand(req):
                    self.stager.submit(req)
                case RunStagedCommand(id):
                    self._run_staged(id)
                case DropStagedCommand(id):
                    self.stager.drop(id)
                case _:
                    self.weights.handle(command)

    def is_recoverable(self, error: Exception) -> bool:
        """Return True if the next step can run after `error` in a step.

        With several ranks, no next step can run, because ranks may wait for each other inside a collective. On CUDA the
        next step can run only after a failed allocation, because any other error makes the context unusable.
        """
        if self.tp.size > 1:
            return False
        return is_out_of_memory(error) or self.runner.device.type == "cpu"

    def _run_staged(self, request_id: int) -> ControlReply:
        staged = self.stager.take(request_id)
        return self.weights.handle(staged.req, staged.prepared)

    def _broadcast(self, command: Command) -> None:
        if self.tp.size > 1:
            self.tp.broadcast_command(msgspec.msgpack.encode(command))

"""`WorkerCommands`: carries out weight commands in a worker process of another project's engine.

It is the counterpart of `worker.TpWorker`: each tensor-parallel rank has the same `WeightUpdater`, `WeightSources` and
`Stager`. The engine runs `handle` on all ranks between two of its steps. A request is staged on a thread of its own
while the engine generates.
"""

from __future__ import annotations

import msgspec

from verl_server.backends.process.commands import (
    COMMANDS,
    CheckCommand,
    PollCommand,
    Refusal,
    WeightsState,
    WorkerReply,
)
from verl_server.errors import VerlServerError
from verl_server.ipc.tp_group import TpGroup
from verl_server.messages.io_struct import ControlReply
from verl_server.messages.weight_requests import UpdateWeightsFromTensorReq
from verl_server.server_args import ServerArgs
from verl_server.worker.tp_worker import DropStagedCommand, RunStagedCommand, StageCommand
from verl_server.worker.weights.stager import Stager
from verl_server.worker.weights.updated_model import UpdatedModel
from verl_server.worker.weights.weight_sources import WeightSources
from verl_server.worker.weights.weight_updater import WeightUpdater


class WorkerCommands:
    def __init__(self, model: UpdatedModel, tp: TpGroup, server_args: ServerArgs) -> None:
        sources = WeightSources(model, tp, server_args)
        self._model, self._registrations = model, sources.registrations
        self._stager = Stager(sources, tp, take_timeout=server_args.sync_timeout)
        self._weights = WeightUpdater(model, tp, sources, server_args)

    def handle(self, command: bytes) -> bytes:
        """Carry out a `Command`, and return a `WorkerReply`. Every rank gets the same commands in the same order."""
        reply = WorkerReply(self._state())
        match COMMANDS.decode(command):
            case CheckCommand(req):
                try:
                    self._weights.check(req)
                except VerlServerError as error:
                    reply.refusal = Refusal.of(error)
            case StageCommand(req):
                self._stager.submit(req)
            case RunStagedCommand(id):
                staged = self._stager.take(id)
                reply.reply = self._weights.handle(staged.req, staged.prepared)
            case DropStagedCommand(id):
                self._stager.drop(id)
            case PollCommand():
                pass
            case UpdateWeightsFromTensorReq() as req:
                reply.reply = self._checked(req)
            case req:
                reply.reply = self._weights.handle(req)
        reply.finished = [(id, None if error is None else Refusal.of(error)) for id, error in self._stager.finished()]
        reply.state = self._state()
        return msgspec.msgpack.encode(reply)

    def _checked(self, req: UpdateWeightsFromTensorReq) -> ControlReply:
        """Carry out a push by id, which `EngineWorkers` does not check on arrival."""
        try:
            self._weights.check(req)
        except VerlServerError as error:
            return ControlReply(id=req.id, success=False, message=str(error), status_code=error.status_code)
        return self._weights.handle(req)

    def _state(self) -> WeightsState:
        weights = self._weights
        return WeightsState(
            version=weights.version,
            state=weights.state,
            epoch=weights.epoch,
            released=weights.released,
            refusal=weights.refusal(),
            num_parameters=len(self._model.weight_map.parameters),
            registrations=self._registrations.ids,
        )

"""A server without a model that can be started again on its port, as a new run that knows nothing of the last one."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.server.conftest import Stack
from tests.server.fake_scheduler import INFO
from verl_server.ipc.sockets import bind_socket
from verl_server.messages import io_struct as io
from verl_server.messages.weight_requests import (
    RegisterWeightsReq,
    UpdateWeightsFromDiskReq,
    UpdateWeightsFromTensorReq,
)
from verl_server.server.http_process import HttpServer
from verl_server.weight_version import OwnVersions

PARAMETERS = INFO["num_parameters"]


class Weights:
    """Answers weight requests as a scheduler would, but holds no weights: it counts labels and parameters."""

    def __init__(self, scheduler: Any) -> None:
        """Label the tokens that `scheduler` samples with the version, too."""
        self._scheduler = scheduler
        self.own_label, self.sizes, self.sources = "", dict[str, int](), list[str]()
        self._own_versions = OwnVersions()

    def __call__(self, req: Any) -> io.ControlReply:
        size, source = 0, ""
        match req:
            case RegisterWeightsReq():
                self.sizes[req.description.id] = len(req.description.tensors)
            case UpdateWeightsFromTensorReq(registration=None):
                source, size = "description", len(req.description.tensors)
                self.sizes |= {req.description.id: size} if req.keep else {}
            case UpdateWeightsFromTensorReq():
                if req.registration not in self.sizes:
                    return io.ControlReply(id=req.id, success=False, message="no such registration", status_code=404)
                source, size = "registration", self.sizes[req.registration]
            case UpdateWeightsFromDiskReq():
                source, size = req.model_path, PARAMETERS
        if not source:
            return io.ControlReply(id=req.id, success=True)
        if size < PARAMETERS and not req.partial:
            return io.ControlReply(id=req.id, success=False, message="it misses parameters", status_code=400)
        label = req.weight_version
        if label is None:
            label = self.own_label = self._own_versions.next_label()
        self.sources.append(source)
        coverage = {"count": PARAMETERS - size, "names": []}
        self._scheduler.version = label
        payload = {"weight_version": label, "not_covered": coverage}
        return io.ControlReply(id=req.id, success=True, message="done", payload=payload)


class Server:
    """A front process over a fake scheduler on a real port. It can be started again on the same port."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._port = folder, 0
        self.start()

    def start(self, **settings: Any) -> None:
        self._stops = ExitStack()
        sock = bind_socket("127.0.0.1", self._port)
        self._stops.callback(sock.close)
        self._port = sock.getsockname()[1]
        self.stack = Stack(self._folder, port=self._port, **settings)
        self.weights = Weights(self.stack.scheduler)
        self.stack.scheduler.control = self.weights
        http = HttpServer(self.stack.manager, self.stack.args, sock)
        self._stops.callback(self.stack.close)
        self._stops.callback(http.end)
        http.start()

    def stop(self) -> None:
        self._stops.close()

    def restart(self, **settings: Any) -> None:
        self.stop()
        self.start(**settings)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def generated(self) -> int:
        return sum(isinstance(message, io.TokenizedGenerateReq) for message in self.stack.scheduler.received)

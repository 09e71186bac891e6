"""`AttachedServer`: a server of another project, as `HttpServerEngineAdapter.attach` uses it.

`identify` recognizes the server and creates the object. Generation, control requests and weights use the wire of that
server. A call or option that the wire cannot express is refused by name.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from verl_server.engine.base import Result
from verl_server.errors import BadRequestError
from verl_server.messages.io_struct import ControlReply, ControlReq
from verl_server.messages.results import GenerateResult, ModelInfo, ServerInfo
from verl_server.messages.weight_requests import UpdateReq, UpdateWeightsFromDistributedReq, UpdateWeightsFromTensorReq

if TYPE_CHECKING:
    import torch

    from verl_server.weight_sync.trainer.shards import TensorShard

    NamedTensors = Iterable[tuple[str, torch.Tensor | TensorShard]]


class GenerateTransport(Protocol):
    """Sends requests with bodies of `/generate`. `timeout` is the number of seconds to wait without an answer."""

    def generate(self, body: dict[str, Any], timeout: float | None) -> Result: ...

    async def async_generate(self, body: dict[str, Any], timeout: float | None) -> Result: ...

    def stream(self, body: dict[str, Any], timeout: float | None) -> Iterator[GenerateResult]: ...

    def async_stream(self, body: dict[str, Any], timeout: float | None) -> AsyncIterator[GenerateResult]: ...


class AttachedServer(Protocol):
    @property
    def name(self) -> str:
        """Project and version, for messages."""

    @property
    def generation(self) -> GenerateTransport: ...

    def control(self, req: ControlReq, timeout: float) -> ControlReply:
        """Send a control request. Raise BadRequestError for a request that the server's wire cannot express."""

    def push(self, tensors: NamedTensors, req: UpdateWeightsFromTensorReq, timeout: float) -> ControlReply:
        """Make the server read these tensors, named as in the checkpoint. Return when it no longer reads them."""

    def abort(self, rid: str, abort_all: bool, timeout: float) -> None: ...

    def server_info(self) -> ServerInfo: ...

    def model_info(self) -> ModelInfo: ...


def refuse_options(req: UpdateReq, server: str) -> None:
    """Raise BadRequestError for an option of an update that a server of another project would ignore."""
    if req.transaction_id is not None:
        raise BadRequestError(f"{server} has no transactions: make one update call with all tensors.")
    if isinstance(req, UpdateWeightsFromTensorReq | UpdateWeightsFromDistributedReq):
        unknown = {"strict_dtype": req.strict_dtype, "partial=False": req.partial is False}
        if isinstance(req, UpdateWeightsFromTensorReq):
            unknown |= {"checksums": bool(req.checksums), "load_format": req.load_format not in (None, "auto")}
        for name in (name for name, is_set in unknown.items() if is_set):
            raise BadRequestError(f"{server} cannot honor {name}: leave the option unset, or use verl-server.")

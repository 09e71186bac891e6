"""An engine without a server. It records control requests and answers them as a server would, but copies no weights."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from verl_server.engine.base import EngineBase
from verl_server.messages.io_struct import ControlReply, ControlReq
from verl_server.messages.weight_requests import (
    RegisterWeightsReq,
    ReleaseMemoryOccupationReq,
    UnregisterWeightsReq,
    UpdateWeightsFromTensorReq,
)


class FakeEngine(EngineBase):
    def __init__(self) -> None:
        super().__init__()
        self.requests: list[ControlReq] = []
        self.known: set[str] = set()
        """Ids of the registrations that the server holds."""
        self.refuse: ControlReply | Exception | None = None
        self.on_request: Callable[[ControlReq], None] = lambda req: None

    @property
    def updates(self) -> list[str]:
        """Source of each update that was received, followed by "+" if its registration is to be kept."""
        return [_source(r) for r in self.requests if isinstance(r, UpdateWeightsFromTensorReq)]

    @property
    def last(self) -> Any:
        return self.requests[-1]

    def _control(self, req: ControlReq) -> ControlReply:
        self.requests.append(req)
        self.on_request(req)
        if isinstance(self.refuse, Exception):
            raise self.refuse
        if self.refuse is not None:
            return self.refuse
        match req:
            case UpdateWeightsFromTensorReq():
                self.known -= set(req.forget)
                if req.registration is not None and req.registration not in self.known:
                    return ControlReply(id=0, success=False, message="no such registration", status_code=404)
                if req.description is not None and req.keep:
                    self.known.add(req.description.id)
            case RegisterWeightsReq():
                self.known = (self.known - set(req.forget)) | {req.description.id}
            case UnregisterWeightsReq():
                self.known -= set(req.registrations or self.known)
            case ReleaseMemoryOccupationReq():
                self.known.clear()
        return ControlReply(id=0, success=True, message="done")

    # -- methods that every engine must define ---------------------------------------------------------------------

    def _generate(self, body: dict[str, Any], timeout: float | None) -> Any:
        raise NotImplementedError

    def _stream(self, body: dict[str, Any], timeout: float | None) -> Iterator[dict[str, Any]]:
        raise NotImplementedError

    async def _async_generate(self, body: dict[str, Any], timeout: float | None) -> Any:
        raise NotImplementedError

    def _async_stream(self, body: dict[str, Any], timeout: float | None) -> AsyncIterator[dict[str, Any]]:
        raise NotImplementedError

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        raise NotImplementedError

    def close_session(self, session_id: str) -> None:
        raise NotImplementedError

    async def async_close_session(self, session_id: str) -> None:
        raise NotImplementedError

    def get_server_info(self) -> dict[str, Any]:
        return {}

    def get_model_info(self) -> dict[str, Any]:
        return {}

    def shutdown(self) -> None:
        pass


def _source(req: UpdateWeightsFromTensorReq) -> str:
    given = [name for name in ("named_tensors", "description", "registration") if getattr(req, name) is not None]
    assert len(given) == 1, given
    return given[0] + ("+" if req.keep else "")

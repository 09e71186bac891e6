"""`SglangServer`: a genuine SGLang server that somebody else launched.

Its `/generate` and most of its control routes have the same names and fields as the routes of this project. Weights are
pushed as SGLang's pickled handles. `mode` is translated into pauses of SGLang. Source of the wire: SGLang 0.5.16, which
was run (`tests/backends/recordings`), and 0.5.23.

A genuine server ends if an update is to empty its prefix cache while its scheduler holds a request, be it one that has
just finished. So the cache is emptied before the update, by a call that the server can refuse, in a pause.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import msgspec
import orjson

from verl_server.engine.attached.server import refuse_options
from verl_server.engine.http_answers import control_reply, raise_for
from verl_server.engine.http_transport import HttpTransport
from verl_server.errors import BadRequestError
from verl_server.messages.io_struct import (
    AbortReq,
    ContinueGenerationReq,
    ControlReply,
    ControlReq,
    FlushCacheReq,
    PauseGenerationReq,
    PauseMode,
)
from verl_server.messages.results import ModelInfo, ServerInfo
from verl_server.messages.weight_requests import (
    DestroyWeightsUpdateGroupReq,
    GetWeightsByNameReq,
    InitWeightsUpdateGroupReq,
    ReleaseMemoryOccupationReq,
    ResumeMemoryOccupationReq,
    UpdateReq,
    UpdateWeightsFromDiskReq,
    UpdateWeightsFromDistributedReq,
    UpdateWeightsFromTensorReq,
    UpdateWeightVersionReq,
    WeightsCheckerReq,
)
from verl_server.weight_version import OwnVersions

if TYPE_CHECKING:
    from verl_server.engine.attached.server import NamedTensors

_SAME = (
    PauseGenerationReq
    | ContinueGenerationReq
    | FlushCacheReq
    | UpdateWeightVersionReq
    | GetWeightsByNameReq
    | WeightsCheckerReq
    | ReleaseMemoryOccupationReq
    | ResumeMemoryOccupationReq
    | InitWeightsUpdateGroupReq
    | DestroyWeightsUpdateGroupReq
)
"""Requests that SGLang accepts with the fields of this project."""
_UPDATE_FIELDS = {
    "model_path",
    "load_format",
    "flush_cache",
    "weight_version",
    "names",
    "dtypes",
    "shapes",
    "group_name",
}
"""Fields of updates that SGLang has, too."""
_DRAIN_SECONDS = 10.0
"""Seconds to wait until aborted requests have left SGLang's scheduler."""


class SglangServer:
    def __init__(self, transport: HttpTransport, url: str, info: dict[str, Any]) -> None:
        """`info` is the answer of the server's `/server_info`."""
        self._transport, self._url = transport, url
        self.name = f"SGLang {info.get('version', '(unknown version)')}"
        self.generation = transport
        self._ranks = int(info.get("tp_size") or 1)
        self._own_versions = OwnVersions()
        self._pause: PauseMode | None = None
        """Mode of the pause, by a caller or for an update that failed. None if this object knows of no pause."""
        self._is_torn = False
        """True if an update failed for which this object had paused generation. Generation is then still paused."""

    def control(self, req: ControlReq, timeout: float) -> ControlReply:
        if isinstance(req, UpdateWeightsFromDiskReq | UpdateWeightsFromDistributedReq):
            fields = {name: value for name, value in _given(req).items() if name in _UPDATE_FIELDS}
            return self._update(req, req.route, fields, timeout)
        if isinstance(req, UpdateWeightsFromTensorReq):
            raise BadRequestError(
                f"{self.name} does not read registered or sharded weights: call update_weights_from_tensor with whole "
                "tensors on the adapter."
            )
        if not isinstance(req, _SAME):
            raise BadRequestError(f"{self.name} at {self._url} does not offer what {req.route} does.")
        if isinstance(req, FlushCacheReq):
            return ControlReply(id=0, success=self._flush(req.timeout, timeout), status_code=400)
        if isinstance(req, PauseGenerationReq):
            self._begin_pause(req.mode, timeout)
            self._is_torn = False
            return ControlReply(id=0, success=True)
        reply = self._post(req.route, _given(req), timeout)
        if reply.success and isinstance(req, ContinueGenerationReq):
            self._pause, self._is_torn = None, False
        return reply

    def push(self, tensors: NamedTensors, req: UpdateWeightsFromTensorReq, timeout: float) -> ControlReply:
        import torch

        from verl_server.engine.attached.pickled_tensors import sglang_payload, whole

        refuse_options(req, self.name)
        kept = whole(list(tensors))
        if any(tensor.is_cuda for _, tensor in kept):
            torch.cuda.synchronize()  # the server reads on streams of its own
        entries = [sglang_payload(kept) for _ in range(self._ranks)]  # each rank opens one
        fields = {"serialized_named_tensors": entries, "flush_cache": req.flush_cache}
        return self._update(req, req.route, fields, timeout)

    def abort(self, rid: str, abort_all: bool, timeout: float) -> None:
        raise_for(self._transport.post(AbortReq.route, {"rid": rid, "abort_all": abort_all}, timeout))

    def server_info(self) -> ServerInfo:
        info: ServerInfo = self._transport.get("/server_info")
        return info

    def model_info(self) -> ModelInfo:
        answer = self._transport.probe("/model_info")
        found: Any = orjson.loads(answer.content) if answer.status_code == 200 else None
        info: ModelInfo = found or self._transport.get("/get_model_info")  # its older name
        return info

    def _update(self, req: UpdateReq, path: str, fields: dict[str, Any], timeout: float) -> ControlReply:
        """Send an update during the pause that `mode` requires.

        With `flush_cache`, refuse it if requests would read pages of the old weights.
        """
        refuse_options(req, self.name)
        self._own_versions.note(req.weight_version or "")
        # SGLang keeps the label of the old weights if an update has none.
        fields["weight_version"] = req.weight_version or self._own_versions.next_label()
        fields["flush_cache"] = False
        mode = "abort" if req.abort_all_requests else req.mode
        ends_pause = self._pause is None or self._is_torn
        if self._pause is None and mode == "wait":
            if not req.flush_cache:
                return self._in_transaction(path, fields, timeout)  # SGLang itself waits for running requests
            if not self._pause_when_idle(timeout):
                return self._refusal(f"{self.name} was not idle within {timeout / 2:g} s.")
        elif self._pause is None:
            self._begin_pause(mode, timeout)
        if req.flush_cache and not self._empty_cache(timeout) and self._pause != "in_place":
            if ends_pause and not self._is_torn:
                self._end_pause(timeout)
            return self._refusal(f"{self.name} cannot empty its prefix cache while it holds requests.")
        self._is_torn = ends_pause
        reply = self._in_transaction(path, fields, timeout)
        if not reply.success:
            message = f"{reply.message} Generation stays paused until continue_generation, or an update that succeeds."
            return ControlReply(id=0, success=False, message=message, status_code=reply.status_code)
        if ends_pause:
            self._end_pause(timeout)
        return reply

    def _pause_when_idle(self, timeout: float) -> bool:
        """Pause in place while no request runs. Return False if one runs for `timeout` / 2 seconds.

        SGLang does not hold new requests meanwhile, so a server that is always busy is never idle.
        """
        deadline = time.monotonic() + timeout / 2
        while (left := deadline - time.monotonic()) > 0 and self._flush(left, timeout):
            self._begin_pause("in_place", timeout)
            if self._flush(0.0, timeout):
                return True
            self._end_pause(timeout)  # a request came in between
        return False

    def _empty_cache(self, timeout: float) -> bool:
        # After a pause with "abort", the scheduler still runs, and drops the last of its requests.
        return self._flush(_DRAIN_SECONDS if self._pause == "abort" else 0.0, timeout)

    def _begin_pause(self, mode: PauseMode, timeout: float) -> None:
        if mode == "wait":
            raise BadRequestError(f'{self.name} has no pause "wait": use "in_place", "retract" or "abort".')
        self._checked(self._post(PauseGenerationReq.route, {"mode": mode}, timeout))
        self._pause = mode

    def _end_pause(self, timeout: float) -> None:
        self._checked(self._post(ContinueGenerationReq.route, {}, timeout))
        self._pause, self._is_torn = None, False

    def _flush(self, patience: float, timeout: float) -> bool:
        """Empty the prefix cache. Return False if requests still run or are held after `patience` seconds."""
        answer = self._transport.post(f"{FlushCacheReq.route}?timeout={patience}", {}, timeout)
        if answer.status_code != 400:
            raise_for(answer)
        return answer.status_code == 200

    def _refusal(self, reason: str) -> ControlReply:
        message = (
            f"{reason} Requests would continue with pages of the old weights, so no weights were written. Use "
            'mode="abort", or accept these pages: mode="in_place", or flush_cache=False.'
        )
        return ControlReply(id=0, success=False, message=message, status_code=400)

    def _in_transaction(self, path: str, fields: dict[str, Any], timeout: float) -> ControlReply:
        """Send an update between the two calls that SGLang requires since 0.5.2x. Older versions lack these calls."""
        begun = self._transport.post("/begin_weight_update", {}, timeout).status_code == 200
        try:
            return self._post(path, fields, timeout)
        finally:
            if begun:
                self._checked(self._post("/end_weight_update", {}, timeout))

    def _post(self, path: str, fields: dict[str, Any], timeout: float) -> ControlReply:
        answer = self._transport.post(path, fields, timeout)
        if answer.status_code in (200, 400) and answer.content[:1] == b"{":
            body = orjson.loads(answer.content)
            if body.get("success") is False:
                return ControlReply(id=0, success=False, message=str(body.get("message", "")), status_code=400)
        return control_reply(answer)

    def _checked(self, reply: ControlReply) -> None:
        if not reply.success:
            raise BadRequestError(f"{self.name} at {self._url}: {reply.message}")


def _given(req: ControlReq) -> dict[str, Any]:
    fields = msgspec.to_builtins(req).items()
    return {name: value for name, value in fields if value is not None and name not in ("type", "id")}

"""`VllmServer`: a genuine vLLM server that somebody else launched.

Generation goes through `/v1/completions`. Pauses, weights, sleep and cache are routes that vLLM has only if it was
started with VLLM_SERVER_DEV_MODE=1. vLLM (0.26) has no weight versions. This object keeps the label, so all updates
must use one adapter. Source of the wire: vLLM 0.26.0 and 0.32.0.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import orjson

from verl_server.engine.attached.server import refuse_options
from verl_server.engine.attached.vllm_completions import ServedWeights, VllmCompletions
from verl_server.engine.http_answers import raise_for
from verl_server.engine.http_transport import HttpTransport
from verl_server.errors import BadRequestError, VerlServerError, WeightUpdateError
from verl_server.messages.io_struct import (
    ContinueGenerationReq,
    ControlReply,
    ControlReq,
    FlushCacheReq,
    PauseGenerationReq,
    PauseMode,
)
from verl_server.messages.results import ModelInfo, ServerInfo
from verl_server.messages.weight_requests import (
    ReleaseMemoryOccupationReq,
    ResumeMemoryOccupationReq,
    UpdateReq,
    UpdateWeightsFromDiskReq,
    UpdateWeightsFromTensorReq,
    UpdateWeightVersionReq,
)
from verl_server.weight_version import OwnVersions

if TYPE_CHECKING:
    from verl_server.engine.attached.server import NamedTensors

_PAUSES: dict[PauseMode, str] = {"abort": "abort", "wait": "wait", "in_place": "keep", "retract": "keep"}
"""`mode` of an update -> `mode` of vLLM's `/pause`."""


class VllmServer:
    def __init__(self, transport: HttpTransport, url: str, version: str) -> None:
        self._transport, self._url = transport, url
        self.name = f"vLLM {version}"
        (model, *_) = transport.get("/v1/models")["data"]
        self._model: dict[str, Any] = model
        self._own_versions, self._contents = OwnVersions(), OwnVersions()
        self._label = self._own_versions.next_label()
        """Label of the served weights, also of those that this adapter finds."""
        self._pages = self._contents.next_label()
        """Names the contents of the weights, to keep vLLM's pages apart. The label does not name them: a caller may
        repeat it, and an earlier adapter may have given it to other weights."""
        self._is_paused = False
        """True if a caller has paused generation."""
        self._is_torn = False
        """True if an update has failed. Generation is paused then."""
        self._can_receive = False
        """True if vLLM's transfer of weights was initialized."""
        self._updates = threading.Lock()
        self.generation = VllmCompletions(transport, model["id"], self._logprobs_mode(), self._served)

    def _served(self) -> ServedWeights:
        return ServedWeights(self._label, self._pages)

    def control(self, req: ControlReq, timeout: float) -> ControlReply:
        match req:
            case PauseGenerationReq():
                self._pause(req.mode, timeout)
                self._is_paused = True
            case ContinueGenerationReq():
                if self._is_torn:
                    raise BadRequestError("The last update failed, so the weights may be torn: push all weights first.")
                self._post("/resume", None, timeout)
                self._is_paused = False
            case FlushCacheReq():
                return ControlReply(id=0, success=self._reset_cache("", timeout), status_code=400)
            case UpdateWeightVersionReq():
                self._own_versions.note(req.new_version)
                self._label = req.new_version
            case ReleaseMemoryOccupationReq():
                _check_tags(req.tags, {"weights", "kv_cache"})
                self._post("/sleep?level=2", None, timeout)
            case ResumeMemoryOccupationReq():
                tags = [tag for tag in req.tags or [] if tag != "cuda_graph"]
                self._post(
                    "/wake_up" + "".join(f"{'&' if i else '?'}tags={t}" for i, t in enumerate(tags)), None, timeout
                )
            case UpdateWeightsFromDiskReq():
                arguments = {"method": "reload_weights", "kwargs": {"weights_path": req.model_path}, "timeout": timeout}
                return self._update(req, lambda: self._post("/collective_rpc", arguments, timeout), timeout)
            case UpdateWeightsFromTensorReq():
                raise BadRequestError(
                    f"{self.name} does not read registered or sharded weights: call update_weights_from_tensor with "
                    "whole tensors on the adapter."
                )
            case _:
                raise BadRequestError(f"{self.name} at {self._url} does not offer what {req.route} does.")
        return ControlReply(id=0, success=True, message="Success")

    def push(self, tensors: NamedTensors, req: UpdateWeightsFromTensorReq, timeout: float) -> ControlReply:
        import torch

        from verl_server.engine.attached.pickled_tensors import vllm_handles, whole

        refuse_options(req, self.name)
        kept = whole(list(tensors))
        info = {
            "names": [name for name, _ in kept],
            "dtype_names": [str(tensor.dtype).removeprefix("torch.") for _, tensor in kept],
            "shapes": [list(tensor.shape) for _, tensor in kept],
            "ipc_handles_pickled": vllm_handles(kept),
        }
        torch.cuda.synchronize()  # the workers read on streams of their own

        def send() -> None:
            if not self._can_receive:
                self._post("/init_weight_transfer_engine", {"init_info": {}}, timeout)
                self._can_receive = True
            self._post("/start_weight_update", {}, timeout)
            self._post("/update_weights", {"update_info": info}, timeout)
            self._post("/finish_weight_update", {}, timeout)

        return self._update(req, send, timeout)

    def abort(self, rid: str, abort_all: bool, timeout: float) -> None:
        if rid or abort_all:  # vLLM names the first prompt of a request cmpl-RID-0, with all of its samples
            self._post("/abort_requests", {} if abort_all else {"request_ids": [f"cmpl-{rid}-0"]}, timeout)

    def server_info(self) -> ServerInfo:
        state: Any = {"weight_version": self._label, "paused": self._is_paused, "engine_version": self.name}
        load = self._transport.probe("/load")
        if load.status_code == 200:
            state["num_running_reqs"] = orjson.loads(load.content).get("server_load", 0)
        info: Any = {
            "model_path": self._model.get("root") or self._model["id"],
            "weight_version": self._label,
            "internal_states": [state],
            "scheduler_info": {"engine_version": self.name, "context_length": self._model.get("max_model_len")},
        }
        found: ServerInfo = info
        return found

    def model_info(self) -> ModelInfo:
        info: Any = {
            "model_path": self._model.get("root") or self._model["id"],
            "served_model_name": self._model["id"],
            "is_generation": True,
            "weight_version": self._label,
        }
        found: ModelInfo = info
        return found

    def _logprobs_mode(self) -> str | None:
        """Return vLLM's setting `logprobs_mode`, or None if the server does not report it."""
        answer = self._transport.probe("/server_info?config_format=json")
        if answer.status_code != 200:
            return None
        config = orjson.loads(answer.content).get("vllm_config") or {}
        mode = (config.get("model_config") or {}).get("logprobs_mode") if isinstance(config, dict) else None
        return None if mode is None else str(mode)

    def _update(self, req: UpdateReq, write: Callable[[], None], timeout: float) -> ControlReply:
        """Write weights during the pause that `mode` requires. After a failure, the server stays paused."""
        refuse_options(req, self.name)
        with self._updates:
            if not (self._is_paused or self._is_torn):
                self._pause("abort" if req.abort_all_requests else req.mode, timeout)
            self._pages = self._contents.next_label()
            try:
                write()
            except VerlServerError as error:
                self._is_torn = True
                raise WeightUpdateError(
                    f"{self.name} did not install the weights, and may serve a part of them: {error} Generation stays "
                    "paused until an update succeeds. For tensors, vLLM needs --weight-transfer-config "
                    """'{"backend": "ipc"}' and VLLM_ALLOW_INSECURE_SERIALIZATION=1."""
                ) from error
            self._own_versions.note(req.weight_version or "")
            self._label, self._is_torn = req.weight_version or self._own_versions.next_label(), False
            label = self._label
            if not self._is_paused:
                self._post("/resume", None, timeout)
        return ControlReply(id=0, success=True, message="Success", payload={"weight_version": label})

    def _pause(self, mode: PauseMode, timeout: float) -> None:
        self._post(f"/pause?mode={_PAUSES[mode]}", None, timeout)
        if mode == "retract" and not self._reset_cache("?reset_running_requests=true", timeout):
            raise WeightUpdateError(f"{self.name} could not drop the KV cache of its running requests.")

    def _reset_cache(self, query: str, timeout: float) -> bool:
        """Empty the prefix cache. Return False if requests hold pages. Older versions of vLLM return True."""
        found = self._post(f"/reset_prefix_cache{query}", None, timeout)
        return not (isinstance(found, dict) and found.get("success") is False)

    def _post(self, path: str, body: dict[str, Any] | None, timeout: float) -> Any:
        """Return the JSON of the answer, None if there is none."""
        answer = self._transport.post(path, body, timeout)
        if answer.status_code in (404, 405):
            raise BadRequestError(
                f"{self.name} at {self._url} has no {path.partition('?')[0]}: start it with VLLM_SERVER_DEV_MODE=1."
            )
        raise_for(answer)
        return orjson.loads(answer.content) if answer.content else None


def _check_tags(tags: list[str] | None, together: set[str]) -> None:
    if tags is not None and not together <= set(tags):
        raise BadRequestError(f"vLLM releases {' and '.join(sorted(together))} together: name both tags, or none.")

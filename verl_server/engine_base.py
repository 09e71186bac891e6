"""`EngineBase`: what trainers and rollouts call, whichever side of HTTP the engine is on.

SGLang's method and argument names. A subclass brings generation, one `_control` call and a few getters; the
weight, memory, cache and pause methods here are the same for all. A refused update raises WeightUpdateError.
"""

from __future__ import annotations

import abc
import math
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal, Self

from verl_server.errors import BadRequestError, VerlServerError, WeightUpdateError, error_for_status
from verl_server.io_struct import (
    ContinueGenerationReq,
    ControlReply,
    ControlReq,
    FlushCacheReq,
    GetWeightsByNameReq,
    PauseGenerationReq,
    ReleaseMemoryOccupationReq,
    ResumeMemoryOccupationReq,
    UpdateWeightsFromDiskReq,
    UpdateWeightsFromTensorReq,
    UpdateWeightVersionReq,
    WeightsCheckerReq,
)
from verl_server.server_args import ServerArgs
from verl_server.weight_sync.handles import LocalSerializedTensor

if TYPE_CHECKING:
    import torch

UpdateMode = Literal["wait", "in_place", "retract", "abort"]
Result = dict[str, Any] | list[dict[str, Any]]


class EngineBase(abc.ABC):
    """One policy that generates. Thread-safe; a context manager that shuts down at the end."""

    server_args: ServerArgs
    scheduler_info: dict[str, Any]
    url: str | None = None
    """Where it answers HTTP, if it does."""

    # -- generation -----------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
        image_data: Any = None,
        return_logprob: bool | list[bool] = False,
        logprob_start_len: int | list[int] | None = None,
        top_logprobs_num: int | list[int] | None = None,
        token_ids_logprob: list[int] | list[list[int]] | None = None,
        lora_path: str | list[str] | None = None,
        custom_logit_processor: str | list[str] | None = None,
        stream: bool = False,
        *,
        rid: str | list[str] | None = None,
        return_text_in_logprobs: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """{"text", "output_ids", "meta_info"}, a list of them, or with `stream` an iterator of cumulative ones.

        Waits as long as it takes unless `timeout` (seconds) is given; beyond it the request is aborted and
        ControlTimeoutError raised.
        """
        body = generate_body(
            text=prompt,
            sampling_params=sampling_params,
            input_ids=input_ids,
            image_data=image_data,
            return_logprob=return_logprob,
            logprob_start_len=logprob_start_len,
            top_logprobs_num=top_logprobs_num,
            token_ids_logprob=token_ids_logprob,
            lora_path=lora_path,
            custom_logit_processor=custom_logit_processor,
            rid=rid,
            return_text_in_logprobs=return_text_in_logprobs,
        )
        if stream:
            return self._stream(body | {"stream": True}, timeout)
        return self._generate(body, timeout)

    async def async_generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
        image_data: Any = None,
        return_logprob: bool | list[bool] = False,
        logprob_start_len: int | list[int] | None = None,
        top_logprobs_num: int | list[int] | None = None,
        token_ids_logprob: list[int] | list[list[int]] | None = None,
        lora_path: str | list[str] | None = None,
        custom_logit_processor: str | list[str] | None = None,
        stream: bool = False,
        *,
        rid: str | list[str] | None = None,
        return_text_in_logprobs: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """`generate`, awaited from any event loop; with `stream` it returns an async iterator."""
        body = generate_body(
            text=prompt,
            sampling_params=sampling_params,
            input_ids=input_ids,
            image_data=image_data,
            return_logprob=return_logprob,
            logprob_start_len=logprob_start_len,
            top_logprobs_num=top_logprobs_num,
            token_ids_logprob=token_ids_logprob,
            lora_path=lora_path,
            custom_logit_processor=custom_logit_processor,
            rid=rid,
            return_text_in_logprobs=return_text_in_logprobs,
        )
        if stream:
            return self._async_stream(body | {"stream": True}, timeout)
        return await self._async_generate(body, timeout)

    # -- weights --------------------------------------------------------------------------------------------

    def update_weights_from_tensor(
        self,
        named_tensors: Iterable[tuple[str, torch.Tensor | LocalSerializedTensor]],
        load_format: str | None = None,
        flush_cache: bool = True,
        *,
        weight_version: str | None = None,
        mode: UpdateMode = "wait",
        abort_all_requests: bool = False,
        strict_dtype: bool = False,
        partial: bool = True,
    ) -> tuple[bool, str]:
        """Copy tensors (Hugging Face names) into the served weights; returns (True, message).

        Tensors of this process travel as handles to their memory, which must not be written before this
        returns. See `UpdateWeightsFromTensorReq` for the options.
        """
        kept = list(named_tensors)  # alive until the reply: the handles point into them
        req = UpdateWeightsFromTensorReq(
            named_tensors=_described(kept),
            load_format=load_format,
            flush_cache=flush_cache,
            abort_all_requests=abort_all_requests,
            mode=mode,
            weight_version=weight_version,
            strict_dtype=strict_dtype,
            partial=partial,
        )
        return self._update(req)

    def update_weights_from_disk(
        self,
        model_path: str,
        load_format: str | None = None,
        *,
        flush_cache: bool = True,
        weight_version: str | None = None,
        mode: UpdateMode = "wait",
        abort_all_requests: bool = False,
    ) -> tuple[bool, str]:
        """Load a folder of safetensors, as the server's host sees it, over the served weights."""
        req = UpdateWeightsFromDiskReq(
            model_path=str(model_path),
            load_format=load_format,
            flush_cache=flush_cache,
            abort_all_requests=abort_all_requests,
            mode=mode,
            weight_version=weight_version,
        )
        return self._update(req)

    def update_weight_version(self, new_version: str, abort_all_requests: bool = True) -> tuple[bool, str]:
        """Relabel the served weights."""
        return self._update(UpdateWeightVersionReq(new_version=new_version, abort_all_requests=abort_all_requests))

    def get_weights_by_name(self, name: str, truncate_size: int = 100) -> list[Any]:
        """First rows of a parameter as float32 nested lists."""
        rows: list[Any] = self._ask(GetWeightsByNameReq(name=name, truncate_size=truncate_size))
        return rows

    def weights_checker(self, action: str = "checksum") -> dict[str, Any]:
        """Digests of the served weights, per rank and parameter."""
        payload = self._ask(WeightsCheckerReq(action=action))
        return payload if isinstance(payload, dict) else {}

    # -- memory, cache, pause -------------------------------------------------------------------------------

    def release_memory_occupation(self, tags: list[str] | None = None) -> None:
        """Give memory back: "kv_cache", "weights", "cuda_graph", or None for all. Refused while requests run."""
        self._ask(ReleaseMemoryOccupationReq(tags=tags))

    def resume_memory_occupation(self, tags: list[str] | None = None) -> None:
        """Take memory again. Resumed weights are not loaded: push them before generating."""
        self._ask(ResumeMemoryOccupationReq(tags=tags))

    def flush_cache(self, timeout: float = 0.0) -> bool:
        """Empty the prefix cache, waiting `timeout` seconds for an idle engine; False if it stayed busy."""
        return self._control(FlushCacheReq(timeout=timeout)).success

    def pause_generation(self, mode: Literal["abort", "retract", "in_place"] = "abort") -> None:
        self._ask(PauseGenerationReq(mode=mode))

    def continue_generation(self) -> None:
        self._ask(ContinueGenerationReq())

    # -- what a subclass brings -----------------------------------------------------------------------------

    @abc.abstractmethod
    def _generate(self, body: dict[str, Any], timeout: float | None) -> Result: ...

    @abc.abstractmethod
    def _stream(self, body: dict[str, Any], timeout: float | None) -> Iterator[dict[str, Any]]: ...

    @abc.abstractmethod
    async def _async_generate(self, body: dict[str, Any], timeout: float | None) -> Result: ...

    @abc.abstractmethod
    def _async_stream(self, body: dict[str, Any], timeout: float | None) -> AsyncIterator[dict[str, Any]]: ...

    @abc.abstractmethod
    def _control(self, req: ControlReq) -> ControlReply:
        """Bounded. Raises for a dead or unreachable engine; a refusal is `success=False`."""

    @abc.abstractmethod
    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        """End one request or all; their callers get what there is, with finish_reason.type "abort"."""

    @abc.abstractmethod
    def get_server_info(self) -> dict[str, Any]: ...

    @abc.abstractmethod
    def get_model_info(self) -> dict[str, Any]: ...

    @abc.abstractmethod
    def shutdown(self) -> None:
        """End every process of ours. Idempotent."""

    # -- shared ---------------------------------------------------------------------------------------------

    def _ask(self, req: ControlReq, refused: type[VerlServerError] = BadRequestError) -> Any:
        """The payload of a control call; a refusal raises."""
        reply = self._control(req)
        if not reply.success:
            raise error_for_status(reply.status_code, reply.message, refused)
        return reply.payload

    def _update(self, req: ControlReq) -> tuple[bool, str]:
        reply = self._control(req)
        if not reply.success:
            raise error_for_status(reply.status_code, reply.message, WeightUpdateError)
        return True, reply.message

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def generate_body(**fields: Any) -> dict[str, Any]:
    """The `/generate` body of these arguments: unset ones left out, arrays and tensors as lists."""
    _check_finite("sampling_params", fields.get("sampling_params"))
    return {key: _plain(value) for key, value in fields.items() if value is not None and value is not False}


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, list | tuple) and any(hasattr(v, "tolist") or isinstance(v, tuple) for v in value):
        return [_plain(v) for v in value]
    return list(value) if isinstance(value, tuple) else value


def _check_finite(path: str, value: Any) -> None:
    """JSON encoders write NaN as null, which would mean the default: refuse it before."""
    if isinstance(value, float) and not math.isfinite(value):
        raise BadRequestError(f"{path} is {value}; it must be a finite number.")
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in entries:
        _check_finite(f"{path}.{key}", entry)


def _described(named: list[tuple[str, Any]]) -> list[tuple[str, LocalSerializedTensor]]:
    """Handles for the tensors among them, in the order given."""
    for entry in named:
        if not (isinstance(entry, tuple | list) and len(entry) == 2 and isinstance(entry[0], str)):
            raise BadRequestError(
                f"named_tensors must give (name, tensor) pairs, not {type(entry).__name__}: pass "
                "model.named_parameters() or model.state_dict().items()."
            )
    plain = [(name, value) for name, value in named if not isinstance(value, LocalSerializedTensor)]
    if not plain:
        return named
    from verl_server.weight_sync.sender import describe_tensors

    described = iter(describe_tensors(plain))
    return [(n, v) if isinstance(v, LocalSerializedTensor) else next(described) for n, v in named]

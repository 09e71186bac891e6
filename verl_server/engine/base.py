"""`EngineBase`: what trainers and rollouts call, whichever side of HTTP the engine is on.

SGLang's method and argument names. A subclass brings generation, one `_control` call and a few getters; cache and
pause methods are here, those of weights and memory in `EngineWeights`, the same for all.
"""

from __future__ import annotations

import abc
import math
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal, Self

from verl_server.engine.weights import EngineWeights
from verl_server.errors import BadRequestError
from verl_server.io_struct import ContinueGenerationReq, FlushCacheReq, PauseGenerationReq
from verl_server.server_args import ServerArgs

Result = dict[str, Any] | list[dict[str, Any]]


class EngineBase(EngineWeights):
    """One policy that generates. Thread-safe; a context manager that shuts down at the end."""

    server_args: ServerArgs
    scheduler_info: dict[str, Any]
    url: str | None = None
    """Where it answers HTTP, if it does."""
    admin_api_key: str | None = None
    """Key of the control routes at `url`, if they need one."""

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

    # -- cache, pause ---------------------------------------------------------------------------------------

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
    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        """End one request or all; their callers get what there is, with finish_reason.type "abort"."""

    @abc.abstractmethod
    def get_server_info(self) -> dict[str, Any]: ...

    @abc.abstractmethod
    def get_model_info(self) -> dict[str, Any]: ...

    @abc.abstractmethod
    def shutdown(self) -> None:
        """End every process of ours. Idempotent."""

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

"""`EngineBase`: what trainers and rollouts call, whichever side of HTTP the engine is on.

SGLang's method and argument names. A subclass brings generation, one `_control` call and a few getters; cache and
pause methods are here, those of weights and memory in `EngineWeights`, the same for all.
"""

from __future__ import annotations

import abc
import math
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal, Self, Unpack, overload

from verl_server.engine.options import GenerateOptions, check_names
from verl_server.engine.weights import EngineWeights
from verl_server.errors import BadRequestError
from verl_server.io_struct import ContinueGenerationReq, FlushCacheReq, GetInternalStateReq, PauseGenerationReq
from verl_server.results import GenerateResult, InternalState, ModelInfo, SchedulerInfo, ServerInfo
from verl_server.server_args import ServerArgs

Result = GenerateResult | list[GenerateResult]
"""A list for several prompts, and for one prompt with `n` above 1."""


class EngineBase(EngineWeights):
    """One policy that generates. Thread-safe; a context manager that shuts down at the end."""

    server_args: ServerArgs
    scheduler_info: SchedulerInfo
    url: str | None = None
    """Where it answers HTTP, if it does."""
    admin_api_key: str | None = None
    """Key of the control routes at `url`, if they need one."""

    # -- generation -----------------------------------------------------------------------------------------
    # One prompt, several prompts, a stream. (No prompt at all fits the first two, and is refused at run time.)

    @overload
    def generate(  # type: ignore[overload-overlap]
        self,
        prompt: str | None = None,
        sampling_params: dict[str, Any] | None = None,
        input_ids: list[int] | None = None,
        *,
        stream: Literal[False] = False,
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> GenerateResult: ...

    @overload
    def generate(
        self,
        prompt: list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        input_ids: list[list[int]] | None = None,
        *,
        stream: Literal[False] = False,
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> list[GenerateResult]: ...

    @overload
    def generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
        *,
        stream: Literal[True],
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Iterator[GenerateResult]: ...

    def generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
        *,
        stream: bool = False,
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Result | Iterator[GenerateResult]:
        """One result, a list of them, or with `stream` an iterator of cumulative ones.

        One prompt with `sampling_params["n"]` above 1 gives a list, too, which the declared type cannot tell. The
        sampling parameters are those of `SamplingParams`. The call has no bound unless `timeout` (seconds) is given;
        beyond it the request is aborted and ControlTimeoutError is raised.
        """
        body = generate_body(prompt, sampling_params, input_ids, options)
        return self._stream(body | {"stream": True}, timeout) if stream else self._generate(body, timeout)

    @overload
    async def async_generate(  # type: ignore[overload-overlap]
        self,
        prompt: str | None = None,
        sampling_params: dict[str, Any] | None = None,
        input_ids: list[int] | None = None,
        *,
        stream: Literal[False] = False,
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> GenerateResult: ...

    @overload
    async def async_generate(
        self,
        prompt: list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        input_ids: list[list[int]] | None = None,
        *,
        stream: Literal[False] = False,
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> list[GenerateResult]: ...

    @overload
    async def async_generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
        *,
        stream: Literal[True],
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncIterator[GenerateResult]: ...

    async def async_generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
        *,
        stream: bool = False,
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Result | AsyncIterator[GenerateResult]:
        """`generate`, awaited from any event loop; with `stream` it returns an async iterator."""
        body = generate_body(prompt, sampling_params, input_ids, options)
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

    def get_internal_state(self) -> InternalState:
        """The scheduler's load and memory figures."""
        state: InternalState = self._ask(GetInternalStateReq())
        return state

    # -- what a subclass brings -----------------------------------------------------------------------------

    @abc.abstractmethod
    def _generate(self, body: dict[str, Any], timeout: float | None) -> Result: ...

    @abc.abstractmethod
    def _stream(self, body: dict[str, Any], timeout: float | None) -> Iterator[GenerateResult]: ...

    @abc.abstractmethod
    async def _async_generate(self, body: dict[str, Any], timeout: float | None) -> Result: ...

    @abc.abstractmethod
    def _async_stream(self, body: dict[str, Any], timeout: float | None) -> AsyncIterator[GenerateResult]: ...

    @abc.abstractmethod
    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        """End one request or all; their callers get what there is, with finish_reason.type "abort"."""

    @abc.abstractmethod
    def get_server_info(self) -> ServerInfo: ...

    @abc.abstractmethod
    def get_model_info(self) -> ModelInfo: ...

    @abc.abstractmethod
    def shutdown(self) -> None:
        """End every process of ours. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


def generate_body(
    prompt: str | list[str] | None,
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None,
    input_ids: list[int] | list[list[int]] | None,
    options: GenerateOptions,
) -> dict[str, Any]:
    """The `/generate` body of these arguments: unset ones are left out, arrays and tensors become lists."""
    check_names(options, GenerateOptions, "generate")
    _check_finite("sampling_params", sampling_params)
    fields = {"text": prompt, "sampling_params": sampling_params, "input_ids": input_ids, **options}
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

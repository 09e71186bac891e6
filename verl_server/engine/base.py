"""`EngineBase`: the interface that trainers and rollouts call. An engine runs in this process or behind HTTP.

Method and argument names are SGLang's. A subclass implements generation, `_control` for all control requests, and a few
getters. The methods for cache and pause are in this module, and those for weights and memory in `EngineWeights`.
"""

from __future__ import annotations

import abc
import math
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal, Self, Unpack, overload

from verl_server.engine.options import GenerateOptions, check_names
from verl_server.engine.weights import EngineWeights
from verl_server.errors import BadRequestError
from verl_server.messages.io_struct import (
    ContinueGenerationReq,
    FlushCacheReq,
    GetInternalStateReq,
    PauseGenerationReq,
    PauseMode,
)
from verl_server.messages.results import GenerateResult, InternalState, ModelInfo, SchedulerInfo, ServerInfo
from verl_server.server_args import ServerArgs
from verl_server.version_demand import EXACT_FIELD, MIN_FIELD
from verl_server.weight_version import label_of

Result = GenerateResult | list[GenerateResult]
"""One result, or a list for several prompts and for one prompt with `n` above 1."""


class EngineBase(EngineWeights):
    """One policy that generates text. Any thread may call the methods.

    At the end of a `with` block the engine shuts down.
    """

    server_args: ServerArgs
    """Settings of the server."""
    scheduler_info: SchedulerInfo
    """Report of rank 0's scheduler at its start."""
    url: str | None = None
    """Base URL of the server, or None if the engine does not serve HTTP."""
    admin_api_key: str | None = None
    """Key of the control routes at `url`. None if the routes need no key, or if the key is unknown."""

    # -- generation -----------------------------------------------------------------------------------------
    # The overloads: one prompt, several prompts, a stream. A call without a prompt matches the first two for a type
    # checker; it raises an error at run time.

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
        """Generate, and return one result for one prompt or a list of results for several prompts.

        With `stream` the call returns an iterator of results. Each result has the whole output so far or, with the
        server's setting `incremental_streaming_output`, only the new part of the output. One prompt with
        `sampling_params["n"]` above 1 also returns a list, although the declared type is one result. The keys of
        `sampling_params` are the fields of `SamplingParams`. Without `timeout` (seconds) the wait has no bound. After
        the timeout, the request is aborted and ControlTimeoutError is raised.
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
        """Do the same as `generate`, on any event loop. With `stream` the awaited call returns an async iterator."""
        body = generate_body(prompt, sampling_params, input_ids, options)
        if stream:
            return self._async_stream(body | {"stream": True}, timeout)
        return await self._async_generate(body, timeout)

    # -- cache, pause ---------------------------------------------------------------------------------------

    def flush_cache(self, timeout: float = 0.0) -> bool:
        """Empty the prefix cache. Wait up to `timeout` seconds for an idle engine; return False if it stays busy."""
        return self._control(FlushCacheReq(timeout=timeout)).success

    def pause_generation(self, mode: PauseMode = "abort") -> None:
        """Stop generation until `continue_generation`. `mode` is the treatment of running requests.

        With "abort", running requests return their partial output. With "retract", they continue later and compute
        their KV cache again. With "in_place", they continue later and keep their KV cache. With "wait", they finish
        before the pause begins.
        """
        self._ask(PauseGenerationReq(mode=mode))

    def continue_generation(self) -> None:
        """Continue generation after `pause_generation`."""
        self._ask(ContinueGenerationReq())

    def get_internal_state(self) -> InternalState:
        """Return the scheduler's load and memory figures."""
        state: InternalState = self._ask(GetInternalStateReq())
        return state

    # -- implemented by subclasses --------------------------------------------------------------------------

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
        """Abort the request `rid`, or all requests.

        Their callers get the partial output, with finish_reason.type "abort".
        """

    @abc.abstractmethod
    def close_session(self, session_id: str) -> None:
        """Declare that no request with this `session_id` follows, so that the prefix cache evicts its history first.

        An id that no request had is ignored. Call this method after the last reply of the session.
        """

    @abc.abstractmethod
    async def async_close_session(self, session_id: str) -> None:
        """Do the same as `close_session`, on any event loop."""

    @abc.abstractmethod
    def get_server_info(self) -> ServerInfo:
        """Return the server's settings, load and weight version."""

    @abc.abstractmethod
    def get_model_info(self) -> ModelInfo:
        """Return the answer of `/model_info`."""

    @abc.abstractmethod
    def shutdown(self) -> None:
        """End every process that this engine started, and close its connections. Later calls do nothing."""

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
    """Return the body of `/generate`. Arguments that are None or False are left out; arrays and tensors become lists.

    Raise BadRequestError for an unknown option and for NaN or infinity in `sampling_params`.
    """
    check_names(options, GenerateOptions, "generate")
    _check_finite("sampling_params", sampling_params)
    demands = {
        MIN_FIELD: label_of(options.get("min_weight_version")),
        EXACT_FIELD: label_of(options.get("exact_weight_version")),
    }
    fields = {"text": prompt, "sampling_params": sampling_params, "input_ids": input_ids, **options, **demands}
    return {key: _plain(value) for key, value in fields.items() if value is not None and value is not False}


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, list | tuple) and any(hasattr(v, "tolist") or isinstance(v, tuple) for v in value):
        return [_plain(v) for v in value]
    return list(value) if isinstance(value, tuple) else value


def _check_finite(path: str, value: Any) -> None:
    """Raise BadRequestError if `value` contains NaN or infinity.

    A JSON encoder would write null, which the server reads as the default.
    """
    if isinstance(value, float) and not math.isfinite(value):
        raise BadRequestError(f"{path} is {value}; it must be a finite number.")
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in entries:
        _check_finite(f"{path}.{key}", entry)

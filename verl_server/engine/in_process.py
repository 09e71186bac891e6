"""`Engine`: an engine in this Python process, without HTTP.

The model runs in scheduler processes. This process runs the TokenizerManager, whose event loop has a thread of its own.
All methods may be called from any thread. `HttpServerEngineAdapter` has the same methods over HTTP.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, TypeVar, cast

from verl_server.engine.base import EngineBase, Result
from verl_server.errors import BadRequestError, ControlTimeoutError, ServerUnavailableError
from verl_server.messages.io_struct import ControlReply, ControlReq
from verl_server.messages.results import GenerateResult, ModelInfo, ServerInfo
from verl_server.server.generate_request import GenerateReqInput
from verl_server.server.launch import EngineProcesses, wait_for_followers
from verl_server.server_args import ServerArgs

if TYPE_CHECKING:
    from verl_server.server.tokenizer_manager import TokenizerManager

T = TypeVar("T")


class Engine(EngineBase):
    """`Engine(model_path=..., **settings)` or `Engine(server_args=...)`. It is ready when the constructor returns.

    With `nnodes > 1`, all nodes but the first run scheduler ranks only: on those nodes every call except `wait` and
    `shutdown` raises ServerUnavailableError.
    """

    def __init__(self, *, server_args: ServerArgs | None = None, **kwargs: Any) -> None:
        if server_args is not None and kwargs:
            raise BadRequestError(f"Give server_args or keyword arguments, not both (also got {list(kwargs)}).")
        super().__init__()
        self._processes = EngineProcesses(server_args or ServerArgs.from_kwargs(**kwargs))
        self.server_args = self._processes.server_args
        # This slow import runs while the scheduler processes start.
        from verl_server.server.dialects.sglang.info_routes import InfoApi

        # The finalizer runs at shutdown(), when the engine is garbage-collected, or at interpreter exit.
        self._finalizer = weakref.finalize(self, self._processes.shutdown)
        try:
            self.scheduler_info = self._processes.wait_ready()
            if self._processes.manager is not None:
                self._manager_or_none: TokenizerManager | None = self._processes.manager
                self._info = InfoApi(self._processes.manager)
            else:
                self._manager_or_none = None
        except BaseException:
            self.shutdown()
            raise

    @property
    def tokenizer_manager(self) -> TokenizerManager:
        """The TokenizerManager of this engine. `launch_server_from_verl_engine` starts an HTTP server that uses it."""
        if self._manager_or_none is None:
            raise ServerUnavailableError(
                f"This is node {self.server_args.node_rank} of {self.server_args.nnodes}: it only runs scheduler "
                "ranks. Call the engine of node 0."
            )
        return self._manager_or_none

    # -- generation -----------------------------------------------------------------------------------------

    def _generate(self, body: dict[str, Any], timeout: float | None) -> Result:
        return self.tokenizer_manager.run_sync(self._result(GenerateReqInput.parse(body), timeout))

    async def _async_generate(self, body: dict[str, Any], timeout: float | None) -> Result:
        return await self.tokenizer_manager.run_async(self._result(GenerateReqInput.parse(body), timeout))

    async def _result(self, obj: GenerateReqInput, timeout: float | None) -> Result:
        generation = await self.tokenizer_manager.submit(obj)
        try:
            return cast(Result, await _bounded(generation.result(), timeout))
        finally:
            generation.close()

    def _stream(self, body: dict[str, Any], timeout: float | None) -> Iterator[GenerateResult]:
        manager = self.tokenizer_manager
        frames = manager.generate_request(GenerateReqInput.parse(body))
        try:
            while (frame := manager.run_sync(_next(frames, timeout))) is not None:
                yield frame
        finally:
            manager.run_sync(_close(frames))

    async def _async_stream(self, body: dict[str, Any], timeout: float | None) -> AsyncIterator[GenerateResult]:
        manager = self.tokenizer_manager
        frames = manager.generate_request(GenerateReqInput.parse(body))
        try:
            while (frame := await manager.run_async(_next(frames, timeout))) is not None:
                yield frame
        finally:
            await manager.run_async(_close(frames))

    # -- control and info -----------------------------------------------------------------------------------

    def _control(self, req: ControlReq) -> ControlReply:
        return self.tokenizer_manager.run_sync(self.tokenizer_manager.control(req))

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        async def abort() -> None:
            self.tokenizer_manager.abort_request(rid, abort_all)

        self.tokenizer_manager.run_sync(abort(), timeout=30)

    def close_session(self, session_id: str) -> None:
        self.tokenizer_manager.run_sync(self._close_session(session_id), timeout=30)

    async def async_close_session(self, session_id: str) -> None:
        await self.tokenizer_manager.run_async(self._close_session(session_id))

    async def _close_session(self, session_id: str) -> None:
        self.tokenizer_manager.finish_hint(session_id)

    def get_server_info(self) -> ServerInfo:
        manager = self.tokenizer_manager
        return cast(ServerInfo, manager.run_sync(self._info.server_info_dict(), timeout=30))

    def get_model_info(self) -> ModelInfo:
        from verl_server.server.dialects.sglang.info_routes import model_info

        return cast(ModelInfo, model_info(self.tokenizer_manager))

    def wait(self) -> None:
        """Block until the scheduler ranks of this node end. Call it on all nodes except the first."""
        wait_for_followers(self._processes)

    def shutdown(self) -> None:
        self._finalizer()
        self._end_pushes()


async def _bounded(work: Coroutine[Any, Any, T], timeout: float | None) -> T:
    try:
        return await asyncio.wait_for(work, timeout)
    except TimeoutError:
        raise ControlTimeoutError(f"The generation did not end within {timeout} s; it was aborted.") from None


async def _next(frames: AsyncIterator[Any], timeout: float | None) -> Any:
    async def step() -> Any:
        return await anext(frames, None)

    return await _bounded(step(), timeout)


async def _close(frames: Any) -> None:
    await frames.aclose()

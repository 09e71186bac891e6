"""`VllmDriver`: an `EngineDriver` that runs vLLM's `AsyncLLM` token in, token out.

`AsyncLLM` belongs to an event loop, which runs in a thread of this driver. vLLM puts the outputs of one step into their
requests' collectors in one turn of that loop, and `_Steps` gathers them to one `Step`.
vLLM's processes are children of this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from verl_server.backends.process.driver import EngineInfo, NewTokens, Step
from verl_server.backends.vllm.sampling import new_tokens, refusal, sampling_params
from verl_server.backends.vllm.settings import engine_settings, set_environment
from verl_server.backends.vllm.versions import check_installed
from verl_server.errors import ControlTimeoutError, ServerDiedError
from verl_server.io_struct import FinishReason, TokenizedGenerateReq
from verl_server.server_args import ServerArgs

T = TypeVar("T")


class VllmDriver:
    def __init__(self, server_args: ServerArgs, ring: Callable[[], None]) -> None:
        """Start vLLM, and wait until it is ready. `ring` is called on another thread when `take` has something new."""
        name = check_installed(server_args.allow_untested_engine)
        set_environment(server_args)
        from vllm.platforms import current_platform  # type: ignore[import-not-found]

        settings = engine_settings(server_args, on_gpu=current_platform.is_cuda())
        self._steps = _Steps(ring)
        self._inner: dict[str, str] = {}
        """Our request id -> vLLM's, which has a random suffix. Used on the loop only."""
        self._order = asyncio.Lock()
        """Its waiters take it in order, so that a request is added before it is aborted."""
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True).start()
        self._engine: Any = None
        self._engine = self._run(_start(settings), server_args.startup_timeout)
        self.info = _info(name, self._engine)
        self.call("verl_start", server_args.to_json().encode(), server_args.startup_timeout)

    def refusal(self, req: TokenizedGenerateReq) -> str | None:
        if len(req.input_ids) + (req.sampling.max_new_tokens or 0) > self.info.context_length:
            return (
                f"Prompt ({len(req.input_ids)} tokens) and max_new_tokens ({req.sampling.max_new_tokens}) exceed the "
                f"context length of {self.info.context_length} tokens."
            )
        return refusal(req)

    def submit(self, req: TokenizedGenerateReq, seed: int, cache_key: str) -> None:
        asyncio.run_coroutine_threadsafe(self._submit(req, seed, cache_key), self._loop)

    def abort(self, rids: list[str]) -> None:
        asyncio.run_coroutine_threadsafe(self._abort(rids), self._loop)

    def take(self) -> list[Step]:
        return self._steps.take()

    def hold(self, timeout: float) -> None:
        self._run(self._hold(), timeout)

    def resume(self) -> None:
        asyncio.run_coroutine_threadsafe(self._engine.engine_core.resume_scheduler_async(), self._loop)

    def retract(self, timeout: float) -> None:
        self._run(self._engine.reset_prefix_cache(reset_running_requests=True), timeout)

    def call(self, method: str, argument: bytes, timeout: float) -> list[bytes]:
        return list(self._run(self._engine.collective_rpc(method, args=(argument,)), timeout))

    def close(self) -> None:
        if self._loop.is_running():
            with contextlib.suppress(Exception):  # it may have died, which is why it is closed
                self._engine.shutdown()
            self._loop.call_soon_threadsafe(self._loop.stop)

    # -- on the loop ---------------------------------------------------------------------------------------------

    async def _submit(self, req: TokenizedGenerateReq, seed: int, cache_key: str) -> None:
        async with self._order:
            engine = self._engine
            try:
                prompt = {"type": "token", "prompt_token_ids": req.input_ids, "cache_salt": cache_key}
                tasks = await engine.get_supported_tasks()
                inner = engine.input_processor.process_inputs(
                    req.rid, prompt, sampling_params(req, seed), tasks, priority=-req.priority
                )
                engine.input_processor.assign_request_id(inner)
                self._inner[req.rid] = inner.request_id
                engine.output_processor.add_request(inner, None, None, 0, _Collector(req, self._on_output))
                await engine.engine_core.add_request_async(inner)
            except Exception as error:
                self._inner.pop(req.rid, None)
                if engine.errored:
                    self._steps.fail(error)
                else:  # vLLM refuses this request only
                    reason = FinishReason(type="abort", message=f"vLLM refused it: {error}", status_code=400)
                    self._steps.add(NewTokens(req.rid, [], [], reason))

    def _on_output(self, req: TokenizedGenerateReq, output: Any) -> None:
        """Add the output of one request to the open step, unless the request was aborted."""
        if isinstance(output, Exception):
            self._steps.fail(output)
        elif req.rid in self._inner:
            if output.finished:
                del self._inner[req.rid]
            self._steps.add(new_tokens(req, output))

    async def _abort(self, rids: list[str]) -> None:
        async with self._order:  # after the requests were added
            inner = [self._inner.pop(rid) for rid in rids if rid in self._inner]
            if inner:
                await self._engine.abort(inner, internal=True)

    async def _hold(self) -> None:
        # `AsyncLLM.pause_generation` would sleep for 20 ms after this call.
        core = self._engine.engine_core
        await core.pause_scheduler_async(mode="keep", clear_cache=False)
        while not core.outputs_queue.empty():  # they were sent before the answer, and are processed after it
            await asyncio.sleep(0)
        self._steps.end()

    # -- on the backend's thread ---------------------------------------------------------------------------------

    def _run(self, call: Coroutine[Any, Any, T], timeout: float) -> T:
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        try:
            return future.result(timeout)
        except TimeoutError:
            future.cancel()
            raise ControlTimeoutError(f"vLLM did not answer within {timeout:g} s.") from None
        except Exception as error:
            if self._engine is not None and self._engine.errored:
                raise ServerDiedError(f"vLLM died during a call: {error}") from error
            raise


class _Collector:
    """Stands in the place of vLLM's `RequestOutputCollector`: passes each output on at once, without a task."""

    def __init__(self, req: TokenizedGenerateReq, put: Callable[[TokenizedGenerateReq, Any], None]) -> None:
        self._req, self._put = req, put

    def put(self, output: Any) -> None:
        self._put(self._req, output)


class _Steps:
    """Gathers the outputs that arrive in one turn of the loop to a `Step`."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._open: Step = []
        self._done: deque[Step] = deque()
        self._error: Exception | None = None

    def add(self, new: NewTokens) -> None:
        """Add the output of one request. Called on the loop."""
        if not self._open:
            asyncio.get_running_loop().call_soon(self.end)
        self._open.append(new)

    def fail(self, error: Exception) -> None:
        """Make `take` raise. Called on the loop."""
        self._error = self._error or error
        self._ring()

    def take(self) -> list[Step]:
        """Return the steps since the last call. Raise ServerDiedError after `fail`."""
        if self._error is not None:
            raise ServerDiedError(f"vLLM failed: {type(self._error).__name__}: {self._error}") from self._error
        steps: list[Step] = []
        while self._done:
            steps.append(self._done.popleft())
        return steps

    def end(self) -> None:
        """Make the open step available to `take`, if there is one. Called on the loop."""
        if self._open:
            step, self._open = self._open, []
            self._done.append(step)
            self._ring()


async def _start(settings: dict[str, Any]) -> Any:
    from vllm import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    # It decides vLLM's default for the tokens of a step: 16,384 instead of 2,048 on an H200, as in its `LLM`.
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**settings), usage_context=UsageContext.LLM_CLASS)


def _info(name: str, engine: Any) -> EngineInfo:
    config = engine.vllm_config
    cache, model = config.cache_config, config.model_config
    return EngineInfo(
        name=name,
        device=str(config.device_config.device_type),
        dtype=str(model.dtype).removeprefix("torch."),
        context_length=model.max_model_len,
        vocab_size=model.get_vocab_size(),
        kv_cache_tokens=(cache.num_gpu_blocks or 0) * cache.block_size,
        page_size=cache.block_size,
        max_running_requests=config.scheduler_config.max_num_seqs,
        prefill_chunk=config.scheduler_config.max_num_batched_tokens,
    )

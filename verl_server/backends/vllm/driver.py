"""`VllmDriver`: an `EngineDriver` that runs vLLM's `AsyncLLM` token in, token out.

`AsyncLLM` belongs to an event loop, which runs in a thread of this driver. vLLM puts the outputs of one step into their
requests' collectors in one turn of that loop, and `_Steps` gathers them to one `Step`.
vLLM's processes are children of this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from verl_server.backends.process.driver import EngineInfo, NewTokens, Step
from verl_server.backends.vllm.plugin import ENDS_WITH_PARENT
from verl_server.backends.vllm.sampling import new_tokens, refusal, sampling_params
from verl_server.backends.vllm.versions import check_installed
from verl_server.errors import BadRequestError, ControlTimeoutError, ServerDiedError
from verl_server.io_struct import FinishReason, TokenizedGenerateReq
from verl_server.model_folder import resolve_model_folder
from verl_server.server_args import ServerArgs

T = TypeVar("T")


class VllmDriver:
    def __init__(self, server_args: ServerArgs, ring: Callable[[], None]) -> None:
        """Start vLLM, and wait until it is ready. `ring` is called on another thread when `take` has something new."""
        name = check_installed(server_args.allow_untested_engine)
        settings = engine_settings(server_args)
        _set_environment(server_args)
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


_REFUSED = {
    "worker_cls": "the weight channel extends vLLM's own worker",
    "scheduler_cls": "pauses and version borders rely on vLLM's own scheduler",
    "enable_eplb": "it moves experts, so that pushed weights would go to the wrong ones",
}
"""Argument of `AsyncEngineArgs` -> why nobody may set it."""


def check_engine_args(engine_args: dict[str, Any], ours: set[str]) -> None:
    """Raise BadRequestError if `engine_args` has a name that is in `ours` or would break a promise of the server."""
    taken = sorted(ours & set(engine_args))
    if taken:
        raise BadRequestError(f"engine_args must not have {', '.join(taken)}: verl-server sets them itself.")
    for name in sorted(_REFUSED.keys() & set(engine_args)):
        raise BadRequestError(f"engine_args must not have {name}: {_REFUSED[name]}. Remove it.")


def engine_settings(server_args: ServerArgs) -> dict[str, Any]:
    """Return the arguments of vLLM's `AsyncEngineArgs`. Raise BadRequestError for `engine_args` that are set here."""
    folder = resolve_model_folder(server_args.model_path, server_args.revision)
    ours: dict[str, Any] = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "dtype": _dtype_of(folder) if server_args.dtype == "auto" else server_args.dtype,
        "load_format": server_args.load_format,
        "max_model_len": server_args.context_length,
        "tensor_parallel_size": server_args.tp_size,
        "max_num_seqs": server_args.max_running_requests,
        "enable_prefix_caching": not server_args.disable_radix_cache,
        "gpu_memory_utilization": server_args.mem_fraction_static,
        "trust_remote_code": server_args.trust_remote_code,
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": -1,
        "scheduling_policy": "priority",
        "disable_log_stats": True,
        "worker_extension_cls": "verl_server.backends.vllm.worker_extension.WorkerExtension",
    }
    if server_args.chunked_prefill_size is not None:
        ours["max_num_batched_tokens"] = server_args.chunked_prefill_size
    check_engine_args(server_args.engine_args, set(ours) | {"max_num_batched_tokens"})
    return ours | server_args.engine_args


def _dtype_of(folder: Path) -> str:
    """Return the dtype of a checkpoint, as the embedded engine understands "auto". vLLM would round float32."""
    config = json.loads((folder / "config.json").read_bytes())
    for part in (config, config.get("text_config") or {}):
        if name := part.get("dtype") or part.get("torch_dtype"):
            return str(name).removeprefix("torch.")
    return "auto"


def _set_environment(server_args: ServerArgs) -> None:
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ[ENDS_WITH_PARENT] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", server_args.log_level.upper())
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(max(1, round(server_args.kv_cache_gib))))
    if server_args.gpu_uuids:
        names = [uuid if uuid.startswith("GPU-") else f"GPU-{uuid}" for uuid in server_args.gpu_uuids]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names)
    elif server_args.base_gpu_id:
        last = server_args.base_gpu_id + server_args.tp_size
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(server_args.base_gpu_id, last)))
    # All outputs of a step are one turn of the loop, so that they become one message.
    os.environ["VLLM_V1_OUTPUT_PROC_CHUNK_SIZE"] = str(1 << 30)


async def _start(settings: dict[str, Any]) -> Any:
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(AsyncEngineArgs(**settings))


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

"""`ServerActor`: the Ray actor that owns the server of one replica.

`VerlServerReplica` starts one on the node of the replica's GPUs. verl's clients call `generate`, verl's replica calls
the control methods, and the `ServerAdapter` of a trainer rank calls `release_memory`, `resume_memory` and
`set_version`. The server is a subprocess; it ends when the actor's process ends.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
from typing import Any

import ray
from verl.utils.fs import copy_to_local
from verl.utils.profiler.config import relocate_rollout_traces, rollout_trace_dir
from verl.workers.rollout.replica import TokenOutput

from verl_server.engine.http import HttpServerEngineAdapter
from verl_server.errors import BadRequestError, ControlTimeoutError, ServerDiedError, ServerUnavailableError
from verl_server.integrations.verl.generation import (
    check_text_only,
    generate_request,
    output_fields,
    rejected_fields,
)
from verl_server.integrations.verl.gpus import share_of_free_memory
from verl_server.integrations.verl.settings import ServingOptions
from verl_server.integrations.verl.step_labels import step_of
from verl_server.server_args import ServerArgs

logger = logging.getLogger(__name__)

_WATCH_PERIOD = 1.0
"""Seconds between two checks of the server's process."""
_DEATH_DELAY = 30.0
"""Seconds until a request to a server that has ended is answered with the error. verl's balancer prefers the replica
with the fewest requests in progress: with immediate errors it would send every prompt there."""
_ABORT_PERIOD = 0.1
"""Seconds between two aborts while requests that were sent before the abort may still arrive at the server."""


def actor_name(replica_rank: int, node_rank: int = 0, suffix: str = "") -> str:
    """Return the Ray name of a replica's actor, unique within the namespace of a job."""
    return f"verl_server_server_{replica_rank}_{node_rank}{suffix}"


class ServerActor:
    """One server of this package, behind the methods that verl calls on a rollout server.

    An asynchronous Ray actor: all methods run on one event loop, and blocking calls to the server run in threads. After
    the server has ended, every method raises ServerDiedError with the end of the server's log.
    """

    def __init__(self, settings: dict[str, Any], options: ServingOptions | None = None, profiler: Any = None) -> None:
        """Take `settings`, keywords of `ServerArgs`. `profiler` is verl's `DistProfiler` of this replica, or None."""
        self._settings = settings
        self._options = options or ServingOptions()
        self._profiler = profiler
        self._server: HttpServerEngineAdapter | None = None
        self._watch: asyncio.Task[str] | None = None
        self._memory_lock = asyncio.Lock()
        self._released: set[str] = set()
        """Tags of the released memory. verl releases and resumes twice in a row; the server refuses that."""
        self._global_steps: int | None = None
        self._rejecting = False
        """True while new requests are answered at once, without being sent."""
        self._num_sent = 0
        """Number of requests that were sent, or are about to be sent, and have no answer yet."""
        self._has_weights = settings.get("load_format") != "dummy"
        self._numbers = itertools.count()
        self._warned_of_edited = False

    # -- start and end --------------------------------------------------------------------------------------

    async def launch(self) -> None:
        """Start the server on this node, and return when it is ready. Raise ServerLaunchError with its log."""
        host = ray.util.get_node_ip_address().strip("[]")
        network = {"host": host, "port": 0, "allow_unauthenticated": True}
        # The replica makes Ray keep the node's own value, which may be a part of the host's GPUs. The server finds its
        # GPUs by UUID, and opens the memory of trainer ranks on the others.
        if self._settings.get("gpu_uuids") and os.environ.get("CUDA_VISIBLE_DEVICES") == "":
            raise BadRequestError(
                f"CUDA_VISIBLE_DEVICES is empty in the server's actor on {host}, so the server would see no GPU. Start "
                "Ray on this node with the GPUs of trainer and rollout visible."
            )
        self._server = await asyncio.to_thread(self._start, self._settings | network)
        self._watch = asyncio.create_task(self._report_death(self._server))

    def _start(self, settings: dict[str, Any]) -> HttpServerEngineAdapter:
        """Launch the server. A model folder on a remote file system is copied to this node first."""
        use_shm = self._options.use_shm
        paths = {name: settings[name] for name in ("model_path", "tokenizer_path") if settings.get(name)}
        local: dict[str, Any] = {name: copy_to_local(path, use_shm=use_shm) for name, path in paths.items()}
        utilization, gpu_uuids = self._options.gpu_memory_utilization, settings.get("gpu_uuids")
        if gpu_uuids and utilization is not None and "mem_fraction_static" not in settings:
            local["mem_fraction_static"] = share_of_free_memory(gpu_uuids, utilization)
        if os.environ.get("OMP_NUM_THREADS") == "1":
            del os.environ["OMP_NUM_THREADS"]  # Ray sets it in an actor that reserves no CPU; the server uses threads
        return HttpServerEngineAdapter(server_args=ServerArgs.from_kwargs(**(settings | local)))

    async def _report_death(self, server: HttpServerEngineAdapter) -> str:
        """Log the end of the server when it ends, even if no caller calls the server. Return the logged text."""
        while (report := server.exit_report()) is None:
            await asyncio.sleep(_WATCH_PERIOD)
        logger.error("%s", report)
        return report

    async def wait_dead(self) -> str:
        """Wait until the server has ended. Return how it ended, with the end of its log."""
        self._running()
        assert self._watch is not None
        return await asyncio.shield(self._watch)

    def _running(self) -> HttpServerEngineAdapter:
        """Return the server. Raise ServerDiedError if it has ended, ServerUnavailableError before `launch`."""
        if self._server is None:
            raise ServerUnavailableError("The server was not launched.")
        if (report := self._server.exit_report()) is not None:
            raise ServerDiedError(report)
        return self._server

    async def get_server_address(self) -> str:
        """Return "host:port" of the server; an IPv6 address is in brackets."""
        return self._running().server_args.url.removeprefix("http://")

    async def get_connection(self) -> tuple[str, str | None]:
        """Return the server's URL and its admin key."""
        server = self._running()
        return server.server_args.url, server.admin_api_key

    # -- generation -----------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: list[Any] | None = None,
        video_data: list[Any] | None = None,
        **kwargs: Any,
    ) -> TokenOutput:
        """Generate for one prompt. The caller receives partial output with `stop_reason` "aborted" after an abort.

        While generation is paused or an update is in progress, the request waits, without a bound. Raise
        BadRequestError for what the server does not support, ServerUnavailableError while it has no weights, and
        ServerDiedError, after a delay, if the server had ended before the call.
        """
        try:
            server = self._running()
        except ServerDiedError:
            await asyncio.sleep(_DEATH_DELAY)
            raise
        check_text_only({"image_data": image_data, "video_data": video_data, **kwargs})
        context_length = server.scheduler_info["context_length"]
        request = generate_request(list(prompt_ids), sampling_params, request_id, context_length, self._options)
        if not self._has_weights:
            await self._check_weights(server)
        if self._rejecting:
            return TokenOutput(**rejected_fields(self._global_steps))
        self._num_sent += 1
        try:
            # The number keeps apart two requests with one id: `full_determinism` repeats the id in each turn.
            result = await server.async_generate(rid=f"{request_id}-{next(self._numbers)}", **request)
        finally:
            self._num_sent -= 1
        output = output_fields(result, request)
        self._warn_of_edited(output["extra_fields"])
        return TokenOutput(**output)

    def _warn_of_edited(self, found: dict[str, Any]) -> None:
        """Log once that verl trains on log-probabilities of a distribution that its actor does not compute."""
        if self._warned_of_edited or found.get("policy_logprobs") not in ("given", "unknown"):
            return
        self._warned_of_edited = True
        logger.warning(
            "A request had penalties, a bias or a mask (forced tools, a grammar), so `log_probs` are not those that "
            "verl's actor computes: ratios and corrections of the rollout are wrong for its tokens. The actor's values "
            "are in the output's extra_fields (output_token_policy_logprobs); verl does not read them. Sample without "
            "these settings to train with verl."
        )

    async def _check_weights(self, server: HttpServerEngineAdapter) -> None:
        """Raise ServerUnavailableError unless an update has replaced the random weights of load_format=dummy."""
        info = await asyncio.to_thread(server.get_server_info)
        if not info["weights_confirmed"]:
            raise ServerUnavailableError(
                "The server has random weights, because rollout.load_format=dummy and no update has succeeded yet. "
                "Push weights before the first rollout, or set rollout.load_format=auto."
            )
        self._has_weights = True

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """End all requests with their partial output, and pause generation until `resume_generation`.

        Requests that arrive during the pause wait on the server. With `reject_request` they are answered at once with
        `stop_reason` "aborted" and no tokens, and no request waits on the server when this method returns. Raise
        ControlTimeoutError if that takes longer than `control_timeout`.
        """
        server = self._running()
        self._rejecting = reject_request
        await asyncio.to_thread(server.pause_generation, "abort")
        # Requests and the pause use different connections. A request that was sent before the pause may arrive after
        # it, and would wait for a resume that may never come. No request is sent meanwhile, so `_num_sent` falls to 0.
        deadline = time.monotonic() + server.server_args.control_timeout
        while self._rejecting and self._num_sent:
            if time.monotonic() > deadline:
                raise ControlTimeoutError(f"{self._num_sent} requests did not end after they were aborted.")
            await asyncio.sleep(_ABORT_PERIOD)
            await asyncio.to_thread(self._running().pause_generation, "abort")

    async def resume_generation(self) -> None:
        """Continue generation after `abort_all_requests`."""
        self._rejecting = False
        await asyncio.to_thread(self._running().continue_generation)

    # -- weights --------------------------------------------------------------------------------------------

    async def set_version(self, label: str) -> None:
        """Record the trainer's label of the served weights (`StepLabels`), and set it if the push did not."""
        server = self._running()
        info = await asyncio.to_thread(server.get_model_info)
        if info["weight_version"] != label:
            await asyncio.to_thread(server.update_weight_version, label, False)
        self._global_steps = step_of(label)

    # -- memory ---------------------------------------------------------------------------------------------

    async def release_memory(self, tags: list[str]) -> None:
        """Release the memory in `tags` ("weights", "kv_cache") that is not released already.

        The call waits for running requests, at most `control_timeout` seconds, and then raises BadRequestError.
        """
        async with self._memory_lock:
            server = self._running()
            wanted = [tag for tag in tags if tag not in self._released]
            if not wanted:
                return
            timeout = server.server_args.control_timeout
            if not await asyncio.to_thread(server.flush_cache, timeout):
                raise BadRequestError(
                    f"The memory of the server was not released: requests still ran after {timeout:g} s. Wait for the "
                    "rollouts before sleep, or call abort_all_requests first."
                )
            await asyncio.to_thread(server.release_memory_occupation, wanted)
            self._released.update(wanted)

    async def resume_memory(self, tags: list[str]) -> None:
        """Allocate the memory in `tags` that is released. Resumed weights have no contents until the next push."""
        async with self._memory_lock:
            server = self._running()
            wanted = [tag for tag in tags if tag in self._released]
            if wanted:
                await asyncio.to_thread(server.resume_memory_occupation, wanted)
                self._released.difference_update(wanted)

    async def sleep(self) -> None:
        """Release the KV cache and, unless the server is standalone, the weights.

        Nobody else uses the GPUs of a standalone server. Without `free_cache_engine`, release nothing.
        """
        self._running()
        if self._options.free_cache_engine:
            is_alone = self._options.mode == "standalone"
            await self.release_memory(["kv_cache"] if is_alone else ["kv_cache", "weights"])

    async def wake_up(self) -> None:
        """Resume the memory that `sleep` released.

        Raise BadRequestError for a hybrid server, which an update resumes.
        """
        if self._options.mode == "hybrid":
            raise BadRequestError(
                "wake_up is not supported by a hybrid replica: its weights have no contents after sleep, and the "
                "trainer's update_weights wakes it."
            )
        await self.resume_memory(["weights", "kv_cache"])

    async def clear_kv_cache(self) -> None:
        """Empty the prefix cache. An update of the weights does that by itself."""
        server = self._running()
        timeout = server.server_args.control_timeout
        if "kv_cache" not in self._released and not await asyncio.to_thread(server.flush_cache, timeout):
            raise BadRequestError(f"The prefix cache was not emptied: requests still ran after {timeout:g} s.")

    async def release_kv_cache(self) -> None:
        """Release the memory of the KV cache."""
        self._running()
        if self._options.free_cache_engine:
            await self.release_memory(["kv_cache"])

    async def resume_kv_cache(self) -> None:
        """Allocate the memory of the KV cache again."""
        await self.resume_memory(["kv_cache"])

    # -- profiler -------------------------------------------------------------------------------------------

    def _is_profiled(self) -> bool:
        profiler = self._profiler
        return bool(
            profiler is not None
            and profiler.check_enable()
            and profiler.check_this_rank()
            and profiler.is_discrete_mode()
        )

    async def start_profile(self, **kwargs: Any) -> None:
        """Record the server's steps if verl's profiler settings choose this replica. `kwargs` are for other ranks."""
        server = self._running()
        if self._is_profiled():
            contents = self._profiler.tool_config.contents
            folder = rollout_trace_dir(self._profiler.config, self._profiler.rank)
            options = {"with_stack": "stack" in contents or "module" in contents, "record_shapes": "shapes" in contents}
            await asyncio.to_thread(server.start_profile, folder, **options)

    async def stop_profile(self) -> None:
        """Write the trace, and move it to verl's folder of traces if verl's settings require it."""
        server = self._running()
        if self._is_profiled():
            await asyncio.to_thread(server.stop_profile)
            relocate_rollout_traces(self._profiler.config, self._profiler.rank)

"""`VerlServerReplica`: verl's replica of this server. It places one `ServerActor` beside the replica's workers.

verl's `LLMServerManager` makes a replica for each group of `tensor_model_parallel_size` GPUs, in the trainer's driver.
The base class of verl implements the control methods; they call the methods of the actor.
"""

from __future__ import annotations

import _thread
import asyncio
import logging
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.plugin.platform import get_platform
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.profiler.profile import build_rollout_dist_profiler
from verl.workers.rollout.replica import RolloutMode, RolloutReplica

from verl_server.errors import BadRequestError
from verl_server.integrations.verl.checkpoint_engine import RolloutServer, announce_server
from verl_server.integrations.verl.gpus import uuid_of
from verl_server.integrations.verl.server_actor import ServerActor, actor_name
from verl_server.integrations.verl.settings import (
    check_supported,
    log_without_effect,
    server_settings,
    serving_options,
)
from verl_server.server_args import ServerArgs

logger = logging.getLogger(__name__)

_MOST_CALLS = 100_000
"""The most calls that an actor runs at the same time. A control call must never wait for paused generate calls."""


class WorkerPlace(NamedTuple):
    """Node and GPU of one of the replica's workers."""

    node_id: str
    """Ray's id of the node."""
    gpu_uuid: str
    """UUID of the worker's GPU; "" on the CPU."""


def _place(_: Any) -> WorkerPlace:
    """Return the node and the GPU of the worker in which this function runs."""
    context, platform, uuid = ray.get_runtime_context(), get_platform(), ""
    if platform.device_name == "cuda":
        uuid = uuid_of(context.get_accelerator_ids()[platform.ray_resource_name()][0])
    return WorkerPlace(context.get_node_id(), uuid)


class VerlServerReplica(RolloutReplica):
    """One server of this package, on the GPUs of `tensor_model_parallel_size` workers of one node."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take the arguments of verl's base class. Raise BadRequestError for settings that are not supported."""
        super().__init__(*args, **kwargs)
        check_supported(self.config, self.model_config)
        log_without_effect(self.config)
        if self.nnodes > 1:
            raise BadRequestError(
                f"rollout.tensor_model_parallel_size={self.world_size} needs {self.nnodes} nodes of "
                f"{self.gpus_per_node} GPUs, but a replica of rollout.name=verl_server runs on one node: use at most "
                f"{self.gpus_per_node}."
            )

    @property
    def max_concurrency(self) -> int:
        """Most calls that the actor runs at once."""
        return max(_MOST_CALLS, int(super().max_concurrency))

    async def launch_servers(self) -> None:
        """Start the actor and its server on the node of the workers, and return when the server is ready.

        If the start fails, the actor is ended before the error is raised.
        """
        places = await asyncio.gather(*(worker.__ray_call__.remote(_place) for worker in self.workers))
        nodes = [place.node_id for place in places]
        if len(set(nodes)) != 1 or len(places) != self.world_size:
            raise BadRequestError(
                f"Replica {self.replica_rank} needs {self.world_size} workers on one node, but its {len(places)} "
                f"workers are on these nodes, in the order of the ranks: {nodes}. Let the number of GPUs of each node, "
                "rollout.n_gpus_per_node, be a multiple of rollout.tensor_model_parallel_size."
            )
        server = self._create_actor(places[0].node_id, tuple(place.gpu_uuid for place in places if place.gpu_uuid))
        try:
            await server.launch.remote()
            address = await server.get_server_address.remote()
            if self.rollout_mode == RolloutMode.STANDALONE:
                await self._announce(server)
        except BaseException:
            ray.kill(server)
            raise
        self.servers = [server]
        self._server_handle, self._server_address = server, address
        is_task = ray.get_runtime_context().get_actor_id() is not None
        server.wait_dead.remote().future().add_done_callback(partial(self._end_job, is_task))

    def _end_job(self, is_task: bool, death: Future[str]) -> None:
        """Log the death of the server or of its actor, and end verl's training task if it runs in this process.

        verl's asynchronous trainers only count failed rollouts and start others, so nothing else would end the job.
        Called in a thread of Ray. `is_task` is True if this process runs the training task.
        """
        # `ray.shutdown` ends the actor too. It waits for this thread, and most calls of Ray here would wait for it.
        if not ray.is_initialized():
            return
        report = death.exception() or death.result()
        logger.error("The job ends, because the server of replica %d has died. %s", self.replica_rank, report)
        if is_task:
            _thread.interrupt_main()  # as ray.cancel does: the task's `finally` blocks run

    async def _announce(self, server: Any) -> None:
        """Store the server in the workers, whose checkpoint engines report it to the trainer."""
        url, admin_api_key = await server.get_connection.remote()
        announced = RolloutServer(self.replica_rank, url, admin_api_key)
        await asyncio.gather(*(worker.__ray_call__.remote(announce_server, announced) for worker in self.workers))

    def _create_actor(self, node_id: str, gpu_uuids: tuple[str, ...]) -> Any:
        mode, platform = self.rollout_mode.value, get_platform()
        trained = not (self.is_reward_model or self.is_teacher_model)
        settings = server_settings(self.config, self.model_config, mode, self.replica_rank, gpu_uuids, trained=trained)
        profiler = self._profiler()
        if profiler is not None and profiler.check_enable():
            settings.setdefault("profile_folder", profiler.config.save_path)
        ServerArgs.from_kwargs(**settings)  # raises here, where the user reads it, for a setting that cannot work
        role = "_reward" if self.is_reward_model else "_teacher" if self.is_teacher_model else ""
        environment = {**{name: "1" for name in platform.ray_noset_envvars()}, **platform.rollout_env_vars()}
        return (
            ray.remote(ServerActor)
            .options(
                num_cpus=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node_id, soft=False),
                runtime_env={"env_vars": environment},
                name=actor_name(self.replica_rank, suffix=role + self.name_suffix),
                max_concurrency=self.max_concurrency,
            )
            .remote(settings, serving_options(self.config, self.model_config, mode), profiler)
        )

    def _profiler(self) -> Any:
        """Return verl's profiler of this replica, or None if another tool than torch's profiler is configured."""
        config = self.config.profiler
        if config is None or config.tool != "torch":
            return None
        tool_config = omega_conf_to_dataclass((config.tool_config or {}).get("torch"))
        return build_rollout_dist_profiler(self.replica_rank, self.world_size, config=config, tool_config=tool_config)

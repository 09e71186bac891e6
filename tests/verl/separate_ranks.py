"""Workers of the tests of separate GPUs: trainer ranks with a sharded model, and rollout workers without a GPU.

They have the methods that verl's `CheckpointEngineManager` calls on the workers of a real job.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig
from verl.checkpoint_engine import CheckpointEngineRegistry, CheckpointEngineWorker
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.workers.config import CheckpointEngineConfig, HFModelConfig, RolloutConfig
from verl.workers.rollout import BaseRollout

from verl_server.engine.http import HttpServerEngineAdapter
from verl_server.integrations.verl.checkpoint_engine import RolloutServer, announce_server
from verl_server.integrations.verl.weight_push import ShardedWeights
from verl_server.models.tiny import random_model


def full_weights(folder: Path, seed: int) -> dict[str, torch.Tensor]:
    """The weights of a trainer that was filled with `seed`."""
    return dict(random_model(AutoConfig.from_pretrained(folder), seed=seed).named_parameters())


class TrainerRank(Worker):
    """A trainer rank with an FSDP2 model over Gloo, and with an engine that pushes it."""

    def __init__(self, folder: Path, config: CheckpointEngineConfig) -> None:
        super().__init__()
        dist.init_process_group("gloo")
        self._folder = folder
        self._model = random_model(AutoConfig.from_pretrained(folder))
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in self._model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self._model, mesh=mesh)
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            config.backend,
            is_master=dist.get_rank() == 0,
            bucket_size=config.update_weights_bucket_megabytes << 20,
            **config.engine_kwargs.get(config.backend, {}),
        )
        self._yields = "shards"
        self._fails_at: int | None = None
        self._without = ""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def fill(self, seed: int) -> None:
        """Write the weights of `full_weights(folder, seed)` into the shards, in place."""
        full = full_weights(self._folder, seed)
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                local = parameter.to_local()
                start = dist.get_rank() * -(-parameter.shape[0] // dist.get_world_size())
                local.copy_(full[name][start : start + len(local)])

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def prepare_push(
        self, yields: str = "shards", failing_rank: int = -1, fails_at: int = 0, without: str = ""
    ) -> None:
        """Choose what the next pushes bring ("shards", "moved" shards or "full" tensors), and which rank fails when."""
        self._yields, self._without = yields, without
        self._fails_at = fails_at if dist.get_rank() == failing_rank else None

    def _weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        if self._yields == "full":
            return self._pairs()
        return ShardedWeights(self._pairs(), self._pairs, stay_in_place=self._yields == "shards")

    def _pairs(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index, (name, parameter) in enumerate(self._model.state_dict().items()):
            if index == self._fails_at:  # the other ranks wait for this one in `full_tensor`, if they call it
                raise ValueError("the trainer ran out of luck")
            if self._without and self._without in name:
                continue
            yield name, parameter.full_tensor() if self._yields == "full" else parameter

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> Any:
        return await self.checkpoint_engine.send_weights(self._weights(), global_steps=global_steps)

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def servers_id(self) -> int:
        """Identify the connections to the servers. They are kept from one push to the next."""
        return id(self.checkpoint_engine._connection)


class NoAdapter(BaseRollout):
    """An adapter that takes what the checkpoint engine yields."""

    def __init__(self) -> None:
        self.replica_rank, self.is_leader_rank = 0, True

    async def resume(self, tags: list[str]) -> None: ...

    async def release(self) -> None: ...

    async def update_weights(self, weights: Any, **kwargs: Any) -> None:
        assert kwargs["wire_format"] == "verl_server"
        assert [pair async for pair in weights] == []


class RolloutRank(CheckpointEngineWorker):
    """verl's worker on a GPU of a replica, without an adapter of its own."""

    def __init__(self, config: RolloutConfig) -> None:
        super().__init__(config, HFModelConfig.__new__(HFModelConfig), NoAdapter())


class Replica:
    """A server and its workers, with the methods that `CheckpointEngineManager` calls on a replica."""

    def __init__(self, rank: int, server: HttpServerEngineAdapter, workers: list[Any]) -> None:
        self.server, self.workers = server, workers
        place = RolloutServer(rank, server.url, server.admin_api_key)
        ray.get([worker.__ray_call__.remote(announce_server, place) for worker in workers])

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        self.server.pause_generation("abort")

    async def resume_generation(self) -> None:
        self.server.continue_generation()

    async def release_kv_cache(self) -> None:
        self.server.release_memory_occupation(["kv_cache"])

    async def resume_kv_cache(self) -> None:
        self.server.resume_memory_occupation(["kv_cache"])

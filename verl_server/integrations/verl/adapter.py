"""`ServerAdapter`: a trainer rank's side of one rollout replica.

verl's workers construct it: every trainer rank when trainer and rollout share GPUs, and every `CheckpointEngineWorker`
otherwise. Its calls are calls of all ranks of the worker group. The first rank of each replica talks to the replica's
server actor (memory, step number); all ranks push the weights to the server (`weight_push`).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterable, Callable, Iterable, Iterator
from typing import Any, TypeVar

import ray
import torch
import torch.distributed as dist
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.base import BaseRollout

from verl_server import lora
from verl_server.engine.base import EngineBase
from verl_server.engine.verl_engine import VerlEngine
from verl_server.errors import ControlTimeoutError, ServerDiedError, ServerUnavailableError, VerlServerError
from verl_server.integrations.verl.server_actor import actor_name
from verl_server.integrations.verl.step_labels import StepLabels
from verl_server.integrations.verl.trainer_ranks import RANK_TIMEOUT, TrainerRanks
from verl_server.integrations.verl.weight_push import Named, WeightPush

T = TypeVar("T")

WIRE_FORMAT = "verl_server"
"""`wire_format` of weights that this package's checkpoint engine has already written into the server."""
_TAGS = ["kv_cache", "weights"]
_ACTOR_TIMEOUT = 900.0
"""Seconds to wait for an answer of the server actor. The actor's own waits are shorter."""


class ServerAdapter(BaseRollout):
    """A trainer rank's side of one rollout replica. All ranks call the same methods in the same order.

    An error of one rank or of one server is raised on every rank.
    """

    def __init__(
        self,
        config: RolloutConfig,
        model_config: HFModelConfig,
        device_mesh: DeviceMesh | None,
        replica_rank: int = -1,
    ) -> None:
        """If `replica_rank` is -1, it is computed: each replica has `tensor_model_parallel_size` consecutive ranks."""
        super().__init__(config, model_config, device_mesh)
        rank, size = int(os.environ["RANK"]), self.config.tensor_model_parallel_size
        self._replica_size = size
        self.replica_rank = rank // size if replica_rank == -1 else replica_rank
        self.is_leader_rank = rank % size == 0
        self._actor: Any = None
        self._ranks: TrainerRanks | None = None
        self._engine: VerlEngine | None = None
        self._push: WeightPush | None = None
        self._labels: StepLabels | None = None

    async def resume(self, tags: list[str]) -> None:
        """Allocate released memory of the server again. `tags` may have "weights" and "kv_cache".

        Other tags are ignored, because their memory was not released.
        """
        await self._run(lambda: self._resume(tags))

    async def release(self) -> None:
        """Release the memory of the server's weights and KV cache, unless `free_cache_engine` is off."""
        if self.config.free_cache_engine:
            await self._run(self._release)

    async def update_weights(
        self,
        weights: Iterable[Named] | AsyncIterable[Named],
        global_steps: int | None = None,
        wire_format: str = "named_tensors",
        peft_config: dict[str, Any] | None = None,
        base_sync_done: bool = True,
    ) -> None:
        """Copy `weights` into the server's weights, as version `global_steps` (None: a version without a number).

        Every rank iterates `weights`, which must contain every parameter: (name, tensor) pairs, `DTensor`s, or
        `ShardedWeights`. If `wire_format` is `WIRE_FORMAT`, the trainer writes the weights while they are iterated.
        Raise NotImplementedError for `peft_config` (adapters) with "named_tensors", and for any other `wire_format`.
        `base_sync_done` has no effect.
        """
        if wire_format == WIRE_FORMAT:
            async for _ in _asynchronous(weights):
                pass  # the trainer has written the weights: iterating waits for it
            return
        if wire_format != "named_tensors":
            raise NotImplementedError(
                f"wire_format={wire_format!r} is not implemented. The server takes whole weights: use a checkpoint "
                "engine that yields named tensors, or the backend 'verl_server'."
            )
        if peft_config is not None:
            raise NotImplementedError(
                f"{lora.MERGE_IN_VERL}. An update of an adapter is not supported, because adapters are not served."
            )
        if isinstance(weights, AsyncIterable):
            weights = _copied(weights, asyncio.get_running_loop())
        await self._run(lambda: self._update(weights, global_steps))

    # -- inside ------------------------------------------------------------------------------------------------

    async def _run(self, call: Callable[[], T]) -> T:
        if self._ranks is None:  # all ranks come here in their first call
            self._ranks = TrainerRanks(self._replica_size)
        try:
            return await self._ranks.run(call)
        except BaseException:
            if self._push is not None:  # the thread of the call may still wait, and cannot discard the push
                await asyncio.to_thread(self._push.discard)
            raise

    def _resume(self, tags: list[str]) -> None:
        ranks, engine = self._connected()

        def resume() -> bool:
            server: EngineBase | None = engine.engine
            assert server is not None
            slept = "weights" in server.get_server_info()["internal_states"][0]["released"]
            self._on_actor("resume_memory", tags)
            return slept

        slept = ranks.act("resume", resume)
        # verl's call of the replica put the servers to sleep. They closed this rank's memory then.
        if all(ranks.gather("slept", b"1" if slept else b"")):
            engine.memory_released(["weights"])

    def _release(self) -> None:
        ranks, engine = self._connected()
        ranks.act("release", lambda: self._on_actor("release_memory", _TAGS))
        engine.memory_released(_TAGS)

    def _update(self, weights: Iterable[Named], global_steps: int | None) -> None:
        ranks, _ = self._connected()
        assert self._push is not None
        self._labels = self._labels or StepLabels(ranks.incarnation)
        label = self._labels.next_label(global_steps)
        self._push.update(weights, label)
        ranks.act("set_version", lambda: self._on_actor("set_version", label))

    def _connected(self) -> tuple[TrainerRanks, VerlEngine]:
        """Return the ranks and the engine. The first call attaches all ranks to the servers of their replicas."""
        ranks = self._ranks
        assert ranks is not None
        if self._engine is None:
            url, admin_api_key = ranks.act("get_connection", lambda: self._on_actor("get_connection"))
            try:
                engine = ranks.agree("attach", lambda: self._attach(ranks, url, admin_api_key))
            except BaseException:
                ranks.close()  # the connections of some ranks' engines may be missing
                raise
            bucket_bytes = self.config.checkpoint_engine.update_weights_bucket_megabytes << 20
            self._engine, self._push = engine, WeightPush(ranks, engine, bucket_bytes)
        return ranks, self._engine

    def _attach(self, ranks: TrainerRanks, url: str, admin_api_key: str | None) -> VerlEngine:
        size = self._replica_size
        mesh = init_device_mesh("cpu", (dist.get_world_size() // size, size), mesh_dim_names=("dp", "tp"))
        return VerlEngine(
            mesh,
            server_url=url,
            admin_api_key=admin_api_key,
            read_all_ranks=ranks.is_on_one_host,  # FSDP shards a parameter over the ranks of all replicas
            rank_timeout=RANK_TIMEOUT,
        )

    def _on_actor(self, method: str, *args: Any) -> Any:
        """Call a method of the replica's server actor and return the answer. Called on the first rank only."""
        name = actor_name(self.replica_rank)
        try:
            self._actor = self._actor or ray.get_actor(name)
            return ray.get(getattr(self._actor, method).remote(*args), timeout=_ACTOR_TIMEOUT)
        except ValueError as error:
            if self._actor is not None:
                raise
            raise ServerUnavailableError(f"There is no server actor {name!r} in this job ({error}).") from error
        except RayTaskError as error:
            if isinstance(error.cause, VerlServerError):
                raise error.cause from None
            raise
        except RayActorError as error:
            raise ServerDiedError(f"The server actor {name!r} has ended: {error}") from error
        except GetTimeoutError as error:
            raise ControlTimeoutError(f"{method}: {name!r} did not answer within {_ACTOR_TIMEOUT:g} s.") from error


async def _asynchronous(weights: Iterable[Named] | AsyncIterable[Named]) -> Any:
    if isinstance(weights, AsyncIterable):
        async for named in weights:
            yield named
    else:
        for named in weights:
            yield named


def _copied(weights: AsyncIterable[Named], loop: asyncio.AbstractEventLoop) -> Iterator[Named]:
    """Iterate `weights` on the loop from another thread, and copy each tensor.

    The copies are necessary because verl's checkpoint engines yield views of receive buffers that they use again.
    """
    iterator = aiter(weights)

    async def step() -> Named | None:
        return await anext(iterator, None)

    while (named := asyncio.run_coroutine_threadsafe(step(), loop).result()) is not None:
        name, tensor = named
        yield name, torch.clone(tensor)

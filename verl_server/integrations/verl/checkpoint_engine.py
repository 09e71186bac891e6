"""`VerlServerCheckpointEngine`: sends weights from verl's trainer to rollout servers on other GPUs.

verl's `CheckpointEngineManager` calls it, in the order of the methods, on all trainer ranks (`ActorRolloutRefWorker`)
and on all rollout workers (`CheckpointEngineWorker`, one for each GPU of a replica). The workers only report the server
to which they belong. The trainer's ranks push the weights directly to the servers (`separate_servers`).

    actor_rollout_ref.rollout.checkpoint_engine.backend=verl_server
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import ray
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.utils.device import set_expandable_segments

from verl_server.errors import BadRequestError
from verl_server.integrations.verl.separate_servers import Named, SeparateServers, ServerTarget
from verl_server.integrations.verl.step_labels import StepLabels
from verl_server.integrations.verl.trainer_ranks import TrainerRanks
from verl_server.integrations.verl.weight_push import WeightPush

Transport = Literal["auto", "group"]


@dataclass(frozen=True)
class RolloutServer:
    """The server of a replica, which the replica announces to its workers."""

    replica_rank: int
    url: str
    admin_api_key: str | None = field(repr=False)


@dataclass(frozen=True)
class _Trainer:
    """The report of a trainer rank from `prepare`."""

    node: str
    address: str
    transport: Transport
    connected: tuple[ServerTarget, ...] | None
    """The servers to which this rank is connected. None if it has no connection, or if its last push failed."""


@dataclass(frozen=True)
class _Rollout:
    """The report of a rollout worker from `prepare`."""

    node: str
    server: RolloutServer


def announce_server(worker: Any, server: RolloutServer) -> None:
    """Store the replica's server in one of its `CheckpointEngineWorker`s.

    The replica runs it in each worker: `worker.__ray_call__.remote(announce_server, server)`. A worker with another
    checkpoint engine ignores it.
    """
    if isinstance(worker.checkpoint_engine, VerlServerCheckpointEngine):
        worker.checkpoint_engine.server = server


@CheckpointEngineRegistry.register("verl_server")
class VerlServerCheckpointEngine(CheckpointEngine):
    """Pushes weights by memory handles if trainer and server share a host, and over a process group otherwise."""

    wire_format = "verl_server"

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        transport: Transport = "auto",
        group_backend: Literal["nccl", "gloo"] | None = None,
    ) -> None:
        """Store the settings.

        `bucket_size` (bytes) and `is_master` (unused) come from verl. The others are set with
        `rollout.checkpoint_engine.engine_kwargs.verl_server`. `transport` "auto" chooses by host, and "group" uses the
        process group for every server. `group_backend` is by default "nccl" on GPUs, else "gloo".
        """
        if transport not in ("auto", "group"):
            raise BadRequestError(
                f"checkpoint_engine.engine_kwargs.verl_server.transport={transport!r} is unknown: use auto or group."
            )
        self.server: RolloutServer | None = None
        """The server of this rollout worker's replica. None on trainer ranks."""
        self._bucket_bytes, self._transport = bucket_size, transport
        self._backend = group_backend or ("nccl" if torch.cuda.is_available() else "gloo")
        self._connection: _Connection | None = None
        self._labels: StepLabels | None = None
        """Labels of this process's pushes. A later connection does not begin another incarnation."""

    def prepare(self) -> _Trainer | _Rollout:
        node = ray.get_runtime_context().get_node_id()
        if self.server is not None:
            return _Rollout(node, self.server)
        connected = self._connection.targets if self._connection is not None else None
        return _Trainer(node, ray.util.get_node_ip_address().strip("[]"), self._transport, connected)

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[_Trainer | _Rollout]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return the arguments of `init_process_group`: (for the trainer ranks, for the rollout workers).

        Runs in the driver. `metadata` has the reports of the trainer ranks, then those of the rollout workers in the
        order of the replicas. A server reads memory if all trainer ranks run on its host.
        """
        trainers = [report for report in metadata if isinstance(report, _Trainer)]
        rollouts = [report for report in metadata if isinstance(report, _Rollout)]
        if (len(trainers), len(rollouts)) != (actor_wg_world_size, rollout_world_size):
            raise BadRequestError(
                f"Of {rollout_world_size} rollout workers {len(rollouts)} have a server that is known to them. "
                "checkpoint_engine.backend=verl_server needs rollout.name=verl_server, and replicas that were started "
                "on GPUs of their own."
            )
        nodes = {trainer.node for trainer in trainers}
        targets = tuple(
            ServerTarget(server.url, server.admin_api_key, trainers[0].transport == "auto" and nodes == {node})
            for server, node in dict.fromkeys((report.server, report.node) for report in rollouts)
        )
        # Connecting is collective, so either all ranks keep their connections or none does.
        reconnect = any(trainer.connected != targets for trainer in trainers)
        trainer_kwargs: dict[str, list[Any]] = {
            "targets": [targets] * actor_wg_world_size,
            "address": [trainers[0].address] * actor_wg_world_size,
            "reconnect": [reconnect] * actor_wg_world_size,
        }
        return trainer_kwargs, {}

    def init_process_group(
        self, targets: tuple[ServerTarget, ...] = (), address: str = "", reconnect: bool = False
    ) -> None:
        """Connect the trainer ranks with each other and with the servers, unless they are. Rollout workers do nothing.

        All trainer ranks call it together.
        """
        if not reconnect:
            return
        self._disconnect()
        ranks = TrainerRanks(dist.get_world_size())
        try:
            servers = SeparateServers(
                ranks, targets, address=address, group_backend=self._backend, bucket_bytes=self._bucket_bytes
            )
        except BaseException:
            ranks.close()
            raise
        self._connection = _Connection(targets, ranks, servers, WeightPush(ranks, servers, self._bucket_bytes))

    async def send_weights(self, weights: Iterable[Named], global_steps: int | None = None) -> dict[str, Any]:
        """Make every server serve the weights of all trainer ranks, with a label of `global_steps`.

        All trainer ranks call it together. Every rank iterates `weights`, which have every parameter: full tensors,
        or `ShardedWeights`. Raise on every rank if a server or a rank failed. A server then serves its old weights or
        the new weights, or refuses to generate until the next push that succeeds.
        """
        if self._connection is None:
            raise BadRequestError("send_weights needs init_process_group before it, and after every push that failed.")
        connection = self._connection
        # verl turns these segments on after a push to a colocated server. No other process can read them.
        set_expandable_segments(False)
        self._labels = self._labels or StepLabels(connection.ranks.incarnation)
        version = self._labels.next_label(global_steps)
        if connection.servers.needs_full_tensors:
            weights = _full_tensors(weights)
        try:
            await connection.ranks.run(lambda: connection.push.update(weights, version))
        except BaseException:
            self._disconnect()
            raise
        return {}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[Named, None]:
        """Yield nothing: the server itself receives the weights. Errors are raised by `send_weights`."""
        weights: tuple[Named, ...] = ()
        for named in weights:
            yield named

    def finalize(self) -> None:
        """Do nothing: the connections serve the next push, too."""

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.push.discard()
            connection.servers.close()
            connection.ranks.close()


@dataclass(frozen=True)
class _Connection:
    """A trainer rank's connections to the other ranks and, on the first rank, to the servers."""

    targets: tuple[ServerTarget, ...]
    ranks: TrainerRanks
    servers: SeparateServers
    push: WeightPush


def _full_tensors(weights: Iterable[Named]) -> Iterator[Named]:
    for name, tensor in weights:
        yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

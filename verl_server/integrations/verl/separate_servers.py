"""`SeparateServers`: rollout servers on other GPUs, to which all ranks of a trainer push together.

`checkpoint_engine` holds one on every trainer rank, and `WeightPush` uses it as it uses the engine of a replica. A
server on the host of all trainer ranks reads their memory (`WeightPusher`). Any other server receives what the first
rank broadcasts (`broadcast_weights`). The first rank alone talks to the servers (`ServerSet`).
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from verl_server.engine.http import HttpServerEngineAdapter
from verl_server.engine.push import Push, WeightPusher
from verl_server.engine.rank_group import RankGroup
from verl_server.engine.weights import push_request
from verl_server.errors import BadRequestError, ControlTimeoutError, ServerDiedError, VerlServerError
from verl_server.integrations.verl.trainer_ranks import RANK_TIMEOUT, TrainerRanks
from verl_server.weight_sync.group.broadcast import BroadcastGroup, broadcast_weights, init_weights_update_group

_SILENCE_SECONDS = 60.0
"""Most seconds without a heartbeat of the first rank."""
_CLOSE_SECONDS = 5.0
"""Most seconds that `close` waits until the servers have closed the trainer's memory and left the process group."""

Named = tuple[str, torch.Tensor]


@dataclass(frozen=True)
class ServerTarget:
    """A server that receives the weights."""

    url: str
    admin_api_key: str | None = field(repr=False)
    reads_memory: bool
    """True if the server runs on the host of all trainer ranks and reads their memory. False if it receives
    broadcasts."""


class SeparateServers:
    """The servers of one trainer, on every rank of the trainer's default process group.

    All ranks call the same methods in the same order, and return or raise together.
    """

    def __init__(
        self,
        ranks: TrainerRanks,
        targets: tuple[ServerTarget, ...],
        *,
        address: str,
        group_backend: str,
        bucket_bytes: int,
    ) -> None:
        """Connect the first rank with the servers. `ranks` are all ranks, as one replica.

        `address` is the IP address under which the servers reach the first rank's host. `group_backend` is "nccl" or
        "gloo", for servers that receive broadcasts. `bucket_bytes` is the number of bytes of a broadcast.
        """
        self.needs_full_tensors = not all(target.reads_memory for target in targets)
        """True if a server receives broadcasts: the first rank then needs every tensor in full."""
        self._is_first = ranks.is_first
        self.engine: ServerSet | None = ServerSet(bucket_bytes) if ranks.is_first else None
        """The connections to the servers, on the first rank."""
        group = RankGroup(list(range(dist.get_world_size())), RANK_TIMEOUT, _SILENCE_SECONDS)
        self._pusher = WeightPusher(group)
        self._group = group
        try:
            ranks.act("connect", lambda: self._servers.connect(targets, address, group_backend))
        except BaseException:
            self.close()
            raise

    @property
    def _servers(self) -> ServerSet:
        assert self.engine is not None
        return self.engine

    def update_weights_from_tensor(
        self, named_tensors: Iterable[Named], *, weight_version: str | None = None
    ) -> tuple[bool, str]:
        """Copy the tensors of all ranks into the weights of all servers. Return (True, "").

        Each rank passes its shards. Where all ranks hold a tensor in full, the servers read the first rank's copy.
        """
        named = list(named_tensors)
        if not self._is_first:  # the server would have to open equal copies in vain
            named = [(name, tensor) for name, tensor in named if isinstance(tensor, DTensor)]

        def send(push: Push) -> None:
            self._servers.broadcast(named, weight_version)
            self._servers.send(push, weight_version)

        self._pusher.update(named, None, send)
        return True, ""

    def unregister_weights(self) -> None:
        """Make the servers close the memory of all ranks. Afterwards this memory may be freed or offloaded."""
        self._pusher.unregister(lambda ids: self._servers.unregister(ids))

    def close(self) -> None:
        """Close the connections. On the first rank, make the servers close the trainer's memory before.

        It does not wait for other ranks, so it is safe after an error.
        """
        registrations = self._pusher.end()
        if self.engine is not None:
            self.engine.close(registrations)
        self._group.close()


class ServerSet:
    """Connections of one process to several servers. A call returns or raises when all servers have answered."""

    def __init__(self, bucket_bytes: int) -> None:
        """`bucket_bytes` is the number of bytes of a broadcast."""
        self._bucket_bytes = bucket_bytes
        self._readers: list[HttpServerEngineAdapter] = []
        """Servers that read the memory of the trainer."""
        self._members: list[HttpServerEngineAdapter] = []
        """Servers that receive broadcasts."""
        self._group: BroadcastGroup | None = None

    def connect(self, targets: Iterable[ServerTarget], address: str, group_backend: str) -> None:
        """Attach to all servers, and form a process group with those that do not read memory."""
        for target in targets:
            engine = HttpServerEngineAdapter.attach(target.url, admin_api_key=target.admin_api_key)
            (self._readers if target.reads_memory else self._members).append(engine)
        if not self._members:
            return
        sizes = {engine.server_args.tp_size for engine in self._members}
        if len(sizes) > 1:
            raise BadRequestError(f"All servers of a broadcast need the same tp_size, but they have {sorted(sizes)}.")
        device = torch.device("cuda", torch.cuda.current_device()) if group_backend == "nccl" else torch.device("cpu")
        self._group = init_weights_update_group(
            self._members,
            address,
            tp_size=sizes.pop(),
            backend=group_backend,
            device=device,
            group_name=f"verl-{uuid.uuid4().hex}",  # a server may not have noticed the end of an earlier group
        )

    def begin_weight_update(self, *, lease_seconds: float, full: bool) -> None:
        """Open a transaction on every server, or on none; see `EngineWeights.begin_weight_update`."""
        try:
            self._each(self._all, lambda engine: engine.begin_weight_update(lease_seconds=lease_seconds, full=full))
        except BaseException:
            with contextlib.suppress(VerlServerError):
                self.end_weight_update(discard=True)
            raise

    def end_weight_update(self, *, weight_version: str | None = None, discard: bool = False) -> None:
        """Close the transaction of every server; see `EngineWeights.end_weight_update`."""
        self._each(self._all, lambda engine: engine.end_weight_update(weight_version=weight_version, discard=discard))

    def send(self, push: Push, version: str | None) -> None:
        """Send an update to every server that reads memory."""
        req = push_request(None, True, version, {})
        self._each(self._readers, lambda engine: engine.send_update(push.for_readers(engine.server_args.tp_size), req))

    def broadcast(self, named: list[Named], version: str | None) -> None:
        """Send full tensors to every other server. The end of the transaction checks that none is missing."""
        if self._group is not None:
            broadcast_weights(self._group, named, bucket_bytes=self._bucket_bytes, weight_version=version)

    def unregister(self, registrations: list[str], timeout: float | None = None) -> None:
        """Make every server close registered memory."""
        self._each(self._readers, lambda engine: engine.send_unregistration(registrations), timeout)

    def close(self, registrations: list[str]) -> None:
        """Make the servers close `registrations` and leave the process group, then close the connections."""
        group, self._group = self._group, None
        with contextlib.suppress(VerlServerError, TimeoutError):
            if registrations:
                self.unregister(registrations, _CLOSE_SECONDS)
        if group is not None:
            group.close()
            name = group.name
            with contextlib.suppress(VerlServerError, TimeoutError):
                self._each(self._members, lambda engine: engine.destroy_weights_update_group(name), _CLOSE_SECONDS)
        for engine in self._all:
            engine.shutdown()
        self._readers, self._members = [], []

    @property
    def _all(self) -> list[HttpServerEngineAdapter]:
        return [*self._readers, *self._members]

    def _each(
        self,
        engines: list[HttpServerEngineAdapter],
        call: Callable[[HttpServerEngineAdapter], Any],
        timeout: float | None = None,
    ) -> None:
        """Run `call` for all engines at once. Return or raise when all have answered, or after `timeout` seconds.

        An error that leaves the outcome open has priority over a refusal, because a server may still be reading.
        """
        if not engines:
            return
        pool = ThreadPoolExecutor(len(engines), "verl-server-push")
        try:
            calls = {pool.submit(call, engine): engine for engine in engines}
            done, pending = wait(calls, timeout)
        finally:
            pool.shutdown(wait=False)
        errors = [(calls[future].url, error) for future in done if (error := future.exception()) is not None]
        errors += [(calls[future].url, TimeoutError(f"No answer within {timeout} s.")) for future in pending]
        if not errors:
            return
        url, error = max(errors, key=lambda item: _leaves_open(item[1]))
        error.add_note(
            f"This is the error of the rollout server at {url}. {len(errors)} of {len(engines)} servers failed; the "
            "servers may serve different weights until the next push that succeeds."
        )
        raise error


def _leaves_open(error: BaseException) -> bool:
    return not isinstance(error, VerlServerError) or isinstance(error, (ControlTimeoutError, ServerDiedError))

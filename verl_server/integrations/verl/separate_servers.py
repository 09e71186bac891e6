"""`SeparateServers`: rollout servers on other GPUs, to which all ranks of a trainer push together.

`checkpoint_engine` holds one on every trainer rank. A server on the trainer's host reads the memory of the ranks
(`WeightPusher`). A server on another host receives what the first rank broadcasts (`broadcast_weights`). Every method
is collective: all ranks call it, and all ranks return or raise together.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from verl_server.engine.http import HttpServerEngineAdapter
from verl_server.engine.rank_group import RankGroup
from verl_server.engine.weights import push_request
from verl_server.errors import BadRequestError, ControlTimeoutError, ServerDiedError, VerlServerError
from verl_server.weight_sync.group.broadcast import BroadcastGroup, broadcast_weights, init_weights_update_group
from verl_server.weight_sync.trainer.pusher import Push, WeightPusher

_SILENCE_SECONDS = 60.0
"""Most seconds without a heartbeat of the rank that sends."""
_CLOSE_SECONDS = 5.0
"""Most seconds that `close` waits until the servers have closed the trainer's memory."""
_CALL = "update_weights"

Named = Iterator[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class ServerTarget:
    """A server that receives the weights."""

    url: str
    admin_api_key: str | None = field(repr=False)
    reads_memory: bool
    """True if the server runs on the host of all trainer ranks and reads their memory. False if it receives
    broadcasts."""


class SeparateServers:
    """The servers of one trainer, on every rank of the trainer's default process group."""

    def __init__(
        self, targets: tuple[ServerTarget, ...], *, address: str, backend: str, bucket_bytes: int, timeout: float
    ) -> None:
        """Connect the ranks with each other, and the first rank with the servers.

        `address`: the IP address of the first rank's host, as the servers reach it. `backend`: "nccl" or "gloo", for
        servers that receive broadcasts. `bucket_bytes`: tensors that must be gathered are pushed in buckets of about
        this size. `timeout`: seconds that a rank waits for another rank to make the same call, and lease of a
        transaction.
        """
        self._bucket_bytes, self._timeout = bucket_bytes, timeout
        self._receives_broadcasts = not all(target.reads_memory for target in targets)
        self._readers: list[HttpServerEngineAdapter] = []
        self._members: list[HttpServerEngineAdapter] = []
        self._broadcast_group: BroadcastGroup | None = None
        self._ranks = RankGroup(list(range(dist.get_world_size())), timeout, _SILENCE_SECONDS)
        self._pusher = WeightPusher(self._ranks)
        try:
            self._ranks.call("init_process_group", lambda _: self._connect(targets, address, backend))
        except BaseException:
            self.close()
            raise

    def push(self, weights: Iterable[tuple[str, torch.Tensor]], version: str | None) -> None:
        """Make all servers serve `weights` as `version`.

        `weights` are (name, tensor) pairs; all ranks pass the same names. Shards (`DTensor`) are read where they are if
        every server reads memory. Otherwise full tensors are made one after the other, and sent in buckets of one
        transaction for each server. Raises on every rank if a server or a rank fails. A server then serves the old
        weights or the new weights, or it answers 503 until a push succeeds.
        """
        named, head = iter(weights), list[tuple[str, torch.Tensor]]()

        def take_first() -> bytes:
            head.extend(itertools.islice(named, 1))
            return b"shards" if head and isinstance(head[0][1], DTensor) else b"full tensors"

        kinds = self._ranks.gather(_CALL, take_first)
        if len(set(kinds)) > 1:
            raise BadRequestError(f"The ranks must all push shards or all push full tensors, but push {kinds}.")
        everything = itertools.chain(head, named)
        if kinds[0] == b"shards" and not self._receives_broadcasts:
            self._push_shards(everything, version)
        else:
            self._push_full(everything, version)

    def close(self) -> None:
        """Close the connections of this rank, and on the first rank make the servers close the trainer's memory.

        It does not wait for other ranks, so it is safe after an error.
        """
        registrations = self._pusher.end()
        if registrations:
            with contextlib.suppress(VerlServerError, TimeoutError):
                self._each(
                    self._readers, lambda engine: engine.send_unregistration(registrations), timeout=_CLOSE_SECONDS
                )
        if self._broadcast_group is not None:
            self._broadcast_group.close()
        for engine in [*self._readers, *self._members]:
            engine.shutdown()
        self._readers, self._members = [], []
        self._ranks.close()

    # -- inside; what the first rank does, other ranks have neither adapters nor a broadcast group ----------------

    def _connect(self, targets: tuple[ServerTarget, ...], address: str, backend: str) -> None:
        for target in targets:
            engine = HttpServerEngineAdapter.attach(target.url, admin_api_key=target.admin_api_key)
            (self._readers if target.reads_memory else self._members).append(engine)
        if not self._members:
            return
        sizes = {engine.server_args.tp_size for engine in self._members}
        if len(sizes) > 1:
            raise BadRequestError(f"All servers of one broadcast need the same tp_size, but they have {sorted(sizes)}.")
        device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
        self._broadcast_group = init_weights_update_group(
            self._members, address, tp_size=sizes.pop(), backend=backend, device=device
        )

    def _push_shards(self, named: Iterable[tuple[str, torch.Tensor]], version: str | None) -> None:
        """Push all tensors in one update. Shards in stable memory are registered from the second push on."""
        self._pusher.update(named, None, lambda push: self._send(push, version, partial=False))

    def _push_full(self, named: Named, version: str | None) -> None:
        """Push full tensors from the first rank's memory in buckets. The buckets of a server are one transaction."""
        self._ranks.call("begin_weight_update", lambda _: self._each(self._engines, self._begin))
        try:
            while self._push_bucket(named):
                pass
            self._ranks.call(
                "end_weight_update",
                lambda _: self._each(self._engines, lambda engine: engine.end_weight_update(weight_version=version)),
            )
        except BaseException:
            with contextlib.suppress(VerlServerError, TimeoutError):
                self._each(
                    self._engines, lambda engine: engine.end_weight_update(discard=True), timeout=_CLOSE_SECONDS
                )
            raise

    def _push_bucket(self, named: Named) -> bool:
        """Push the next tensors. Return False if none are left."""
        bucket: list[tuple[str, torch.Tensor]] = []
        counts = self._ranks.gather(_CALL, lambda: str(self._take(named, bucket)).encode())
        if len(set(counts)) > 1:
            raise BadRequestError(f"The ranks must push the same tensors, but a bucket has {counts} tensors on them.")
        if counts[0] == b"0":
            return False
        self._ranks.call(_CALL, lambda _: self._broadcast(bucket))
        # The other ranks bring nothing: their copies are equal, and would only have to be opened too.
        self._pusher.update(bucket, None, lambda push: self._send(push, None, partial=True))
        return True

    def _take(self, named: Named, bucket: list[tuple[str, torch.Tensor]]) -> int:
        """Take tensors of about `bucket_bytes` from `named`, and return how many. The first rank keeps them.

        Making a full tensor may be collective, so every rank takes the same ones.
        """
        nbytes = count = 0
        for name, tensor in named:
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            nbytes, count = nbytes + full.nbytes, count + 1
            if self._ranks.rank == 0:
                bucket.append((name, full.detach()))
            if nbytes >= self._bucket_bytes:
                break
        return count

    @property
    def _engines(self) -> list[HttpServerEngineAdapter]:
        return [*self._readers, *self._members]

    def _begin(self, engine: HttpServerEngineAdapter) -> str:
        return engine.begin_weight_update(full=True, lease_seconds=self._timeout)

    def _send(self, push: Push, version: str | None, *, partial: bool) -> None:
        def send(engine: HttpServerEngineAdapter) -> Any:
            req = push_request(None, True, version, {"partial": partial})
            return engine.send_update(push.for_readers(engine.server_args.tp_size), req)

        self._each(self._readers, send)

    def _broadcast(self, bucket: list[tuple[str, torch.Tensor]]) -> None:
        if self._broadcast_group is not None:
            broadcast_weights(self._broadcast_group, bucket, bucket_bytes=self._bucket_bytes)

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
        errors = {calls[future].url: error for future in done if (error := future.exception()) is not None}
        errors |= {calls[future].url: TimeoutError(f"No answer within {timeout} s.") for future in pending}
        if not errors:
            return
        url, error = max(errors.items(), key=lambda item: _leaves_open(item[1]))
        error.add_note(
            f"This is the error of the rollout server at {url}. {len(errors)} of {len(engines)} servers failed; the "
            "servers may serve different weights until the next push that succeeds."
        )
        raise error


def _leaves_open(error: BaseException) -> bool:
    return not isinstance(error, VerlServerError) or isinstance(error, (ControlTimeoutError, ServerDiedError))

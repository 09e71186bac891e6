"""`WeightPush`: one update of the served weights from an iterator that all trainer ranks iterate.

`ServerAdapter` calls it in a thread (`TrainerRanks.run`). There are two ways:

- Shards whose memory stays in place are sent in one push of this memory, which is complete or refused.
- All other tensors (gathered, or moved to the GPU for the push) are sent in buckets, inside one transaction, so the
  server never serves a part of them. Each bucket is answered before its tensors are dropped.

After each step all ranks agree on its outcome, so no rank enters the next collective while another one raises.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor

from verl_server.errors import BadRequestError, VerlServerError
from verl_server.integrations.verl.trainer_ranks import RANK_TIMEOUT, TrainerRanks

logger = logging.getLogger(__name__)

Named = tuple[str, torch.Tensor]


class Transactions(Protocol):
    """The calls of a server, or of several, that make many updates one version; see `EngineWeights`."""

    def begin_weight_update(self, *, lease_seconds: float, full: bool) -> Any: ...

    def end_weight_update(self, *, weight_version: str | None = ..., discard: bool = ...) -> Any: ...


class UpdatedEngine(Protocol):
    """The servers that an update writes to: `VerlEngine` for a replica, `SeparateServers` for several on other GPUs."""

    @property
    def engine(self) -> Transactions | None:
        """The connection to the servers, or None on a rank without a connection."""

    def update_weights_from_tensor(
        self, named_tensors: Iterable[Named], *, weight_version: str | None = ...
    ) -> Any: ...

    def unregister_weights(self) -> None: ...


class ShardedWeights:
    """The weights of a sharded trainer. An iteration yields gathered tensors, as verl's other consumers expect."""

    def __init__(
        self, shards: Iterable[Named], gathered: Callable[[], Iterable[Named]], *, stay_in_place: bool
    ) -> None:
        """`shards` are (name, `DTensor` or whole tensor) pairs; iterating them takes part in no collective.

        `gathered` returns an iterator over full tensors. With `stay_in_place`, the memory of the shards belongs to the
        trainer and stays until the next update; otherwise it is allocated for this update.
        """
        self.shards, self.stay_in_place = shards, stay_in_place
        self._gathered = gathered
        self._iterator: Iterator[Named] | None = None

    def __iter__(self) -> Iterator[Named]:
        return self

    def __next__(self) -> Named:
        if self._iterator is None:
            self._iterator = iter(self._gathered())
        return next(self._iterator)


class WeightPush:
    """Updates the server of this rank's replica. All trainer ranks call `update` together."""

    def __init__(self, ranks: TrainerRanks, engine: UpdatedEngine, bucket_bytes: int) -> None:
        """`engine` is attached to the replica's server. `bucket_bytes` is the most bytes of a bucket on a rank, unless
        one tensor is larger."""
        self._ranks, self._engine, self._bucket_bytes = ranks, engine, bucket_bytes
        self._has_transaction = False
        self._has_warned = False

    def update(self, weights: Iterable[Named], version: str) -> None:
        """Serve `weights` under the label `version`. `weights` must contain every parameter.

        Raise an error on every rank if a server, or the iterator of a rank, failed. Then each server serves its old
        weights, refuses to generate until the next update, or serves the new ones if only another replica failed.
        """
        if isinstance(weights, ShardedWeights) and self._can_read_shards():
            if weights.stay_in_place:
                pairs = list(weights.shards)
                self._engine.update_weights_from_tensor(pairs, weight_version=version)
                return
            weights = weights.shards
        try:
            self._update_in_buckets(weights, version)
        except BaseException:
            self.discard()
            raise
        # The caller frees this memory next.
        self._on_all_ranks("unregister_weights", self._engine.unregister_weights)

    def discard(self) -> None:
        """End a transaction that is open.

        The call is not collective: it works even if other ranks have ended or wait.
        """
        server = self._engine.engine
        if self._has_transaction and server is not None:
            self._has_transaction = False
            with contextlib.suppress(VerlServerError):  # the transaction's lease ends it
                server.end_weight_update(discard=True)

    # -- inside ------------------------------------------------------------------------------------------------

    def _update_in_buckets(self, weights: Iterable[Named], version: str) -> None:
        buckets = _Buckets(weights, self._bucket_bytes, gather=not self._ranks.is_on_one_host)
        self._on_server("begin_weight_update", self._begin)
        while bucket := self._next_bucket(buckets):
            self._on_all_ranks("update_weights_from_tensor", partial(self._engine.update_weights_from_tensor, bucket))
            del bucket  # the next bucket needs this memory
        self._on_server("end_weight_update", lambda server: self._end(server, version))

    def _next_bucket(self, buckets: _Buckets) -> list[Named]:
        """Return the next bucket, which is empty at the end of the weights."""
        bucket = self._ranks.agree("iterate the weights", buckets.next)
        last_name = bucket[-1][0] if bucket else ""
        names = [name.decode() for name in self._ranks.gather("bucket", last_name.encode())]
        if len(set(names)) > 1:
            raise BadRequestError(
                "The ranks iterate different weights. The names at the end of their buckets, by rank "
                f"('': no more weights): {names}."
            )
        return bucket

    def _begin(self, server: Transactions) -> None:
        # The lease covers the slowest bucket: a rank that takes longer to gather it has failed.
        server.begin_weight_update(full=True, lease_seconds=RANK_TIMEOUT)
        self._has_transaction = True

    def _end(self, server: Transactions, version: str) -> None:
        server.end_weight_update(weight_version=version)
        self._has_transaction = False

    def _on_all_ranks(self, what: str, call: Callable[[], Any]) -> None:
        """Run a call of the engine on every rank. Every rank raises an error if it failed for one replica."""
        if self._ranks.is_on_one_host:  # the engine's calls are calls of all ranks then
            call()
        else:
            self._ranks.agree(what, call)

    def _on_server(self, what: str, call: Callable[[Transactions], Any]) -> None:
        """Run `call` with the server's adapter on the first rank of each replica."""

        def act() -> None:
            assert self._engine.engine is not None
            call(self._engine.engine)

        self._ranks.act(what, act)

    def _can_read_shards(self) -> bool:
        if not self._ranks.is_on_one_host and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "The trainer's ranks are on several hosts, and a server cannot read the memory of another host. The "
                "weights are gathered for every update."
            )
        return self._ranks.is_on_one_host


class _Buckets:
    """Cuts an iterator over weights into buckets, at the same tensors on every rank."""

    def __init__(self, weights: Iterable[Named], limit: int, *, gather: bool) -> None:
        """`limit` is the number of bytes of a bucket. With `gather`, full tensors replace sharded tensors."""
        self._weights = iter(weights)
        self._limit, self._gather = limit, gather
        self._next: Named | None = None

    def next(self) -> list[Named]:
        """Return tensors whose bytes on one rank stay below the limit, or one tensor; empty at the end."""
        bucket: list[Named] = []
        num_bytes = 0
        while (named := self._next or next(self._weights, None)) is not None:
            name, tensor = named
            self._next = None
            if self._gather and isinstance(tensor, DTensor):
                tensor = tensor.full_tensor()
            size = _bytes_per_rank(tensor)
            if bucket and num_bytes + size > self._limit:
                self._next = (name, tensor)
                break
            bucket.append((name, tensor))
            num_bytes += size
        return bucket


def _bytes_per_rank(tensor: torch.Tensor) -> int:
    """Return the same number on every rank, although the shards of a `DTensor` may differ in size."""
    num_shards = 1
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        num_shards = math.prod(mesh.size(i) for i, kind in enumerate(tensor.placements) if not kind.is_replicate())
    return math.ceil(tensor.numel() * tensor.element_size() / num_shards)

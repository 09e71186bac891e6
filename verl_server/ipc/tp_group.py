"""`TpGroup`: the tensor-parallel ranks of one engine and how they talk.

Each scheduler process holds one. Four connections: the loop's `channel` (rank 0 tells the others what to run, on which
they wait as long as it lives; and votes on control calls), the groups `stage` and `join` (the votes of the stager's
threads, beside the loop's: no connection is for two threads) and the device group of the model's collectives (Gloo on
CPU, NCCL on CUDA; between GPUs of one host sums go through `peer_memory`). A dead peer fails all of them at once.
"""

from __future__ import annotations

import dataclasses
import datetime
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from verl_server.ipc.peer_memory import PeerMemory
from verl_server.ipc.rank_sockets import GlooChannel, RankSockets

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13
_FOREVER = datetime.timedelta(days=3650)


@dataclass(frozen=True)
class TpGroup:
    rank: int = 0
    size: int = 1
    channel: RankSockets | GlooChannel | None = None
    stage_group: dist.ProcessGroup | None = None
    join_group: dist.ProcessGroup | None = None
    device_group: dist.ProcessGroup | None = None
    peer_memory: PeerMemory | None = None

    @classmethod
    def create(
        cls,
        rank: int,
        size: int,
        init_addr: str | None,
        device: torch.device,
        sync_timeout: float,
        *,
        startup_timeout: float = 600.0,
        control_timeout: float = 300.0,
        peer_memory: bool = True,
    ) -> TpGroup:
        """Meet the other ranks at `init_addr`: "host:port", or a URL of torch.distributed.

        On one host that is a `file://` in a private folder (a TCP store would listen on every interface),
        over several "host:port" of node 0. Blocks until all ranks are there, at most `startup_timeout` seconds.
        """
        if size == 1:
            return cls()

        def seconds(value: float) -> datetime.timedelta:
            return datetime.timedelta(seconds=value)

        assert init_addr is not None, "more than one rank, but no place to meet"
        init_method = init_addr if "://" in init_addr else f"tcp://{init_addr}"
        if init_method.startswith("file://"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "gloo", init_method=init_method, rank=rank, world_size=size, timeout=seconds(startup_timeout)
        )
        vote_timeout = max(startup_timeout, control_timeout)
        votes = dist.new_group(backend="gloo", timeout=seconds(vote_timeout))
        channel = RankSockets.connect(votes, vote_timeout, hear_timeout=None) or GlooChannel(
            votes, dist.new_group(backend="gloo", timeout=_FOREVER), first=0
        )
        # A rank may be done with its part while another still reads from a slow disk, or waits for a trainer.
        patience = seconds(startup_timeout + 2 * control_timeout)
        stage, join = (dist.new_group(backend="gloo", timeout=patience) for _ in range(2))
        backend = "nccl" if device.type == "cuda" else "gloo"
        model = dist.new_group(backend=backend, timeout=seconds(sync_timeout))
        tp = cls(rank, size, channel, stage, join, model)
        if not peer_memory or isinstance(channel, GlooChannel):  # that is: not all ranks are on one host
            return tp
        return dataclasses.replace(tp, peer_memory=PeerMemory.connect(model, device, tp.gather))

    def for_staging(self) -> TpGroup:
        """The same ranks, voting on what one of the stager's threads prepared."""
        return self._voting_through(self.stage_group)

    def for_joining(self) -> TpGroup:
        """The same, for the other thread."""
        return self._voting_through(self.join_group)

    def _voting_through(self, group: dist.ProcessGroup | None) -> TpGroup:
        return self if group is None else dataclasses.replace(self, channel=GlooChannel(group, group, first=0))

    def broadcast_command(self, data: bytes | None) -> bytes:
        """Rank 0's bytes on every rank; the others block until rank 0 has a command."""
        if self.channel is None:
            return data or b""
        if data is None:
            return self.channel.hear()
        self.channel.tell(data)
        return data

    def gather(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, in rank order, on every rank: the vote of a weight update."""
        return self.channel.gather(data) if self.channel is not None else [data]

    def all_agree(self, ok: bool) -> bool:
        """Whether every rank says so."""
        return all(vote == b"1" for vote in self.gather(b"1" if ok else b"0"))

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks; `tensor` may hold it, too."""
        if self.size == 1:
            return tensor
        if self.peer_memory is not None and (summed := self.peer_memory.sum(tensor)) is not None:
            return summed
        dist.all_reduce(tensor, group=self.device_group)
        return tensor

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Rank 0's contents on every rank's device, in the stream's order."""
        if self.size > 1:
            dist.broadcast(tensor, src=0, group=self.device_group)

    def all_gather_last_dim(self, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenate equal shards [..., n] of all ranks to [..., size * n]."""
        if self.size == 1:
            return tensor
        parts = tensor.new_empty(self.size * len(tensor), *tensor.shape[1:])
        _all_gather(parts, tensor.contiguous(), group=self.device_group)
        return torch.cat(parts.chunk(self.size), dim=-1)

"""`TpGroup`: the connections between the tensor-parallel ranks of one engine.

Each scheduler process holds one. There are four connections. On the loop's `channel`, rank 0 sends the commands to run,
for which the other ranks wait without a bound, and the ranks vote on control calls. The stager's two threads vote on
`stage_group` and `join_group`, because no connection may be used by two threads. The model's collectives run on
`device_group` (Gloo on the CPU, NCCL on CUDA), except for sums between GPUs of one host, which `peer_memory` computes.
If a peer ends, calls on all of these connections fail.
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

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # torch 2.13 renames it
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
        """Connect to the other ranks through `init_addr`: "host:port", or a URL of torch.distributed.

        On one host this is a `file://` URL in a private folder, because a TCP store would listen on every interface. On
        several hosts it is "host:port" of node 0. Wait for all ranks, at most `startup_timeout` seconds. All timeouts
        are in seconds; `sync_timeout` bounds the model's collectives.
        """
        if size == 1:
            return cls()

        def seconds(value: float) -> datetime.timedelta:
            return datetime.timedelta(seconds=value)

        assert init_addr is not None, "several ranks need an init_addr"
        init_method = init_addr if "://" in init_addr else f"tcp://{init_addr}"
        if init_method.startswith("file://"):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "gloo", init_method=init_method, rank=rank, world_size=size, timeout=seconds(startup_timeout)
        )
        channel, stage, join = _connect(startup_timeout, control_timeout)
        backend = "nccl" if device.type == "cuda" else "gloo"
        model = dist.new_group(backend=backend, timeout=seconds(sync_timeout))
        tp = cls(rank, size, channel, stage, join, model)
        if not peer_memory or isinstance(channel, GlooChannel):  # a GlooChannel: not all ranks are on one host
            return tp
        return dataclasses.replace(tp, peer_memory=PeerMemory.connect(model, device, tp.gather))

    @classmethod
    def beside(cls, rank: int, size: int, *, startup_timeout: float, control_timeout: float) -> TpGroup:
        """Connect ranks whose default process group exists, for votes and commands only.

        All ranks of the default group must be tensor-parallel ranks, and all must call this method.
        """
        if size == 1:
            return cls()
        return cls(rank, size, *_connect(startup_timeout, control_timeout))

    def for_staging(self) -> TpGroup:
        """Return a group of the same ranks with a connection for the votes of the thread that stages weight updates."""
        return self._with_channel(self.stage_group)

    def for_joining(self) -> TpGroup:
        """Return a group of the same ranks with a connection for the votes of the thread that joins process groups."""
        return self._with_channel(self.join_group)

    def _with_channel(self, group: dist.ProcessGroup | None) -> TpGroup:
        return self if group is None else dataclasses.replace(self, channel=GlooChannel(group, group, first=0))

    def broadcast_command(self, data: bytes | None) -> bytes:
        """Send `data` from rank 0 to all ranks, and return it. Other ranks pass None and wait without a bound."""
        if self.channel is None:
            return data or b""
        if data is None:
            return self.channel.receive_broadcast()
        self.channel.broadcast(data)
        return data

    def gather(self, data: bytes) -> list[bytes]:
        """Return the bytes of every rank, in rank order, on every rank."""
        return self.channel.gather(data) if self.channel is not None else [data]

    def all_agree(self, ok: bool) -> bool:
        """Return True if `ok` is true on every rank."""
        return all(vote == b"1" for vote in self.gather(b"1" if ok else b"0"))

    def connect_collectives(self, device: torch.device) -> None:
        """Run each collective of the model once on a GPU, small and large. Do nothing on the CPU.

        In the first call of each kind, NCCL connects the ranks and allocates the memory for that.
        """
        if self.device_group is None or device.type != "cuda":
            return
        for nbytes in (2**10, 2**26):
            part = torch.zeros(nbytes, dtype=torch.uint8, device=device)
            dist.all_reduce(part, group=self.device_group)
            dist.broadcast(part, src=0, group=self.device_group)
            _all_gather(part.new_empty(self.size * nbytes), part, group=self.device_group)
        torch.cuda.synchronize(device)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of `tensor` over the ranks, which may overwrite `tensor`."""
        if self.size == 1:
            return tensor
        if self.peer_memory is not None and (summed := self.peer_memory.sum(tensor)) is not None:
            return summed
        dist.all_reduce(tensor, group=self.device_group)
        return tensor

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Overwrite `tensor` with rank 0's contents on every rank, in the order of the current stream."""
        if self.size > 1:
            dist.broadcast(tensor, src=0, group=self.device_group)

    def all_gather_last_dim(self, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenate equal shards [..., n] of all ranks to [..., size * n]."""
        if self.size == 1:
            return tensor
        parts = tensor.new_empty(self.size * len(tensor), *tensor.shape[1:])
        _all_gather(parts, tensor.contiguous(), group=self.device_group)
        return torch.cat(parts.chunk(self.size), dim=-1)


def _connect(
    startup_timeout: float, control_timeout: float
) -> tuple[RankSockets | GlooChannel, dist.ProcessGroup, dist.ProcessGroup]:
    """Return (the loop's channel, the stager's group, the joiner's group) between all ranks of the default group."""

    def group(seconds: float) -> dist.ProcessGroup:
        made: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=seconds))
        return made

    vote_timeout = max(startup_timeout, control_timeout)
    votes = group(vote_timeout)
    channel = RankSockets.connect(votes, vote_timeout, broadcast_timeout=None) or GlooChannel(
        votes, dist.new_group(backend="gloo", timeout=_FOREVER), first=0
    )
    # A rank may have finished its part while another rank still reads from a slow disk, or waits for a trainer.
    patience = startup_timeout + 2 * control_timeout
    return channel, group(patience), group(patience)

"""Bytes between ranks, and the environment that launched ranks leave behind.

`VerlEngine` (trainer ranks) and the scheduler's ranks gather and broadcast msgspec bytes through these
instead of torch's `*_object` collectives, which unpickle what they receive. torch is imported only where
ranks talk: a server's front process needs the rest of this module before it pays for that import.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist

_LAUNCHER_PREFIXES = ("TORCHELASTIC_", "GROUP_", "ROLE_", "PET_")
_LAUNCHER_NAMES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
)


def clean_child_env(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """A copy of the environment without the launcher's rendezvous variables.

    A server started by a trainer rank forms process groups of its own; with torchrun's variables it would
    join the trainer's. torchrun also sets OMP_NUM_THREADS=1, which is meant for the trainer's ranks only.
    """
    source = dict(os.environ if env is None else env)
    launched = "TORCHELASTIC_RUN_ID" in source
    kept = {k: v for k, v in source.items() if k not in _LAUNCHER_NAMES and not k.startswith(_LAUNCHER_PREFIXES)}
    if launched and kept.get("OMP_NUM_THREADS") == "1":
        del kept["OMP_NUM_THREADS"]
    # libgomp's threads spin for milliseconds at the end of every parallel region. On cores that are shared with a
    # trainer or environments they spin on the very core that the slowest thread needs, and a step takes 20 times
    # as long (measured: 400 tokens/s instead of 4,000 beside two busy processes; no loss on idle cores).
    kept.setdefault("GOMP_SPINCOUNT", "1000")
    return kept


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that was free a moment ago on `host`."""
    with socket.socket() as sock:
        sock.bind((host, 0))
        return int(sock.getsockname()[1])


def broadcast_bytes(data: bytes | None, src: int, group: dist.ProcessGroup | None = None) -> bytes:
    """Send `data` of global rank `src` to every rank of a CPU group (two collectives: length, payload)."""
    import torch
    import torch.distributed as dist

    mine = dist.get_rank() == src
    if mine and data is None:
        raise ValueError("The source rank of broadcast_bytes must bring data.")
    length = torch.tensor([len(data) if mine and data is not None else 0], dtype=torch.int64)
    dist.broadcast(length, src, group=group)
    payload = torch.empty(int(length), dtype=torch.uint8)
    if mine and data:
        payload = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    if len(payload):
        dist.broadcast(payload, src, group=group)
    return payload.numpy().tobytes()


def all_gather_bytes(data: bytes, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """Every rank's `data` in rank order, on every rank of a CPU group (lengths, then padded payloads)."""
    import torch
    import torch.distributed as dist

    size = dist.get_world_size(group)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(data)], dtype=torch.int64), group=group)
    widest = max(int(n) for n in lengths)
    if widest == 0:
        return [b""] * size
    mine = torch.zeros(widest, dtype=torch.uint8)
    if data:
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    payloads = [torch.empty(widest, dtype=torch.uint8) for _ in range(size)]
    dist.all_gather(payloads, mine, group=group)
    return [p[: int(n)].numpy().tobytes() for p, n in zip(payloads, lengths, strict=True)]

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

_FIRST_BYTES = 4096
"""Size of the first message between ranks; what fits, with its length, takes one collective instead of two."""
_LENGTH_BYTES = 8
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
    # glibc writes past the caches only for blocks beyond a share of the last cache, 100 MB and more on a large one.
    # Weights are never small enough to stay there: from 4 MB on, a weight copy takes two thirds of the time.
    kept.setdefault("GLIBC_TUNABLES", "glibc.cpu.x86_non_temporal_threshold=0x400000")
    return kept


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that was free a moment ago on `host`."""
    with socket.socket() as sock:
        sock.bind((host, 0))
        return int(sock.getsockname()[1])


def broadcast_bytes(data: bytes | None, src: int, group: dist.ProcessGroup | None = None) -> bytes:
    """Send `data` of global rank `src` to every rank of a CPU group: one collective if it is short, else two."""
    import torch
    import torch.distributed as dist

    mine = dist.get_rank() == src
    if mine and data is None:
        raise ValueError("The source rank of broadcast_bytes must bring data.")
    first = _first_message(data or b"")
    dist.broadcast(torch.frombuffer(first, dtype=torch.uint8), src, group=group)
    length, start = _read_first(first)
    rest = bytearray(length - len(start))
    if rest:
        rest[:] = data[len(start) :] if mine and data else rest
        dist.broadcast(torch.frombuffer(rest, dtype=torch.uint8), src, group=group)
    return start + bytes(rest)


def all_gather_bytes(data: bytes, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """Every rank's `data` in rank order, on every rank of a CPU group: one collective if all are short, else two."""
    import torch
    import torch.distributed as dist

    def gathered(mine: bytearray) -> list[bytearray]:
        everyone = [bytearray(len(mine)) for _ in range(dist.get_world_size(group))]
        outputs = [torch.frombuffer(buffer, dtype=torch.uint8) for buffer in everyone]
        dist.all_gather(outputs, torch.frombuffer(mine, dtype=torch.uint8), group=group)
        return everyone

    firsts = [_read_first(first) for first in gathered(_first_message(data))]
    widest = max(length - len(start) for length, start in firsts)
    if not widest:
        return [start for _, start in firsts]
    rest = data[_FIRST_BYTES - _LENGTH_BYTES :]
    rests = gathered(bytearray(rest + bytes(widest - len(rest))))
    return [start + bytes(rest[: length - len(start)]) for (length, start), rest in zip(firsts, rests, strict=True)]


def _first_message(data: bytes) -> bytearray:
    """What always travels: the length, and as much of the data as has room."""
    start = len(data).to_bytes(_LENGTH_BYTES, "little") + data[: _FIRST_BYTES - _LENGTH_BYTES]
    return bytearray(start.ljust(_FIRST_BYTES, b"\0"))


def _read_first(message: bytearray) -> tuple[int, bytes]:
    """(length of all data, its beginning)."""
    length = int.from_bytes(message[:_LENGTH_BYTES], "little")
    return length, bytes(message[_LENGTH_BYTES : _LENGTH_BYTES + length])

"""Collectives over bytes: broadcast and all-gather between the ranks of a CPU process group.

Trainer ranks (`VerlEngine`) and the scheduler's ranks exchange msgspec bytes through these functions instead of
torch's `*_object` collectives, which unpickle what they receive.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist

_FIRST_BYTES = 4096
"""Size of the first message between ranks. Data that fits into it beside its length needs one collective, not two."""
_LENGTH_BYTES = 8


def broadcast_bytes(data: bytes | None, src: int, group: dist.ProcessGroup | None = None) -> bytes:
    """Return the `data` of global rank `src` on every rank of a CPU group.

    This takes one collective if the data is short, else two.
    """
    import torch
    import torch.distributed as dist

    mine = dist.get_rank() == src
    if mine and data is None:
        raise ValueError("The source rank of broadcast_bytes must pass data.")
    first = _first_message(data or b"")
    dist.broadcast(torch.frombuffer(first, dtype=torch.uint8), src, group=group)
    length, start = _read_first(first)
    rest = bytearray(length - len(start))
    if rest:
        rest[:] = data[len(start) :] if mine and data else rest
        dist.broadcast(torch.frombuffer(rest, dtype=torch.uint8), src, group=group)
    return start + bytes(rest)


def all_gather_bytes(data: bytes, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """Return every rank's `data`, in rank order, on every rank of a CPU group.

    This takes one collective if all of them are short, else two.
    """
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
    """Return the first message: the length of `data`, and as much of its beginning as fits."""
    start = len(data).to_bytes(_LENGTH_BYTES, "little") + data[: _FIRST_BYTES - _LENGTH_BYTES]
    return bytearray(start.ljust(_FIRST_BYTES, b"\0"))


def _read_first(message: bytearray) -> tuple[int, bytes]:
    """Return (length of the data, beginning of the data) of a first message."""
    length = int.from_bytes(message[:_LENGTH_BYTES], "little")
    return length, bytes(message[_LENGTH_BYTES : _LENGTH_BYTES + length])

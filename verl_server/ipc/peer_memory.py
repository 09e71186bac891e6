"""`PeerMemory`: sums over the GPUs of one host, which read each other's memory directly.

The `TpGroup` holds it. A decode step of several ranks sums a few kilobytes after every half layer, and most of the time
of such a sum is NCCL's latency. Microseconds for a bf16 sum of [n, 4096] over two H200s (`benchmarks/all_reduce.py`):

                 n =   1     16     64    128    256    512   2048   4096
    NCCL            17.8   16.7   20.4   24.0   37.9   43.6   85.0    158
    PeerMemory       7.0    8.7   10.6   12.9   16.7   24.8   73.0    144

Every rank reads the whole of a small tensor from every peer (one shot). If the tensor is large, every rank sums one
share and writes the sums to the peers (two shots). Both operations are part of PyTorch's symmetric memory. This module
owns the buffer, chooses the operation, and falls back to NCCL if the GPUs cannot map each other's memory.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

logger = logging.getLogger(__name__)
T = TypeVar("T")

_BUFFER_BYTES = 32 * 2**20
"""Enough for 4,096 tokens of hidden size 4,096 in bf16. For larger tensors NCCL is as fast: bandwidth is the limit."""
_ONE_SHOT_BYTES = 2**19
"""Largest tensor that is summed in one shot."""
_SIZES = (2, 4, 8)
_DTYPES = (torch.bfloat16, torch.float32)
_ALIGNMENT = 16
_NATIVE_ATOMICS = 3
"""CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED of the CUDA driver API."""


class PeerMemory:
    def __init__(self, buffer: Tensor, group_name: str) -> None:
        """`buffer` is uint8 on this device. Every rank of the group has mapped it."""
        self._buffer, self._group_name = buffer, group_name

    @classmethod
    def connect(
        cls, group: dist.ProcessGroup, device: torch.device, gather: Callable[[bytes], list[bytes]]
    ) -> PeerMemory | None:
        """Map the buffers of all ranks of a group on one host. Return None on all ranks if one rank cannot.

        `gather` returns the bytes of every rank, in rank order, on every rank.
        """

        def all_agree(ok: bool) -> bool:
            return all(vote == b"1" for vote in gather(b"1" if ok else b"0"))

        if device.type != "cuda" or dist.get_world_size(group) not in _SIZES:
            return None
        if not all_agree(_can_access(device, gather(_uuid(device.index)))):
            return None
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # it is not used here, and its set-up can fail
        with torch.cuda.device(device):
            buffer, failure = _attempt(_make_buffer)
            mapped = None
            if all_agree(buffer is not None) and buffer is not None:
                mapped, failure = _attempt(lambda: _rendezvous(buffer, group))
        if not all_agree(mapped is not None) or buffer is None:
            reason = failure or "another rank logs the reason"
            logger.warning("The GPUs cannot map each other's memory, so NCCL computes sums over the ranks: %s", reason)
            return None
        logger.info("Sums over the ranks use peer memory")
        return cls(buffer, group.group_name)

    def sum(self, tensor: Tensor) -> Tensor | None:
        """Return the sum of `tensor` over the ranks, which may overwrite `tensor`.

        Return None, without a sum, if the tensor is too large, not aligned or of another dtype.
        """
        if tensor.nbytes > _BUFFER_BYTES or tensor.nbytes % _ALIGNMENT or tensor.dtype not in _DTYPES:
            return None
        buffer = self._buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        # A sum ends when all ranks have read the buffer, so the next sum may overwrite it.
        buffer.copy_(tensor)
        if tensor.nbytes <= _ONE_SHOT_BYTES:
            summed: Tensor = torch.ops.symm_mem.one_shot_all_reduce(buffer, "sum", self._group_name)
            return summed
        torch.ops.symm_mem.two_shot_all_reduce_(buffer, "sum", self._group_name)
        return tensor.copy_(buffer)


def _make_buffer() -> Tensor:
    import torch.distributed._symmetric_memory as symmetric_memory

    return symmetric_memory.empty(_BUFFER_BYTES, dtype=torch.uint8, device=torch.device("cuda"))


def _rendezvous(buffer: Tensor, group: dist.ProcessGroup) -> Any:
    import torch.distributed._symmetric_memory as symmetric_memory

    return symmetric_memory.rendezvous(buffer, group)


def _attempt(call: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return call(), None
    except (RuntimeError, ImportError) as error:
        return None, error


def _uuid(index: int) -> bytes:
    return str(torch.cuda.get_device_properties(index).uuid).encode()


def _can_access(device: torch.device, uuids: list[bytes]) -> bool:
    """Return True if the device can map these GPUs' memory, and synchronize with their kernels by atomic counters."""
    visible = {_uuid(index): index for index in range(torch.cuda.device_count())}
    if not visible.keys() >= set(uuids):
        return False
    peers = [visible[uuid] for uuid in uuids if visible[uuid] != device.index]
    return all(torch.cuda.can_device_access_peer(device, peer) and _has_atomics(device.index, peer) for peer in peers)


def _has_atomics(device: int, peer: int) -> bool:
    """Return True if atomic operations work between two GPUs, as over NVLink.

    Over PCIe, the other GPU may never see a counter change, and would wait forever.
    """
    value = ctypes.c_int(0)
    code = ctypes.CDLL("libcuda.so.1").cuDeviceGetP2PAttribute(ctypes.byref(value), _NATIVE_ATOMICS, device, peer)
    return code == 0 and value.value == 1

"""`PeerMemory`: sums over the GPUs of one host, read straight out of each other's memory.

Held by the `TpGroup`. A decode step of several ranks sums a few kilobytes after every half layer, where NCCL's latency
is most of the time. Microseconds a sum of [n, 4096] in bf16 over two H200s (`benchmarks/all_reduce.py`):

                 n =   1     16     64    128    256    512   2048   4096
    NCCL            17.8   16.7   20.4   24.0   37.9   43.6   85.0    158
    this             7.0    8.7   10.6   12.9   16.7   24.8   73.0    144

Every rank reads all of a small tensor from every peer (one shot); of a large one it sums its share, and writes it to
the peers (two shots). Both are PyTorch's symmetric memory; what is here is the buffer, the choice, and what to do
where there is none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

logger = logging.getLogger(__name__)

_BUFFER_BYTES = 32 * 2**20
"""4,096 tokens of a hidden size of 4,096. Beyond it bandwidth decides, of which NCCL makes as much."""
_ONE_SHOT_BYTES = 2**19
_SIZES = (2, 4, 8)
_DTYPES = (torch.bfloat16, torch.float32)
_ALIGNMENT = 16


class PeerMemory:
    def __init__(self, buffer: Tensor, group_name: str) -> None:
        """`buffer`: uint8, on this device, which every rank of the group has mapped."""
        self._buffer, self._group_name = buffer, group_name

    @classmethod
    def connect(
        cls, group: dist.ProcessGroup, device: torch.device, all_agree: Callable[[bool], bool]
    ) -> PeerMemory | None:
        """Map the buffers of all ranks of a group on one host; None on all of them if one cannot."""
        if device.type != "cuda" or dist.get_world_size(group) not in _SIZES or not all_agree(_reaches_peers(device)):
            return None
        memory, failure = None, None
        try:
            import torch.distributed._symmetric_memory as symmetric_memory

            buffer = symmetric_memory.empty(_BUFFER_BYTES, dtype=torch.uint8, device=device)
            symmetric_memory.rendezvous(buffer, group)
            memory = cls(buffer, group.group_name)
        except (RuntimeError, ImportError) as error:
            failure = error
        if not all_agree(memory is not None):
            logger.warning("The GPUs cannot map each other's memory, sums go through NCCL: %s", failure or "see a peer")
            return None
        logger.info("Sums over the ranks go through peer memory")
        return memory

    def sum(self, tensor: Tensor) -> Tensor | None:
        """Over the ranks, maybe in place; None if the tensor is not for it: too large, or of another dtype."""
        if tensor.nbytes > _BUFFER_BYTES or tensor.nbytes % _ALIGNMENT or tensor.dtype not in _DTYPES:
            return None
        buffer = self._buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        # A sum ends when all ranks have read: the buffer is free for the next one.
        buffer.copy_(tensor)
        if tensor.nbytes <= _ONE_SHOT_BYTES:
            summed: Tensor = torch.ops.symm_mem.one_shot_all_reduce(buffer, "sum", self._group_name)
            return summed
        torch.ops.symm_mem.two_shot_all_reduce_(buffer, "sum", self._group_name)
        return tensor.copy_(buffer)


def _reaches_peers(device: torch.device) -> bool:
    others = (other for other in range(torch.cuda.device_count()) if other != device.index)
    return all(torch.cuda.can_device_access_peer(device, other) for other in others)

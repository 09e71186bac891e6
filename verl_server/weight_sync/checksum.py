"""A checksum of a tensor's bits that CPU and GPU compute alike, at the speed of memory.

Both ends of a weight update use it: the server for `/weights_checker`, a trainer to know what the server
should say. Every single changed element changes the result (each is multiplied by an odd number that depends
on its position, modulo 2^64); it is not meant to resist an adversary.
"""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK = 1 << 20
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def tensor_checksum(tensor: Tensor) -> str:
    """16 hex digits for the elements in order; dtype matters, strides and device do not."""
    flat = tensor.detach().reshape(-1)
    bits = flat.view(_INTEGERS[flat.element_size()])
    odd = torch.arange(min(_CHUNK, bits.numel()), dtype=torch.int64, device=bits.device) * 2 + 1
    total = bits.numel()
    for start in range(0, bits.numel(), _CHUNK):
        chunk = bits[start : start + _CHUNK].to(torch.int64)
        # The products wrap around; + 1 tells zeros from nothing.
        factors = (odd[: chunk.numel()] + 2 * start) * 0x5851F42D4C957F2D
        total += int(((chunk + 1) * factors).sum())
    return f"{total % 2**64:016x}"

"""A checksum of a tensor's bits that CPU and GPU compute alike, at the speed of memory.

Both ends of a weight update use it: the server for `/weights_checker` and for the checksums that travel with an
update, a trainer to know what the server should say. It is the polynomial sum of w[i] * g^(i+1) modulo 2^64 over
the tensor's 32-bit words w, with an odd g. So these are always seen, whatever the values: one changed element of
up to 32 bits, two swapped words, two flipped bits. It is not meant to resist an adversary.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

_G = 0x5851F42D4C957F2D  # 5 modulo 8: its powers repeat as late as they can, and no two of them add up to 0
_BLOCK = 1 << 14
"""Words whose powers of g are tabulated. Block j counts g^(j * _BLOCK) times its own sum."""
_CUDA_BLOCKS = 1 << 8
"""Blocks in one kernel, which writes 8 bytes for each word (32 MiB)."""


def tensor_checksum(tensor: Tensor) -> str:
    """16 hex digits for the elements in order; dtype's size and their number matter, strides and device do not."""
    blocks = 1 if tensor.device.type == "cpu" else _CUDA_BLOCKS
    total = tensor.numel() * 8 + tensor.element_size()  # tells zeros from nothing
    # The products' operand, allocated once: one block of it fits the processor's cache.
    wide = torch.empty(min(blocks * _BLOCK, tensor.nbytes // 4 + 1), dtype=torch.int64, device=tensor.device)
    sums = [_block_sums(_words(chunk), wide) for chunk in _chunks(tensor.detach(), blocks * _BLOCK * 4)]
    factor, step = 1, pow(_G, _BLOCK, 2**64)
    for value in torch.cat(sums).tolist() if sums else []:
        total += value * factor
        factor = factor * step % 2**64
    return f"{total % 2**64:016x}"


def _chunks(tensor: Tensor, nbytes: int) -> Iterator[Tensor]:
    """The elements' bytes in order, `nbytes` at a time; rows that do not lie in order are copied piecewise."""
    if tensor.is_contiguous():
        yield from (chunk for chunk in torch.split(tensor.reshape(-1).view(torch.uint8), nbytes) if len(chunk))
        return
    rest = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    row = tensor[0].numel() * tensor.element_size() if tensor.numel() else 1
    for rows in torch.split(tensor, max(1, nbytes // row)):
        rest = torch.cat([rest, rows.contiguous().reshape(-1).view(torch.uint8)])
        whole = len(rest) - len(rest) % nbytes
        yield from (chunk for chunk in torch.split(rest[:whole], nbytes) if len(chunk))
        rest = rest[whole:]
    if len(rest):
        yield rest


def _words(data: Tensor) -> Tensor:
    """The bytes as int32, zeros behind an odd end; a copy if they are not aligned."""
    if len(data) % 4:
        data = torch.nn.functional.pad(data, (0, 4 - len(data) % 4))
    if data.storage_offset() % 4 or data.data_ptr() % 4:
        data = data.clone()
    return data.view(torch.int32)


def _block_sums(words: Tensor, wide: Tensor) -> Tensor:
    """The sum of word * g^(i+1) of each block of a chunk, i counting from the block's start; int64 [blocks]."""
    powers = _powers(words.device)
    wide = wide[: len(words)].copy_(words)
    if words.device.type == "cpu":
        return torch.dot(wide, powers[: len(words)]).reshape(1)
    whole = len(words) - len(words) % _BLOCK
    sums = wide[:whole].view(-1, _BLOCK).mul_(powers).sum(1)
    rest = wide[whole:]
    return torch.cat([sums, rest.mul_(powers[: len(rest)]).sum().reshape(1)]) if len(rest) else sums


@functools.cache
def _powers(device: torch.device) -> Tensor:
    """g^1 ... g^_BLOCK modulo 2^64, as int64."""
    values, power = [], 1
    for _ in range(_BLOCK):
        power = power * _G % 2**64
        values.append(power - 2**64 if power >= 2**63 else power)
    return torch.tensor(values, dtype=torch.int64, device=device)

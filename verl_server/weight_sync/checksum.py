"""A checksum of a tensor's bits that CPU and GPU compute alike, at the speed of memory.

Both ends of a weight update use the checksum: the server for `/weights_checker` and for the checksums that an update
contains, a trainer to compute the checksum that the server should report. The checksum is the polynomial sum of w[i] *
g^(i+1) modulo 2^64 over the tensor's 32-bit words w, with an odd g. It always detects one changed element of up to 32
bits, two swapped words, and two flipped bits. It does not resist an adversary.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

_G = 0x5851F42D4C957F2D  # 5 modulo 8: its powers repeat as late as they can, and no two of them add up to 0
_BLOCK = 1 << 15
"""Number of words in a block, and of tabulated powers of g. The sum of block j is multiplied by g^(j * _BLOCK)."""
_CUDA_BLOCKS = 1 << 8
"""Blocks in one kernel, which writes 8 bytes for each word (64 MiB)."""


def tensor_checksum(tensor: Tensor) -> str:
    """Return 16 hex digits that depend on the elements in order, their number and the size of the dtype.

    Strides and device do not change the checksum.
    """
    return tensor_checksums([tensor])[0]


def tensor_checksums(tensors: Iterable[Tensor]) -> list[str]:
    """Return the `tensor_checksum` of each tensor.

    Each tensor is released before the next tensor is read. The function waits for a GPU only once, because a wait for a
    busy GPU takes milliseconds.
    """
    pending = [_begin(tensor.detach()) for tensor in tensors]
    values: dict[torch.device, Iterator[int]] = {}
    for device in {sums.device for _, sums in pending}:
        values[device] = iter(torch.cat([sums for _, sums in pending if sums.device == device]).tolist())
    step = pow(_G, _BLOCK, 2**64)
    checksums = []
    for total, sums in pending:
        factor = 1
        for value in itertools.islice(values[sums.device], len(sums)):
            total += value * factor
            factor = factor * step % 2**64
        checksums.append(f"{total % 2**64:016x}")
    return checksums


def _begin(tensor: Tensor) -> tuple[int, Tensor]:
    """Return (start value of the checksum, sums of blocks as int64 [blocks] on the tensor's device)."""
    blocks = 1 if tensor.device.type == "cpu" else _CUDA_BLOCKS
    # The products' operand, allocated once: one block of it fits the processor's cache.
    wide = torch.empty(min(blocks * _BLOCK, tensor.nbytes // 4 + 1), dtype=torch.int64, device=tensor.device)
    sums = [_block_sums(words, wide) for words in _words(tensor, blocks * _BLOCK)]
    start = tensor.numel() * 8 + tensor.element_size()  # so that zeros differ from an empty tensor
    return start, torch.cat(sums) if sums else wide[:0]


def _words(tensor: Tensor, count: int) -> Iterator[Tensor]:
    """Yield the elements' bits in order as int32, `count` words at a time; zeros fill the last word."""
    if tensor.numel() == 0:
        return
    if tensor.is_contiguous():
        data = tensor.reshape(-1).view(torch.uint8)
        if len(data) % 4 == 0 and data.storage_offset() % 4 == 0 and data.data_ptr() % 4 == 0:
            yield from torch.split(data.view(torch.int32), count)
            return
    for chunk in _copied(tensor, count * 4):
        yield torch.nn.functional.pad(chunk, (0, -len(chunk) % 4)).view(torch.int32)


def _copied(tensor: Tensor, nbytes: int) -> Iterator[Tensor]:
    """Yield the elements' bytes in order, `nbytes` at a time, for rows that are not aligned or do not lie in order."""
    rest = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    rows = tensor.reshape(-1) if tensor.is_contiguous() else tensor
    row = rows[0].numel() * tensor.element_size()
    for some in torch.split(rows, max(1, nbytes // row)):
        rest = torch.cat([rest, some.contiguous().reshape(-1).view(torch.uint8)])
        whole = len(rest) - len(rest) % nbytes
        yield from torch.split(rest[:whole], nbytes) if whole else ()
        rest = rest[whole:].clone()
    if len(rest):
        yield rest


def _block_sums(words: Tensor, wide: Tensor) -> Tensor:
    """Return the sum of word[i] * g^(i+1) of each block of a chunk, int64 [blocks]. i counts from the block's start."""
    powers = _powers(words.device)
    if words.device.type == "cpu":
        return torch.dot(wide[: len(words)].copy_(words), powers[: len(words)]).reshape(1)
    whole = len(words) - len(words) % _BLOCK
    rows, rest = words[:whole].view(-1, _BLOCK), words[whole:]
    sums = torch.mul(rows, powers, out=wide[:whole].view(-1, _BLOCK)).sum(1)
    return torch.cat([sums, (rest * powers[: len(rest)]).sum().reshape(1)]) if len(rest) else sums


@functools.cache
def _powers(device: torch.device) -> Tensor:
    """g^1 ... g^_BLOCK modulo 2^64, as int64."""
    values, power = [], 1
    for _ in range(_BLOCK):
        power = power * _G % 2**64
        values.append(power - 2**64 if power >= 2**63 else power)
    return torch.tensor(values, dtype=torch.int64, device=device)

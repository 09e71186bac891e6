"""The search for NaN and infinity in the bits that a copy moves.

A floating-point number is NaN or infinity exactly if all bits of its exponent are set. The copies move words that hold
one or more numbers. For each number in a word, `(word & exponents) + lowest` carries into the number's sign bit exactly
if all bits of the exponent are set. The carry never passes the sign bit. This takes two operations on a register that
holds the word anyway.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_EXPONENTS = {
    torch.float64: 0x7FF0_0000_0000_0000,
    torch.float32: 0x7F80_0000,
    torch.float16: 0x7C00,
    torch.bfloat16: 0x7F80,
}


class Bits(NamedTuple):
    """Bit masks of a word, which holds one or more numbers of a dtype.

    Each mask is a signed integer of the word's width. All masks are 0 if the dtype has neither NaN nor infinity.
    """

    exponents: int
    """The exponent of every number in the word."""
    lowest: int
    """The lowest bit of every exponent."""
    signs: int
    """The sign bit of every number."""


def exponent_bits(dtype: torch.dtype, word_bytes: int) -> Bits:
    """Return the masks for words of `word_bytes` bytes (at most 8) that hold numbers of `dtype`."""
    exponent = _EXPONENTS.get(dtype, 0)
    lowest = exponent & ~(exponent << 1)
    masks = (exponent, lowest, exponent + lowest)
    return Bits(*(_repeated(mask, dtype.itemsize, word_bytes) for mask in masks))


def _repeated(mask: int, nbytes: int, word_bytes: int) -> int:
    return int.from_bytes(mask.to_bytes(nbytes, "little") * (word_bytes // nbytes), "little", signed=True)


def is_checked(dtype: torch.dtype) -> bool:
    """Return True if numbers of `dtype` can be NaN or infinity, so that copies search for them."""
    return dtype in _EXPONENTS


def holds_nonfinite(tensor: Tensor) -> bool:
    """Return True if an element of a tensor is NaN or infinity. The function waits for the device.

    It is called for tensors that no kernel checked.
    """
    if not is_checked(tensor.dtype) or bool(tensor.sum().isfinite()):
        return False  # NaN and infinity make the sum so; it may also overflow by itself
    return not bool(tensor.isfinite().all())

"""Launch parameters of the attention kernels: the tile of a program, its warps, and how far ahead it loads.

`PagedAttention` asks for them. They were measured on Hopper (`benchmarks/attention.py`), whose tensor cores read the
factors of a product from shared memory. Other GPUs read them from registers, and have less shared memory. For these,
`_in_registers` changes a tile so that it fits. No such GPU was measured: `tests/worker/startup/test_cards.py` compiles
the kernels for them, and checks shared memory and spilled registers.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TypeVar

import triton

from verl_server.kernels.gpu import Limits


@dataclass(frozen=True)
class DecodeConfig:
    """Launch parameters for decode."""

    block: int
    """Keys per unit of work."""
    warps: int
    stages: int
    """One more than the number of blocks that are loaded ahead."""
    programs_per_sm: int

    @classmethod
    def of(cls, head_dim: int, itemsize: int, limits: Limits) -> DecodeConfig:
        """Return blocks of at most 16 KiB of keys, so that three programs fit into a multiprocessor of Hopper.

        One block is loaded ahead if blocks have 16 KiB, and two if they are smaller.
        """
        block_d = triton.next_power_of_2(head_dim)
        row = block_d * itemsize
        block = max(16, min(64, 16384 // row))
        stages = 2 if block * row >= 16384 else 3
        programs = 3
        if limits.operands_in_registers:
            # Beside keys and values there are the queries, and weights and sums whose layout changes.
            programs = limits.programs(2 * (stages - 1) * block * row + 16 * block_d * 8, most=3)
        return cls(block, warps=4, stages=stages, programs_per_sm=programs)


@dataclass(frozen=True)
class ExtendConfig:
    """Launch parameters for prefill: a tile has `rows` of (token, query head), a block has `keys` keys."""

    rows: int
    keys: int
    warps: int
    stages: int
    registers: int | None
    """Limit of registers per thread, so that more than one program fits into a multiprocessor; None: no limit."""

    @classmethod
    def of(cls, head_dim: int, itemsize: int, group: int, max_extend: int, limits: Limits) -> ExtendConfig:
        """Return the parameters for a longest chunk of `max_extend` tokens.

        For 128 to 2,047 tokens, two small programs per multiprocessor hide latency best. For longer and for shorter
        chunks (which take time when they follow a long history), one program with large blocks is faster.
        """
        row = triton.next_power_of_2(head_dim) * itemsize
        shape = (head_dim, itemsize, triton.next_power_of_2(group), limits)
        if row > 256:
            large = cls(rows=64, keys=max(16, min(32, 16384 // row)), warps=4, stages=2, registers=None)
            return _in_registers(large, *shape)
        if 128 <= max_extend < 2048:
            small = _in_registers(cls(rows=128, keys=32, warps=8, stages=3, registers=128), *shape)
            if limits.programs(_shared_bytes(small, head_dim, itemsize), most=2) == 2:
                return small
        rows = 64 if max_extend * group <= 64 else 128
        return _in_registers(cls(rows, keys=64, warps=rows // 16, stages=3, registers=None), *shape)


@dataclass(frozen=True)
class SharedConfig:
    """Launch parameters for shared keys: a tile has `rows` of (entry, query head), a block has `keys` keys."""

    rows: int
    keys: int
    warps: int
    stages: int
    programs_per_sm: int

    @classmethod
    def of(cls, head_dim: int, itemsize: int, group: int, limits: Limits) -> SharedConfig:
        row = triton.next_power_of_2(head_dim) * itemsize
        keys = max(16, min(64, 16384 // row))
        stages = 3 if row <= 256 else 2
        least = 2 * triton.next_power_of_2(group)
        tile = cls(max(64, least), keys, warps=4, stages=stages, programs_per_sm=2)
        tile = _in_registers(tile, head_dim, itemsize, least, limits)
        if limits.operands_in_registers:
            programs = limits.programs(_shared_bytes(tile, head_dim, itemsize), most=2)
            return dataclasses.replace(tile, programs_per_sm=programs)
        return tile


_Tile = TypeVar("_Tile", ExtendConfig, SharedConfig)


def _in_registers(tile: _Tile, head_dim: int, itemsize: int, least_rows: int, limits: Limits) -> _Tile:
    """Return the tile for the GPU: the same if its tensor cores read the factors of a product from shared memory.

    If they read registers, more warps share a large tile, because each thread holds a part of the queries and of a
    block too. Products of fp32, which no tensor core computes, hold the most, so their tiles have fewer rows. Then
    stages, keys and rows are reduced, in this order, until a program fits into the shared memory. There are at least
    `least_rows` rows, and 16.
    """
    if not limits.operands_in_registers:
        return tile
    block_d, least_rows = triton.next_power_of_2(head_dim), max(16, least_rows)
    rows = tile.rows if itemsize < 4 else max(least_rows, min(32, 4096 // block_d))
    warps = 8 if itemsize == 4 or rows * block_d > 4096 else tile.warps
    tile = dataclasses.replace(tile, rows=rows, warps=warps)
    while _shared_bytes(tile, head_dim, itemsize) > limits.shared_memory:
        if tile.stages > 2:
            tile = dataclasses.replace(tile, stages=tile.stages - 1)
        elif tile.keys > 16:
            tile = dataclasses.replace(tile, keys=tile.keys // 2)
        elif tile.rows // 2 >= least_rows:
            tile = dataclasses.replace(tile, rows=tile.rows // 2)
        else:
            break  # Triton's error names the kernel and the bytes that it needs
    return tile


_INDICES = 1024
"""Bytes that suffice for page numbers and sums that cross warps."""


def _shared_bytes(tile: ExtendConfig | SharedConfig, head_dim: int, itemsize: int) -> int:
    """Return the shared memory of a program whose products read registers: queries, and blocks that are loaded ahead.

    The weights of a block pass through it too, unless both products give a warp the same rows.
    """
    block_d: int = triton.next_power_of_2(head_dim)
    blocks = 2 * (tile.stages - 1) * tile.keys * block_d
    weights = tile.rows * tile.keys if itemsize == 4 or tile.rows < block_d else 0
    return (tile.rows * block_d + blocks + weights) * itemsize + _INDICES

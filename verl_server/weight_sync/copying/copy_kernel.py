"""The Triton kernel of a fused copy, and its launches. `CopyPlan` imports it if there are Triton and a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from verl_server.weight_sync.copying.copy_table import FIELDS, INTEGERS, Table

_FIELDS = tl.constexpr(FIELDS)


class TileCopies:
    """Compiled and loaded launches, which run the copies of the tables. The tables are on the device."""

    def __init__(self, tables: Sequence[Table], device: torch.device, *, num_warps: int) -> None:
        """Compile the launches, and wait for the current stream. After that, any stream may launch.

        Triton may raise an error.
        """
        self._device = device
        # The flags are in page-locked host memory, which the kernel writes only if it sees NaN or infinity. So nothing
        # has to be cleared on the device before a copy, nor fetched from the device afterwards.
        self._seen = [torch.zeros(len(table.pairs), dtype=torch.int32, pin_memory=True) for table in tables]
        self._pairs = [table.pairs for table in tables]
        with torch.cuda.device(device):
            self._launches = [
                _prepared(table, seen, device, num_warps) for table, seen in zip(tables, self._seen, strict=True)
            ]
            torch.cuda.current_stream().synchronize()

    def run(self) -> None:
        """Enqueue the copies on the device's current stream."""
        for seen in self._seen:
            seen.zero_()
        with torch.cuda.device(self._device):
            for launch in self._launches:
                launch()

    def nonfinite(self) -> list[int]:
        """Return the indices of the pairs whose destination received NaN or infinity in the last run.

        The device must have completed the run.
        """
        found = (
            pairs[i]
            for seen, pairs in zip(self._seen, self._pairs, strict=True)
            for i in seen.nonzero().flatten().tolist()
        )
        return sorted(set(found))


def _prepared(table: Table, seen: torch.Tensor, device: torch.device, num_warps: int) -> Callable[[], object]:
    """Return a function that launches the compiled kernel with prepared arguments."""
    records, tiles, constants = table.records.to(device), table.tiles.to(device), kernel_constants(table)
    kernel = requested(table, seen, num_warps)
    # The first launch loads the code. An empty record makes it copy nothing.
    kernel[1, 1, 1](torch.zeros_like(records[:1]), torch.zeros_like(tiles[:1]), seen, *constants)
    return partial(kernel[len(tiles), 1, 1], records, tiles, seen, *constants)


def requested(table: Table, seen: torch.Tensor, num_warps: int) -> Any:
    """Return the compiled kernel for a table. It depends on dtypes and constants only, not on addresses."""
    constants = kernel_constants(table)
    return copy_tiles.warmup(table.records, table.tiles, seen, *constants, grid=(1,), num_warps=num_warps)


def kernel_constants(table: Table) -> tuple[Any, ...]:
    """Return the constants that `copy_tiles` is compiled with."""
    kind = table.kind
    bits = _type(INTEGERS[kind.destination.itemsize])
    return _type(kind.source), _type(kind.destination), kind.vector, table.tile_words, bits, *kind.exponents


def _type(dtype: torch.dtype) -> tl.dtype:
    return getattr(tl, str(dtype).removeprefix("torch."))


@triton.jit  # type: ignore[untyped-decorator]
def copy_tiles(
    records: tl.tensor,
    tiles: tl.tensor,
    seen: tl.tensor,
    SOURCE: tl.constexpr,
    DESTINATION: tl.constexpr,
    VECTOR: tl.constexpr,
    TILE: tl.constexpr,
    BITS: tl.constexpr,
    EXPONENTS: tl.constexpr,
    LOWEST: tl.constexpr,
    SIGNS: tl.constexpr,
) -> None:
    """Program i copies the i-th tile: up to TILE words of VECTOR elements.

    `copy_table.Table` has the shapes of the tensors. The kernel sets an element of `seen`, int32 [records], to 1 if it
    wrote NaN or infinity for this record. BITS is the integer dtype as wide as DESTINATION. The three arguments after
    BITS are the `exponent_bits` of DESTINATION.
    """
    tile = tiles + tl.program_id(0).to(tl.int64) * 2
    index = tl.load(tile).to(tl.int64)
    record = records + index * _FIELDS
    # The table guarantees that words are aligned, which the compiler cannot know.
    source = tl.multiple_of(
        tl.load(record).to(tl.pointer_type(SOURCE)), min(16, VECTOR * SOURCE.primitive_bitwidth // 8)
    )
    destination = tl.multiple_of(
        tl.load(record + 1).to(tl.pointer_type(DESTINATION)), min(16, VECTOR * DESTINATION.primitive_bitwidth // 8)
    )
    words = tl.load(record + 2)
    row_words = tl.load(record + 3)
    start = tl.load(tile + 1).to(tl.int64) * TILE
    lane = tl.arange(0, TILE)
    inside = lane < words - start
    if row_words == words:
        bits = _move(source + start * VECTOR, destination + start * VECTOR, lane, lane, inside, VECTOR, BITS)
    else:
        first_row = start // row_words
        # The number counts from the start of the tile's first row. It fits 32 bits, in which division is cheap.
        word = lane + (start - first_row * row_words).to(tl.int32)
        row = word // row_words.to(tl.int32)
        column = word - row * row_words.to(tl.int32)
        from_word = (first_row + row) * tl.load(record + 4) + column
        to_word = (first_row + row) * tl.load(record + 5) + column
        bits = _move(source, destination, from_word, to_word, inside, VECTOR, BITS)
    if EXPONENTS != 0:
        # Each thread stores by itself: a reduction over the whole program would cost more than the check.
        signs = tl.reduce(((bits & EXPONENTS) + LOWEST) & SIGNS, 1, _or)
        tl.store(seen + index + tl.zeros_like(lane), 1, mask=inside & (signs != 0))


@triton.jit  # type: ignore[untyped-decorator]
def _move(
    source: tl.tensor,
    destination: tl.tensor,
    from_word: tl.tensor,
    to_word: tl.tensor,
    inside: tl.tensor,
    VECTOR: tl.constexpr,
    BITS: tl.constexpr,
) -> tl.tensor:
    """Copy words, and convert them as torch does: from double to 16 bits through float32. Return the written words."""
    element = tl.arange(0, VECTOR)[None, :]
    values = tl.load(source + (from_word * VECTOR)[:, None] + element, mask=inside[:, None])
    if source.dtype != destination.dtype:
        values = values.to(tl.float32).to(destination.dtype.element_ty)
    tl.store(destination + (to_word * VECTOR)[:, None] + element, values, mask=inside[:, None])
    return values.to(BITS, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _or(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return a | b

"""Tables of a fused copy: pairs of tensors as rows of words, which are cut into tiles.

`CopyPlan` makes the tables on the host, `copy_kernel` runs one program for each tile. This module computes from shapes,
strides and addresses what is copied. The kernel only reads the tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from verl_server.weight_sync.copying.finite import Bits, exponent_bits

FIELDS = 6
"""Number of int64 fields of a record.

The fields are: source address, destination address, number of words, words in a row, row stride of the source in words,
row stride of the destination in words.
"""
_WORD_BYTES = 16
"""The widest load and store of a GPU thread."""
_MAX_TILE_WORDS = 4096
_MAX_ROW_WORDS = 2**30
"""The most words of a row: inside a tile the kernel counts in 32 bits."""
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CONVERTIBLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class Rows(NamedTuple):
    """Source and destination of one shape, seen as `rows` x `columns`. The elements of a row are adjacent in both."""

    rows: int
    columns: int
    destination_stride: int
    """Elements from one row of the destination to the next, 0 if there is one row.

    `source_stride` is the same for the source.
    """
    source_stride: int


class Kind(NamedTuple):
    """Properties shared by all copies of one launch. Equal dtypes are copied as integers, as wide as possible."""

    source: torch.dtype
    destination: torch.dtype
    vector: int
    """Elements in a word."""
    numbers: torch.dtype
    """dtype of the tensors that are written. `destination` may be an integer with their bits."""

    @property
    def exponents(self) -> Bits:
        """Bit masks of an element of `destination`, with which the kernel finds NaN and infinity."""
        return exponent_bits(self.numbers, self.destination.itemsize)

    def tile_words(self, tile_bytes: int) -> int:
        """Return the number of words in a tile. `tile_bytes` counts bytes of the wider dtype.

        If `tile_bytes` is a power of two, the result is a power of two, too.
        """
        word_bytes = self.vector * max(self.source.itemsize, self.destination.itemsize)
        return min(tile_bytes // word_bytes, _MAX_TILE_WORDS)


@dataclass(frozen=True)
class Table:
    """The blocks of one kind, which one launch copies."""

    kind: Kind
    tile_words: int
    records: Tensor
    """int64 [blocks, FIELDS], on the host."""
    tiles: Tensor
    """int32 [tiles, 2], on the host: (index of the record, index of the tile in the record).

    The tiles are in the order in which they start.
    """
    pairs: list[int]
    """Index of the pair of each record."""


def as_rows(destination: Tensor, source: Tensor) -> Rows | None:
    """Return the pair's elements, in any order, as rows that are contiguous in source and destination.

    An element without neighbours is a row of one column. Return None if there are no such rows.
    """
    dims = [d for d in zip(destination.shape, destination.stride(), source.stride(), strict=True) if d[0] > 1]
    dims.sort(key=lambda d: (d[1], d[2]), reverse=True)
    merged: list[tuple[int, int, int]] = []
    for size, to_stride, from_stride in dims:
        if merged and merged[-1][1:] == (size * to_stride, size * from_stride):
            merged[-1] = (merged[-1][0] * size, to_stride, from_stride)
        else:
            merged.append((size, to_stride, from_stride))
    if not merged or merged[-1][1:] != (1, 1):
        merged.append((1, 1, 1))
    if len(merged) > 2:
        return None
    rows, to_stride, from_stride = merged[0] if len(merged) == 2 else (1, 0, 0)
    return Rows(rows, merged[-1][0], to_stride, from_stride)


def build_tables(
    pairs: Sequence[tuple[Tensor, Tensor]], tile_bytes: int, links: Sequence[int] | None = None
) -> tuple[list[Table], list[int]]:
    """Return tables that cover the pairs, and the indices of pairs that no table can take.

    `links` are those of `CopyPlan`.
    """
    records: dict[Kind, list[tuple[int, ...]]] = {}
    pairs_of: dict[Kind, list[int]] = {}
    left = []
    for i, (destination, source) in enumerate(pairs):
        found = _blocks(destination, source)
        if not found:
            left.append(i)
        for kind, record in found:
            records.setdefault(kind, []).append(record)
            pairs_of.setdefault(kind, []).append(i)
    links = [0] * len(pairs) if links is None else links
    tables = [
        _table(kind, records[kind], pairs_of[kind], [links[i] for i in pairs_of[kind]], kind.tile_words(tile_bytes))
        for kind in records
    ]
    return tables, left


def _table(kind: Kind, blocks: list[tuple[int, ...]], pairs: list[int], links: list[int], tile_words: int) -> Table:
    """Return the table of some blocks. `pairs[i]` and `links[i]` are the pair and the link of block i."""
    records = torch.tensor(blocks, dtype=torch.int64)
    counts = (records[:, 2] + tile_words - 1) // tile_words
    owners = torch.repeat_interleave(torch.arange(len(blocks)), counts)
    numbers = torch.arange(len(owners)) - (counts.cumsum(0) - counts)[owners]
    tiles = torch.stack([owners, numbers], dim=1).to(torch.int32)
    return Table(kind, tile_words, records, tiles[_spread(torch.tensor(links)[owners])], pairs)


def _spread(links: Tensor) -> Tensor:
    """Return an order of tiles that spreads the tiles of each link evenly, so that all links are busy."""
    position = torch.empty(len(links), dtype=torch.float64)
    for link in sorted(set(links.tolist())):
        mine = (links == link).nonzero().squeeze(1)
        position[mine] = (torch.arange(len(mine), dtype=torch.float64) + 0.5) / len(mine)
    return position.argsort(stable=True)


def _blocks(destination: Tensor, source: Tensor) -> list[tuple[Kind, tuple[int, ...]]]:
    """Return one block for the pair's words, and one for the elements at the pair's end that do not fill a word.

    Return [] if the kernel cannot copy the pair.
    """
    rows = as_rows(destination, source)
    converts = destination.dtype != source.dtype
    if rows is None or (converts and not {destination.dtype, source.dtype} <= set(_CONVERTIBLE)):
        return []
    to, to_rest = divmod(destination.data_ptr(), destination.itemsize)
    start, start_rest = divmod(source.data_ptr(), source.itemsize)
    if to_rest or start_rest:
        return []
    widest = max(1, _WORD_BYTES // min(destination.itemsize, source.itemsize))
    if rows.rows > 1:
        vector = _lowest_bit(to | start | rows.columns | rows.destination_stride | rows.source_stride | widest)
        if rows.columns // vector > _MAX_ROW_WORDS:
            return []
        return [_block(destination, source, rows, vector, 0)]
    vector = _lowest_bit(to | start | widest)
    body = rows.columns // vector * vector
    blocks = [_block(destination, source, Rows(1, body, 0, 0), vector, 0)] if body else []
    if body < rows.columns:
        blocks.append(_block(destination, source, Rows(1, rows.columns - body, 0, 0), 1, body))
    return blocks


def _block(destination: Tensor, source: Tensor, rows: Rows, vector: int, skip: int) -> tuple[Kind, tuple[int, ...]]:
    """Return the record of rows that start `skip` elements into the pair, in words of `vector` elements."""
    row_words = rows.columns // vector
    return _kind(destination.dtype, source.dtype, vector), (
        source.data_ptr() + skip * source.itemsize,
        destination.data_ptr() + skip * destination.itemsize,
        rows.rows * row_words,
        row_words,
        rows.source_stride // vector,
        rows.destination_stride // vector,
    )


def _kind(destination: torch.dtype, source: torch.dtype, vector: int) -> Kind:
    if destination != source:
        return Kind(source, destination, vector, destination)
    word_bytes = vector * source.itemsize
    integer = INTEGERS[min(word_bytes, 8)]
    return Kind(integer, integer, word_bytes // integer.itemsize, destination)


def _lowest_bit(number: int) -> int:
    """Return the largest power of two that divides `number`."""
    return number & -number

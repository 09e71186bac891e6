"""Tiles of attention: those that were measured on Hopper stay, and other GPUs get tiles that fit."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("triton")

from verl_server.kernels.attention_tiles import DecodeConfig, ExtendConfig, SharedConfig, _shared_bytes
from verl_server.kernels.gpu import HOPPER, Limits

AMPERE = Limits(163 * 1024, operands_in_registers=True)
SMALL = Limits(99 * 1024, operands_in_registers=True)
"""RTX 3090, 4090 and 5090."""
BLACKWELL = Limits(227 * 1024, operands_in_registers=False)


@pytest.mark.parametrize(
    ("head_dim", "itemsize", "decode", "extend", "shared"),
    [
        (64, 2, (64, 4, 3, 3), [(64, 64, 4, 3, None), (128, 32, 8, 3, 128), (128, 64, 8, 3, None)], (64, 64, 4, 3, 2)),
        (80, 2, (64, 4, 2, 3), [(64, 64, 4, 3, None), (128, 32, 8, 3, 128), (128, 64, 8, 3, None)], (64, 64, 4, 3, 2)),
        (128, 2, (64, 4, 2, 3), [(64, 64, 4, 3, None), (128, 32, 8, 3, 128), (128, 64, 8, 3, None)], (64, 64, 4, 3, 2)),
        (256, 2, (32, 4, 2, 3), [(64, 32, 4, 2, None)] * 3, (64, 32, 4, 2, 2)),
        (64, 4, (64, 4, 2, 3), [(64, 64, 4, 3, None), (128, 32, 8, 3, 128), (128, 64, 8, 3, None)], (64, 64, 4, 3, 2)),
        (128, 4, (32, 4, 2, 3), [(64, 32, 4, 2, None)] * 3, (64, 32, 4, 2, 2)),
        (256, 4, (16, 4, 2, 3), [(64, 16, 4, 2, None)] * 3, (64, 16, 4, 2, 2)),
    ],
)
def test_hopper_has_what_was_measured(
    head_dim: int,
    itemsize: int,
    decode: tuple[int, ...],
    extend: list[tuple[int | None, ...]],
    shared: tuple[int, ...],
) -> None:
    assert DecodeConfig.of(head_dim, itemsize, HOPPER) == DecodeConfig(*decode)
    chunks = [ExtendConfig.of(head_dim, itemsize, 4, longest, HOPPER) for longest in (16, 1000, 4096)]
    assert chunks == [ExtendConfig(*tile) for tile in extend]  # type: ignore[arg-type]
    assert SharedConfig.of(head_dim, itemsize, 4, HOPPER) == SharedConfig(*shared)


@pytest.mark.parametrize("shared_kib", [72, 99, 163])
def test_tiles_fit_into_any_shared_memory(shared_kib: int) -> None:
    limits = Limits(shared_kib * 1024, operands_in_registers=True)
    dims, itemsizes, groups = (16, 64, 80, 96, 128, 256), (2, 4), (1, 4, 7, 16)
    for head_dim, itemsize, group in itertools.product(dims, itemsizes, groups):
        tiles = [ExtendConfig.of(head_dim, itemsize, group, longest, limits) for longest in (16, 1000, 4096)]
        for tile in [*tiles, SharedConfig.of(head_dim, itemsize, group, limits)]:
            assert _shared_bytes(tile, head_dim, itemsize) <= limits.shared_memory
            assert tile.rows >= max(16, group) and tile.keys >= 16 and tile.stages >= 2
        assert DecodeConfig.of(head_dim, itemsize, limits).programs_per_sm >= 1


def test_what_cards_get_instead() -> None:
    """The choices that docs/performance.md names."""
    assert ExtendConfig.of(128, 2, 4, 1000, AMPERE).registers == 128, "two small programs fit"
    assert ExtendConfig.of(128, 2, 4, 1000, SMALL) == ExtendConfig(128, 64, 8, 3, None), "one large program"
    assert [DecodeConfig.of(128, 2, limits).programs_per_sm for limits in (AMPERE, SMALL)] == [3, 2]
    assert SharedConfig.of(128, 2, 4, SMALL) == SharedConfig(64, 64, 8, 3, 1)
    assert ExtendConfig.of(64, 4, 4, 4096, SMALL) == ExtendConfig(32, 64, 8, 3, None), "fp32"
    assert ExtendConfig.of(128, 2, 4, 4096, BLACKWELL) == ExtendConfig.of(128, 2, 4, 4096, HOPPER)


def test_a_group_of_heads_stays_in_one_tile() -> None:
    assert ExtendConfig.of(256, 4, 40, 4096, SMALL).rows == 64
    assert SharedConfig.of(128, 2, 64, SMALL).rows == 128


def test_programs_that_share_a_multiprocessor() -> None:
    assert SMALL.programs(99 * 1024, most=3) == 1
    assert SMALL.programs(49 * 1024, most=3) == 2, "each has a KiB of the system's beside it"
    assert SMALL.programs(50 * 1024, most=3) == 1
    assert SMALL.programs(1024, most=3) == 3

"""The copies of `benchmarks.shard_copy` are those of a push from FSDP2 to TP 2, and its orders keep every tile."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.served_slices import served_tensors, traffic
from benchmarks.shapes import SHAPES, shape_folder
from benchmarks.shard_copy import make_copies, part_elements, reordered, shard_elements, spread
from benchmarks.weight_copy import parameters
from verl_server.weight_sync.copying.copy_table import build_tables


def test_as_many_elements_cross_the_link_as_in_a_push(tmp_path: Path) -> None:
    tensors = parameters(SHAPES["tiny"])
    shards = [torch.full((shard_elements(tensors),), float(rank)) for rank in range(2)]
    expected = traffic(served_tensors(shape_folder(tmp_path, "tiny"), 2), 2)
    for reader in range(2):
        target = torch.full((part_elements(tensors),), -1.0)
        copies = make_copies(tensors, shards, target, reader)
        for destination, source in zip(copies.destinations, copies.sources, strict=True):
            assert bool((destination == -1).all()), "two copies overlap"
            destination.copy_(source)
        for owner in range(2):
            assert int((target == owner).sum()) == expected[reader, owner]


@pytest.mark.parametrize("until", [0.0, 0.5, 0.85, 1.0])
def test_an_order_keeps_every_tile(until: float) -> None:
    tensors = parameters(SHAPES["tiny"])
    shards = [torch.zeros(shard_elements(tensors)) for _ in range(2)]
    copies = make_copies(tensors, shards, torch.zeros(part_elements(tensors)), 0)
    tables, _ = build_tables(list(zip(copies.destinations, copies.sources, strict=True)), 2**13)
    for table in tables:
        moved = reordered(table, copies.owners, 0, lambda remote: spread(remote, until=until))
        assert sorted(moved.tiles.tolist()) == sorted(table.tiles.tolist())
        remote = [copies.owners[table.pairs[record]] == 1 for record, _ in moved.tiles.tolist()]
        last = max((i for i, is_remote in enumerate(remote) if is_remote), default=0)
        assert last < max(until, sum(remote) / len(remote)) * len(remote) + 1

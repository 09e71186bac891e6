"""`WeightPush` without a trainer: how it cuts buckets, and when it asks for shards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from verl_server.integrations.verl.weight_push import ShardedWeights, _Buckets

SIZES = {"a": 10, "b": 30, "c": 20, "d": 100, "e": 5, "f": 5}


def cut(limit: int) -> list[list[str]]:
    """Return the names in each bucket of at most `limit` fp32 numbers."""
    buckets = _Buckets(((name, torch.zeros(size)) for name, size in SIZES.items()), 4 * limit, gather=False)
    return [[name for name, _ in bucket] for bucket in iter(buckets.next, [])]


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (1000, [["a", "b", "c", "d", "e", "f"]]),
        (60, [["a", "b", "c"], ["d"], ["e", "f"]]),
        (40, [["a", "b"], ["c"], ["d"], ["e", "f"]]),
        (1, [["a"], ["b"], ["c"], ["d"], ["e"], ["f"]]),
    ],
)
def test_buckets_stay_below_the_limit(limit: int, expected: list[list[str]]) -> None:
    """A tensor that is larger than the limit has a bucket of its own."""
    assert cut(limit) == expected


def test_no_weights_are_no_bucket() -> None:
    buckets = _Buckets(iter(()), 100, gather=False)
    assert buckets.next() == [] and buckets.next() == []


def test_sharded_weights_are_gathered_only_when_they_are_iterated() -> None:
    calls = []

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        calls.append("gathered")
        return iter([("a", torch.ones(2))])

    weights = ShardedWeights([("a", torch.zeros(1))], gathered, stay_in_place=True)
    assert [name for name, _ in weights.shards] == ["a"] and not calls
    assert next(weights)[1].tolist() == [1.0, 1.0]
    assert list(weights) == [] and calls == ["gathered"]

"""Shards must tile a tensor exactly. Otherwise the error names the missing or overlapping range."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from tests.weight_sync.described import Boxes, grid, irregular, split_over
from verl_server.errors import WeightUpdateError
from verl_server.weight_sync.receiver.boxes import Box, box_at, check_tiling, common_box, index_in, indexed_box, volume


def boxes_of(boxes: Boxes) -> list[Box]:
    made = [box_at(offset, shape) for offset, shape in boxes]
    return [box for box in made if volume(box)]


def test_a_box_is_what_an_index_takes() -> None:
    full = torch.arange(120).reshape(6, 4, 5)
    index = (slice(1, 4), slice(None), slice(2, 9))
    box = indexed_box(index, full.shape)
    assert box == ((1, 4), (0, 4), (2, 5))
    assert torch.equal(full[index], full[index_in(box, box_at([0, 0, 0], full.shape))])
    assert volume(box) == full[index].numel()


def test_what_two_boxes_share() -> None:
    a, b = box_at([0, 0], [4, 4]), box_at([2, 3], [9, 1])
    common = common_box(a, b)
    assert common == ((2, 4), (3, 4))
    assert index_in(common, b) == (slice(0, 2), slice(0, 1))
    assert common_box(a, box_at([4, 0], [1, 1])) is None
    assert common_box(a, box_at([1, 1], [0, 3])) is None


@pytest.mark.parametrize("shape", [(7,), (7, 5), (3, 4, 5), (1, 1), (0, 5), ()])
def test_every_tiling_is_taken(shape: tuple[int, ...]) -> None:
    check_tiling(shape, boxes_of([([0] * len(shape), list(shape))]))
    if shape:
        for layout in (split_over(0, 3), split_over(1, 4), grid(2, 3), split_over(0, 50)):
            check_tiling(shape, boxes_of(layout(shape)))
        for seed in range(20):
            check_tiling(shape, boxes_of(irregular(random.Random(seed))(shape)))


@pytest.mark.parametrize("seed", range(40))
def test_the_verdict_is_that_of_counting_elements(seed: int) -> None:
    dice = random.Random(seed)
    shape = [dice.randint(1, 5) for _ in range(dice.randint(1, 3))]
    boxes = list(dict.fromkeys(boxes_of(irregular(dice)(shape))))
    for _ in range(dice.randrange(3)):  # damage the tiling
        match dice.choice(["drop", "add", "nothing"]):
            case "drop" if len(boxes) > 1:
                boxes.pop(dice.randrange(len(boxes)))
            case "add":
                offset = [dice.randrange(n) for n in shape]
                added = box_at(offset, [dice.randint(1, n - o) for n, o in zip(shape, offset, strict=True)])
                boxes = list(dict.fromkeys([*boxes, added]))
    count = torch.zeros(shape, dtype=torch.int64)
    for box in boxes:
        count[index_in(box, box_at([0] * len(shape), shape))] += 1
    if bool((count == 1).all()):
        check_tiling(shape, boxes)
    else:
        with pytest.raises(WeightUpdateError, match="overlap" if bool((count > 1).any()) else "no shard covers"):
            check_tiling(shape, boxes)


def test_what_is_missing_is_named_with_its_range() -> None:
    boxes = boxes_of(grid(4, 2)((8, 6)))
    with pytest.raises(WeightUpdateError, match=r"no shard covers \[4:6, 3:6\] of \[8, 6\]"):
        check_tiling((8, 6), [box for box in boxes if box != ((4, 6), (3, 6))])
    with pytest.raises(WeightUpdateError, match=r"no shard covers \[2:8, 0:6\]"):
        check_tiling((8, 6), boxes[:2])
    with pytest.raises(WeightUpdateError, match=r"no shard covers \[0:8, 0:6\]"):
        check_tiling((8, 6), [])


def test_what_overlaps_is_named() -> None:
    with pytest.raises(WeightUpdateError, match=r"\[0:4, 0:6\] and \[3:8, 0:6\] overlap"):
        check_tiling((8, 6), [box_at([0, 0], [4, 6]), box_at([3, 0], [5, 6])])


def test_a_large_mesh_is_taken_and_chaos_is_not_even_tried() -> None:
    check_tiling((4096, 64), boxes_of(grid(64, 64)((4096, 64))))
    check_tiling((100_000,), boxes_of(split_over(0, 20_000)((100_000,))))
    size = 5000
    diagonal = [box_at([i, i], [1, 1]) for i in range(size)]
    with pytest.raises(WeightUpdateError, match="5000 shards have too irregular borders"):
        check_tiling((size, size), diagonal)
    for a, b in itertools.pairwise(diagonal[:3]):
        assert common_box(a, b) is None

"""A step begins where the step before ended, also after a resume; a checkpoint has the position if it must."""

from __future__ import annotations

import pytest

from verl_server.train.checkpoints import Progress
from verl_server.train.task_order import TaskOrder


def test_steps_follow_each_other() -> None:
    order = TaskOrder(4)
    for step in range(3):
        assert order.first(step) == 4 * step and order.stored(step) is None
        order.played(step, 4)
    order.played(3, 7)
    assert [order.first(step) for step in (3, 4)] == [12, 19]  # the step may still be repeated, or be saved as done
    assert (order.stored(3), order.stored(4)) == (None, 19)
    with pytest.raises(KeyError):
        order.first(2)


@pytest.mark.parametrize(("next_group", "first"), [(None, 20), (31, 31)])
def test_a_resumed_run_begins_at_the_position_of_its_checkpoint(next_group: int | None, first: int) -> None:
    order = TaskOrder(4)
    order.resume(Progress(5, 5, next_group=next_group))
    assert order.first(5) == first and order.stored(5) == next_group
    order.played(5, 4)
    assert order.first(6) == first + 4 and order.stored(6) == (None if next_group is None else 35)

"""The draw of environments: exact shares in every window, and the tasks of a run that goes on with other weights."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from fractions import Fraction

import pytest

from verl_server.errors import BadRequestError
from verl_server.train.checkpoints import Progress
from verl_server.train.environment_draw import EnvironmentDraw, Rotation
from verl_server.train.held_out import HELD_OUT
from verl_server.train.mixture import MixedEnvironment, Mixture
from verl_server.train.options import GRPOConfig
from verl_server.train.run_tasks import make_tasks


def draw_with(groups: int = 4, **weights: float) -> EnvironmentDraw:
    return EnvironmentDraw(Mixture(tuple(MixedEnvironment(n, "http://e", w) for n, w in weights.items())), groups)


def progress(
    step: int, draw: EnvironmentDraw | None, next_group: int | None = None, undone: list[int] | None = None
) -> Progress:
    state = None if draw is None else draw.state()
    return Progress(step, step, next_group=next_group, undone_groups=undone, draw=state)


def test_every_beginning_of_a_run_has_its_shares_within_one_group() -> None:
    draws = random.Random(0)
    for _ in range(300):
        shares = {str(i): draws.randint(1, draws.choice([3, 20])) for i in range(draws.randint(1, 6))}
        rotation, counts = Rotation(shares), Counter[str]()
        for place in range(2 * rotation.period):
            name, before = rotation.at(place)
            assert before == counts[name] and rotation.before(place) == {n: counts[n] for n in shares}
            counts[name] += 1
            for n, share in shares.items():
                assert abs(counts[n] - Fraction((place + 1) * share, rotation.period)) < 1
        assert counts == {name: 2 * share for name, share in shares.items()}


def test_each_environment_has_the_seeds_of_a_run_of_its_own() -> None:
    config = GRPOConfig(groups=6, group_size=2, seed=5)
    draw = draw_with(6, two=3, three=2, four=1)
    tasks = [task for step in range(4) for task in make_tasks(step, config, 0, 6, draw)]
    alone = [task.seed for step in range(4) for task in make_tasks(step, config, 0, 6)]
    for name, share in (("two", 3), ("three", 2), ("four", 1)):
        seeds = [task.seed for task in tasks if task.environment == name]
        assert seeds == alone[: len(seeds)] and len(seeds) == 4 * 2 * share
    draws = [task.sampling_seed for task in tasks]
    assert len(set(draws)) == len(draws), "no two episodes share the stream of their draws"
    parts = [make_tasks(3, config, first, 2, draw) for first in (0, 2, 4)]
    assert list(itertools.chain(*parts)) == make_tasks(3, config, 0, 6, draw), "ranks have the tasks of one rank"
    assert all(task.seed < HELD_OUT for task in make_tasks(0, GRPOConfig(seed=2**40, groups=6), 0, 6, draw))


def places(draw: EnvironmentDraw, numbers: range) -> list[tuple[str, int]]:
    return [draw.of_group(number) for number in numbers]


def test_a_run_that_goes_on_has_the_order_of_one_that_was_not_interrupted() -> None:
    whole, resumed = draw_with(a=3, b=2), draw_with(a=3, b=2)
    resumed.resume(progress(2, draw_with(a=3, b=2)))
    assert places(resumed, range(8, 30)) == places(whole, range(8, 30))


def test_no_task_is_skipped_or_repeated_when_a_fork_changes_the_weights() -> None:
    first, second, third = draw_with(a=3, b=2), draw_with(a=1, b=1, c=4), draw_with(8, c=1, b=1)
    played = places(first, range(12))
    second.resume(progress(3, first))
    played += places(second, range(12, 24))
    third.resume(progress(6, second))  # it has eight groups a step: its group 48 comes after the group 23 of the other
    played += places(third, range(48, 60))
    for name, count in Counter(name for name, _ in played).items():
        assert sorted(task for n, task in played if n == name) == list(range(count)), name
    again = draw_with(8, c=1, b=1)
    again.resume(progress(7, third))
    assert places(again, range(56, 70)) == places(third, range(56, 70)), "a start of the fork goes on"


def test_groups_that_were_drawn_and_not_trained_keep_their_tasks() -> None:
    """An asynchronous run had begun eleven groups, and had not trained four of them. `b` is not in the fork."""
    before, fork = draw_with(a=3, b=2), draw_with(a=1, c=1)
    undone = [3, 6, 7, 10]
    kept = {number: before.of_group(number) for number in undone}
    assert {name for name, _ in kept.values()} == {"a", "b"}
    fork.resume(progress(2, before, next_group=11, undone=undone))
    known = {n: fork.of_group(n) for n in [*undone, *range(11, 31)]}
    assert {n: known[n] for n in undone if kept[n][0] == "a"} == {n: d for n, d in kept.items() if d[0] == "a"}
    trained = {before.of_group(n) for n in range(11) if n not in undone}
    tasks = [*known.values(), *(place for place in trained if place[0] == "a")]
    assert len(set(tasks)) == len(tasks), "no task comes again"
    numbers = sorted(task for name, task in tasks if name == "a")
    assert numbers == list(range(len(numbers))), "none is skipped"
    other_groups = draw_with(16, a=3, b=2)  # an asynchronous run does not count in steps
    other_groups.resume(progress(2, before, next_group=11, undone=undone))
    assert places(other_groups, range(30)) == places(before, range(30))


def test_a_fork_of_a_run_with_one_environment_repeats_no_task_of_it() -> None:
    fork = draw_with(a=1, b=1)
    fork.resume(progress(5, None))
    assert places(fork, range(20, 24)) == [("a", 20), ("b", 20), ("a", 21), ("b", 21)]


def test_a_draw_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(BadRequestError, match="draw of environments in the checkpoint cannot be read"):
        draw_with(a=1).resume(Progress(1, 1, draw={"shares": 3}))

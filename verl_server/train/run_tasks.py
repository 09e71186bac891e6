"""The tasks of a run's groups: seeds of environments and of sampling, and the environment of a mixture.

All are functions of the seed of the run and of the number of a group, so that a run which continues, or is divided over
other ranks, plays the same tasks. `grpo` asks for those of its part of a step, `async_grpo` for those of one group.
"""

from __future__ import annotations

from verl_server.rollout.trajectory import Task
from verl_server.train.environment_draw import EnvironmentDraw
from verl_server.train.held_out import HELD_OUT
from verl_server.train.options import GRPOConfig


def make_tasks(
    step: int,
    config: GRPOConfig,
    first_group: int,
    groups: int,
    draw: EnvironmentDraw | None = None,
    first_of_step: int | None = None,
) -> list[Task]:
    """Return the tasks of `groups` groups of a step, from `first_group` on.

    Seeds are below those of held-out tasks, and a function of (config.seed, number of the group in the run).
    `first_of_step` is the number of the step's first group (`task_order`). By default, each step has `config.groups`
    groups. With `draw`, each environment counts its own groups, so that it gets the seeds of a run with this
    environment alone.
    """
    tasks = []
    begin = step * config.groups if first_of_step is None else first_of_step
    for group in range(first_group, first_group + groups):
        number = begin + group
        environment, own = (None, number) if draw is None else draw.of_group(number)
        seed, place = ((config.seed * 1_000_003 + count) % HELD_OUT for count in (own, number))
        for member in range(config.group_size):
            name = f"{step}-{group}-{member}"
            sampling_seed = (place * config.group_size + member) % 2**62
            tasks.append(
                Task(
                    seed=seed,
                    group=group,
                    episode_id=name,
                    sampling_seed=sampling_seed,
                    member=member,
                    environment=environment,
                )
            )
    return tasks

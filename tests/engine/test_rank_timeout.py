"""One setting bounds how long ranks wait for each other. (The error at its end is tested in `verl_engine_ranks.py`.)"""

from __future__ import annotations

import inspect

from verl_server.engine.rank_group import RANK_TIMEOUT
from verl_server.engine.verl_engine import VerlEngine
from verl_server.rollout.episode import Limits
from verl_server.train.ranks import setup_ranks


def test_ranks_wait_longer_than_an_episode_may_take() -> None:
    assert Limits().trajectory_timeout < RANK_TIMEOUT


def test_engine_and_trainer_have_the_same_default() -> None:
    assert inspect.signature(VerlEngine).parameters["rank_timeout"].default == RANK_TIMEOUT
    assert inspect.signature(setup_ranks).parameters["timeout"].default == RANK_TIMEOUT

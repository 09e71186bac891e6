"""Two servers never share a stream of seeds unless the user asks for it."""

from __future__ import annotations

import random

import pytest
import torch

from verl_server import ServerArgs
from verl_server.engine.placement import seed_of_engine
from verl_server.server.launch import with_random_seed


def drawn(**settings: int) -> int | None:
    """Return the seed of a server whose program seeds its random generators first, as trainer ranks do."""
    random.seed(1)
    torch.manual_seed(1)
    return with_random_seed(ServerArgs(model_path="folder", **settings)).random_seed


def test_servers_and_their_restarts_draw_different_seeds() -> None:
    seeds = {drawn() for _ in range(20)}
    assert len(seeds) == 20
    assert all(seed is not None and 0 <= seed < 2**53 for seed in seeds)


@pytest.mark.parametrize("seed", [0, 7])
def test_a_given_seed_is_kept(seed: int) -> None:
    assert drawn(random_seed=seed) == seed


def test_only_the_first_node_draws() -> None:
    args = ServerArgs(model_path="folder", tp_size=2, nnodes=2, node_rank=1, dist_init_addr="host:1")
    assert with_random_seed(args).random_seed is None


def test_engines_of_a_mesh_have_different_seeds_that_a_given_one_repeats() -> None:
    seeds = [[seed_of_engine(seed, rank) for rank in range(0, 64, 2)] for seed in (0, 1, 7)]
    assert [first for first, *_ in seeds] == [0, 1, 7], "the first engine must use the seed itself"
    assert len({seed for row in seeds for seed in row}) == 3 * 32
    assert seeds[1] == [seed_of_engine(1, rank) for rank in range(0, 64, 2)]
    assert all(0 <= seed < 2**53 for row in seeds for seed in row)

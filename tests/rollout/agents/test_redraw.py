"""`losses` judges draws: it knows the token that was drawn, and by how much any other token lost."""

from __future__ import annotations

import numpy as np
import torch

from tests.rollout.agents.redraw import losses
from verl_server.kernels import draw

ROWS, VOCAB = 400, 300


def drawn(logits: torch.Tensor, seeds: list[int], positions: list[int]) -> torch.Tensor:
    keys = draw.row_keys(draw.mix(np.array(seeds)), np.array(positions))
    rows = len(logits)
    ids, _ = draw.choose(logits, torch.ones(rows), torch.zeros(rows, dtype=torch.bool), torch.from_numpy(keys))
    return ids


def test_the_drawn_token_loses_nothing_and_others_lose_more_than_rounding() -> None:
    logits = 3 * torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(0))
    seeds, positions = list(range(ROWS)), [7 * i for i in range(ROWS)]
    ids = drawn(logits, seeds, positions)
    assert float(losses(logits, seeds, positions, ids.tolist()).max()) < 1e-5
    others = losses(logits, seeds, positions, ((ids + 1) % VOCAB).tolist())
    assert float(others.quantile(0.02)) > 1e-3
    later = [place + 1 for place in positions]
    for wrong_seeds, wrong_positions in (([seed + 1 for seed in seeds], positions), (seeds, later)):
        assert float(losses(logits, wrong_seeds, wrong_positions, ids.tolist()).median()) > 0.1


def test_a_loss_is_the_change_of_a_logit_that_changes_the_draw() -> None:
    logits = 3 * torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(1))
    seeds, positions = list(range(ROWS)), [3] * ROWS
    ids = drawn(logits, seeds, positions)
    block = ids // draw.BLOCK * draw.BLOCK
    rival = block + (ids - block + 1) % torch.minimum(torch.tensor(draw.BLOCK), VOCAB - block)  # of the same block
    lost = losses(logits, seeds, positions, rival.tolist())
    for change, wins in ((-1e-3, False), (1e-3, True)):
        moved = logits.scatter_add(1, rival.unsqueeze(1), (lost.float() + change).unsqueeze(1))
        assert ((drawn(moved, seeds, positions) == rival) == wins).all()

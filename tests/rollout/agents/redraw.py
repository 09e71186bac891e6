"""Recompute the draws of a session with transformers in float32: which token the session's seed draws at each place.

A draw is a function of the seed of the turn, the position and the logits. The server's logits and those of this module
differ by rounding, so a token may lose its draw here by a margin of that size, but not by more.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from verl_server.kernels.draw import BLOCK, gumbel, mix, row_keys
from verl_server.rollout.trajectory import Trajectory


def turn_seed(session_seed: int, prompt: list[int], earlier_samples: int = 0) -> int:
    """Return the seed of a turn: a function of the session's seed, the prompt and the prompt's earlier samples."""
    digest = hashlib.blake2b(b"%d %d " % (session_seed, earlier_samples), digest_size=8)
    digest.update(np.array(prompt, dtype="<i4").tobytes())
    return int.from_bytes(digest.digest(), "little") >> 1


def losses(logits: Tensor, seeds: list[int], positions: list[int], ids: list[int]) -> Tensor:
    """Return by how much each of `ids` loses its draw: 0 for the token that the draw takes, fp64 [n].

    `logits` [n, vocab] fp32 at temperature 1. The loss is in units of a logit, the larger one of both stages of a draw.
    """
    keys = row_keys(mix(np.array(seeds, dtype=np.int64)), np.array(positions, dtype=np.int64))
    key, taken = torch.from_numpy(keys).unsqueeze(1), torch.tensor(ids).unsqueeze(1)
    n, vocab = logits.shape
    blocks = -(-vocab // BLOCK)
    padded = torch.full((n, blocks * BLOCK), -torch.inf, dtype=torch.float64)
    padded[:, :vocab] = logits.double()
    by_block = padded.view(n, blocks, BLOCK)
    block_scores = by_block.logsumexp(-1) + gumbel(key, -1 - torch.arange(blocks))
    token_scores = (padded + gumbel(key, torch.arange(blocks * BLOCK) + 1)).view(n, blocks, BLOCK)
    block = taken // BLOCK
    lost_block = block_scores.amax(-1, keepdim=True) - block_scores.gather(1, block)
    in_block = token_scores.gather(1, block.unsqueeze(2).expand(n, 1, BLOCK)).squeeze(1)
    lost_token = in_block.amax(-1, keepdim=True) - in_block.gather(1, taken % BLOCK)
    return torch.maximum(lost_block, lost_token).squeeze(1)


class Redraw:
    """The model of one folder."""

    def __init__(self, folder: Path) -> None:
        auto: Any = AutoModelForCausalLM
        self._model = auto.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def check(self, trajectory: Trajectory) -> tuple[Tensor, Tensor]:
        """Return of each sampled token (the loss of its draw, the error of its log-probability).

        The trajectory is the only branch of its session, and no prompt was sampled twice.
        """
        ids, seed = trajectory.tokens, trajectory.task.sampling_seed
        assert seed is not None
        logits = self._model(torch.tensor([ids])).logits[0]
        places = [place for place, sampled in enumerate(trajectory.loss_mask) if sampled]
        seeds = {
            place: turn_seed(seed, ids[: turn.action_span[0]])
            for turn in trajectory.turns
            for place in range(*turn.action_span)
        }
        rows = logits[[place - 1 for place in places]]
        taken = [ids[place] for place in places]
        lost = losses(rows, [seeds[place] for place in places], places, taken)
        mine = rows.log_softmax(-1).gather(1, torch.tensor(taken).unsqueeze(1)).squeeze(1)
        theirs = torch.tensor([trajectory.logprobs[place] for place in places])
        return lost, (mine - theirs).abs()

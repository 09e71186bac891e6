"""Weights of any trainer layout reach any server layout with the same bits as a copy of the full tensors."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from tests.weight_sync.described import Layout, Trainer, grid, irregular, replicated, split_over
from verl_server.models.config import ModelConfig
from verl_server.models.transformer import Decoder
from verl_server.weight_sync.receiver.weight_receiver import WeightReceiver

CPU = torch.device("cpu")


def make_decoder(rank: int, size: int, dtype: torch.dtype, *, tied: bool) -> Decoder:
    """Return a decoder with grouped heads, biases, q/k norms, and a vocabulary that no size divides.

    It has 2 KV heads, so that 4 ranks hold copies of them.
    """
    config = ModelConfig(
        architecture="Qwen3ForCausalLM",
        vocab_size=37,
        hidden_size=12,
        intermediate_size=20,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=6,
        norm_eps=1e-6,
        max_position_embeddings=16,
        rope={"rope_theta": 10000.0, "rope_type": "default"},
        dtype=dtype,
        tie_word_embeddings=tied,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        qk_norm=True,
    )
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return Decoder(config, SimpleNamespace(rank=rank, size=size), 16, CPU)  # type: ignore[arg-type]
    finally:
        torch.set_default_dtype(default)


def layouts(dice: random.Random) -> list[Layout]:
    """Return the layouts of a random trainer: FSDP, tensor parallelism, both, replicas of them, or random boxes."""
    kinds: list[Layout] = [
        split_over(0, 1),
        split_over(0, dice.randint(2, 9)),
        split_over(1, dice.randint(2, 4)),
        grid(dice.randint(1, 4), dice.randint(1, 4)),
        irregular(dice),
    ]
    kinds = dice.choice([kinds, [dice.choice(kinds)]])  # one layout for all tensors, or a layout for each tensor
    return [replicated(kind, dice.choice([1, 1, 2, 3])) for kind in kinds]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("seed", range(12))
def test_any_layout_into_any_other(seed: int, size: int) -> None:
    dice = random.Random(seed * 10 + size)
    theirs, ours = (dice.choice([torch.float32, torch.bfloat16]) for _ in range(2))
    tied = dice.random() < 0.5
    generator = torch.Generator().manual_seed(seed)
    reference = [make_decoder(rank, size, ours, tied=tied) for rank in range(size)]
    shapes = {name: slot.shape for name, slot in reference[0].weight_map().slots.items()}
    full = {name: torch.randn(shape, generator=generator).to(theirs) for name, shape in shapes.items()}
    trainer, plan = Trainer(dice.randint(1, 5)), layouts(dice)
    for name in dice.sample(list(full), len(full)):
        trainer.place(name, full[name], dice.choice(plan)(full[name].shape), dice)
    for rank in range(size):
        for name, slot in reference[rank].weight_map().slots.items():
            slot.copy_from(full[name])
        served = make_decoder(rank, size, ours, tied=tied)
        receiver = WeightReceiver(served.weight_map(), rank, size, CPU)
        update = receiver.stage(trainer.description(), strict_dtype=theirs == ours, partial=False)
        assert update.nbytes <= sum(p.nbytes for p in served.parameters())
        update.commit()
        for (name, mine), (_, expected) in zip(
            served.named_parameters(), reference[rank].named_parameters(), strict=True
        ):
            bits = torch.int16 if ours == torch.bfloat16 else torch.int32
            assert torch.equal(mine.view(bits), expected.view(bits)), name

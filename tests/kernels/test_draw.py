"""The draw: its noise is as random as claimed, and a token wins as often as its probability says."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from verl_server.kernels import draw
from verl_server.kernels.draw import BLOCK, choose, gumbel, mix, row_keys


def keys_of(seeds: range, positions: range) -> Tensor:
    """Return the keys of all seeds at all positions, [seeds * positions, 1]."""
    mixed = mix(np.array(seeds, dtype=np.int64))
    keys = [row_keys(mixed, np.full(len(mixed), position, dtype=np.int64)) for position in positions]
    return torch.from_numpy(np.concatenate(keys)).unsqueeze(1)


def uniforms(keys: Tensor, counters: Tensor) -> Tensor:
    """Return the uniform numbers from which the noise was made, by the Gumbel distribution function."""
    return torch.exp(-torch.exp(-gumbel(keys, counters)))


def chosen(logits: Tensor, keys: Tensor, greedy: bool = False) -> tuple[Tensor, Tensor]:
    n = logits.shape[0]
    return choose(logits, torch.ones(n), torch.full((n,), greedy), keys.squeeze(1))


def assert_uniform(values: Tensor, cells: int) -> None:
    """Assert that `values` are uniform in 0..cells-1: chi-square within five standard deviations."""
    counts = torch.bincount(values, minlength=cells).double()
    expected = counts.sum() / cells
    chi = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi - (cells - 1)) < 5 * math.sqrt(2 * (cells - 1)), (chi, cells - 1)


TOKENS = torch.arange(1, 1 + BLOCK)
BLOCKS = torch.arange(-1, -1 - 64, -1)
SOURCES = {
    "tokens of one row": (keys_of(range(1), range(1)), torch.arange(1, 65536)),
    "blocks of one row": (keys_of(range(1), range(1)), torch.arange(-1, -65536, -1)),
    "one token, over seeds": (keys_of(range(-32768, 32768), range(1)), torch.tensor([1])),
    "one token, over positions": (keys_of(range(1), range(65536)), torch.tensor([1])),
    "all together": (keys_of(range(32), range(32)), torch.cat([TOKENS, BLOCKS])),
}


@pytest.mark.parametrize("source", SOURCES)
def test_noise_is_uniform_and_neighbours_are_independent(source: str) -> None:
    """Single values fill 256 cells evenly, and pairs of neighbours 32 x 32 cells, along counters and along rows."""
    values = uniforms(*SOURCES[source])
    assert_uniform((values * 256).long().flatten(), 256)
    cells = (values * 32).long()
    if cells.shape[1] > 1:
        assert_uniform((cells[:, :-1] * 32 + cells[:, 1:]).flatten(), 1024)
    if cells.shape[0] > 1:
        assert_uniform((cells[:-1] * 32 + cells[1:]).flatten(), 1024)


def test_every_bit_is_fair() -> None:
    bits = draw._bits(keys_of(range(256), range(4)).numpy(), TOKENS.numpy())
    for place in range(52):
        share = float(((bits >> place) & 1).mean())
        assert abs(share - 0.5) < 5 * 0.5 / math.sqrt(bits.size), place


def test_noise_is_finite_at_both_ends_of_the_uniform(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draw, "_bits", lambda keys, counters: np.array([0, 2**52 - 1]))
    noise = gumbel(torch.zeros(1, 1, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))
    assert noise.isfinite().all() and noise[0] < -3.5 and noise[1] > 36


def test_the_hash_is_splitmix64() -> None:
    """The outputs are the generator's published first outputs for seed 1234567."""
    outputs = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    words = mix(1234567 + np.arange(1, 6, dtype=np.int64) * draw.GOLDEN)
    assert words.view(np.uint64).tolist() == outputs


def test_numpy_and_torch_make_the_same_bits() -> None:
    keys = keys_of(range(-9, 9), range(3))
    assert np.array_equal(draw._bits(keys, TOKENS).numpy(), draw._bits(keys.numpy(), TOKENS.numpy()))


@pytest.mark.parametrize("vocab", [3, BLOCK, BLOCK + 1, 5 * BLOCK - 7])
def test_tokens_win_as_often_as_their_probability(vocab: int) -> None:
    """The vocabularies have a part of a block, one block, a block and one token, and a shorter last block."""
    logits = 2 * torch.randn(1, vocab, generator=torch.Generator().manual_seed(vocab))
    logits[0, 1] = -torch.inf
    keys = keys_of(range(200), range(200))
    ids, logprobs = chosen(logits.expand(len(keys), -1), keys)
    expected_logprobs = logits.log_softmax(-1).expand(len(keys), -1).gather(1, ids.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(logprobs, expected_logprobs, rtol=1e-5, atol=1e-5)
    counts, expected = torch.bincount(ids, minlength=vocab), logits[0].softmax(-1) * len(keys)
    assert counts[1] == 0
    kept = expected >= 5
    chi = float(((counts - expected)[kept] ** 2 / expected[kept]).sum())
    freedom = int(kept.sum()) - 1
    assert abs(chi - freedom) < 5 * math.sqrt(2 * freedom), (chi, freedom)


def test_chunks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(20, 300, generator=torch.Generator().manual_seed(0))
    keys = keys_of(range(20), range(1))
    whole = chosen(logits, keys)
    monkeypatch.setattr(draw, "_CACHED_ELEMENTS", 900)
    for got, expected in zip(chosen(logits, keys), whole, strict=True):
        assert torch.equal(got, expected)


def test_greedy_takes_the_first_of_the_largest() -> None:
    logits = torch.zeros(3, 4 * BLOCK)
    logits[0, [BLOCK + 5, BLOCK + 9, 3 * BLOCK]] = 2.0
    logits[1, [0, 7]] = 1.0
    keys = keys_of(range(3), range(1))
    assert chosen(logits, keys, greedy=True)[0].tolist() == [BLOCK + 5, 0, 0]
    ids, _ = choose(logits, torch.ones(3), torch.tensor([True, False, True]), keys.squeeze(1))
    assert ids[[0, 2]].tolist() == [BLOCK + 5, 0]

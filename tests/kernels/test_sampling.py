"""The sampling kernels draw what `kernels.draw` draws."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from verl_server.kernels import draw, sampling


def rows(n: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return inverse temperatures, greedy flags and keys of n requests, all different."""
    seeds = draw.mix(np.arange(n, dtype=np.int64) - n // 2)
    keys = torch.from_numpy(draw.row_keys(seeds, 1000 + np.arange(n)))
    scales, greedy = 1 / torch.linspace(0.3, 1.7, n), torch.arange(n) % 5 == 4
    return scales.to(device), greedy.to(device), keys.to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "vocab"), [(17, 320), (9, 50), (40, 1000), (6, 64), (3, 5000)])
def test_kernels_agree_with_the_definition(device: torch.device, dtype: torch.dtype, n: int, vocab: int) -> None:
    """The rows have gaps between them, as with a padded vocabulary."""
    padded = (3 * torch.randn(n, vocab + 8, generator=torch.Generator().manual_seed(n))).to(dtype).to(device)
    logits, parameters = padded[:, :vocab], rows(n, device)
    logits[:, 7] = -torch.inf
    ids, logprobs = sampling.choose(logits, *parameters)
    expected_ids, expected_logprobs = draw.choose(logits, *parameters)
    assert ids.dtype == torch.int64 and logprobs.dtype == torch.float32
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(logprobs, expected_logprobs, rtol=1e-5, atol=1e-5)


@pytest.mark.cuda
def test_a_large_vocabulary() -> None:
    """Draws at 256 x 152k are those of the definition on GPU and CPU. Rounding may change one of them."""
    logits = torch.randn(256, 151_936, device="cuda").bfloat16()
    parameters = rows(256, "cuda")
    ids, logprobs = sampling.choose(logits, *parameters)
    for expected_ids, expected in (
        draw.choose(logits, *parameters),
        draw.choose(logits.cpu(), *(p.cpu() for p in parameters)),
    ):
        same = ids.cpu() == expected_ids.cpu()
        assert same.sum() >= 255
        torch.testing.assert_close(logprobs.cpu()[same], expected.cpu()[same], rtol=1e-5, atol=2e-5)


def test_rows_without_a_distribution_are_flagged_and_harm_nobody_else(device: torch.device) -> None:
    n, vocab = 10, 300
    logits = torch.randn(n, vocab, generator=torch.Generator().manual_seed(0)).to(device)
    parameters = rows(n, device)
    healthy = sampling.choose(logits, *parameters)
    logits[1, 17], logits[3, 0], logits[4, 5], logits[5, 299] = torch.nan, torch.inf, torch.nan, torch.inf
    logits[7], logits[9] = -torch.inf, -torch.inf
    bad = torch.tensor([1, 3, 4, 5, 7, 9])
    good = torch.tensor([0, 2, 6, 8])
    for choose in (sampling.choose, draw.choose):
        ids, logprobs = choose(logits, *parameters)
        assert logprobs[bad].isnan().all() and ((ids >= 0) & (ids < vocab)).all()
        assert torch.equal(ids[good], healthy[0][good])
        torch.testing.assert_close(logprobs[good], healthy[1][good], rtol=1e-5, atol=1e-5)

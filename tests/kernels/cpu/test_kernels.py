"""The compiled CPU operators agree with PyTorch in higher precision, at sizes that do not fill their tiles."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from verl_server.kernels import draw
from verl_server.kernels.cpu.kernels import AttentionArgs, CpuKernels


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("rows", "outputs", "size"),
    [(1, 8, 16), (2, 5, 7), (3, 24, 40), (9, 1033, 700), (16, 64, 256), (17, 9, 257), (33, 70, 512), (64, 1031, 300)]
    + [(rows, 14, 33) for rows in (4, 5, 7, 8, 12)],
)
def test_linear(cpu_kernels: CpuKernels, rows: int, outputs: int, size: int, bias: bool) -> None:
    x, weight = values(rows, size), values(outputs, size, seed=1)
    offset = values(outputs, seed=2) if bias else None
    got = cpu_kernels.linear(x, weight, offset)
    expected = F.linear(x.double(), weight.double(), None if offset is None else offset.double())
    torch.testing.assert_close(got.double(), expected, atol=2e-6 * size**0.5 + 1e-5, rtol=1e-5)


def test_linear_of_rows_that_lie_apart(cpu_kernels: CpuKernels) -> None:
    x, weight = values(12, 64)[::2], values(20, 64, seed=1)
    torch.testing.assert_close(cpu_kernels.linear(x, weight, None), F.linear(x, weight), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("outputs", [40, 37])
def test_linear_does_not_depend_on_the_rows_around(cpu_kernels: CpuKernels, outputs: int) -> None:
    """The rows have the same bits for any number of rows, also in the last outputs of a thread's share."""
    x, weight = values(300, 600), values(outputs, 600, seed=1)
    whole = cpu_kernels.linear(x, weight, None)
    for rows in (1, 2, 4, 5, 8, 9, 16, 17, 31, 48, 64):
        assert torch.equal(cpu_kernels.linear(x[:rows], weight, None), whole[:rows])


@pytest.mark.parametrize("size", [16, 24, 7, 1024])
def test_norms(cpu_kernels: CpuKernels, size: int) -> None:
    x = values(70, size) * torch.tensor([1.0, 100.0, 1e-4, 0.0, 3.0]).repeat(14).unsqueeze(1)
    residual, weight = values(70, size, seed=1), values(size, seed=2)

    def exact(x: Tensor) -> Tensor:
        return (x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight).float()

    torch.testing.assert_close(cpu_kernels.rms_norm(x, weight, 1e-6), exact(x), atol=1e-6, rtol=1e-5)
    total = residual + x
    got = cpu_kernels.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(residual, total)
    torch.testing.assert_close(got, exact(total), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("size", [16, 5, 300])
def test_silu_mul(cpu_kernels: CpuKernels, size: int) -> None:
    gate_up = values(70, 2 * size) * 4
    gate_up[0, 0], gate_up[1, 0] = -200.0, 200.0
    gate, up = gate_up.double().chunk(2, dim=-1)
    torch.testing.assert_close(cpu_kernels.silu_mul(gate_up), (F.silu(gate) * up).float(), atol=1e-6, rtol=1e-5)


def test_numbers_that_are_none_stay_so(cpu_kernels: CpuKernels) -> None:
    """NaN stays NaN, so that a diverged model is noticed."""
    x = values(4, 32)
    x[1, 3] = torch.nan
    for out in (
        cpu_kernels.rms_norm(x, torch.ones(32), 1e-6),
        cpu_kernels.silu_mul(x),
        cpu_kernels.linear(x, values(9, 32), None),
    ):
        assert out.isnan().any(-1).tolist() == [False, True, False, False]


@pytest.mark.parametrize(("n", "vocab"), [(17, 320), (9, 50), (40, 1000), (6, 64), (1, 5000)])
def test_choose_is_the_draw(cpu_kernels: CpuKernels, n: int, vocab: int) -> None:
    """The rows have gaps between them, as with a padded vocabulary."""
    logits = 3 * values(n, vocab + 8)[:, :vocab]
    logits[:, 7] = -torch.inf
    keys = torch.from_numpy(draw.row_keys(draw.mix(np.arange(n, dtype=np.int64) - n // 2), 1000 + np.arange(n)))
    parameters = 1 / torch.linspace(0.3, 1.7, n), torch.arange(n) % 5 == 4, keys
    ids, logprobs = cpu_kernels.choose(logits, *parameters)
    expected_ids, expected = draw.choose(logits, *parameters)
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("temperature", [1e-2, 1e-5, 2e-6])
def test_choose_is_the_draw_at_low_temperatures(cpu_kernels: CpuKernels, temperature: float) -> None:
    """At low temperatures the rounding of one product can decide the draw. No probability is above 1."""
    logits = 20 + 2 * values(64, 400)
    logits[:, 100] = logits[:, :64].amax(1).nextafter(torch.tensor(99.0))
    keys = torch.from_numpy(draw.row_keys(draw.mix(np.arange(64, dtype=np.int64)), np.full(64, 9)))
    parameters = torch.full((64,), 1 / temperature), torch.zeros(64, dtype=torch.bool), keys
    ids, logprobs = cpu_kernels.choose(logits, *parameters)
    expected_ids, expected = draw.choose(logits, *parameters)
    assert torch.equal(ids, expected_ids) and bool((logprobs <= 0).all())
    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-6)


def test_rows_without_a_distribution_are_flagged_and_harm_nobody_else(cpu_kernels: CpuKernels) -> None:
    n, vocab = 10, 300
    logits = values(n, vocab)
    parameters = torch.ones(n), torch.arange(n) % 5 == 4, torch.arange(n) * 7919
    healthy, _ = cpu_kernels.choose(logits, *parameters)
    logits[1, 17], logits[3, 0], logits[4, 5], logits[5, 299] = torch.nan, torch.inf, torch.nan, torch.inf
    logits[7], logits[9] = -torch.inf, -torch.inf
    ids, logprobs = cpu_kernels.choose(logits, *parameters)
    assert logprobs.isnan().nonzero().flatten().tolist() == [1, 3, 4, 5, 7, 9]
    assert ((ids >= 0) & (ids < vocab)).all()
    assert torch.equal(ids[[0, 2, 6, 8]], healthy[[0, 2, 6, 8]])


def test_a_head_that_is_not_compiled_is_refused(cpu_kernels: CpuKernels) -> None:
    with pytest.raises(ValueError, match="not compiled for head_dim=24"):
        cpu_kernels.attend(AttentionArgs(head_dim=24))

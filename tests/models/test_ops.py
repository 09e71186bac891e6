"""The plain operators agree with higher precision."""

from __future__ import annotations

import pytest
import torch

from verl_server.models import ops
from verl_server.models.ops import TORCH_OPS, linear


@pytest.mark.parametrize("intel", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("rows", "out", "inner"),
    [(3, 24, 40), (5, 1032, 1024), (64, 1032, 1024), (257, 1032, 1024)],
)
def test_every_way_to_multiply(
    monkeypatch: pytest.MonkeyPatch, intel: bool, bias: bool, rows: int, out: int, inner: int
) -> None:
    """On Intel's processors some products are computed by another library."""
    monkeypatch.setattr(ops, "_INTEL", intel)
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(rows, inner, generator=generator), torch.randn(out, inner, generator=generator)
    offset = torch.randn(out, generator=generator) if bias else None
    expected = torch.nn.functional.linear(x.double(), weight.double(), None if offset is None else offset.double())
    with torch.inference_mode():
        got = linear(x, weight, offset)
    assert got.shape == (rows, out) and got.is_contiguous()
    torch.testing.assert_close(got.double(), expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_rounds_before_the_weight(dtype: torch.dtype) -> None:
    """The rows include one so small that eps decides."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(4, 64, generator=generator) * torch.tensor([[1.0], [30.0], [1e-4], [0.0]])).to(dtype)
    weight = torch.rand(64, generator=generator).to(dtype)
    exact = x.double() * (x.double().pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
    got = TORCH_OPS.rms_norm(x, weight, 1e-6)
    assert got.dtype == dtype
    torch.testing.assert_close(got, exact.to(dtype) * weight)

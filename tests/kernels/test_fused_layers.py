"""Norms, activation and rotary kernels agree with `models.layers`, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("triton")

from tests.depth import at_depth
from tests.kernels.devices import settle
from verl_server.kernels.activation import silu_mul
from verl_server.kernels.norms import add_rms_norm, rms_norm
from verl_server.kernels.rotary import norm_rotate_store
from verl_server.models.layers import RMSNorm, RotaryEmbedding, rotate

EPS = 1e-6
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def values(*shape: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def assert_rounded_alike(got: Tensor, expected: Tensor) -> None:
    """Assert equality, except for single elements whose sum was rounded differently after another order of addition.

    Triton's interpreter truncates to bfloat16 where a GPU rounds. There, elements may differ by several units in the
    last place.
    """
    assert got.shape == expected.shape and got.dtype == expected.dtype
    truncates = got.dtype == torch.bfloat16 and not got.is_cuda
    bound = (4 if truncates else 2) * torch.finfo(got.dtype).eps
    torch.testing.assert_close(got, expected, rtol=bound, atol=bound)
    if got.dtype != torch.float32 and not truncates:
        assert (got != expected).float().mean() < 0.01


def norm_layer(weight: Tensor) -> RMSNorm:
    norm = RMSNorm(weight.numel(), EPS)
    norm.weight = nn.Parameter(weight, requires_grad=False)
    return norm


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "size"), [(1, 1024), (3, 64), (5, 96), (2, 2560)])
def test_norms(device: torch.device, pdl: bool, dtype: torch.dtype, tokens: int, size: int) -> None:
    x, residual = (values(tokens, size, dtype=dtype, device=device, seed=s) * 3 for s in (0, 1))
    weight = values(size, dtype=dtype, device=device, seed=2)
    norm = norm_layer(weight)
    total = x + residual
    settle(device)
    assert_rounded_alike(rms_norm(x, weight, EPS, pdl=pdl), norm(x))
    assert_rounded_alike(add_rms_norm(x, residual, weight, EPS, pdl=pdl), norm(total))
    assert_rounded_alike(residual, total)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "size"), [(1, 3072), (4, 100), (2, 1024)])
def test_activation(device: torch.device, pdl: bool, dtype: torch.dtype, tokens: int, size: int) -> None:
    gate_up = values(tokens, 2 * size, dtype=dtype, device=device) * 4
    gate, up = gate_up.chunk(2, dim=-1)
    settle(device)
    assert_rounded_alike(silu_mul(gate_up, pdl=pdl), F.silu(gate) * up)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page_size", "head_first"),
    at_depth([(4, 1, 64, 4, True), (12, 12, 32, 1, False), (6, 3, 80, 16, True), (16, 8, 128, 16, False)], quick=3),
)
def test_norm_rotate_store(
    device: torch.device,
    pdl: bool,
    dtype: torch.dtype,
    normed: bool,
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    head_first: bool,
) -> None:
    """Tokens are stored in both orders of the pool's memory, and slots without a token keep their contents."""
    tokens, pages = 5, 12
    qkv = values(tokens, (heads + 2 * kv_heads) * head_dim, dtype=dtype, device=device)
    weights = [values(head_dim, dtype=dtype, device=device, seed=s) if normed else None for s in (1, 2)]
    rotary = RotaryEmbedding(head_dim, 100, {"rope_theta": 1e4, "rope_type": "default"}, torch.device(device))
    positions = torch.tensor([0, 99, 7, 8, 31], dtype=torch.int32, device=device)
    slots = torch.tensor([3, 2, 11, 0, 7], dtype=torch.int32, device=device)
    shape = (pages, page_size, 2, kv_heads, head_dim)
    if head_first:
        pool = torch.full([shape[i] for i in (0, 2, 3, 1, 4)], 7.0, dtype=dtype, device=device).permute(0, 3, 1, 2, 4)
    else:
        pool = torch.full(shape, 7.0, dtype=dtype, device=device)
    tables = rotary.at(torch.arange(100, device=device))
    settle(device)
    q = norm_rotate_store(qkv, weights[0], weights[1], EPS, *tables, positions, slots, pool, pdl=pdl)

    parts = qkv.view(tokens, -1, head_dim).split([heads, kv_heads, kv_heads], dim=1)
    cos, sin = rotary.at(positions)
    expected = [
        rotate(part if weight is None else norm_layer(weight)(part), cos, sin)
        for part, weight in zip(parts, weights, strict=False)
    ]
    assert_rounded_alike(q, expected[0])
    flat = pool.reshape(pages * page_size, 2, kv_heads, head_dim)
    assert_rounded_alike(flat[slots.long(), 0], expected[1])
    assert torch.equal(flat[slots.long(), 1], parts[2])
    untouched = torch.ones(len(flat), dtype=torch.bool, device=device)
    untouched[slots.long()] = False
    assert (flat[untouched] == 7.0).all()

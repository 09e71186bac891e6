"""Masks of allowed tokens, by the kernel and by its definition."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from verl_server.kernels import token_mask


def random_masks(rows: int, vocab: int) -> tuple[Tensor, Tensor]:
    """Return (bool [rows, vocab], the same as int32 words)."""
    allowed = np.random.default_rng(rows * vocab).random((rows, vocab)) < 0.3
    allowed[:, -1] = True
    bits = np.zeros((rows, -(-vocab // 32) * 32), dtype=bool)
    bits[:, :vocab] = allowed
    words = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
    return torch.from_numpy(allowed), torch.from_numpy(words)


def check(device: str, dtype: torch.dtype, n: int, vocab: int, apply: Callable[..., None] = token_mask.apply) -> None:
    """Mask every second row, last row first. The rows have gaps between them, as with a padded vocabulary."""
    rows = torch.arange(n - 1, -1, -2)
    allowed, words = random_masks(len(rows), vocab)
    padded = torch.randn(n, vocab + 8, generator=torch.Generator().manual_seed(n)).to(dtype)
    expected = padded.clone()
    expected[rows, :vocab] = expected[rows, :vocab].masked_fill(~allowed, -torch.inf)
    result = padded.to(device)
    apply(result[:, :vocab], rows.to(device), words.to(device))
    assert torch.equal(result.cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "vocab"), [(1, 31), (2, 32), (5, 1000), (4, 5000)])
def test_forbidden_tokens_become_minus_infinity(dtype: torch.dtype, n: int, vocab: int) -> None:
    check("cpu", dtype, n, vocab)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "vocab"), [(1, 31), (2, 32), (5, 1000), (4, 9000)])
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")
def test_the_kernel_computes_the_same(dtype: torch.dtype, n: int, vocab: int) -> None:
    from verl_server.kernels import token_mask_triton

    check("cpu", dtype, n, vocab, token_mask_triton.apply)


@pytest.mark.cuda
@pytest.mark.parametrize(("n", "vocab"), [(3, 1000), (256, 151_936)])
def test_the_kernel_on_the_device(n: int, vocab: int) -> None:
    check("cuda", torch.bfloat16, n, vocab)
    check("cuda", torch.bfloat16, n, vocab, token_mask.apply_reference)
    token_mask.compile_kernel(vocab, torch.bfloat16, torch.device("cuda"))

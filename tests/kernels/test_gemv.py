"""The product with one vector agrees with torch's, in Triton's interpreter and on a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from tests.depth import at_depth
from tests.kernels.devices import settle
from verl_server.kernels.gemv import gemv


@pytest.mark.parametrize(("rows", "size"), at_depth([(64, 1024), (33, 96), (5, 3000), (4100, 16)], quick=3))
@pytest.mark.parametrize("bias", [False, True])
def test_product(device: torch.device, pdl: bool, rows: int, size: int, bias: bool) -> None:
    torch.manual_seed(rows + size)
    x, weight = torch.randn(1, size, device=device), torch.randn(rows, size, device=device)
    b = torch.randn(rows, device=device) if bias else None
    settle(device)
    torch.testing.assert_close(gemv(x, weight, b, pdl=pdl), F.linear(x, weight, b), atol=1e-3, rtol=1e-4)


@pytest.mark.cuda
def test_bf16_is_summed_in_fp32(pdl: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 12288, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(4096, 12288, device="cuda", dtype=torch.bfloat16)
    exact = F.linear(x.double(), weight.double())
    settle(x.device)
    assert ((gemv(x, weight, pdl=pdl).double() - exact).abs() <= exact.abs() * 2**-8 + 1e-3).all()

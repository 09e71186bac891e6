"""Products of a few rows agree with torch's, in Triton's interpreter and on a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from verl_server.kernels.skinny import SkinnyProduct

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("m", [2, 16, 17])
@pytest.mark.parametrize(("n", "k"), [(64, 1024), (128, 896), (640, 256)], ids=["split", "uneven_split", "whole"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_product(m: int, n: int, k: int, with_bias: bool) -> None:
    torch.manual_seed(m + n)
    product = SkinnyProduct(DEVICE)
    for _ in range(2):  # the second product uses the workspace as the first one left it
        x, weight, b = (torch.randn(size, device=DEVICE).half() for size in ((m, k), (n, k), (n,)))
        exact = F.linear(x.double(), weight.double(), b.double() if with_bias else None)
        out = product(x, weight, b if with_bias else None)
        assert out.shape == (m, n)
        assert ((out.double() - exact).abs() <= exact.abs() * 2**-10 + 1e-3).all()


@pytest.mark.parametrize(
    ("m", "n", "k", "dtype", "faster"),
    [
        (32, 1024, 2048, torch.half, True),
        (33, 1024, 2048, torch.half, False),
        (2, 1000, 2048, torch.half, False),
        (2, 1024, 2000, torch.half, False),
        (2, 1024, 2048, torch.float, False),
        (2, 128, 1024, torch.half, False),
        (2, 151936, 2048, torch.half, False),
    ],
    ids=["fits", "rows", "uneven_out", "uneven_in", "float32", "short_sum", "vocabulary"],
)
def test_is_faster(m: int, n: int, k: int, dtype: torch.dtype, faster: bool) -> None:
    x, weight = torch.empty(m, k, dtype=dtype, device="meta"), torch.empty(n, k, dtype=dtype, device="meta")
    assert SkinnyProduct(DEVICE).is_faster(x, weight) == faster


@pytest.mark.cuda
@pytest.mark.parametrize("m", [2, 5, 16, 32])
@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (1024, 2048)])
def test_bf16_is_summed_in_fp32(m: int, n: int, k: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
    product = SkinnyProduct(DEVICE)
    exact = F.linear(x.double(), weight.double())
    first = product(x, weight)
    assert ((first.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-3).all()
    for _ in range(20):  # the sum is the same whichever program ends last
        assert torch.equal(product(x, weight), first)


@pytest.mark.cuda
def test_captured_in_a_graph() -> None:
    torch.manual_seed(0)
    product = SkinnyProduct(DEVICE)
    x = torch.randn(8, 4096, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    product(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = product(product(x, weight), weight)
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert torch.equal(out, product(product(x, weight), weight))

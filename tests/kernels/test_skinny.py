"""Products of a few rows agree with torch's, in Triton's interpreter and on a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from tests.kernels.devices import settle
from verl_server.kernels import gpu
from verl_server.kernels.norms import rms_norm
from verl_server.kernels.skinny import SkinnyProduct, Tile

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
H200 = 132, 90, gpu.HOPPER.shared_memory
SHAPES = [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (1024, 2048)]
"""[out, in] of the weights of a layer of Qwen3-8B, and of one of 0.6B whose K more programs divide."""


@pytest.mark.parametrize("m", [2, 16, 17])
@pytest.mark.parametrize(("n", "k"), [(64, 1024), (128, 896), (640, 256)], ids=["split", "uneven_split", "whole"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_product(m: int, n: int, k: int, with_bias: bool, pdl: bool) -> None:
    torch.manual_seed(m + n)
    product = SkinnyProduct(DEVICE)
    for _ in range(2):  # the second product uses the workspace as the first one left it
        x, weight, b = (torch.randn(size, device=DEVICE).half() for size in ((m, k), (n, k), (n,)))
        exact = F.linear(x.double(), weight.double(), b.double() if with_bias else None)
        settle(DEVICE)
        out = product(x, weight, b if with_bias else None, pdl=pdl)
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


@pytest.mark.parametrize("tile", [Tile(128, 64, 3, 2, 4), Tile(64, 128, 2, 1, 4), Tile(64, 64, 4, 4, 8)])
def test_other_launch_parameters(tile: Tile) -> None:
    torch.manual_seed(0)
    x, weight = (torch.randn(size, device=DEVICE).half() for size in ((5, 512), (256, 512)))
    product = SkinnyProduct(DEVICE, parts=16)
    exact = F.linear(x.double(), weight.double())
    assert ((product.compute(x, weight, None, tile).double() - exact).abs() <= exact.abs() * 2**-10 + 1e-3).all()


def test_a_workspace_that_is_too_small_is_refused() -> None:
    x, weight = torch.zeros(2, 512, device=DEVICE).half(), torch.zeros(256, 512, device=DEVICE).half()
    with pytest.raises(AssertionError, match="workspace"):
        SkinnyProduct(DEVICE, parts=2).compute(x, weight, None, Tile(64, 128, 3, 2, 4))


@pytest.mark.parametrize("m", [2, 16, 17, 32])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_programs_that_begin_early_are_placed_evenly(m: int, n: int, k: int) -> None:
    """No multiprocessor of an H200 has room for more programs than its share, whatever runs on the others."""
    x, weight = torch.empty(m, k, dtype=torch.half, device="meta"), torch.empty(n, k, dtype=torch.half, device="meta")
    with gpu.assumed(*H200):
        product = SkinnyProduct(torch.device("meta"))
    ordinary, early = product.tile(x, weight), product.tile(x, weight, pdl=True)
    share = -(-n // early.block_n * early.split // 132)
    # As Triton reports it for wgmma: memory for each stage of both factors.
    program = early.stages * (early.block_n + (16 if m <= 16 else 32)) * early.block_k * 2
    assert gpu.HOPPER.programs(program, most=9) == share
    assert program <= gpu.HOPPER.shared_memory
    assert (early.split, early.block_k) == (ordinary.split, ordinary.block_k), "the order of the sums is the same"
    assert early.stages >= ordinary.stages


@pytest.mark.cuda
@pytest.mark.parametrize("m", [2, 5, 16, 32])
@pytest.mark.parametrize(("n", "k"), SHAPES)
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


@pytest.mark.cuda
@pytest.mark.parametrize("m", [2, 8, 32])
@pytest.mark.parametrize(("size", "split"), [(2048, 4), (4096, 2), (8448, 1)])
def test_beginning_early_changes_no_bit(m: int, size: int, split: int) -> None:
    """A captured chain of 24 products that share the workspace. Only its first launch, a copy, is an ordinary one.

    Of each two, a norm writes what the first one reads, the second one follows at once, and a norm reads its results.
    The graph's memory is reused, so a product that stores too early spoils what another kernel still reads.
    """
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs Hopper or later")
    torch.manual_seed(0)
    product = SkinnyProduct(DEVICE)
    weights = [torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    source, scale = (torch.randn(rows, size, device="cuda", dtype=torch.bfloat16) for rows in (m, 1))
    if torch.cuda.get_device_properties(0).multi_processor_count == 132:
        assert product.tile(source, weights[0]).split == split

    def chain(pdl: bool) -> list[Tensor]:
        results = [source.clone()]
        for i in range(12):
            x = rms_norm(results[-1], scale[0], 1e-6, pdl=pdl)
            pair = weights[i % 4], weights[(i + 1) % 4]
            results.append(rms_norm(product(product(x, pair[0], pdl=pdl), pair[1], pdl=pdl), scale[0], 1e-6, pdl=pdl))
        return results[1:]

    graphs, results = [], []
    for pdl in (False, True):
        settle(DEVICE)
        chain(pdl)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results.append(chain(pdl))
        graphs.append(graph)
    for _ in range(20):
        source.normal_()
        for graph in graphs:
            graph.replay()
        for ordinary, early in zip(*results, strict=True):
            assert torch.equal(ordinary, early)
        assert results[0][-1].isfinite().all()

"""Products of a few rows and a weight at memory bandwidth, for small decode steps.

A program computes the outputs of 64 rows of the weight. These are the rows of the tensor cores' tile and the rows of x
are its columns, so little of the tile is padding. The program iterates over K and loads several blocks ahead. If the
weight has too few rows to occupy all multiprocessors, several programs divide the K of a tile: each stores its sums in
a workspace, and the program that finishes last adds them in order, so the result does not depend on which one that is.

With programmatic dependent launch (`dependent`), a program waits before its first load: x comes from another kernel,
and the loads of the weight are pipelined together with those of x.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from verl_server.kernels import dependent, gpu

_BLOCK_N, _BLOCK_K = 64, 128
_MAX_ROWS = 32


@dataclass(frozen=True)
class Tile:
    """Launch parameters of a product."""

    block_n: int
    """Rows of the weight of a program."""
    block_k: int
    """Columns of the weight in a block."""
    stages: int
    """One more than the number of blocks that are loaded ahead."""
    split: int
    """Programs that divide the K of a tile."""
    warps: int


class SkinnyProduct:
    """x @ weight.T + bias for few rows of x, on one GPU and one stream, because layers share the workspace.

    The launch parameters without `pdl` and `is_faster` were measured on one H200 with the weights of Qwen3-0.6B and 8B.
    On a machine without a GPU the kernel runs in Triton's interpreter, which is for tests.

    `parts`: number of tiles of 64 x 32 sums for which the workspace has room. None: one for each multiprocessor.
    """

    def __init__(self, device: torch.device, parts: int | None = None) -> None:
        self._programs, self._limits = gpu.multiprocessors(device, interpreted=8), gpu.limits(device)
        parts = parts or self._programs
        self._parts = torch.empty(parts * _BLOCK_N * _MAX_ROWS, dtype=torch.float32, device=device)
        self._arrivals = torch.zeros(parts, dtype=torch.int32, device=device)

    def is_faster(self, x: Tensor, weight: Tensor) -> bool:
        """Return True if this kernel supports the shapes and dtypes, and is faster than torch."""
        n, k = weight.shape
        if x.shape[0] > _MAX_ROWS or x.element_size() != 2 or n % _BLOCK_N or k % _BLOCK_K:
            return False
        # A short sum is not worth dividing, and torch is as fast for the many rows of a vocabulary.
        return n <= 65536 and k >= (1024 if self._split(n, k) == 1 else 2048)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, pdl: bool = False) -> Tensor:
        """x [m, in] @ `weight` [out, in].T + `bias` [out], summed in fp32. Return [m, out].

        All have one dtype; x and `weight` are contiguous. `pdl`: see `dependent`; the result is the same, bit by bit.
        """
        return self.compute(x, weight, bias, self.tile(x, weight, pdl=pdl), pdl=pdl)

    def compute(self, x: Tensor, weight: Tensor, bias: Tensor | None, tile: Tile, *, pdl: bool = False) -> Tensor:
        """Compute the product with launch parameters of the caller, who answers for their fit to the GPU."""
        (m, k), n = x.shape, weight.shape[0]
        assert weight.shape[1] == k and x.is_contiguous() and weight.is_contiguous()
        assert m <= _MAX_ROWS and n % tile.block_n == 0 and k % tile.block_k == 0
        out = torch.empty((m, n), dtype=x.dtype, device=x.device)
        programs, block_m = n // tile.block_n * tile.split, _block_m(m)
        assert tile.split == 1 or programs * tile.block_n * block_m <= self._parts.numel(), "too small a workspace"
        _skinny[(programs,)](
            x, weight, weight if bias is None else bias, out, self._parts, self._arrivals, m, n, k, tile.split,
            BIAS=bias is not None, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, BLOCK_M=block_m, STAGES=tile.stages,
            num_warps=tile.warps, **dependent.options(pdl),
        )  # fmt: skip
        return out

    def tile(self, x: Tensor, weight: Tensor, *, pdl: bool = False) -> Tile:
        """Return the launch parameters with which a call computes the product."""
        n, k = weight.shape
        split = self._split(n, k)
        stages = self._stages(n // _BLOCK_N * split, _block_m(x.shape[0]), x.element_size(), pdl)
        return Tile(_BLOCK_N, _BLOCK_K, stages, split, warps=4)

    def _split(self, n: int, k: int) -> int:
        """Return how many programs divide the K of a tile: a power of two, so that each multiprocessor has at most one
        program, and each program at least two blocks."""
        split = 1
        while n // _BLOCK_N * split * 2 <= self._programs and split * 4 * _BLOCK_K <= k:
            split *= 2
        return split

    def _stages(self, programs: int, block_m: int, itemsize: int, pdl: bool) -> int:
        """With one or two programs per multiprocessor, several blocks are loaded ahead. Fewer stages let more programs
        fit into a multiprocessor."""
        stages = 5 if block_m == 16 else 4
        stage_bytes = (_BLOCK_N + block_m) * _BLOCK_K * itemsize
        if programs > self._limits.programs((stages - 1) * stage_bytes, most=2) * self._programs:
            return 3
        if pdl and programs <= self._programs:
            # Programs that begin early are placed while those of other kernels occupy some multiprocessors. If two of
            # them fitted into one, another one might get none. On Hopper a program has memory for each of its stages.
            while self._limits.programs(stages * stage_bytes, most=2) > 1:
                stages += 1
        return stages


def _block_m(m: int) -> int:
    return 16 if m <= 16 else 32


@triton.jit(do_not_specialize=["m_size", "split"])  # type: ignore[untyped-decorator]
def _skinny(
    x: tl.tensor, weight: tl.tensor, bias: tl.tensor, out: tl.tensor, parts: tl.tensor, arrivals: tl.tensor,
    m_size: tl.tensor, n_size: tl.tensor, k_size: tl.tensor, split: tl.tensor, BIAS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
) -> None:  # fmt: skip
    """Program tile * split + part sums one part of K for BLOCK_N rows of the weight. All sizes except m_size are
    multiples of their block sizes."""
    dependent.let_next_begin(DEPENDENT)
    program = tl.program_id(0)
    tile, part = program // split, program % split
    blocks = k_size // BLOCK_K
    n, m, k = tile * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    real = m < m_size
    weight_at = weight + n.to(tl.int64)[:, None] * k_size + k[None, :]
    x_at = x + m[:, None] * k_size + k[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    dependent.wait(DEPENDENT)  # the product before may use the workspace until here
    for block in tl.range(part * blocks // split, (part + 1) * blocks // split, num_stages=STAGES):
        rows = tl.load(weight_at + block * BLOCK_K)
        columns = tl.load(x_at + block * BLOCK_K, mask=real[:, None], other=0.0)
        acc = tl.dot(rows, tl.trans(columns), acc)

    out_at = out + m[None, :] * n_size + n[:, None]
    added = tl.load(bias + n).to(tl.float32)[:, None] if BIAS else 0.0
    if split == 1:
        tl.store(out_at, (acc + added).to(out.dtype.element_ty), mask=real[None, :])
    else:
        part_at = parts + tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + m[None, :]
        tl.store(part_at + program * (BLOCK_N * BLOCK_M), acc)
        tl.debug_barrier()  # all threads of this program have stored before one of them counts the part as done
        if tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == split - 1:
            tl.store(arrivals + tile, 0)  # the counter starts at 0 for the next product
            total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for i in tl.range(0, split):
                total += tl.load(part_at + (tile * split + i) * (BLOCK_N * BLOCK_M))
            tl.store(out_at, (total + added).to(out.dtype.element_ty), mask=real[None, :])

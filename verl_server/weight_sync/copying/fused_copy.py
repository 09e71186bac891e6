"""Copies many tensors into many tensors, in place, at the rate of one flat copy.

`UpdatePlan` makes a `CopyPlan` once for a set of (destination, source) views, off the serving loop, and runs it at
every update. On a GPU one Triton kernel processes a table of all pairs (`copy_table`, `copy_kernel`). In host memory a
few threads share the pairs (`host_copy`). torch copies the pairs that neither of them can copy.

Kernel and threads search the written values for NaN and infinity while the values are in registers or in a cache
(`finite`). Only pairs that torch copies on a GPU are read a second time for this search.

Milliseconds for Qwen3-8B's tensors (16.4 GB in bf16) on one H200, and from a second one's memory over NVLink
(`benchmarks/weight_copy.py`, torch 2.11; the limit is one flat `copy_` of the same bytes):

                              bf16   half (tp 2)   fp32 to bf16   peer bf16   peer half
    limit                     7.73       3.89          11.25         41.5        20.8
    this kernel               7.87       3.94          11.20         43.7        21.9
    loop of copy_             8.93       6.70          12.47         42.9        23.8
    CUDA graph of the loop    9.09       6.55          11.95         42.9        23.7
    cudaMemcpyBatchAsync      8.95         -             -           41.5          -
    _foreach_copy_           11.79       6.77          14.35         47.0        23.9

For 0.6B (1.2 GB, limit 0.580) the kernel takes 0.588, _foreach_copy_ 0.912, the loop 1.90.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from verl_server.weight_sync.copying.copy_table import build_tables
from verl_server.weight_sync.copying.finite import is_checked
from verl_server.weight_sync.copying.host_copy import HostCopies, Pair

TILE_BYTES = 2**15
NUM_WARPS = 16
"""Warps of a program, which copies one tile (TILE_BYTES of the wider side). On one H200 tiles of 8 to 64 KiB with 4 to
16 warps are within 3% of each other; a persistent grid and `evict_first` took 5 to 10% longer. Over NVLink all are
alike, but wide tiles with few warps that convert took 10% longer."""


class Copies(Protocol):
    """Prepared copies of some pairs: by the kernel, by host threads, or by torch."""

    def run(self) -> None: ...

    def nonfinite(self) -> list[int]:
        """Return the positions of the pairs whose destination received NaN or infinity in the last run."""


class CopyPlan:
    """Copies of `sources[i]` into `destinations[i]`, prepared once and run many times.

    A pair has one shape. If its dtypes differ, values are converted as `Tensor.copy_` does. Sources may be in another
    process's memory, or on a peer GPU opened through CUDA IPC. Destinations may be views, but must not overlap each
    other or a source. The plan keeps references to all tensors. Their memory must not move.
    """

    nbytes: int
    """Bytes that one run writes."""

    def __init__(
        self,
        destinations: Sequence[Tensor],
        sources: Sequence[Tensor],
        *,
        fused: bool = True,
        links: Sequence[int] | None = None,
    ) -> None:
        """Prepare the copies. On a GPU, wait for the current stream, and compile if necessary (see `compile_kernels`).

        `links[i]` is the link over which `sources[i]` is read, for example the number of the GPU that holds it. The
        kernel reads over all links at the same time. With `fused=False`, torch copies everything. Raise ValueError if
        the shapes of a pair differ, or the lengths of the arguments do.
        """
        self._pairs, links, kept = _checked_pairs(destinations, sources, links)
        self.nbytes = sum(destination.nbytes for destination, _ in self._pairs)
        self._steps: list[tuple[Copies, list[int]]] = []
        """(copies, index in `destinations` of each of their pairs)."""
        for device, indices in _by_device(self._pairs).items():
            pairs, numbers = [self._pairs[i] for i in indices], [kept[i] for i in indices]
            if fused and device is not None and device.type == "cuda":
                steps = _device_steps(pairs, device, [links[i] for i in indices])
                self._steps += [(copies, [numbers[i] for i in taken]) for copies, taken in steps]
            elif fused and device is not None and device.type == "cpu":
                self._steps.append((HostCopies(pairs), numbers))
            else:
                self._steps.append((TorchCopies(pairs), numbers))

    @torch.inference_mode()  # destinations may be inference tensors
    def run(self) -> None:
        """Copy. Between GPUs, only enqueue work on the current stream: synchronize before the sources change."""
        for copies, _ in self._steps:
            copies.run()

    def nonfinite(self) -> list[int]:
        """Return the positions in `destinations` of the tensors to which the last run wrote NaN or infinity.

        A conversion also writes infinity for a number that the destination's dtype cannot hold. The device must have
        completed the run.
        """
        return sorted(numbers[i] for copies, numbers in self._steps for i in copies.nonfinite())


def compile_kernels(device: torch.device, dtype: torch.dtype) -> None:
    """Compile and load the kernels that copy sources of `dtype` and of float32 into parameters of `dtype`.

    The first call in a process takes some seconds and holds the interpreter's lock, so call it before serving.
    """
    destinations = [torch.empty(16, dtype=dtype, device=device) for _ in range(2)]
    CopyPlan(destinations, [torch.empty(16, dtype=source, device=device) for source in (dtype, torch.float32)])


def record_kernels(dtype: torch.dtype) -> None:
    """Request the compilation of the same kernels from Triton, without a GPU and without a launch."""
    from verl_server.weight_sync.copying.copy_kernel import requested

    destinations = [torch.empty(16, dtype=dtype) for _ in range(2)]
    sources = [torch.empty(16, dtype=source) for source in (dtype, torch.float32)]
    for table in build_tables(list(zip(destinations, sources, strict=True)), TILE_BYTES)[0]:
        requested(table, torch.zeros(len(table.pairs), dtype=torch.int32), NUM_WARPS)


def _checked_pairs(
    destinations: Sequence[Tensor], sources: Sequence[Tensor], links: Sequence[int] | None
) -> tuple[list[Pair], list[int], list[int]]:
    """Return (detached pairs, links, indices) without the pairs that have no elements.

    Raise ValueError if the shapes of a pair differ, or the lengths of the arguments do.
    """
    links = [0] * len(sources) if links is None else links
    if not len(destinations) == len(sources) == len(links):
        raise ValueError(
            f"{len(destinations)} destinations for {len(sources)} sources over {len(links)} links; the numbers "
            "must be equal."
        )
    for i, (destination, source) in enumerate(zip(destinations, sources, strict=True)):
        if destination.shape != source.shape:
            raise ValueError(f"Copy {i}: shape {list(source.shape)} does not fit into {list(destination.shape)}.")
    kept = [i for i, destination in enumerate(destinations) if destination.numel()]
    return [(destinations[i].detach(), sources[i].detach()) for i in kept], [links[i] for i in kept], kept


def _by_device(pairs: Sequence[Pair]) -> dict[torch.device | None, list[int]]:
    """Return the indices of pairs by device.

    The key None has the pairs between devices, for example of a checkpoint.
    """
    groups: dict[torch.device | None, list[int]] = {}
    for i, (destination, source) in enumerate(pairs):
        device = destination.device if destination.device == source.device else None
        groups.setdefault(device, []).append(i)
    return groups


def _device_steps(pairs: list[Pair], device: torch.device, links: list[int]) -> list[tuple[Copies, list[int]]]:
    """Return (copies, indices of their pairs) for pairs on one GPU."""
    tables, left = build_tables(pairs, TILE_BYTES, links)
    every = list(range(len(pairs)))
    try:
        from verl_server.weight_sync.copying.copy_kernel import TileCopies

        copies = TileCopies(tables, device, num_warps=NUM_WARPS)
    except Exception as error:  # without Triton or a C compiler, torch copies as correctly, but slower
        warnings.warn(
            f"The fused weight copy is off, torch's takes about half as long again. Triton says: {error!r}",
            stacklevel=3,
        )
        return [(TorchCopies(pairs), every)]
    return [(copies, every), *([(TorchCopies([pairs[i] for i in left]), left)] if left else [])]


class TorchCopies:
    """Copies by torch on a GPU, or between devices.

    After the copy, the largest magnitude of each destination is computed, which reads the destination once more. A copy
    between devices takes many times as long as this. On one GPU, torch copies unusual views only.
    """

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self._destinations, self._sources = [d for d, _ in pairs], [s for _, s in pairs]
        self._checked = [i for i, destination in enumerate(self._destinations) if is_checked(destination.dtype)]
        self._largest: Sequence[Tensor] = ()

    def run(self) -> None:
        torch._foreach_copy_(self._destinations, self._sources)
        if self._checked:  # enqueue, behind the copy, the largest absolute number of each, or NaN
            self._largest = torch._foreach_norm([self._destinations[i] for i in self._checked], float("inf"))

    def nonfinite(self) -> list[int]:
        if not self._largest:
            return []
        largest = torch.stack([value.double() for value in self._largest])
        return [self._checked[i] for i in largest.isfinite().logical_not().nonzero().flatten().tolist()]

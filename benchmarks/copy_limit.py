"""The limit of a weight push: the same bytes through plain copies, over the same links, with nothing else to do.

`measure` runs in a process of its own, before the trainer and the server start, so that the memory and the CUDA
contexts it takes are gone when they are measured.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from multiprocessing.queues import SimpleQueue
from typing import TypedDict

import torch
from torch import Tensor, multiprocessing

Traffic = dict[tuple[int, int], int]
"""(reading GPU, owning GPU) -> elements; on CPU {(0, 0): elements}."""
_REPEATS = 11


class Limit(TypedDict):
    all_ms: float
    """All copies at once: what a push cannot beat."""
    links: dict[str, float]
    """"owner->reader" -> GB/s of source of that copy alone, for pairs of different GPUs."""


def measure(device: str, traffic: Traffic, source: torch.dtype, target: torch.dtype) -> Limit:
    """Median of some runs, one flat copy for each pair; they convert if the dtypes differ."""
    context = multiprocessing.get_context("spawn")
    results: SimpleQueue[Limit] = context.SimpleQueue()
    process = context.Process(target=_measure, args=(results, device, traffic, source, target), daemon=True)
    process.start()
    process.join()
    if process.exitcode != 0:
        raise RuntimeError(f"The measurement of plain copies ended with exit code {process.exitcode}; see above.")
    return results.get()


def _measure(
    results: SimpleQueue[Limit], device: str, traffic: Traffic, source: torch.dtype, target: torch.dtype
) -> None:
    copies = {pair: _FlatCopy(device, pair, n, source, target) for pair, n in traffic.items()}
    links = {
        f"{owner}->{reader}": copy.source_bytes / 1e6 / _median_ms(copy.launch, copy.wait)
        for (reader, owner), copy in copies.items()
        if reader != owner
    }

    def launch() -> None:
        for copy in copies.values():
            copy.launch()

    def wait() -> None:
        for copy in copies.values():
            copy.wait()

    results.put(Limit(all_ms=_median_ms(launch, wait), links=links))


class _FlatCopy:
    """`elements` of one dtype from one GPU's memory to another's (or the same), on a stream of its own."""

    def __init__(
        self, device: str, pair: tuple[int, int], elements: int, source: torch.dtype, target: torch.dtype
    ) -> None:
        reader, owner = (torch.device(device, i) if device == "cuda" else torch.device(device) for i in pair)
        self._source: Tensor = torch.ones(elements, dtype=source, device=owner)  # zeros may share one page
        self._target: Tensor = torch.zeros(elements, dtype=target, device=reader)
        self.source_bytes = self._source.nbytes
        on_gpu = device == "cuda"
        self._streams = [torch.cuda.Stream(d) for d in (owner, reader)] if on_gpu else []  # type: ignore[no-untyped-call]

    def launch(self) -> None:
        if not self._streams:
            self._target.copy_(self._source)
            return
        owner, reader = self._streams
        with torch.cuda.stream(owner), torch.cuda.stream(reader):
            self._target.copy_(self._source, non_blocking=True)

    def wait(self) -> None:
        for stream in self._streams:
            stream.synchronize()


def _median_ms(launch: Callable[[], None], wait: Callable[[], None]) -> float:
    times = []
    for _ in range(_REPEATS):
        wait()
        start = time.perf_counter()
        launch()
        wait()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[1:])

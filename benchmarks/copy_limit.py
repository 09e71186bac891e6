"""The limit of a weight push: plain copies of the same bytes over the same links, without any other work.

`measure` runs in a process of its own, while neither trainer nor server runs. So its memory and its CUDA contexts are
freed before theirs are measured.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.queues import SimpleQueue
from typing import TypedDict

import torch
from torch import Tensor, multiprocessing

Traffic = dict[tuple[int, int], int]
"""(reading GPU, owning GPU) -> number of elements; on the CPU {(0, 0): number of elements}."""
_REPEATS = 11


class Limit(TypedDict):
    all_ms: float
    """Milliseconds of all copies at once. No push can be faster."""
    links: dict[str, float]
    """Pair "owner->reader" of different GPUs -> GB/s of its copy without the other copies."""


def measure(device: str, traffic: Traffic, source: torch.dtype, target: torch.dtype) -> Limit:
    """Medians over several runs of plain copies.

    On GPUs there is one flat copy for each pair, and all copies run at once. On the CPU there are torch's copy, memmove
    with one thread and memmove with all cores, and the result is that of the fastest. If the dtypes differ, only
    torch's copy runs, which converts.
    """
    context = multiprocessing.get_context("spawn")
    results: SimpleQueue[Limit] = context.SimpleQueue()
    run = _measure_host if device == "cpu" else _measure_gpus
    process = context.Process(target=run, args=(results, traffic, source, target), daemon=True)
    process.start()
    process.join()
    if process.exitcode != 0:
        raise RuntimeError(f"The measurement of plain copies ended with exit code {process.exitcode}; see above.")
    return results.get()


def better(one: Limit, other: Limit) -> Limit:
    """The better of two measurements in each figure, because the speed of a machine varies over time."""
    links = {link: max(rate, other["links"][link]) for link, rate in one["links"].items()}
    return Limit(all_ms=min(one["all_ms"], other["all_ms"]), links=links)


def _measure_host(results: SimpleQueue[Limit], traffic: Traffic, source: torch.dtype, target: torch.dtype) -> None:
    elements = sum(traffic.values())
    origin = torch.ones(elements, dtype=source)  # not zeros, whose pages may all be the same physical page
    copy = torch.zeros(elements, dtype=target)
    medians = [_median_ms(lambda: copy.copy_(origin))]
    cores = len(os.sched_getaffinity(0))
    with ThreadPoolExecutor(cores) as pool:
        for threads in (1, cores) if source == target else ():
            medians.append(_median_ms(partial(_memmove, pool, threads, copy, origin)))
    results.put(Limit(all_ms=min(medians), links={}))


def _memmove(pool: ThreadPoolExecutor, threads: int, target: Tensor, source: Tensor) -> None:
    step = -(-source.nbytes // threads)
    starts = range(0, source.nbytes, step)
    to, at, end = target.data_ptr(), source.data_ptr(), source.nbytes
    list(pool.map(lambda start: ctypes.memmove(to + start, at + start, min(step, end - start)), starts))


def _measure_gpus(results: SimpleQueue[Limit], traffic: Traffic, source: torch.dtype, target: torch.dtype) -> None:
    copies = {pair: _FlatCopy(pair, elements, source, target) for pair, elements in traffic.items()}
    links = {
        f"{owner}->{reader}": copy.source_bytes / 1e6 / _median_ms(partial(_run, [copy]))
        for (reader, owner), copy in copies.items()
        if reader != owner
    }
    results.put(Limit(all_ms=_median_ms(lambda: _run(list(copies.values()))), links=links))


class _FlatCopy:
    """A copy of `elements` elements from the memory of one GPU to that of another (or the same), on its own streams."""

    def __init__(self, pair: tuple[int, int], elements: int, source: torch.dtype, target: torch.dtype) -> None:
        reader, owner = (torch.device("cuda", gpu) for gpu in pair)
        self._source = torch.ones(elements, dtype=source, device=owner)
        self._target = torch.zeros(elements, dtype=target, device=reader)
        self.source_bytes = self._source.nbytes
        self._streams = [torch.cuda.Stream(device) for device in (owner, reader)]  # type: ignore[no-untyped-call]
        for device in (owner, reader):
            torch.cuda.synchronize(device)

    def launch(self) -> None:
        owner, reader = self._streams
        with torch.cuda.stream(owner), torch.cuda.stream(reader):
            self._target.copy_(self._source, non_blocking=True)

    def wait(self) -> None:
        for stream in self._streams:
            stream.synchronize()


def _run(copies: list[_FlatCopy]) -> None:
    for copy in copies:
        copy.launch()
    for copy in copies:
        copy.wait()


def _median_ms(run: Callable[[], object]) -> float:
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[1:])

"""The limit of a weight push: the same bytes through plain copies, over the same links, with nothing else to do.

`measure` runs in a process of its own, while neither trainer nor server runs, so that the memory and the CUDA
contexts it takes are gone when theirs are measured.
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
"""(reading GPU, owning GPU) -> elements; on CPU {(0, 0): elements}."""
_REPEATS = 11


class Limit(TypedDict):
    all_ms: float
    """All copies at once: what a push cannot beat."""
    links: dict[str, float]
    """"owner->reader" -> GB/s of source of that copy alone, for pairs of different GPUs."""


def measure(device: str, traffic: Traffic, source: torch.dtype, target: torch.dtype) -> Limit:
    """Medians of some runs. On GPUs one flat copy for each pair, all at once; on CPU the fastest of torch's copy and
    of memmove with one thread or all cores. If the dtypes differ, torch converts.
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
    """Of two measurements, before and after: machines have better and worse moments."""
    links = {link: max(rate, other["links"][link]) for link, rate in one["links"].items()}
    return Limit(all_ms=min(one["all_ms"], other["all_ms"]), links=links)


def _measure_host(results: SimpleQueue[Limit], traffic: Traffic, source: torch.dtype, target: torch.dtype) -> None:
    elements = sum(traffic.values())
    origin = torch.ones(elements, dtype=source)  # of zeros, all pages may be one
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
    """`elements` of one dtype from one GPU's memory to another's (or the same), on streams of its own."""

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

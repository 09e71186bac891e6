"""Time of release and resume of device memory: `MemoryArena` on an NVIDIA GPU, or on the CPU.

    python -m benchmarks.memory_cycle --device cuda --gib 16

Prints one JSON line per figure (`name, value, unit, limit, ok`): milliseconds of release and resume, with and without a
backup in host memory, and the bytes that `--cycles` of them leak. On CUDA it also checks that a graph that was captured
before a release computes the right numbers after the resume.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
import tyro

from verl_server.worker.memory_arena import MemoryArena

_LEAK_BYTES = 64 * 2**20
"""Bytes that an allocator or the driver may take once, independent of the number of cycles."""


@dataclasses.dataclass
class Args:
    """Measure release and resume of one memory arena."""

    device: Literal["cpu", "cuda"] = "cuda"
    """Device of the arena."""
    gib: float = 4.0
    """Size of the arena in GiB. The backup needs the same size in host memory."""
    cycles: int = 50
    """Number of releases and resumes."""


def report(name: str, value: float, unit: str, limit: float | None = None) -> bool:
    ok = limit is None or value <= limit
    print(json.dumps({"name": name, "value": round(value, 4), "unit": unit, "limit": limit, "ok": ok}), flush=True)
    return ok


def check_memory_cycle(device: torch.device, gib: float = 4.0, cycles: int = 50) -> bool:
    """Measure and check one arena. Returns False if memory is not freed, leaks, moves, or holds wrong values."""
    start = time.perf_counter()
    arena = MemoryArena(int(gib * 2**30), device)
    arena.contents.fill_(1)
    report("arena_make_and_fill", 1e3 * (time.perf_counter() - start), "ms")
    address = arena.contents.data_ptr()
    held = free_bytes(device)
    arena.release()
    ok = report("arena_not_given_back", arena.nbytes - (free_bytes(device) - held), "bytes", _LEAK_BYTES)
    arena.resume()
    releases, resumes = [], []
    for i in range(cycles):
        arena.contents.fill_(i % 128)
        releases.append(seconds(device, arena.release))
        resumes.append(seconds(device, arena.resume))
    arena.contents.fill_(1)
    ok &= report("arena_leak", held - free_bytes(device), "bytes", _LEAK_BYTES)
    ok &= report("arena_moved", float(arena.contents.data_ptr() != address), "times", 0)
    report("arena_release", 1e3 * statistics.median(releases), "ms")
    report("arena_resume", 1e3 * statistics.median(resumes), "ms")
    ok &= check_backup(device, arena)
    if device.type == "cuda":
        ok &= check_graph(device, arena)
    del arena
    return ok


def check_backup(device: torch.device, arena: MemoryArena) -> bool:
    """Copy the contents to host memory and back. The first release also allocates and pins that memory."""
    numbers = arena.view(0, (arena.nbytes // 8,), torch.int64)
    torch.arange(numbers.numel(), out=numbers)
    first, release, resume = 0.0, [], []
    for i in range(4):
        release.append(seconds(device, lambda: arena.release(keep_contents=True)))
        resume.append(seconds(device, arena.resume))
        first = first or release.pop()
        numbers.add_(1 if i < 3 else 0)
    report("backup_first_release", 1e3 * first, "ms")
    report("backup_release", 1e3 * statistics.median(release), "ms")
    report("backup_resume", 1e3 * statistics.median(resume), "ms")
    numbers.sub_(torch.arange(3, numbers.numel() + 3, device=device))
    return report("backup_wrong_numbers", int(torch.count_nonzero(numbers)), "elements", 0)


def check_graph(device: torch.device, arena: MemoryArena) -> bool:
    """Capture a product with a matrix in the arena, and replay it after a release and a resume of the arena."""
    matrix = arena.view(512, (1024, 1024), torch.float32)
    matrix.fill_(1.0)
    x, out = torch.ones(1024, device=device), torch.zeros(1024, device=device)
    graph = torch.cuda.CUDAGraph()
    out.copy_(matrix @ x)  # the first call initializes libraries, which must not happen during the capture
    with torch.cuda.graph(graph):
        out.copy_(matrix @ x)
    wrong = 0
    for value in (2.0, 3.0):
        arena.release()
        arena.resume()
        matrix.fill_(value)
        graph.replay()
        wrong += int((out != 1024 * value).sum())
    return report("graph_wrong_numbers", wrong, "elements", 0)


def seconds(device: torch.device, step: Callable[[], object]) -> float:
    """Seconds of one step. The device is idle before and after it."""
    synchronize(device)
    start = time.perf_counter()
    step()
    synchronize(device)
    return time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_bytes(device: torch.device) -> int:
    """Free bytes of the device. On the CPU, the negative resident bytes of this process: only differences matter."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(device)[0])
    return -int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def main() -> None:
    args = tyro.cli(Args)
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit("--device cuda needs an NVIDIA GPU. --device cpu measures the same on the CPU.")
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(json.dumps({"torch": torch.__version__, "machine": machine, "argv": sys.argv}))
    sys.exit(0 if check_memory_cycle(device, args.gib, args.cycles) else 1)


if __name__ == "__main__":
    main()

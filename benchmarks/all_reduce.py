"""Sums over tensor-parallel GPUs: `ipc.peer_memory` and NCCL, both replayed in CUDA graphs.

    python -m benchmarks.all_reduce --ranks 2

Prints one JSON line for each number of rows of `--hidden` bf16 elements: the microseconds of a sum (`value`) and those
of NCCL (`nccl`). Before the measurement each sum is compared with NCCL's; a wrong sum ends the run with exit code 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from verl_server.ipc.peer_memory import PeerMemory

_ROWS = (1, 4, 16, 64, 128, 256, 512, 2048, 4096)
_SUMS = 100
"""Number of sums in one graph."""


def run_rank(rank: int, ranks: int, hidden: int, meet: str) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"file://{meet}/ranks", rank=rank, world_size=ranks)
    group = dist.group.WORLD
    assert group is not None

    def gather(data: bytes) -> list[bytes]:
        everyones: list[bytes] = [b""] * ranks
        dist.all_gather_object(everyones, data)
        return everyones

    memory = PeerMemory.connect(group, device, gather)
    if memory is None:
        raise RuntimeError("These GPUs cannot access each other's memory.")
    for rows in _ROWS:
        mine = torch.randn(rows, hidden, dtype=torch.bfloat16, device=device)
        expected = mine.clone()
        dist.all_reduce(expected)
        for got in (memory.sum(mine.clone()), replayed_sum(memory, mine)):
            if got is None or not torch.allclose(got, expected, atol=0.04 * ranks, rtol=0.02):
                raise AssertionError(f"The sum of {rows} rows differs from NCCL's sum.")
        nccl = microseconds(lambda x=mine: dist.all_reduce(x))  # type: ignore[misc]
        peers = microseconds(lambda x=mine: memory.sum(x))  # type: ignore[misc]
        if rank == 0:
            line = {"name": "all_reduce", "rows": rows, "hidden": hidden, "ranks": ranks, "unit": "us"}
            print(json.dumps(line | {"value": round(peers, 2), "nccl": round(nccl, 2)}), flush=True)
    dist.destroy_process_group()


def replayed_sum(memory: PeerMemory, mine: torch.Tensor) -> torch.Tensor | None:
    """The sum of `mine` by the replay of a graph that was captured with other values."""
    source = torch.zeros_like(mine)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        summed = memory.sum(source.clone())
    source.copy_(mine)
    graph.replay()
    torch.cuda.synchronize()  # before the graph is destroyed
    return summed


def microseconds(call: Callable[[], object]) -> float:
    """Microseconds of one call: a graph has `_SUMS` calls, and the fastest of three replays counts."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(_SUMS):
            call()
    times: list[float] = []
    for _ in range(3):
        graph.replay()  # its sums synchronize the ranks before the timed replay
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * float(start.elapsed_time(end)) / _SUMS)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.all_reduce",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, default=2, help="number of GPUs (2)")
    parser.add_argument("--hidden", type=int, default=4096, help="elements of a row (4096)")
    args = parser.parse_args()
    if torch.cuda.device_count() < args.ranks:
        sys.exit(f"--ranks {args.ranks} needs {args.ranks} GPUs, but torch sees {torch.cuda.device_count()}.")
    with tempfile.TemporaryDirectory() as meet:
        spawn(run_rank, (args.ranks, args.hidden, meet), nprocs=args.ranks)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()

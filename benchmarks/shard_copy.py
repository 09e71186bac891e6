"""The copy of a push from FSDP2 on two GPUs to TP 2 on the same two GPUs, alone, in several ways: one JSON line each.

    python -m benchmarks.shard_copy --device cuda --shape 8b

There is one process for each GPU. It holds the trainer's half of the rows of every tensor (as FSDP2 on two ranks), and
the server's half of every tensor (as TP 2), and reads the other process's half through CUDA IPC. Column-parallel
matrices and the vocabulary are read from the process's own GPU; half of each row-parallel matrix crosses the link.

Before each run the two processes meet in a loop without sleep, so that both begin within a microsecond. `ms` is the
median of the slower process's times from there until its device is done; `device_ms` that of its device alone. The
ways take turns, so that all have the same noise. `times_flat` is the ratio to flat copies of the same bytes by the
copy engines, all at once: the limit in `benchmarks.weight_sync`. Each way first fills a destination of NaN, and the
result is compared. With `idle` in its name, a way runs after 50 ms without work on the GPU, as a push does.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
from torch import Tensor, multiprocessing

from benchmarks.shapes import SHAPES
from benchmarks.weight_copy import Cut, fill, parameters
from verl_server.weight_sync.copying.copy_table import Table, build_tables
from verl_server.weight_sync.copying.fused_copy import NUM_WARPS, TILE_BYTES, CopyPlan

RANKS = 2
_ALIGNMENT = 512
_IDLE_SECONDS = 0.05
Shapes = list[tuple[tuple[int, ...], Cut]]
Run = Callable[[], object]


class Copies(NamedTuple):
    """The copies of one server rank, in the order of the tensors."""

    destinations: list[Tensor]
    sources: list[Tensor]
    owners: list[int]
    """The rank that holds each source."""


class Way(NamedTuple):
    name: str
    make: Callable[[], Run]
    idle: bool = False


def shard_elements(tensors: Shapes) -> int:
    """Elements that one trainer rank takes for its half of the rows of every tensor."""
    return sum(_aligned(torch.Size(shape).numel() // RANKS) for shape, _ in tensors)


def part_elements(tensors: Shapes) -> int:
    """Elements that one server rank takes."""
    return sum(_aligned(torch.Size(s).numel() // (1 if cut == "whole" else RANKS)) for s, cut in tensors)


def make_copies(tensors: Shapes, shards: list[Tensor], target: Tensor, rank: int) -> Copies:
    """The copies of server rank `rank`, which owns `target`. `shards[i]` is the memory of trainer rank i."""
    copies = Copies([], [], [])
    given = taken = 0
    for shape, cut in tensors:
        rows, *rest = shape
        half = torch.Size((rows // RANKS, *rest))
        held = [shard[given : given + half.numel()].view(half) for shard in shards]
        given += _aligned(half.numel())
        if cut == "rows":
            parts = [(rank, held[rank])]
        elif cut == "columns":
            width = shape[1] // RANKS
            parts = [(owner, full[:, rank * width : (rank + 1) * width]) for owner, full in enumerate(held)]
        else:
            parts = list(enumerate(held))
        size = sum(part.numel() for _, part in parts)
        destination = target[taken : taken + size].view(-1, *parts[0][1].shape[1:])
        taken += _aligned(size)
        height = len(parts[0][1])
        for i, (owner, part) in enumerate(parts):
            copies.destinations.append(destination[i * height : (i + 1) * height])
            copies.sources.append(part)
            copies.owners.append(owner)
    return copies


def _aligned(elements: int) -> int:
    return -(-elements // _ALIGNMENT) * _ALIGNMENT


# -- the ways --------------------------------------------------------------------------------------------------------


def ways(copies: Copies, rank: int, device: torch.device) -> Iterator[Way]:
    yield Way("flat copies", partial(flat_copies, copies, rank))
    yield Way("CopyPlan", partial(planned, copies))
    yield Way("CopyPlan, idle", partial(planned, copies), idle=True)
    if device.type == "cpu":
        return
    yield Way("flat copies, idle", partial(flat_copies, copies, rank), idle=True)
    yield Way("flat, by the kernel", partial(flat_kernel, copies, rank))
    yield Way("local only", partial(only, copies, rank, local=True))
    yield Way("remote only", partial(only, copies, rank, local=False))
    for name, order in (
        ("table's order", in_order),
        ("remote first", partial(spread, until=0.0)),
        ("remote in the first half", partial(spread, until=0.5)),
        ("remote in the first 0.7", partial(spread, until=0.7)),
        ("remote in the first 0.85", partial(spread, until=0.85)),
        ("remote spread", partial(spread, until=1.0)),
    ):
        yield Way(f"order: {name}", partial(ordered, copies, rank, order))
    for tile_bytes, warps in ((2**13, 4), (2**14, 8), (2**15, 8), (2**16, 16)):
        make = partial(ordered, copies, rank, partial(spread, until=0.85), tile_bytes, warps)
        yield Way(f"remote in the first 0.85, {tile_bytes // 1024} KiB, {warps} warps", make)
    yield Way("two streams of the kernel", partial(two_streams, copies, rank))
    yield Way("remote by copy engine, without checks", partial(remote_by_engine, copies, rank))


def planned(copies: Copies) -> Run:
    return CopyPlan(copies.destinations, copies.sources, links=copies.owners).run


def _side(copies: Copies, rank: int, *, local: bool) -> Copies:
    chosen = [i for i, owner in enumerate(copies.owners) if (owner == rank) == local]
    return Copies(
        [copies.destinations[i] for i in chosen],
        [copies.sources[i] for i in chosen],
        [copies.owners[i] for i in chosen],
    )


def only(copies: Copies, rank: int, *, local: bool) -> Run:
    return planned(_side(copies, rank, local=local))


def _flat(copies: Copies, rank: int) -> list[tuple[Tensor, Tensor]]:
    """(destination, source) of the same numbers of bytes from each owner, each in one piece."""
    flat = []
    for local in (False, True):
        side = _side(copies, rank, local=local)
        size = sum(d.numel() for d in side.destinations)
        source = side.sources[0]
        whole = torch.empty(0, dtype=source.dtype, device=source.device).set_(
            source.untyped_storage(), 0, (size,), (1,)
        )
        target = side.destinations[0]
        start = 0 if local else (target.untyped_storage().nbytes() // target.itemsize) - size
        room = torch.empty(0, dtype=target.dtype, device=target.device)
        flat.append((room.set_(target.untyped_storage(), start, (size,), (1,)), whole))
    return flat


def flat_copies(copies: Copies, rank: int) -> Run:
    flat = _flat(copies, rank)
    if not copies.sources[0].is_cuda:
        return partial(_copy_all, flat)
    streams = [torch.cuda.Stream() for _ in flat]  # type: ignore[no-untyped-call]
    return partial(_on_streams, streams, [partial(d.copy_, s, non_blocking=True) for d, s in flat])


def flat_kernel(copies: Copies, rank: int) -> Run:
    flat = _flat(copies, rank)
    return CopyPlan([d for d, _ in flat], [s for _, s in flat], links=[0, 1]).run


def two_streams(copies: Copies, rank: int) -> Run:
    """The kernel for what is remote on a stream of high priority, and beside it the one for what is local."""
    streams = [torch.cuda.Stream(priority=-1), torch.cuda.Stream()]  # type: ignore[no-untyped-call]
    return partial(_on_streams, streams, [only(copies, rank, local=local) for local in (False, True)])


def remote_by_engine(copies: Copies, rank: int) -> Run:
    """cudaMemcpy2DAsync for what is remote, the kernel for what is local. Nobody looks for NaN in what is remote."""
    remote = _side(copies, rank, local=False)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]  # type: ignore[no-untyped-call]
    call = _cudart().cudaMemcpy2DAsync
    calls = []
    for to, start in zip(remote.destinations, remote.sources, strict=True):
        rows = start.shape[0] if start.dim() == 2 else 1
        width = start.numel() // rows * start.itemsize
        pitches = [t.stride(0) * t.itemsize if rows > 1 else width for t in (to, start)]
        sizes = (ctypes.c_size_t(width), ctypes.c_size_t(rows))
        arguments = (to.data_ptr(), pitches[0], start.data_ptr(), pitches[1])
        kinds = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t)
        calls.append((*(kind(n) for kind, n in zip(kinds, arguments, strict=True)), *sizes, ctypes.c_int(4)))
    handle = ctypes.c_void_p(streams[0].cuda_stream)

    def run_remote() -> None:
        for arguments in calls:
            if code := call(*arguments, handle):
                raise RuntimeError(f"cudaMemcpy2DAsync returned {code}")

    return partial(_on_streams, streams, [run_remote, only(copies, rank, local=True)])


def _cudart() -> ctypes.CDLL:
    for name in (f"libcudart.so.{(torch.version.cuda or '12').split('.')[0]}", "libcudart.so"):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise OSError("there is no libcudart")


def _on_streams(streams: list[Any], runs: list[Run]) -> None:
    """Run each on its stream, after what the current stream holds, and let the current stream wait for all of them."""
    current = torch.cuda.current_stream()
    for stream, run in zip(streams, runs, strict=True):
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            run()
    for stream in streams:
        current.wait_stream(stream)


def _copy_all(pairs: list[tuple[Tensor, Tensor]]) -> None:
    for destination, source in pairs:
        destination.copy_(source)


Order = Callable[[Tensor], Tensor]
"""For each tile, in the table's order: True if it is remote -> the order of the tiles."""


def in_order(remote: Tensor) -> Tensor:
    return torch.arange(len(remote))


def spread(remote: Tensor, *, until: float) -> Tensor:
    """The remote tiles spread evenly over the first part of all tiles, at least their own share."""
    position = torch.empty(len(remote), dtype=torch.float64)
    count = int(remote.sum())
    until = max(until, count / len(remote))
    slots = ((torch.arange(count, dtype=torch.float64) + 0.5) / max(count, 1) * until * len(remote)).floor().long()
    is_free = torch.ones(len(remote), dtype=torch.bool)
    is_free[slots] = False
    position[remote] = slots.double()
    position[~remote] = is_free.nonzero().squeeze(1).double()
    return position.argsort(stable=True)


def ordered(copies: Copies, rank: int, order: Order, tile_bytes: int = TILE_BYTES, warps: int = NUM_WARPS) -> Run:
    from verl_server.weight_sync.copying.copy_kernel import TileCopies

    pairs = list(zip(copies.destinations, copies.sources, strict=True))
    tables, left = build_tables(pairs, tile_bytes)
    assert not left, "the kernel must support every pair of a model"
    return TileCopies(
        [reordered(t, copies.owners, rank, order) for t in tables], pairs[0][0].device, num_warps=warps
    ).run


def reordered(table: Table, owners: list[int], rank: int, order: Order) -> Table:
    is_remote = torch.tensor([owners[pair] != rank for pair in table.pairs])
    return replace(table, tiles=table.tiles[order(is_remote[table.tiles[:, 0].long()])].contiguous())


# -- two processes in step -------------------------------------------------------------------------------------------


class Meeting:
    """A barrier of two processes that spins. `moments`: shared int64 [RANKS]."""

    def __init__(self, moments: Tensor, rank: int) -> None:
        self._moments, self._rank, self._count = moments.numpy(), rank, 0

    def wait(self) -> None:
        self._count += 1
        self._moments[self._rank] = self._count
        deadline = time.monotonic() + 120.0
        while self._moments[1 - self._rank] < self._count:
            if time.monotonic() > deadline:
                raise TimeoutError("The other process did not come.")


def run_rank(rank: int, args: argparse.Namespace, moments: Tensor, peer: Connection, parent: Connection) -> None:
    device = torch.device(args.device, rank) if args.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    tensors = parameters(SHAPES[args.shape])
    own = torch.empty(shard_elements(tensors), dtype=dtype, device=device)
    fill(own)
    other = _exchange(own, peer)
    target = torch.empty(part_elements(tensors), dtype=dtype, device=device)
    shards = [own, other] if rank == 0 else [other, own]
    copies = make_copies(tensors, shards, target, rank)
    meeting = Meeting(moments, rank)
    found: dict[str, dict[str, Any]] = {}
    runs: list[tuple[Way, Run]] = []
    for way in ways(copies, rank, device):
        try:
            run = way.make()
            equal = _is_right(run, copies, target, device) if not way.name.startswith("flat") else None
            runs.append((way, run))
            found[way.name] = {"equal": equal, "times": []}
        except Exception as error:
            found[way.name] = {"error": repr(error).splitlines()[0]}
    parent.send({name: "error" not in line for name, line in found.items()})
    both = set(parent.recv())
    for turn in range(args.repeats + 1):
        for way, run in runs:
            if way.name not in both:
                continue
            if way.idle:
                time.sleep(_IDLE_SECONDS)
            times = _timed(run, meeting, device)
            if turn:
                found[way.name]["times"].append(times)
    parent.send(found)
    meeting.wait()


def _exchange(own: Tensor, peer: Connection) -> Tensor:
    """Share `own` with the other process, and return the memory that the other process shares."""
    if not own.is_cuda:
        own.share_memory_()  # type: ignore[no-untyped-call]
        peer.send(own)
        other: Tensor = peer.recv()
        return other
    peer.send((own.untyped_storage()._share_cuda_(), own.numel()))  # type: ignore[no-untyped-call]
    handle, size = peer.recv()
    device = torch.cuda.current_device()
    storage = torch.UntypedStorage._new_shared_cuda(device, *handle[1:])  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=own.dtype, device=own.device).set_(storage, 0, (size,), (1,))


def _is_right(run: Run, copies: Copies, target: Tensor, device: torch.device) -> bool:
    target.fill_(float("nan"))
    run()
    _synchronize(device)
    equal = (torch.equal(d, s) for d, s in zip(copies.destinations, copies.sources, strict=True))
    return sum(equal) == len(copies.owners)


def _timed(run: Run, meeting: Meeting, device: torch.device) -> tuple[float, float]:
    """Milliseconds until the device was done, and those of the device alone."""
    count = 2 if device.type == "cuda" else 0
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count)]  # type: ignore[no-untyped-call]
    meeting.wait()
    start = time.perf_counter()
    for event in events[:1]:
        event.record()
    run()
    for event in events[1:]:
        event.record()
    _synchronize(device)
    end = time.perf_counter()
    meeting.wait()  # the other process reads this one's memory until then
    return 1e3 * (end - start), events[0].elapsed_time(events[1]) if events else 1e3 * (end - start)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream().synchronize()


# -- the report ------------------------------------------------------------------------------------------------------


def report(shape: str, both: list[dict[str, dict[str, Any]]]) -> None:
    limit: dict[bool, float] = {}
    for name, first in both[0].items():
        second = both[1][name]
        if "error" in first or "error" in second:
            error = first.get("error") or second.get("error")
            print(json.dumps({"shape": shape, "copy": name, "error": error}), flush=True)
            continue
        turns = list(zip(first["times"], second["times"], strict=True))
        host, on_device = ([max(a[i], b[i]) for a, b in turns] for i in range(2))
        median = statistics.median(host)
        if name.startswith("flat copies"):
            limit["idle" in name] = median
        line = {
            "shape": shape,
            "copy": name,
            "ms": round(median, 3),
            "best_ms": round(min(host), 3),
            "worst_ms": round(max(host), 3),
            "device_ms": round(statistics.median(on_device), 3),
            "times_flat": round(median / limit[False], 3),
        }
        if first["equal"] is not None:
            line["equal"] = first["equal"] and second["equal"]
        print(json.dumps(line), flush=True)


def traffic_line(shape: str) -> dict[str, Any]:
    """The elements that one server rank reads from each side."""
    tensors = parameters(SHAPES[shape])
    meta = torch.device("meta")
    shards = [torch.empty(shard_elements(tensors), device=meta) for _ in range(RANKS)]
    copies = make_copies(tensors, shards, torch.empty(part_elements(tensors), device=meta), 0)
    sides = [sum(d.numel() for d in _side(copies, 0, local=local).destinations) for local in (True, False)]
    return {"shape": shape, "local_elements": sides[0], "remote_elements": sides[1], "pairs": len(copies.owners)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda", help="device of the weights (cuda)")
    parser.add_argument("--shape", choices=["tiny", "deep", "0.6b", "8b"], default="8b", help="shape of the model (8b)")
    parser.add_argument("--repeats", type=int, default=15, help="timed runs of each way (15)")
    args = parser.parse_args()
    gpu = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(json.dumps({"torch": torch.__version__, "machine": gpu} | traffic_line(args.shape)), flush=True)
    context = multiprocessing.get_context("spawn")
    moments = torch.zeros(RANKS, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
    links = context.Pipe()
    pipes = [context.Pipe() for _ in range(RANKS)]
    processes = [
        context.Process(target=run_rank, args=(rank, args, moments, links[rank], pipes[rank][1]), daemon=True)
        for rank in range(RANKS)
    ]
    for process in processes:
        process.start()
    for _, theirs in pipes:
        theirs.close()  # so that recv raises if a process fails
    possible = [ours.recv() for ours, _ in pipes]
    both = [name for name in possible[0] if all(names[name] for names in possible)]
    for ours, _ in pipes:
        ours.send(both)
    report(args.shape, [ours.recv() for ours, _ in pipes])
    for process in processes:
        process.join()


if __name__ == "__main__":
    main()

"""Several ways to copy a model's weights: one JSON line for each way, with its ratio to one flat copy.

    python -m benchmarks.weight_copy --device cuda --shape 8b [--peer]

The (destination, source) pairs are those of a push: from the tensors of a checkpoint to the server's fused parameters,
either whole or the half of rank 0 of two ranks. Each way first fills a destination of NaN, and the result is compared
with `Tensor.to`. Then the copy is timed from the call until the device is done. With `--peer`, the sources belong to
another process on cuda:1 and are opened through CUDA IPC. Needs torch, Triton and transformers.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Literal

import torch
from torch import Tensor, multiprocessing

from benchmarks.shapes import SHAPES
from verl_server.weight_sync.copying.copy_table import build_tables
from verl_server.weight_sync.copying.fused_copy import NUM_WARPS, TILE_BYTES, CopyPlan

Cut = Literal["rows", "columns", "whole"]
Pair = tuple[Tensor, Tensor]
Run = Callable[[], object]
_ALIGNMENT = 512
_TILES = [(2**13, 4), (2**14, 4), (2**14, 8), (2**15, 4), (2**15, 8), (2**15, 16), (2**16, 8), (2**16, 16)]
"""(tile bytes, warps) of a program."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda", help="device of the weights (cuda)")
    parser.add_argument("--shape", choices=list(SHAPES), default="0.6b", help="shape of the model (0.6b)")
    parser.add_argument("--peer", action="store_true", help="copy from another process on cuda:1")
    parser.add_argument("--repeats", type=int, default=15, help="timed runs of each way (15)")
    args = parser.parse_args()
    on_gpu = args.device == "cuda"
    print(json.dumps({"torch": torch.__version__, "threads": torch.get_num_threads(), **vars(args)}), flush=True)
    same = torch.bfloat16 if on_gpu else torch.float32
    tensors = parameters(SHAPES[args.shape])
    with source_memory(args.device, 4 * _elements(tensors, 1), args.peer) as memory:
        for source, target, ranks in ((same, same, 1), (same, same, 2), (torch.float32, torch.bfloat16, 1)):
            case = f"{args.shape} {_name(source)}->{_name(target)} tp{ranks}"
            measure_case(case, tensors, memory, source, target, ranks, args)


def parameters(shape: dict[str, Any]) -> list[tuple[tuple[int, ...], Cut]]:
    """(shape, direction in which tensor parallelism divides it) of each tensor of a Qwen3 checkpoint, in order."""
    hidden, inner, head = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    q, kv = shape["num_attention_heads"] * head, shape["num_key_value_heads"] * head
    layer: list[tuple[tuple[int, ...], Cut]] = [
        ((hidden,), "whole"),
        *(((rows, hidden), "rows") for rows in (q, kv, kv)),  # type: ignore[list-item]
        ((head,), "whole"),
        ((head,), "whole"),
        ((hidden, q), "columns"),
        ((hidden,), "whole"),
        *(((inner, hidden), "rows") for _ in range(2)),  # type: ignore[list-item]
        ((hidden, inner), "columns"),
    ]
    vocabulary: list[tuple[tuple[int, ...], Cut]] = [((shape["vocab_size"], hidden), "rows")]
    head_too = [] if shape.get("tie_word_embeddings") else vocabulary
    return [*vocabulary, *(layer * shape["num_hidden_layers"]), ((hidden,), "whole"), *head_too]


def make_pairs(tensors: list[tuple[tuple[int, ...], Cut]], source: Tensor, target: Tensor, ranks: int) -> list[Pair]:
    """(destination, source) views, consecutive in flat memory. For `ranks` = 2 they cover the half of rank 0 only."""
    pairs = []
    taken, given = 0, 0
    for shape, cut in tensors:
        n = torch.Size(shape).numel()
        full = source[given : given + n].view(shape)
        given += _aligned(n)
        dim = {"rows": 0, "columns": 1}.get(cut)
        part = full if dim is None else full.narrow(dim, 0, shape[dim] // ranks)
        pairs.append((target[taken : taken + part.numel()].view(part.shape), part))
        taken += _aligned(part.numel())
    return pairs


def _aligned(elements: int) -> int:
    return -(-elements // _ALIGNMENT) * _ALIGNMENT


def _elements(tensors: list[tuple[tuple[int, ...], Cut]], ranks: int) -> int:
    return sum(_aligned(torch.Size(s).numel() // (1 if cut == "whole" else ranks)) for s, cut in tensors)


def measure_case(
    case: str,
    tensors: list[tuple[tuple[int, ...], Cut]],
    memory: Tensor,
    source_dtype: torch.dtype,
    target_dtype: torch.dtype,
    ranks: int,
    args: argparse.Namespace,
) -> None:
    device = torch.device(args.device)
    source = memory[: _elements(tensors, 1) * source_dtype.itemsize].view(source_dtype)
    fill(source)
    target = torch.empty(_elements(tensors, ranks), dtype=target_dtype, device=device)
    pairs = make_pairs(tensors, source, target, ranks)
    lines: dict[str, dict[str, Any]] = {}
    runs: dict[str, Run] = {}
    for name, make in gpu_candidates(pairs) if args.device == "cuda" else cpu_candidates(pairs):
        try:
            start = time.perf_counter()
            runs[name] = make()
            prepare_ms = 1e3 * (time.perf_counter() - start)
            target.fill_(float("nan"))
            runs[name]()
            _wait(device)
            equal = all(torch.equal(d, s.to(d.dtype)) for d, s in pairs)
            lines[name] = {"prepare_ms": round(prepare_ms, 1), "equal": equal}
        except (RuntimeError, OSError, ImportError) as error:
            runs.pop(name, None)
            print(json.dumps({"case": case, "copy": name, "error": str(error).splitlines()[0]}), flush=True)
    moved = sum(d.nbytes + s.nbytes for d, s in pairs)
    runs = {"flat copy_": partial(target.copy_, source[: target.numel()]), **runs}
    if device.type == "cpu":
        runs["flat memmove, 2 threads"] = flat_memmove(moved // 2)
    times = timed(runs, device, args.repeats)
    limit = statistics.median(total for _, total in times["flat copy_"])
    for name, pairs_of_ms in times.items():
        host, total = (statistics.median(ms) for ms in zip(*pairs_of_ms, strict=True))
        line = {
            "case": case,
            "copy": name,
            "ms": round(total, 3),
            "best_ms": round(min(ms for _, ms in pairs_of_ms), 3),
            "host_ms": round(host, 3),
            "read_and_write_gb_s": round(moved / total / 1e6),
            "times_flat": round(total / limit, 3),
        }
        print(json.dumps(line | lines.get(name, {})), flush=True)


def timed(runs: dict[str, Run], device: torch.device, repeats: int) -> dict[str, list[tuple[float, float]]]:
    """Return (milliseconds until it returned, milliseconds until the device was done) of each repeat, for each run.

    The runs take turns, so that all have the same noise.
    """
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            _wait(device)
            start = time.perf_counter()
            run()
            returned = time.perf_counter()
            _wait(device)
            if turn:  # turn 0 is the warm-up
                times[name].append((1e3 * (returned - start), 1e3 * (time.perf_counter() - start)))
    return times


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def fill(source: Tensor) -> None:
    """Fill with random numbers. On the CPU, which draws slowly, they repeat with a period that no tensor has."""
    if source.is_cuda:
        for start in range(0, source.numel(), 2**28):  # in parts, because the numbers are drawn in local memory
            part = source[start : start + 2**28]
            part.copy_(torch.randn(part.numel(), device=part.device))
        return
    some = torch.randn(2**20 + 7, dtype=source.dtype)
    for start in range(0, source.numel(), some.numel()):
        part = source[start : start + some.numel()]
        part.copy_(some[: part.numel()])


def gpu_candidates(pairs: list[Pair]) -> Iterator[tuple[str, Callable[[], Run]]]:
    destinations, sources = [d for d, _ in pairs], [s for _, s in pairs]
    yield "loop of copy_", lambda: partial(_copy_all, pairs)
    yield "_foreach_copy_", lambda: partial(torch._foreach_copy_, destinations, sources)
    yield "graph of copy_", lambda: graph_of_copies(pairs)
    if all(d.dtype == s.dtype and s.is_contiguous() for d, s in pairs):
        yield "cudaMemcpyBatchAsync", lambda: memcpy_batch(pairs)
    yield f"CopyPlan (Triton {TILE_BYTES // 1024} KiB, {NUM_WARPS} warps)", lambda: CopyPlan(destinations, sources).run
    for tile_bytes, warps in _TILES:
        yield f"Triton {tile_bytes // 1024} KiB, {warps} warps", partial(tiled, pairs, tile_bytes, warps)


def tiled(pairs: list[Pair], tile_bytes: int, warps: int) -> Run:
    from verl_server.weight_sync.copying.copy_kernel import TileCopies

    tables, left = build_tables(pairs, tile_bytes)
    assert not left, "the kernel must support every pair of a model"
    return TileCopies(tables, pairs[0][0].device, num_warps=warps).run


def graph_of_copies(pairs: list[Pair]) -> Run:
    graph = torch.cuda.CUDAGraph()
    _copy_all(pairs)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        _copy_all(pairs)
    return graph.replay


def memcpy_batch(pairs: list[Pair]) -> Run:
    """The batch copy of the CUDA 13 runtime, by the copy engines. The function rejects the legacy stream, so the copy
    runs on a separate stream."""

    class Attributes(ctypes.Structure):
        _fields_ = (("source_order", ctypes.c_int), ("hints", ctypes.c_int * 4), ("flags", ctypes.c_uint))

    n = len(pairs)
    call = ctypes.CDLL("libcudart.so.13").cudaMemcpyBatchAsync
    to = (ctypes.c_void_p * n)(*(d.data_ptr() for d, _ in pairs))
    start = (ctypes.c_void_p * n)(*(s.data_ptr() for _, s in pairs))
    sizes = (ctypes.c_size_t * n)(*(d.nbytes for d, _ in pairs))
    attributes, first = Attributes(source_order=1), (ctypes.c_size_t * 1)(0)
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def run() -> None:
        one = ctypes.c_size_t(1)
        count, handle = ctypes.c_size_t(n), ctypes.c_void_p(stream.cuda_stream)
        code = call(to, start, sizes, count, ctypes.byref(attributes), first, one, handle)
        if code:
            raise RuntimeError(f"cudaMemcpyBatchAsync returned {code}")

    return run


def cpu_candidates(pairs: list[Pair]) -> Iterator[tuple[str, Callable[[], Run]]]:
    destinations, sources = [d for d, _ in pairs], [s for _, s in pairs]
    yield "loop of copy_", lambda: partial(_copy_all, pairs)
    yield "_foreach_copy_", lambda: partial(torch._foreach_copy_, destinations, sources)
    yield "CopyPlan", lambda: CopyPlan(destinations, sources).run


def flat_memmove(nbytes: int) -> Run:
    """A run that copies `nbytes` bytes with the C library's memmove, in two halves by two threads."""
    source, target = (torch.full((nbytes,), i, dtype=torch.uint8) for i in range(2))
    half = nbytes // 2
    pool = ThreadPoolExecutor(1)

    def run() -> None:
        other = pool.submit(ctypes.memmove, target.data_ptr() + half, source.data_ptr() + half, nbytes - half)
        ctypes.memmove(target.data_ptr(), source.data_ptr(), half)
        other.result()

    return run


def _copy_all(pairs: list[Pair]) -> None:
    for destination, source in pairs:
        destination.copy_(source)


@contextmanager
def source_memory(device: str, nbytes: int, peer: bool) -> Iterator[Tensor]:
    """Yields uint8 [nbytes] for the sources, in this process, or with `peer` in another process on cuda:1."""
    if not peer:
        yield torch.empty(nbytes, dtype=torch.uint8, device=device)
        return
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    owner = context.Process(target=_own_memory, args=(theirs, nbytes), daemon=True)
    owner.start()
    theirs.close()  # so that recv below raises if the owner fails
    handle = ours.recv()
    torch.cuda.init()  # type: ignore[no-untyped-call]
    storage = torch.UntypedStorage._new_shared_cuda(0, *handle[1:])  # type: ignore[no-untyped-call]
    yield torch.empty(0, dtype=torch.uint8, device="cuda:0").set_(storage, 0, (nbytes,), (1,))
    ours.send("done")
    owner.join()


def _own_memory(connection: Connection, nbytes: int) -> None:
    memory = torch.empty(nbytes, dtype=torch.uint8, device="cuda:1")
    connection.send(memory.untyped_storage()._share_cuda_())  # type: ignore[no-untyped-call]
    connection.recv()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    main()

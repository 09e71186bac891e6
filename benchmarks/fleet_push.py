"""Pushes of a trainer to one server, and to all servers of a router: the part `push` of `benchmarks.router`.

The trainer is a process of one rank on the first GPU. Before each push it writes every tensor in place. `named` calls
`update_weights_from_tensor`, which describes the tensors and opens their memory each time; `registered` calls
`push_weights`, for which this was done before. `push_seconds` is the median time of the call. `limit_s` is the time of
plain flat copies of the same bytes over the same links, measured while the servers are idle. At the end, the checksum
of every parameter on every server must be the trainer's.

The trainer needs memory on the first GPU beside the server: `--set mem_fraction_static=0.5` leaves enough for `8b`.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.copy_limit import Traffic, measure
from benchmarks.fronts import ADMIN_KEY
from benchmarks.options import report
from benchmarks.served_slices import expected_checksums, served_tensors, traffic
from benchmarks.trainer_ranks import process_group
from verl_server import HttpServerEngineAdapter, VerlEngine

_PUSH_SECONDS = 300.0
_STOP_SECONDS = 30.0
_WARM_UP = 3


@dataclass(frozen=True)
class Job:
    """The settings of a trainer process."""

    folder: Path
    """Model folder with a config."""
    device: str
    gpu: int
    tp: int
    """Tensor-parallel ranks of each server."""
    address: str
    """URL of a server or of a router."""
    servers: list[str]
    """URLs of the servers that the address stands for."""
    pushes: int

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" else torch.float32


@dataclass(frozen=True)
class Pushed:
    """Measurements of one kind of push, in seconds. `first` opens the memory and plans the copies."""

    nbytes: int
    first: float
    seconds: list[float]


def measure_push(args: argparse.Namespace, folder: Path, servers: list[str], router: str) -> None:
    """Push to the first server, and to all through the address of the router. Report each as soon as it is done."""
    served = served_tensors(folder, args.tp)
    gpu = dict(args.settings).get("base_gpu_id", 0)
    for address, reached in ((servers[0], servers[:1]), (router, servers)):
        job = Job(folder, args.device, gpu, args.tp, address, reached, args.pushes)
        elements: Traffic = {
            (gpu + number * args.tp + reader, gpu): count
            for number in range(len(reached))
            for (reader, _), count in traffic(served, 1).items()
        }
        if args.device == "cpu":
            elements = {(0, 0): sum(elements.values())}
        limit = measure(args.device, elements, job.dtype, job.dtype)
        for source, pushed in run_trainer(job).items():
            median = statistics.median(pushed.seconds)
            report(
                "push_seconds",
                median,
                "s",
                milliseconds=round(1e3 * median, 3),
                servers=len(reached),
                source=source,
                bytes=pushed.nbytes,
                first_s=round(pushed.first, 4),
                worst_s=round(max(pushed.seconds), 4),
                limit_s=round(limit["all_ms"] / 1e3, 6),
                ratio=round(1e3 * median / limit["all_ms"], 3),
                links=limit["links"],
                pushes=len(pushed.seconds),
            )


def run_trainer(job: Job) -> dict[str, Pushed]:
    """Run the trainer's process. Returns the measurements of each kind of push."""
    context = get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_train, args=(job, theirs))
    process.start()
    theirs.close()
    try:
        if not ours.poll(_PUSH_SECONDS):
            raise TimeoutError(f"The trainer did not end within {_PUSH_SECONDS:.0f} s.")
        found: dict[str, Pushed] = ours.recv()
        process.join(_STOP_SECONDS)
    except EOFError:
        raise RuntimeError("The trainer ended before its last push: its error is above.") from None
    finally:
        ours.close()
        process.kill()
        process.join()
    return found


def _train(job: Job, results: Connection) -> None:
    device = torch.device(job.device, job.gpu) if job.device == "cuda" else torch.device("cpu")
    if job.device == "cuda":
        torch.cuda.set_device(device)
    tensors = make_tensors(job, device)
    with tempfile.TemporaryDirectory() as meeting, process_group(0, 1, Path(meeting), job.device):
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        with VerlEngine(mesh, server_url=job.address, admin_api_key=ADMIN_KEY) as engine:
            found = {"named": _measure(job, tensors, lambda: engine.update_weights_from_tensor(list(tensors.items())))}
            start = time.perf_counter()
            engine.register_weights(list(tensors.items()))
            registered = time.perf_counter() - start
            pushed = _measure(job, tensors, lambda: engine.push_weights())
            found["registered"] = Pushed(pushed.nbytes, registered, pushed.seconds)
            check(job, tensors)
            engine.unregister_weights()
    results.send(found)


def make_tensors(job: Job, device: torch.device) -> dict[str, Tensor]:
    """Random tensors under the names and in the shapes of the checkpoint."""
    generator = torch.Generator(device).manual_seed(0)
    return {
        tensor.name: torch.empty(tensor.shape, dtype=job.dtype, device=device).normal_(0.0, 0.02, generator=generator)
        for tensor in served_tensors(job.folder, 1)
    }


def _measure(job: Job, tensors: dict[str, Tensor], push: Callable[[], Any]) -> Pushed:
    seconds = []
    for step in range(_WARM_UP + job.pushes):
        for tensor in tensors.values():
            tensor.add_(0.02 * math.sin(1.0 + step))
        if job.device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        push()
        seconds.append(time.perf_counter() - start)
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    return Pushed(nbytes, seconds[0], seconds[_WARM_UP:])


def check(job: Job, tensors: dict[str, Tensor]) -> None:
    """Raise AssertionError unless every parameter on every rank of every server has the trainer's checksum."""
    expected = expected_checksums(served_tensors(job.folder, job.tp), tensors.items(), job.dtype)
    for url in job.servers:
        with HttpServerEngineAdapter.attach(url, admin_api_key=ADMIN_KEY) as server:
            ranks = server.weights_checker()["ranks"]
        wrong = [
            f"{name} on rank {number}"
            for number, sums in enumerate(expected)
            for name, checksum in sums.items()
            if ranks[number]["checksums"][name] != checksum
        ]
        if wrong:
            raise AssertionError(f"After the last push, {len(wrong)} parameters of {url} differ: {wrong[:4]}")

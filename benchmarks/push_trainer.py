"""The trainer of `benchmarks.weight_sync`: one process per rank, each with a `VerlEngine` and parameters to push.

`benchmarks.weight_sync` spawns `run_rank` for each rank. Rank 0 communicates with it through a pipe: it sends `Ready`,
waits for "go", sends `Result`, and keeps the server running until "end".
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.footprint import device_used_bytes, footprint
from benchmarks.processes import process_tree
from benchmarks.served_slices import expected_checksums, tensors_of_engine
from benchmarks.token_gaps import Interval
from benchmarks.trainer_ranks import process_group
from verl_server import HttpServerEngineAdapter, VerlEngine
from verl_server.messages.io_struct import ControlReply, ControlReq
from verl_server.models.expert_stacks import expanded_tensors
from verl_server.weight_sync.group.broadcast import BroadcastGroup, broadcast_weights, init_weights_update_group

T = TypeVar("T")

Source = Literal["registered", "named", "disk", "group"]
_PROGRESS_SECONDS = 5.0
_REGISTRATIONS = 5
_GRAPH_SECONDS = 120.0


@dataclass(frozen=True)
class Job:
    """The settings of a run, the same for every rank."""

    folder: Path
    """Model folder with a config only. Checkpoints of `source="disk"` and the file of the rendezvous are written to it.
    """
    device: Literal["cpu", "cuda"]
    ranks: int
    """Number of trainer ranks."""
    engines: int
    """Number of servers. Each is launched by an equal share of the ranks, and reads the shards of all ranks."""
    tp: int
    """Tensor-parallel ranks of each server."""
    trainer_dtype: torch.dtype
    server_dtype: torch.dtype
    source: Source
    mode: Literal["in_place", "retract", "wait", "abort"]
    updates: int
    warmup: int
    check_every: int
    interval: float
    """Seconds without other work before and after each push."""
    settings: dict[str, Any]
    """Settings of the server."""
    engine: str = "embedded"
    unchecked: tuple[str, ...] = ()
    """Parameters whose name contains one of these strings have no checksum: the engine has them in its own layout."""


@dataclass(frozen=True)
class Ready:
    """Sent when the server is ready."""

    url: str
    token_capacity: int


@dataclass
class Result:
    """The measurements of a run. Intervals are (start, end) on the clock of `time.perf_counter()`."""

    bytes: int = 0
    """Bytes of the trainer's parameters, each counted once."""
    first_ms: float = 0.0
    """Time of the first push, which opens memory and plans the copies. With `source="registered"`, the time of the
    registration, which does the same without a push."""
    registrations: list[Interval] = field(default_factory=list)
    """Further registrations, while requests ran."""
    pushes: list[Interval] = field(default_factory=list)
    busy: list[Interval] = field(default_factory=list)
    """Intervals in which the trainer wrote its parameters or checked those of the server."""
    checked: int = 0
    """Number of pushes after which every parameter of every server rank had the trainer's checksum."""
    stages: dict[str, list[float]] = field(default_factory=dict)
    """Name of a stage -> its milliseconds in each push; see `benchmarks.weight_sync`."""
    before: dict[str, int] = field(default_factory=dict)
    """`footprint` of the trainer's rank 0 and of the server after the warm-up."""
    after: dict[str, int] = field(default_factory=dict)
    """The same at the end."""
    extra_device_bytes: list[int] = field(default_factory=list)
    """Bytes in use on each GPU after all pushes, less the bytes before the first push."""

    @property
    def milliseconds(self) -> list[float]:
        return [1e3 * (end - start) for start, end in self.pushes]


def run_rank(rank: int, job: Job, parent: Connection) -> None:
    device = torch.device(job.device, rank) if job.device == "cuda" else torch.device("cpu")
    if job.device == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)  # several threads would wait for each other on cores that the server uses
    with process_group(rank, job.ranks, job.folder, job.device):
        _Rank(rank, job, device, parent).run()


class _Rank:
    def __init__(self, rank: int, job: Job, device: torch.device, parent: Connection) -> None:
        self._rank, self._job, self._device, self._parent = rank, job, device, parent
        self._host: dist.ProcessGroup = dist.new_group(backend="gloo")
        self._model = build_parameters(job, rank, device)
        self._served = tensors_of_engine(job.engine, job.folder, job.tp)
        self._result = Result(bytes=sum(p.numel() * p.element_size() for p in self._model.parameters()))

    def run(self) -> None:
        job, result = self._job, self._result
        self._on_rank_0(self._expected)  # so that the collectives of the checks allocate their device memory now
        mesh = init_device_mesh("cpu", (job.engines, job.ranks // job.engines), mesh_dim_names=("dp", "tp"))
        with VerlEngine(mesh, launch_server=True, read_all_ranks=True, **job.settings) as engine:
            self._until_graphs_are_captured(engine)
            self._checksums(engine)  # allocates device memory; here, because the captures empty the allocator's cache
            untouched = device_used_bytes(self._device)
            ready = Ready(str(engine.url), engine.get_server_info()["scheduler_info"]["max_total_num_tokens"])
            if self._rank == 0:
                self._parent.send(ready)
                self._parent.recv()
            dist.barrier(self._host)
            _record_stages(engine, result.stages)
            start = time.perf_counter()
            push, seconds = self._open(engine)
            for step in range(job.warmup):
                seconds.append(self._update(push, step))
            result.first_ms = 1e3 * seconds[0]
            self._check(engine)
            result.before = self._footprint(engine)
            result.pushes, result.busy = [], [(start, time.perf_counter())]
            for milliseconds in result.stages.values():
                milliseconds.clear()
            if job.source == "registered" and job.interval:
                self._register_again(engine)
            self._push_all(engine, push)
            with _recorded(result.busy):
                result.after = self._footprint(engine)
            used = torch.tensor([device_used_bytes(self._device) - untouched])
            every = [torch.zeros_like(used) for _ in range(job.ranks)]
            dist.all_gather(every, used, self._host)
            result.extra_device_bytes = [int(each) for each in every]
            if self._rank == 0:
                self._parent.send(result)
                self._parent.recv()
            dist.barrier(self._host)

    def _until_graphs_are_captured(self, engine: VerlEngine) -> None:
        """Wait until the server has captured its CUDA graphs, which take memory, and some ten milliseconds each."""
        deadline = time.monotonic() + _GRAPH_SECONDS
        while time.monotonic() < deadline:
            state = engine.get_server_info()["internal_states"][0]  # empty during a long capture
            if state and not state.get("memory", {}).get("cuda_graphs_to_capture"):
                return
            time.sleep(0.5)
        raise TimeoutError(f"The server did not capture all CUDA graphs within {_GRAPH_SECONDS:.0f} s.")

    def _push_all(self, engine: VerlEngine, push: Callable[[], Any]) -> None:
        job, result, last_report = self._job, self._result, time.monotonic()
        for step in range(job.updates):
            self._update(push, job.warmup + step)
            if step % job.check_every == 0 or step == job.updates - 1:
                self._check(engine)
                result.checked += 1
            if self._rank == 0 and time.monotonic() - last_report > _PROGRESS_SECONDS:
                last_report = time.monotonic()
                median = statistics.median(result.milliseconds)
                print(
                    f"{step + 1} of {job.updates} pushes, median {median:.2f} ms, {result.checked} checked",
                    file=sys.stderr,
                    flush=True,
                )

    def _register_again(self, engine: VerlEngine) -> None:
        """Register the weights several times, to measure the effect on running requests."""
        for _ in range(_REGISTRATIONS):
            with _recorded(self._result.busy):
                engine.unregister_weights()
            time.sleep(self._job.interval)
            with _recorded(self._result.registrations):
                engine.register_weights(self._model)
            time.sleep(self._job.interval)

    # -- one update ---------------------------------------------------------------------------------------------

    def _open(self, engine: VerlEngine) -> tuple[Callable[[], Any], list[float]]:
        """(function that pushes once, [seconds of the preparation]); the list is empty if nothing is prepared."""
        job = self._job
        options: dict[str, Any] = {"mode": job.mode, "partial": False}
        if job.source == "registered":
            start = time.perf_counter()
            engine.register_weights(self._model)
            return lambda: engine.push_weights(**options), [time.perf_counter() - start]
        if job.source == "disk":
            return lambda: engine.update_weights_from_disk(str(job.folder / "checkpoint"), mode=job.mode), []
        if job.source == "group":
            start = time.perf_counter()
            group = self._join(engine)
            return lambda: self._broadcast(group, options), [time.perf_counter() - start]
        return lambda: engine.update_weights_from_tensor(self._model.named_parameters(), **options), []

    def _update(self, push: Callable[[], Any], step: int) -> float:
        """Write every parameter, push, and record the intervals. Returns the push's seconds on the slowest rank."""
        with _recorded(self._result.busy):
            write_parameters(self._model, step)
            if self._job.source == "disk":
                self._save()
            if self._job.device == "cuda":
                torch.cuda.synchronize(self._device)
        time.sleep(self._job.interval)
        dist.barrier(self._host)
        start = time.perf_counter()
        push()
        times = torch.tensor([-start, start, time.perf_counter()], dtype=torch.float64)
        dist.all_reduce(times, dist.ReduceOp.MAX, self._host)
        first, last, end = -float(times[0]), float(times[1]), float(times[2])
        self._result.pushes.append((first, end))
        self._result.stages.setdefault("skew_ms", []).append(1e3 * (last - first))
        time.sleep(self._job.interval)
        return end - first

    def _check(self, engine: VerlEngine) -> None:
        """Raise AssertionError unless every parameter on every server rank has the trainer's checksum."""
        with _recorded(self._result.busy):
            engines = self._reports(engine)
            expected = self._on_rank_0(self._expected)
            wrong = [
                f"{name} on rank {i} of engine {number}"
                for number, served in enumerate(engines)
                for i, sums in enumerate(expected or [])
                for name, checksum in sums.items()
                if served[i]["checksums"][name] != checksum
            ]
        if wrong:
            push = len(self._result.pushes)
            raise AssertionError(f"After push {push}, {len(wrong)} parameters differ from the trainer's: {wrong[:4]}")

    def _reports(self, engine: VerlEngine) -> list[Any]:
        """Return the checksum reports of the ranks of each engine."""
        own = self._checksums(engine)
        if self._job.ranks == 1:
            return [own]
        reports: list[Any] = [None] * self._job.ranks
        dist.all_gather_object(reports, own, self._host)
        return reports[:: self._job.ranks // self._job.engines]

    def _checksums(self, engine: VerlEngine) -> Any:
        return engine.weights_checker(skip_tensor_list=list(self._job.unchecked) or None)["ranks"]

    def _expected(self, full: Iterator[tuple[str, torch.Tensor]]) -> list[dict[str, str]]:
        members = (member for name, tensor in full for member in expanded_tensors(name, tensor))
        checked = ((name, tensor) for name, tensor in members if not any(part in name for part in self._job.unchecked))
        return expected_checksums(self._served, checked, self._job.server_dtype)

    def _on_rank_0(self, use: Callable[[Iterator[tuple[str, torch.Tensor]]], T]) -> T | None:
        """Return the result of `use` on the full parameters, which are gathered one by one; None except on rank 0."""
        if self._rank == 0:
            return use(self._full_tensors())
        for _ in self._full_tensors():
            pass
        return None

    def _full_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._model.named_parameters():
            full = parameter.detach()
            yield name, full.full_tensor() if isinstance(full, DTensor) else full

    def _join(self, engine: VerlEngine) -> BroadcastGroup | None:
        """Return the process group that a trainer on another host would use; None on ranks other than 0."""
        group = None
        if self._rank == 0:
            assert engine.engine is not None
            backend = "nccl" if self._job.device == "cuda" else "gloo"
            tp, device = self._job.tp, self._device
            group = init_weights_update_group([engine.engine], "127.0.0.1", tp_size=tp, backend=backend, device=device)
        dist.barrier(self._host)
        return group

    def _broadcast(self, group: BroadcastGroup | None, options: dict[str, Any]) -> None:
        tensors = self._on_rank_0(list)
        if group is not None and tensors is not None:
            broadcast_weights(group, tensors, **options)
        dist.barrier(self._host)

    def _save(self) -> None:
        from safetensors.torch import save_file

        tensors = self._on_rank_0(lambda full: {name: tensor.cpu() for name, tensor in full})
        if tensors is not None:
            folder = self._job.folder / "checkpoint"
            folder.mkdir(exist_ok=True)
            save_file(tensors, folder / "model.safetensors.new")
            os.replace(folder / "model.safetensors.new", folder / "model.safetensors")
        dist.barrier(self._host)

    def _footprint(self, engine: VerlEngine) -> dict[str, int]:
        """Resources of rank 0 and of the server, which is its child. On other ranks only the used bytes of the GPU."""
        held = {"device_bytes": device_used_bytes(self._device)}
        if self._rank != 0:
            return held
        assert isinstance(engine.engine, HttpServerEngineAdapter) and engine.engine.pid is not None
        server = process_tree(engine.engine.pid)
        held |= {f"trainer_{key}": value for key, value in footprint([os.getpid()]).items()}
        return held | {f"server_{key}": value for key, value in footprint(server).items()}


def build_parameters(job: Job, rank: int, device: torch.device) -> nn.Module:
    """A module with random parameters of the model at `job.folder`, under their names; with FSDP2 for several ranks."""
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(job.folder))
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}  # lists a tied head once
    root = nn.Module()
    for name, shape in shapes.items():
        *path, last = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        module.register_parameter(last, nn.Parameter(torch.empty(shape, dtype=job.trainer_dtype, device="meta")))
    if job.ranks > 1:
        mesh = init_device_mesh(job.device, (job.ranks,))
        for layer in root.get_submodule("model.layers").children():
            fully_shard(layer, mesh=mesh)
        fully_shard(root, mesh=mesh)
    root.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(rank)
    with torch.no_grad():
        for name, parameter in root.named_parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local.normal_(1.0 if "norm" in name else 0.0, 0.02, generator=generator)
    return root


@torch.no_grad()
def write_parameters(model: nn.Module, step: int) -> None:
    """Change every element in place, as an optimizer does. The change differs from step to step."""
    for parameter in model.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        local.add_(0.02 * math.sin(1.0 + step))


def _record_stages(engine: VerlEngine, stages: dict[str, list[float]]) -> None:
    """Record the times of the stages of each push on this rank, which the methods of the engine do not return."""
    ranks, adapter = engine._pusher._ranks, engine.engine
    gather, act = ranks.gather, ranks.act
    clock = time.perf_counter

    def record(stage: str, seconds: float) -> None:
        stages.setdefault(stage, []).append(1e3 * seconds)

    def recorded_gather(what: str, prepare: Callable[[], bytes]) -> list[bytes]:
        inspected = 0.0

        def timed_prepare() -> bytes:
            nonlocal inspected
            start = clock()
            prepared = prepare()
            inspected = clock() - start
            return prepared

        start = clock()
        gathered = gather(what, timed_prepare)
        record("inspect_ms", inspected)
        record("meet_ms", clock() - start - inspected)
        return gathered

    def recorded_act(what: str, action: Callable[[], Any]) -> Any:
        acted = 0.0

        def timed_action() -> Any:
            nonlocal acted
            start = clock()
            result = action()
            acted = clock() - start
            return result

        start = clock()
        result = act(what, timed_action)
        record("outcome_ms", clock() - start - acted)
        return result

    ranks.gather, ranks.act = recorded_gather, recorded_act  # type: ignore[method-assign,assignment]
    if not isinstance(adapter, HttpServerEngineAdapter):
        return
    control = adapter._control

    def recorded_control(req: ControlReq) -> ControlReply:
        start = clock()
        reply = control(req)
        end = clock()
        seconds = reply.payload.get("seconds") if isinstance(reply.payload, dict) else None
        if seconds is None:
            return reply
        record("http_ms", end - start)
        record("commit_ms", seconds["commit"])
        if "start" in seconds:  # on the monotonic clock of the host, as `clock`
            copy = max(seconds["copy"])
            record("send_ms", seconds["start"] - start)
            record("agree_ms", seconds["agreed"])
            record("copy_ms", copy)
            record("settle_ms", seconds["commit"] - seconds["agreed"] - copy)
            record("answer_ms", end - seconds["start"] - seconds["commit"])
        if "device" in seconds:
            record("device_ms", seconds["device"])
        return reply

    adapter._control = recorded_control  # type: ignore[method-assign]


@contextlib.contextmanager
def _recorded(intervals: list[Interval]) -> Iterator[None]:
    start = time.perf_counter()
    yield
    intervals.append((start, time.perf_counter()))

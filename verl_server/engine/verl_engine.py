"""`VerlEngine`: the face of the rollout engine that every trainer rank holds.

Constructed by all ranks of a mesh (under torchrun), which then call the same methods in the same order. The
first rank of each node owns the processes of that node: an in-process `Engine`, or on the first rank, with
`launch_server=True`, a server process that every rank knows the URL of. Rank 0 acts; results and errors are
the same on every rank (see `rank_group`).
"""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Iterable
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from verl_server.engine.base import EngineBase
from verl_server.engine.http import HttpServerEngineAdapter
from verl_server.engine.in_process import Engine
from verl_server.engine.joint_ranks import JointRanks
from verl_server.engine.rank_group import RankGroup
from verl_server.errors import BadRequestError, ServerUnavailableError
from verl_server.io_struct import UpdateWeightsFromTensorReq
from verl_server.ipc.sockets import free_port
from verl_server.server_args import ServerArgs
from verl_server.weight_sync.handles import LocalSerializedTensor
from verl_server.weight_sync.trainer.pusher import Origin, Push, WeightPusher
from verl_server.weight_sync.trainer.sender import Mapping
from verl_server.weight_sync.trainer.shards import TensorShard

_MEET_TIMEOUT = 1800.0
"""Seconds that trainer ranks may be apart when they come to a call: torch's own default."""

_UPDATE_OPTIONS = (
    "load_format",
    "flush_cache",
    "weight_version",
    "mode",
    "abort_all_requests",
    "strict_dtype",
    "partial",
    "transaction_id",
    "checksums",
)


class _Place(msgspec.Struct, array_like=True):
    """Where a rank runs."""

    host: str
    address: str
    gpu_uuid: str


class VerlEngine:
    def __init__(
        self,
        device_mesh_cpu: DeviceMesh,
        nnodes: int = 1,
        launch_server: bool = False,
        read_all_ranks: bool = False,
        server_args: ServerArgs | None = None,
        **kwargs: Any,
    ) -> None:
        """Start the engine; all ranks return when it is ready, or all raise.

        `device_mesh_cpu` is 1-D, or has a dimension "tp": then each slice along it is an engine of its own, which
        reads the memory of its own ranks. With `read_all_ranks` each reads that of all ranks of the mesh, for
        parameters that are sharded over the slices (FSDP over all ranks, all on one host); what pushes, registers,
        unregisters or releases is then called by all ranks of the mesh together.
        Settings come as `server_args`, as keyword arguments, or both. Unless given, `tp_size` is the number of
        ranks, a server's port is a free one, and the GPUs are those that the ranks use (with a larger `tp_size`
        those from `base_gpu_id` on).
        """
        settings = _given(server_args) | kwargs
        self._group = RankGroup(_ranks_of(device_mesh_cpu), _MEET_TIMEOUT, settings.get("sync_timeout", 60.0))
        self._joint = _joint_ranks(device_mesh_cpu, self._group) if read_all_ranks else None
        self._pusher = WeightPusher(self._joint or self._group)
        settings.setdefault("tp_size", self._group.size)
        self._engine: EngineBase | None = None
        self._launch_server = launch_server
        self.url: str | None = None
        """Base URL of the server, on every rank; None without `launch_server`."""
        self._start(settings, nnodes)

    @property
    def engine(self) -> EngineBase | None:
        """What this rank owns: on rank 0 the engine that serves, elsewhere a node's part of it or nothing."""
        return self._engine

    @property
    def _serving(self) -> EngineBase:
        if self._engine is None:
            raise ServerUnavailableError("This VerlEngine has been shut down.")
        return self._engine

    # -- start -------------------------------------------------------------------------------------------------

    def _start(self, settings: dict[str, Any], nnodes: int) -> None:
        group = self._group
        if group.size % nnodes:
            raise BadRequestError(f"{group.size} ranks do not divide over nnodes={nnodes}.")
        places = [msgspec.msgpack.decode(p, type=_Place) for p in group.gather("VerlEngine", _place)]
        node_rank, local_rank = divmod(group.rank, group.size // nnodes)
        settings |= {"nnodes": nnodes, "node_rank": node_rank}
        if nnodes > 1:
            settings.setdefault("dist_init_addr", self._agree_on_address(places))
        per_node = settings["tp_size"] // nnodes
        gpu_uuids = [place.gpu_uuid for place in places[group.rank - local_rank :][:per_node]]
        if len(gpu_uuids) == per_node and all(gpu_uuids) and settings.get("device", "auto") != "cpu":
            settings.setdefault("gpu_uuids", tuple(gpu_uuids))
        try:
            group.gather("VerlEngine", lambda: self._launch(settings) if local_rank == 0 else b"")
            self.url = group.call("VerlEngine", lambda _: self._serving.url if self._launch_server else None)
        except BaseException:
            self.shutdown()
            raise

    def _agree_on_address(self, places: list[_Place]) -> str:
        """Where the engine's ranks meet: a free port of the first node."""
        one_host = all(place.host == places[0].host for place in places)
        address = "127.0.0.1" if one_host else places[0].address
        port: int = self._group.call("VerlEngine", lambda _: free_port(address))
        return f"{address}:{port}"

    def _launch(self, settings: dict[str, Any]) -> bytes:
        if self._launch_server and settings["node_rank"] == 0:
            # Replicas share hosts, so a port that follows from the rank would collide with another one's.
            self._engine = HttpServerEngineAdapter(server_args=ServerArgs.from_kwargs(**({"port": 0} | settings)))
        else:
            self._engine = Engine(server_args=ServerArgs.from_kwargs(**settings))
        return b""

    # -- generation --------------------------------------------------------------------------------------------

    def generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None,
        input_ids: list[int] | list[list[int]] | None = None,
        **options: Any,
    ) -> Any:
        """What `Engine.generate` returns, the same on every rank; rank 0's arguments count."""
        if options.get("stream"):
            raise BadRequestError("VerlEngine.generate cannot stream: stream from rank 0's `engine`, or over `url`.")
        return self._on_engine("generate", prompt, sampling_params, input_ids=input_ids, **options)

    def flush_cache(self) -> Any:
        return self._on_engine("flush_cache")

    def abort_request(self, rid: str = "", abort_all: bool = False) -> Any:
        return self._on_engine("abort_request", rid, abort_all)

    def pause_generation(self, mode: str = "abort") -> Any:
        return self._on_engine("pause_generation", mode)

    def continue_generation(self) -> Any:
        return self._on_engine("continue_generation")

    # -- weights and memory ------------------------------------------------------------------------------------

    def update_weights_from_tensor(
        self,
        named_tensors: Iterable[tuple[str, torch.Tensor | TensorShard | LocalSerializedTensor]],
        load_format: str | None = None,
        flush_cache: bool = True,
        mapping: Mapping | None = None,
        **options: Any,
    ) -> tuple[bool, str]:
        """Push what the ranks own, in one update: whole tensors (each server rank reads one rank's), `DTensor`s and
        `TensorShard`s, which are read shard by shard from their owners.

        What several ranks bring under one name must be one tensor. When it returns on any rank, no rank's tensors
        are read any more. `options` are those of `Engine.update_weights_from_tensor` (weight_version, mode, ...).
        """

        def send(push: Push) -> tuple[bool, str]:
            req = _update_request(load_format=load_format, flush_cache=flush_cache, **options)
            return self._serving.send_update(push.for_readers(self._serving.server_args.tp_size), req)

        result = self._pusher.update(named_tensors, mapping, send)
        return result[0], result[1]

    def register_weights(self, weights: Origin, mapping: Mapping | None = None, *, strict_dtype: bool = False) -> None:
        """Have the server open and plan the memory of all ranks now; see `Engine.register_weights`."""
        self._pusher.register(weights, mapping, lambda push: self._serving.send_registration(push, strict_dtype))

    def push_weights(self, version: str | int | None = None, **options: Any) -> tuple[bool, str]:
        """Copy what the ranks registered into the served weights, as it is now."""

        def send(push: Push) -> tuple[bool, str]:
            weight_version = None if version is None else str(version)
            return self._serving.send_update(push, _update_request(weight_version=weight_version, **options))

        result = self._pusher.push(send)
        return result[0], result[1]

    def unregister_weights(self) -> None:
        """Have the server close the memory of all ranks; afterwards it may be freed or offloaded."""
        self._pusher.unregister(lambda ids: self._serving.send_unregistration(ids))

    def begin_weight_update(self, transaction_id: str | None = None, **options: Any) -> Any:
        return self._on_engine("begin_weight_update", transaction_id, **options)

    def end_weight_update(self, transaction_id: str | None = None, **options: Any) -> Any:
        return self._on_engine("end_weight_update", transaction_id, **options)

    def init_weights_update_group(self, *args: Any, **options: Any) -> Any:
        """See `Engine.init_weights_update_group`; rank 0's arguments count. Whoever joins does so in another thread."""
        return self._on_engine("init_weights_update_group", *args, **options)

    def destroy_weights_update_group(self, group_name: str = "weight_update_group") -> Any:
        return self._on_engine("destroy_weights_update_group", group_name)

    def update_weights_from_distributed(self, *args: Any, **options: Any) -> Any:
        """See `Engine.update_weights_from_distributed`; the broadcasts are made in another thread."""
        return self._on_engine("update_weights_from_distributed", *args, **options)

    def update_weights_from_disk(self, model_path: str, load_format: str | None = None, **options: Any) -> Any:
        return self._on_engine("update_weights_from_disk", model_path, load_format, **options)

    def get_weights_by_name(self, name: str, truncate_size: int = 100) -> Any:
        return self._on_engine("get_weights_by_name", name, truncate_size)

    def weights_checker(self, action: str = "checksum") -> Any:
        return self._on_engine("weights_checker", action)

    def release_memory_occupation(self, tags: list[str] | None = None) -> Any:
        result = self._on_engine("release_memory_occupation", tags)
        if self._joint is not None:  # others' engines may have this rank's memory open until they have released, too
            self._joint.gather("release_memory_occupation", bytes)
        self._pusher.released(tags)
        return result

    def resume_memory_occupation(self, tags: list[str] | None = None) -> Any:
        return self._on_engine("resume_memory_occupation", tags)

    def get_server_info(self) -> Any:
        return self._on_engine("get_server_info")

    # -- end ---------------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """End what this rank owns. Waits for no other rank, so it is safe after an error. Idempotent."""
        self._pusher.end()
        if self._joint is not None:
            self._joint.close()
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.shutdown()

    def __enter__(self) -> VerlEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    # -- inside ------------------------------------------------------------------------------------------------

    def _on_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return self._group.call(method, lambda _: getattr(self._serving, method)(*args, **kwargs))


def _ranks_of(mesh: DeviceMesh) -> list[int]:
    """The global ranks that share this rank's engine."""
    if mesh.ndim > 1:
        if "tp" not in (mesh.mesh_dim_names or ()):
            raise BadRequestError("A mesh of more than one dimension needs one that is named 'tp'.")
        mesh = mesh["tp"]
    return dist.get_process_group_ranks(mesh.get_group())


def _joint_ranks(mesh: DeviceMesh, engine: RankGroup) -> JointRanks | None:
    """All ranks of a mesh of several slices; None if there is one."""
    everyone = sorted(mesh.mesh.flatten().tolist())
    if len(everyone) == engine.size:
        return None
    group = RankGroup(everyone, _MEET_TIMEOUT, _MEET_TIMEOUT)
    if not group.is_on_one_host:
        raise BadRequestError(
            "read_all_ranks=True needs all ranks of the mesh on one host, for nobody can read another's memory. Shard "
            "the parameters among the ranks of one engine, or update through a process group or from disk."
        )
    return JointRanks(engine, group, [everyone.index(rank) for rank in _ranks_of(mesh)])


def _given(server_args: ServerArgs | None) -> dict[str, Any]:
    """The settings that differ from their defaults: the others are ours to choose."""
    if server_args is None:
        return {}
    values = {
        field.name: (getattr(server_args, field.name), field.default) for field in dataclasses.fields(server_args)
    }
    return {name: value for name, (value, default) in values.items() if value != default}


def _place() -> bytes:
    host = socket.gethostname()
    uuid = ""
    if torch.cuda.is_available():
        uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    try:
        address = socket.gethostbyname(host)
    except OSError:
        address = "127.0.0.1"
    return msgspec.msgpack.encode(_Place(host, address, uuid))


def _update_request(**options: Any) -> UpdateWeightsFromTensorReq:
    unknown = [name for name in options if name not in _UPDATE_OPTIONS]
    if unknown:
        raise BadRequestError(f"Unknown option(s) {unknown}; an update takes {', '.join(_UPDATE_OPTIONS)}.")
    return UpdateWeightsFromTensorReq(**options)

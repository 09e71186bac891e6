"""Where the engines of a device mesh run: the ranks, hosts, GPUs and seed of each, and the launch of a rank's part.

`VerlEngine` calls these functions when it starts.
"""

from __future__ import annotations

import dataclasses
import hashlib
import socket
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
from verl_server.errors import BadRequestError
from verl_server.ipc.sockets import free_port
from verl_server.server_args import ServerArgs


class _Place(msgspec.Struct, array_like=True):
    """Where a rank runs."""

    host: str
    address: str
    gpu_uuid: str


def ranks_of_engine(mesh: DeviceMesh) -> list[int]:
    """The global ranks that share this rank's engine."""
    if mesh.ndim > 1:
        if "tp" not in (mesh.mesh_dim_names or ()):
            raise BadRequestError("A mesh of more than one dimension needs one that is named 'tp'.")
        mesh = mesh["tp"]
    return dist.get_process_group_ranks(mesh.get_group())


def seed_of_engine(random_seed: int, first_rank: int) -> int:
    """The `random_seed` of the engine whose first trainer rank is the global rank `first_rank`.

    Replicas with one seed would all draw the same samples. Rank 0's engine keeps the given seed, so that a mesh of one
    engine samples what a server with this seed samples.
    """
    if first_rank == 0:
        return random_seed
    digest = hashlib.sha256(f"{random_seed}:{first_rank}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 11  # 53 bits: every JSON reader keeps them exactly


def join_ranks(mesh: DeviceMesh, engine: RankGroup, rank_timeout: float) -> JointRanks | None:
    """All ranks of a mesh of several slices; None if there is one."""
    everyone = sorted(mesh.mesh.flatten().tolist())
    if len(everyone) == engine.size:
        return None
    group = RankGroup(everyone, rank_timeout, rank_timeout)
    if not group.is_on_one_host:
        raise BadRequestError(
            "read_all_ranks=True needs all ranks of the mesh on one host, for nobody can read another's memory. Shard "
            "the parameters among the ranks of one engine, or update through a process group or from disk."
        )
    return JointRanks(engine, group, [everyone.index(rank) for rank in ranks_of_engine(mesh)])


def given_settings(server_args: ServerArgs | None) -> dict[str, Any]:
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


def place_engine(group: RankGroup, settings: dict[str, Any], nnodes: int) -> None:
    """Add to `settings` where this rank's part of the engine runs: its node, the address where they meet, its GPUs."""
    if group.size % nnodes:
        raise BadRequestError(f"{group.size} ranks do not divide over nnodes={nnodes}.")
    places = [msgspec.msgpack.decode(p, type=_Place) for p in group.gather("VerlEngine", _place)]
    node_rank, local_rank = divmod(group.rank, group.size // nnodes)
    settings |= {"nnodes": nnodes, "node_rank": node_rank}
    if nnodes > 1:
        settings.setdefault("dist_init_addr", _agree_on_address(group, places))
    per_node = settings["tp_size"] // nnodes
    gpu_uuids = [place.gpu_uuid for place in places[group.rank - local_rank :][:per_node]]
    if len(gpu_uuids) == per_node and all(gpu_uuids) and settings.get("device", "auto") != "cpu":
        settings.setdefault("gpu_uuids", tuple(gpu_uuids))


def _agree_on_address(group: RankGroup, places: list[_Place]) -> str:
    """Where the engine's ranks meet: a free port of the first node."""
    one_host = all(place.host == places[0].host for place in places)
    address = "127.0.0.1" if one_host else places[0].address
    port: int = group.call("VerlEngine", lambda _: free_port(address))
    return f"{address}:{port}"


def launch_engine(settings: dict[str, Any], launch_server: bool, server_url: str | None) -> EngineBase:
    if server_url is not None:
        return HttpServerEngineAdapter.attach(server_url, settings.get("api_key"), settings.get("admin_api_key"))
    if launch_server and settings["node_rank"] == 0:
        # Replicas share hosts, so a port that follows from the rank would collide with another one's.
        return HttpServerEngineAdapter(server_args=ServerArgs.from_kwargs(**({"port": 0} | settings)))
    return Engine(server_args=ServerArgs.from_kwargs(**settings))

"""Placement of engines on a device mesh: the ranks, hosts, GPUs and seed of each engine, and the engine's launch.

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
    """Host and GPU on which a rank runs."""

    host: str
    address: str
    gpu_uuid: str


def ranks_of_engine(mesh: DeviceMesh) -> list[int]:
    """Return the global ranks that share this rank's engine."""
    if mesh.ndim > 1:
        if "tp" not in (mesh.mesh_dim_names or ()):
            raise BadRequestError("A mesh of more than one dimension needs one that is named 'tp'.")
        mesh = mesh["tp"]
    return dist.get_process_group_ranks(mesh.get_group())


def seed_of_engine(random_seed: int, first_rank: int) -> int:
    """Return the `random_seed` of the engine whose first trainer rank is the global rank `first_rank`.

    Engines with the same seed would all draw the same samples. Rank 0's engine keeps the given seed, so that a mesh of
    one engine draws the same samples as a server with this seed.
    """
    if first_rank == 0:
        return random_seed
    digest = hashlib.sha256(f"{random_seed}:{first_rank}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 11  # 53 bits: every JSON reader keeps them exactly


def join_ranks(mesh: DeviceMesh, engine: RankGroup, rank_timeout: float) -> JointRanks | None:
    """Return the joint ranks of a mesh with several engines; None if the mesh has one engine.

    `engine` is the group of this rank's engine. Raise BadRequestError if the ranks of the mesh are on several hosts.
    """
    all_ranks = sorted(mesh.mesh.flatten().tolist())
    if len(all_ranks) == engine.size:
        return None
    group = RankGroup(all_ranks, rank_timeout, rank_timeout)
    if not group.is_on_one_host:
        raise BadRequestError(
            "read_all_ranks=True needs all ranks of the mesh on one host, because an engine cannot read the memory of "
            "another host. Shard the parameters over the ranks of one engine, or update through a process group or "
            "from disk."
        )
    return JointRanks(engine, group, [all_ranks.index(rank) for rank in ranks_of_engine(mesh)])


def given_settings(server_args: ServerArgs | None) -> dict[str, Any]:
    """Return the settings that differ from their defaults. `VerlEngine` may choose values for the others."""
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
    """Add this rank's node, the ranks' meeting address and the node's GPUs to `settings`.

    All ranks of the engine call it together. Raise BadRequestError if the nodes would have unequal numbers of
    ranks.
    """
    if group.size % nnodes:
        raise BadRequestError(f"The number of ranks ({group.size}) must be a multiple of nnodes={nnodes}.")
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
    """Return `host:port` for the engine's ranks to meet: a free port of the first node."""
    one_host = all(place.host == places[0].host for place in places)
    address = "127.0.0.1" if one_host else places[0].address
    port: int = group.call("VerlEngine", lambda _: free_port(address))
    return f"{address}:{port}"


def launch_engine(settings: dict[str, Any], launch_server: bool, server_url: str | None) -> EngineBase:
    """Start this rank's part of the engine, or attach to the server at `server_url`. Return when it is ready."""
    if server_url is not None:
        return HttpServerEngineAdapter.attach(server_url, settings.get("api_key"), settings.get("admin_api_key"))
    if launch_server and settings["node_rank"] == 0:
        # Several engines may share a host. A port that is computed from the rank could be another engine's port.
        return HttpServerEngineAdapter(server_args=ServerArgs.from_kwargs(**({"port": 0} | settings)))
    return Engine(server_args=ServerArgs.from_kwargs(**settings))

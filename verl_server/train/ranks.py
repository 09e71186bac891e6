"""The process group of the trainer's ranks, and the rollout server that they share.

`run.py` and the demo use it. A single process is a group of one rank, so there is one code path.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from verl_server.engine.rank_group import RANK_TIMEOUT, RankGroup
from verl_server.engine.verl_engine import VerlEngine

SAVE_TIMEOUT = 600.0
"""Default of the seconds that one rank waits for another when they save."""


def device_type(device: Literal["auto", "cpu", "cuda"]) -> str:
    """Return the type of the ranks' devices. "auto" is CUDA if there is a GPU."""
    return ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device


def setup_ranks(device: Literal["auto", "cpu", "cuda"], timeout: float = RANK_TIMEOUT) -> torch.device:
    """Join torchrun's process group, or make one of a single rank, and return this rank's device.

    `timeout` bounds the wait of one rank for another in a collective, in seconds.
    """
    kind = device_type(device)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
        bound = datetime.timedelta(seconds=timeout)
        if dist.is_torchelastic_launched():
            dist.init_process_group(backend, timeout=bound)
        else:
            store = torch._C._distributed_c10d.HashStore()
            dist.init_process_group(backend, timeout=bound, store=store, rank=0, world_size=1)
    if kind == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def all_ranks(timeout: float = RANK_TIMEOUT) -> RankGroup:
    """Return the group of all trainer ranks for collective calls. An error of one rank is raised on all ranks.

    `timeout` bounds the wait of one rank for another, in seconds.
    """
    return RankGroup(list(range(dist.get_world_size())), timeout, timeout)


@dataclass
class SaveGroup:
    """The connections through which the ranks save. They are on the CPU, and every wait has a bound.

    No other code uses them. So a thread may save beside the collectives of the training, and one that failed cannot
    interfere.
    """

    ranks: RankGroup
    """The group for errors and for work of the first rank."""
    process_group: dist.ProcessGroup
    """The process group for shards."""

    @classmethod
    def of_all_ranks(cls, timeout: float = SAVE_TIMEOUT) -> SaveGroup:
        """Return the connections of all ranks. Every rank calls it.

        `timeout` bounds the wait of one rank for another, in seconds.
        """
        bound = datetime.timedelta(seconds=timeout)
        return cls(all_ranks(timeout), dist.new_group(backend="gloo", timeout=bound))


def launch_engine(model_path: str, device: torch.device, **settings: Any) -> VerlEngine:
    """Launch a rollout server in a process of its own, which all ranks share. `settings` are fields of `ServerArgs`."""
    defaults: dict[str, Any] = {"tp_size": 1, "device": device.type}
    return VerlEngine(cpu_mesh(), launch_server=True, **(defaults | {"model_path": model_path} | settings))


def attach_engine(
    url: str,
    api_key: str | None = None,
    admin_api_key: str | None = None,
    rank_timeout: float = RANK_TIMEOUT,
) -> VerlEngine:
    """Attach to a rollout server on this host. The server continues to run when the engine is shut down."""
    return VerlEngine(
        cpu_mesh(), server_url=url, api_key=api_key, admin_api_key=admin_api_key, rank_timeout=rank_timeout
    )


def cpu_mesh() -> DeviceMesh:
    """Return the mesh of all ranks on the CPU. Every rank calls it."""
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))


def over_ranks(value: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
    """Return the CPU tensor `value`, reduced over the ranks by `op`, as a new tensor."""
    value = value.clone()
    dist.all_reduce(value, op)
    return value


def full(tensor: Any) -> torch.Tensor:
    """Return the full tensor of a DTensor. Return another tensor as it is."""
    full: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full

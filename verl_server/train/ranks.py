"""What a trainer rank needs besides the algorithm: its process group, its part of the model, the server.

Used by `grpo.py` and the demo. A single process is a group of one rank, so there is one code path.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from verl_server.engine.verl_engine import VerlEngine
from verl_server.weight_sync.trainer.sender import gather_full_tensors


def setup_ranks(device: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """Join torchrun's process group, or make one of a single rank; returns this rank's device."""
    kind = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
        if dist.is_torchelastic_launched():
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    if kind == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def load_policy(model_path: str, device: torch.device) -> torch.nn.Module:
    """The policy in fp32, sharded over the ranks if there are several."""
    model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    model.to(device)
    if dist.get_world_size() > 1:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        # A root that stays gathered after a forward without backward would be pushed as temporaries.
        fully_shard(model, mesh=mesh, reshard_after_forward=True)
    policy: torch.nn.Module = model.train()
    return policy


def launch_engine(model_path: str, device: torch.device, **settings: Any) -> VerlEngine:
    """A rollout server in a process of its own, shared by all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    defaults: dict[str, Any] = {"tp_size": 1, "device": device.type, "weight_version": "0"}
    return VerlEngine(mesh, launch_server=True, model_path=model_path, **(defaults | settings))


def save_policy(model: Any, folder: Path, tokenizer: Any) -> None:
    """Write the trained model as a Hugging Face folder; all ranks call it, rank 0 writes."""
    state = {name: tensor.detach().cpu() for name, tensor in gather_full_tensors(model.named_parameters())}
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=state)
        tokenizer.save_pretrained(folder)


def over_ranks(value: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
    """`value` (on CPU) combined over the ranks."""
    value = value.clone()
    dist.all_reduce(value, op)
    return value


def full(tensor: Any) -> torch.Tensor:
    """A DTensor as a whole."""
    full: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full

"""The checks of `test_sharded_ranks.py` for four ranks: modules sharded as trainers do, described, merged and read.

    torchrun --nproc-per-node 4 -m tests.weight_sync.sharded_ranks RESULT_FOLDER

Each rank appends {"check", "error"} lines to RESULT_FOLDER/RANK.jsonl.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.weight_sync.reading import read
from verl_server.errors import BadRequestError
from verl_server.weight_sync.handles import WeightsDescription
from verl_server.weight_sync.trainer.description import merge
from verl_server.weight_sync.trainer.sender import WeightSender
from verl_server.weight_sync.trainer.trainer_modules import ModuleParameters

INPUT = torch.linspace(-2, 3, 12).square().reshape(2, 6)
Named = list[tuple[str, torch.Tensor]]


class Block(nn.Module):
    """A module whose default sizes four ranks cannot share evenly: 7 and 3 rows, a bias of 3."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(6, width, bias=False), nn.Linear(width, 3), nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(self.norm(x))))


def block(width: int = 7) -> Block:
    torch.manual_seed(1)
    return Block(width)


def merged(sender: WeightSender, named: Named) -> WeightsDescription:
    """Return the merged description of all ranks, on every rank."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, sender.describe(list(named)).description)
    return merge(everyone)


def expect_same(named: Named, description: WeightsDescription) -> None:
    """Assert that the described memory holds the full tensors that the ranks hold together."""
    dist.barrier()  # all have written
    seen = read(description)
    dist.barrier()  # all have read
    for name, tensor in named:
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        assert torch.equal(seen[name], full), name


def train(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    module(INPUT).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def expect_parameters_followed(module: nn.Module) -> None:
    """Assert that an optimizer step changes the values that are read, and keeps the description."""
    sender, parameters = WeightSender(), ModuleParameters(module)
    description = merged(sender, parameters.named())
    expect_same(parameters.named(), description)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    before = read(description)
    dist.barrier()
    train(module, optimizer)
    assert merged(sender, parameters.named()).id == description.id, "nothing moved"
    expect_same(parameters.named(), description)
    assert all(not torch.equal(new, before[name]) for name, new in read(description).items())
    dist.barrier()  # all have read


def check_fsdp_uneven_padded_and_empty() -> None:
    module, mesh = block(), init_device_mesh("cpu", (4,))
    for child in (module.up, module.down):
        fully_shard(child, mesh=mesh)
    expect_parameters_followed(fully_shard(module, mesh=mesh))


def check_fsdp_after_a_forward_without_backward() -> None:
    """Gathered parameters, which the root keeps after a forward without backward, are refused.

    The optimizer writes the shards, not the gathered parameters.
    """
    module, mesh = block(), init_device_mesh("cpu", (4,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(module.up, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    train(module, optimizer)
    sender, parameters = WeightSender(), ModuleParameters(module)
    description = merged(sender, parameters.named())
    with torch.no_grad():
        module(INPUT)
    assert not isinstance(module.down.weight, DTensor), (
        "the root did not keep its gathered parameters, so that the case checks nothing"
    )
    try:
        sender.describe(list(module.named_parameters()))
    except BadRequestError as error:
        assert "down.weight" in str(error) and "reshard()" in str(error), error
    else:
        raise AssertionError("the gathered parameters were described")
    assert merged(sender, parameters.named()).id == description.id, (
        "the sender recognizes the parameters after reshard()"
    )
    expect_same(parameters.named(), description)
    train(module, optimizer)


def check_fsdp_alone() -> None:
    """With one rank in each mesh, FSDP2 may gather into the shard's own memory."""
    mesh = DeviceMesh("cpu", [[0], [1], [2], [3]], mesh_dim_names=("replicate", "shard"))
    expect_parameters_followed(fully_shard(block(), mesh=mesh["shard"]))


def check_hsdp() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    module = fully_shard(block(), mesh=mesh)
    expect_parameters_followed(module)
    description = merged(WeightSender(), list(module.named_parameters()))
    (up,) = [source for source in description.tensors if source.name == "up.weight"]
    assert [shard.offset for shard in up.shards] == [[0, 0], [4, 0], [0, 0], [4, 0]], (
        "the copies are in the order of the ranks"
    )


def check_fsdp_and_tensor_parallel() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    module = parallelize_module(block(12), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    expect_parameters_followed(fully_shard(module, mesh=mesh["dp"]))


def check_tensor_parallel_alone() -> None:
    mesh = init_device_mesh("cpu", (4,))
    expect_parameters_followed(parallelize_module(block(8), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()}))


def check_cpu_offload() -> None:
    module = fully_shard(block(), mesh=init_device_mesh("cpu", (4,)), offload_policy=CPUOffloadPolicy(pin_memory=False))
    expect_parameters_followed(module)


def check_any_placement() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    full = torch.arange(35.0).reshape(7, 5)
    every = [Shard(0), Shard(1), Replicate()]
    named = [(f"{a}{b}", distribute_tensor(full, mesh, [a, b])) for a in every for b in every]
    expect_same(named, merged(WeightSender(), named))


def check_partial_is_refused() -> None:
    mesh = init_device_mesh("cpu", (4,))
    tensor = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    try:
        WeightSender().describe([("w", tensor)])
    except BadRequestError as error:
        assert "Partial" in str(error)
    else:
        raise AssertionError("a partial sum was described")


def check_a_mesh_of_other_ranks_brings_nothing() -> None:
    mesh = DeviceMesh("cpu", [1, 2])
    tensor = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
    description = merged(WeightSender(), [("w", tensor)])
    assert torch.equal(read(description)["w"], torch.arange(6.0))
    dist.barrier()


def check_replaced_parameters_are_seen() -> None:
    module = fully_shard(block(), mesh=init_device_mesh("cpu", (4,)))
    sender, parameters = WeightSender(), ModuleParameters(module)
    first = merged(sender, parameters.named())
    full = {name: torch.ones(p.shape) for name, p in module.named_parameters()}
    sharded = {n: distribute_tensor(full[n], p.device_mesh, p.placements) for n, p in module.named_parameters()}
    module.load_state_dict(sharded, assign=True)
    second = merged(sender, parameters.named())
    assert first.id != second.id
    assert (read(second)["up.weight"] == 1).all()
    dist.barrier()


CHECKS: dict[str, Callable[[], None]] = {
    name.removeprefix("check_"): check for name, check in list(globals().items()) if name.startswith("check_")
}


def main(results: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with (results / f"{dist.get_rank()}.jsonl").open("a") as file:
        for name, check in CHECKS.items():
            error = ""
            try:
                check()
            except Exception:
                error = traceback.format_exc()
            file.write(json.dumps({"check": name, "error": error}) + "\n")
            file.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

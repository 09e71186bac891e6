"""A trainer process on a GPU, for tests of the receiver.

`python -m tests.weight_sync.cuda_owner [DEVICE]` prints the description of an embedding in two shards and of a norm as
JSON. Each line of standard input is a command: "write" multiplies all values by ten, "free" returns the memory to the
driver. The embedding's second shard is an allocation of its own (`LARGE` bytes). The other tensors share a small
segment.
"""

from __future__ import annotations

import os
import sys
import uuid

import msgspec
import torch

from verl_server.weight_sync.handles import Allocation, DescribedTensor, Shard, WeightsDescription

LARGE = 4 << 30
"""Bytes: several times what a CUDA context takes, which ends with this process in any case."""
allocations: list[Allocation] = []
tensors: list[torch.Tensor] = []


def shard(values: torch.Tensor, offset: list[int], storage: torch.Tensor) -> Shard:
    """Copy `values` to the start of `storage`, and describe the copy."""
    base = storage[: values.numel()].view(values.shape)
    base.copy_(values)
    tensors.append(base)
    _, handle, nbytes, start, counter, at, _, _ = base.untyped_storage()._share_cuda_()
    torch.UntypedStorage._release_ipc_counter(counter, at, device=base.device)
    gpu = str(torch.cuda.get_device_properties(base.device).uuid)
    allocations.append(
        Allocation(
            id=uuid.uuid4().hex,
            kind="cuda",
            nbytes=nbytes,
            pid=os.getpid(),
            device_uuid=gpu,
            handle=handle,
            storage_offset_bytes=start,
        )
    )
    strides = list(base.stride())
    return Shard(allocation=len(allocations) - 1, shape=list(values.shape), offset=offset, stride=strides)


def main() -> None:
    device = torch.device("cuda", int(sys.argv[1]) if len(sys.argv) > 1 else 0)
    embed, norm = torch.arange(32.0).reshape(8, 4), torch.ones(4)
    small, other, large = (torch.zeros(n, device=device) for n in (20, 4, LARGE // 4))
    shards = [shard(embed[:5], [0, 0], small), shard(embed[5:], [5, 0], large)]
    sources = [
        DescribedTensor(name="model.embed_tokens.weight", dtype="float32", shape=[8, 4], shards=shards),
        DescribedTensor(name="model.norm.weight", dtype="float32", shape=[4], shards=[shard(norm, [0], other)]),
    ]
    del small, other, large
    torch.cuda.synchronize(device)
    description = WeightsDescription(id="theirs", allocations=allocations, tensors=sources)
    print(msgspec.json.encode(description).decode(), flush=True)
    for line in sys.stdin:
        if line.strip() == "write":
            for tensor in tensors:
                tensor.mul_(10)
        elif line.strip() == "free":
            tensors.clear()
            torch.cuda.empty_cache()
        torch.cuda.synchronize(device)
        print("done", flush=True)


if __name__ == "__main__":
    main()

"""A trainer process written like SGLang's: rank 0 of a process group made from torch's own functions.

Arguments: backend, world size, group name. The process prints its port. Then each line of standard input is a command.
A dtype broadcasts the next tensor of `tensors()` in that dtype, `bucket` broadcasts all remaining tensors as one tensor
of bytes, and `die` kills the process.
"""

from __future__ import annotations

import datetime
import os
import signal
import sys

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    PrefixStore,
    _new_process_group_helper,
    _world,
    rendezvous,
)

from tests.reserved_port import reserved_port

SHAPES = {"a": [40, 50], "b": [7], "c": [3, 3]}


def tensors(device: str = "cpu") -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, 1.5 + i, device=device) for i, (name, shape) in enumerate(SHAPES.items())}


def main() -> None:
    backend, world_size, group_name = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    device = "cuda:1" if backend == "nccl" else "cpu"
    timeout = datetime.timedelta(seconds=60)
    with reserved_port() as port:
        print(port, flush=True)
        store, rank, size = next(rendezvous(f"tcp://127.0.0.1:{port}", 0, world_size, timeout=timeout))
    group, _ = _new_process_group_helper(
        size, rank, [], backend, PrefixStore(group_name, store), group_name=group_name, timeout=timeout
    )
    _world.pg_group_ranks[group] = {i: i for i in range(size)}
    waiting = list(tensors(device).values())
    for line in sys.stdin:
        word = line.strip()
        if word == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if word == "bucket":
            data = torch.cat([tensor.view(-1).view(torch.uint8) for tensor in waiting])
        else:
            data = waiting.pop(0).to(getattr(torch, word))
        dist.broadcast(data, src=0, group=group)
        if device != "cpu":
            torch.cuda.synchronize(device)
        print("sent", flush=True)


if __name__ == "__main__":
    main()

"""The process group of a benchmark's trainer ranks, one process each, which meet in a file."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist


@contextmanager
def process_group(rank: int, ranks: int, folder: Path, device: str) -> Iterator[None]:
    """Join the group of all ranks: Gloo for CPU tensors, and NCCL for those on GPUs.

    An error is printed at once, and the group is not taken down then, because that may wait for a rank that waits for
    this one.
    """
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/ranks", rank=rank, world_size=ranks)
    try:
        yield
    except BaseException:
        print(f"Trainer rank {rank} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        raise
    dist.destroy_process_group()

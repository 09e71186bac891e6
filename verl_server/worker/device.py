"""The device of one rank: its choice, the number of threads, and free memory.

Called by `scheduler.rank`, and then by `ModelRunner`.
"""

from __future__ import annotations

import ctypes
import os

import torch

from verl_server.errors import BadRequestError
from verl_server.server_args import ServerArgs
from verl_server.worker.gpu_holders import holders_sentence


def device_of(server_args: ServerArgs, tp_rank: int) -> torch.device:
    """Return the device of a rank: its entry of `gpu_uuids`, else `base_gpu_id` + local rank, or the CPU.

    Raise BadRequestError if this process does not see that device.
    """
    if server_args.device == "cpu" or (server_args.device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise BadRequestError("device='cuda', but torch sees no CUDA device. Use device='cpu' or check the driver.")
    local_rank = tp_rank % server_args.ranks_per_node
    count = torch.cuda.device_count()
    if server_args.gpu_uuids:
        wanted = server_args.gpu_uuids[local_rank].removeprefix("GPU-").lower()
        uuids = [str(torch.cuda.get_device_properties(i).uuid).removeprefix("GPU-").lower() for i in range(count)]
        if wanted not in uuids:
            raise BadRequestError(
                f"gpu_uuids names {server_args.gpu_uuids[local_rank]}, but this process sees only {uuids} "
                f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r})."
            )
        return torch.device("cuda", uuids.index(wanted))
    ordinal = server_args.base_gpu_id + local_rank
    if ordinal >= count:
        raise BadRequestError(f"Rank {tp_rank} needs CUDA device {ordinal}, but torch sees {count} devices.")
    return torch.device("cuda", ordinal)


def set_threads(server_args: ServerArgs, device: torch.device) -> None:
    """Set torch's number of threads on the CPU. On CUDA, make `device` current."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif device.type == "cpu":
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(server_args.cpu_threads or max(1, cores // server_args.ranks_per_node))


class DeviceMemory:
    """The memory of one GPU, as this process measures it. Other processes may take and free memory at any time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def free(self) -> int:
        """Return the free bytes. Memory that torch's allocator keeps unused does not count."""
        return int(torch.cuda.mem_get_info(self.device)[0])

    def reclaim(self) -> int:
        """Return the free bytes after torch's allocator freed its unused memory.

        Waits for the work of this thread's stream only: a stager's stream may wait for a trainer.
        """
        torch.cuda.current_stream(self.device).synchronize()
        torch.cuda.empty_cache()
        return self.free()

    def reserved(self) -> int:
        """Return the bytes that torch's allocator of this process has reserved, used or unused. Arenas do not count."""
        return int(torch.cuda.memory_reserved(self.device))

    def holders(self) -> str:
        """Return a sentence that says what other processes hold, "" if nobody else is known to hold much."""
        return holders_sentence(device_uuid(self.device))


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has finished the work of this thread's stream. Do nothing on the CPU."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def is_out_of_memory(error: Exception) -> bool:
    """Return True if `error` is a failed allocation, on the device or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if not isinstance(error, RuntimeError):
        return False
    # An allocation of the driver, such as that of a graph's nodes, and one of torch's allocator of the host.
    return str(error).startswith("CUDA error: out of memory") or "can't allocate memory" in str(error)


def trim_heap() -> None:
    """Make glibc free the unused blocks that it keeps because they are smaller than its mmap threshold."""
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):
        return  # another libc, which maps large blocks one by one too


def device_uuid(device: torch.device) -> str:
    """Return the UUID of a GPU without the "GPU-" prefix, "" for the CPU."""
    if device.type != "cuda":
        return ""
    return str(torch.cuda.get_device_properties(device).uuid).removeprefix("GPU-")

"""Questions to the CUDA driver about memory that torch allocated: which allocation is it, is all of it written.

Used by `exports` and `sender` in trainer processes. Everything here is a no-op in a process without CUDA.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable

import torch

_BUFFER_ID = 7
"""CU_POINTER_ATTRIBUTE_BUFFER_ID: a number that no other allocation of this process ever has, before or after."""


def allocation_id(address: int) -> int:
    """The driver's number of the allocation at a device address; 0 if it cannot be asked.

    Memory that was freed and allocated again at the same address has another number.
    """
    driver = _driver()
    if driver is None:
        return 0
    number = ctypes.c_uint64()
    failed = driver.cuPointerGetAttribute(ctypes.byref(number), _BUFFER_ID, ctypes.c_uint64(address))
    return 0 if failed else number.value


def device_frees(devices: Iterable[torch.device]) -> tuple[int, ...]:
    """Number of times that torch's allocator returned memory of each device to the driver; empty if it does not count.

    While this stays the same, whatever the allocator held lies where it lay: no need to ask for `allocation_id`s.
    """
    counts = []
    for device in devices:
        if device.type == "cuda":
            count = torch.cuda.memory_stats_as_nested_dict(device).get("num_device_free")
            if count is None:
                return ()
            counts.append(count)
    return tuple(counts)


@functools.cache
def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def wait_for_writes(devices: Iterable[torch.device]) -> None:
    """Return when everything that was queued on these devices, on any stream, is done.

    CPU tensors may be the target of copies from the current device, which is waited for where CUDA is in use.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return
    current = torch.device("cuda", torch.cuda.current_device())
    for device in {current if device.type == "cpu" else device for device in devices}:
        torch.cuda.synchronize(device)

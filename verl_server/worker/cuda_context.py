"""`create_context`: creates a GPU's primary CUDA context through the driver, while torch is imported.

Called in a thread by `scheduler.process`. torch uses a context that exists. Calls of the driver do not hold the
interpreter's lock, so they run in parallel with the import. Errors are ignored here, because torch fails later with a
better message.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import uuid
from typing import NamedTuple

from verl_server.errors import BadRequestError
from verl_server.server_args import ServerArgs

_MULTIPROCESSORS, _CAPABILITY_MAJOR, _CAPABILITY_MINOR, _SHARED_MEMORY = 16, 75, 76, 97
"""Numbers of the attributes in the driver's header, CUdevice_attribute."""
_SHARED_KIB = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 110: 227, 120: 99, 121: 99}
"""Compute capability -> KiB of shared memory that a program can have, for GPUs that are not at hand (CUDA programming
guide, table of technical specifications). The driver states the number for those that are."""


class GpuKind(NamedTuple):
    """The properties of a GPU on which the compiled kernels depend."""

    capability: int
    """Compute capability, 10 * major + minor."""
    multiprocessors: int
    shared_memory: int
    """Bytes of shared memory that a program can have."""

    @classmethod
    def of(cls, capability: int, multiprocessors: int) -> GpuKind:
        """Return the kind of a GPU that is not at hand.

        Raise BadRequestError if the capability is unknown, or below what Triton's kernels need.
        """
        if capability not in _SHARED_KIB:
            known = ", ".join(f"{number / 10}" for number in _SHARED_KIB)
            raise BadRequestError(
                f"No kernels are compiled for compute capability {capability / 10}. Known are {known}, for example 8.0 "
                "for A100, 8.6 for RTX 3090, 8.9 for RTX 4090 and L40S, 9.0 for H100 and H200, 10.0 for B200, 12.0 for "
                "RTX 5090."
            )
        if multiprocessors < 1:
            raise BadRequestError(f"A GPU has at least 1 multiprocessor, not {multiprocessors}.")
        return cls(capability, multiprocessors, 1024 * _SHARED_KIB[capability])


def create_context(server_args: ServerArgs, tp_rank: int) -> GpuKind | None:
    """Create the context of the device that `device.device_of` chooses. Return the kind of the device, None without a
    GPU."""
    if server_args.device == "cpu":
        return None
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # as torch sets it; the context reads it
    with contextlib.suppress(OSError, AttributeError):  # no driver
        driver = ctypes.CDLL("libcuda.so.1")
        if driver.cuInit(0) == 0:
            device, context = _device(driver, server_args, tp_rank), ctypes.c_void_p()
            if device is not None:
                driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
                return _kind(driver, device)
    return None


def find_gpu(server_args: ServerArgs) -> GpuKind | None:
    """Return the kind of the GPU of rank 0 without creating a context, None without a GPU."""
    with contextlib.suppress(OSError, AttributeError):
        driver = ctypes.CDLL("libcuda.so.1")
        if driver.cuInit(0) == 0 and (device := _device(driver, server_args, 0)) is not None:
            return _kind(driver, device)
    return None


def find_uuid(ordinal: int) -> str:
    """Return the UUID of a visible GPU without creating a context and without "GPU-", "" if there is no such GPU."""
    with contextlib.suppress(OSError, AttributeError):
        driver, device = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), ordinal) == 0:
            return str(uuid.UUID(bytes=_uuid(driver, device)))
    return ""


def _uuid(driver: ctypes.CDLL, device: ctypes.c_int) -> bytes:
    found = (ctypes.c_ubyte * 16)()
    driver.cuDeviceGetUuid(ctypes.byref(found), device)
    return bytes(found)


def _kind(driver: ctypes.CDLL, device: ctypes.c_int) -> GpuKind:
    def attribute(number: int) -> int:
        value = ctypes.c_int()
        driver.cuDeviceGetAttribute(ctypes.byref(value), number, device)
        return value.value

    capability = 10 * attribute(_CAPABILITY_MAJOR) + attribute(_CAPABILITY_MINOR)
    return GpuKind(capability, attribute(_MULTIPROCESSORS), attribute(_SHARED_MEMORY))


def _device(driver: ctypes.CDLL, server_args: ServerArgs, tp_rank: int) -> ctypes.c_int | None:
    """Return the driver's handle of this rank's device, None if there is no such device."""
    local_rank = tp_rank % server_args.ranks_per_node
    device = ctypes.c_int()
    if not server_args.gpu_uuids:
        found = driver.cuDeviceGet(ctypes.byref(device), server_args.base_gpu_id + local_rank) == 0
        return device if found else None
    wanted = server_args.gpu_uuids[local_rank].removeprefix("GPU-").lower().replace("-", "")
    count = ctypes.c_int()
    driver.cuDeviceGetCount(ctypes.byref(count))
    for ordinal in range(count.value):
        if driver.cuDeviceGet(ctypes.byref(device), ordinal) == 0 and _uuid(driver, device).hex() == wanted:
            return device
    return None

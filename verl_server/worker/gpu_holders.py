"""`gpu_holders` returns a GPU's free and total bytes, and the processes that hold its memory, as NVML reports them.

Called where a start or an allocation lacks memory: by `DeviceMemory`, by `DeviceRegion`, by `scheduler.rank`, and by
`backends.process` after another project's engine failed to start. NVML needs no CUDA context, so a call takes no memory
of the GPU.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path

_OWN = 2**30
"""Bytes that a driver and the context of this process take at most. Nobody else holds memory if no more is missing."""
_UNKNOWN = 2**64 - 1  # NVML_VALUE_NOT_AVAILABLE
_SPARE = 16
"""Room for processes that begin between the call that counts them and the call that lists them."""


class _Memory(ctypes.Structure):
    """nvmlMemory_t, in bytes."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Process(ctypes.Structure):
    """nvmlProcessInfo_t of nvmlDeviceGetComputeRunningProcesses_v3."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


@dataclass(frozen=True)
class GpuHolders:
    free: int
    total: int
    others: dict[int, int | None]
    """Id of each other process with a CUDA context on the GPU -> its bytes, None if the driver does not say."""
    own: int = 0
    """Bytes of this process, 0 if the driver does not say."""

    def sentence(self) -> str:
        """Return a sentence that says what other processes hold. Empty if they hold nothing worth mentioning."""
        held = self.total - self.free - self.own
        if not self.others and held <= _OWN:
            return ""
        listed = "; ".join(_describe(pid, used) for pid, used in sorted(self.others.items()))
        listed = listed or "the driver names none here, nvidia-smi on the host may"
        return f"Other processes hold {_gib(held)} of the GPU's {_gib(self.total)} ({listed})."


def gpu_holders(name: str) -> GpuHolders | None:
    """Return who holds the memory of a GPU. `name` is its UUID, or its number in the order of `nvidia-smi`.

    Return None if NVML is missing or does not know the GPU. In a container the driver may list no processes, or ids of
    the host.
    """
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() != 0:
            return None
    except (OSError, AttributeError):
        return None
    try:
        return _read(nvml, name)
    except AttributeError:  # a driver that is too old for one of the calls
        return None
    finally:
        nvml.nvmlShutdown()


def holders_sentence(name: str) -> str:
    """Return the sentence of `gpu_holders(name)`, "" if NVML does not answer or `name` is empty."""
    found = gpu_holders(name) if name else None
    return "" if found is None else found.sentence()


def _read(nvml: ctypes.CDLL, name: str) -> GpuHolders | None:
    device, memory, count = ctypes.c_void_p(), _Memory(), ctypes.c_uint(0)
    if name.isdecimal():
        code = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(name)), ctypes.byref(device))
    else:
        uuid = name if name.startswith(("GPU-", "MIG-")) else f"GPU-{name}"
        code = nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(device))
    if code != 0 or nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) != 0:
        return None
    nvml.nvmlDeviceGetComputeRunningProcesses_v3(device, ctypes.byref(count), None)  # counts them
    count.value += _SPARE
    processes = (_Process * count.value)()
    if nvml.nvmlDeviceGetComputeRunningProcesses_v3(device, ctypes.byref(count), processes) != 0:
        count.value = 0
    used = {each.pid: None if each.used == _UNKNOWN else each.used for each in processes[: count.value]}
    own = used.pop(os.getpid(), None)
    return GpuHolders(memory.free, memory.total, used, own or 0)


def _describe(pid: int, used: int | None) -> str:
    try:
        name = f" ({Path(f'/proc/{pid}/comm').read_text(errors='replace').strip()})"
    except OSError:  # a process of another user or of the host
        name = ""
    return f"process {pid}{name}" + ("" if used is None else f": {_gib(used)}")


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"

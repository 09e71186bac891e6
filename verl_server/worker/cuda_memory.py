"""`DeviceRegion`: addresses of a GPU that outlive the memory behind them, by the CUDA driver's virtual memory calls.

Used by `MemoryArena` only. torch's allocator does not count this memory, but `torch.cuda.mem_get_info` does. Only the
region's own device may access it, and no peer, network card or other process. That is enough, because weights and KV
pool are never passed to NCCL (activations are), and kernels on this device read the trainers' memory.

Driver calls return their errors and do not keep them, so torch's next launch does not report a failure of this module.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from verl_server.errors import ServerUnavailableError
from verl_server.worker.cuda_context import find_uuid
from verl_server.worker.gpu_holders import holders_sentence

_PINNED_ALLOCATION = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_ON_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_RECOMMENDED = 1  # CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


class Location(ctypes.Structure):
    """CUmemLocation. `id` is a device ordinal, the same as torch's."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class AllocationFlags(ctypes.Structure):
    """CUmemAllocationProp.allocFlags. All zero: neither compressed nor accessible to a network card."""

    _fields_ = (
        ("compressionType", ctypes.c_ubyte),
        ("gpuDirectRDMACapable", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class AllocationProp(ctypes.Structure):
    """CUmemAllocationProp, 32 bytes. `requestedHandleTypes` 0: not exported to other processes."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("requestedHandleTypes", ctypes.c_int),
        ("location", Location),
        ("win32HandleMetaData", ctypes.c_void_p),
        ("allocFlags", AllocationFlags),
    )


class AccessDesc(ctypes.Structure):
    """CUmemAccessDesc, 12 bytes."""

    _fields_ = (("location", Location), ("flags", ctypes.c_int))


_Address = ctypes.c_uint64  # CUdeviceptr
_Handle = ctypes.c_uint64  # CUmemGenericAllocationHandle
_SIGNATURES: dict[str, list[Any]] = {
    "cuMemGetAllocationGranularity": [ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(AllocationProp), ctypes.c_int],
    "cuMemAddressReserve": [ctypes.POINTER(_Address), ctypes.c_size_t, ctypes.c_size_t, _Address, ctypes.c_uint64],
    "cuMemAddressFree": [_Address, ctypes.c_size_t],
    "cuMemCreate": [ctypes.POINTER(_Handle), ctypes.c_size_t, ctypes.POINTER(AllocationProp), ctypes.c_uint64],
    "cuMemRelease": [_Handle],
    "cuMemMap": [_Address, ctypes.c_size_t, ctypes.c_size_t, _Handle, ctypes.c_uint64],
    "cuMemSetAccess": [_Address, ctypes.c_size_t, ctypes.POINTER(AccessDesc), ctypes.c_size_t],
    "cuMemUnmap": [_Address, ctypes.c_size_t],
    "cuMemHostRegister_v2": [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint],
    "cuMemHostUnregister": [ctypes.c_void_p],
    "cuGetErrorName": [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)],
}


class DriverError(RuntimeError):
    """A driver call failed; `code` is its CUresult."""

    def __init__(self, call: str, code: int) -> None:
        name = ctypes.c_char_p()
        _driver().cuGetErrorName(code, ctypes.byref(name))
        super().__init__(f"{call} failed: {(name.value or b'unknown error').decode()} ({code}).")
        self.code = code


class DeviceRegion:
    """A range of addresses of one GPU, with physical memory behind all of them (mapped) or none. Mapped at first.

    The tensors that `tensor` returns keep the region alive. Memory and addresses are freed with the last of them.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        location = Location(_ON_DEVICE, self.device.index)
        self._prop = AllocationProp(type=_PINNED_ALLOCATION, location=location)
        self._access = AccessDesc(location, _READ_WRITE)
        granularity, address = ctypes.c_size_t(), _Address()
        with _current(self.device):
            _call("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(self._prop), _RECOMMENDED)
            self.nbytes = max(1, -(-nbytes // granularity.value)) * granularity.value
            _call("cuMemAddressReserve", ctypes.byref(address), self.nbytes, 0, 0, 0)
        self.address = address.value
        self.is_mapped = False
        # Not at exit: the driver may have ended by then, and the end of the process frees everything anyway.
        weakref.finalize(self, _free, self.device, self.address, self.nbytes).atexit = False
        self.map()

    def map(self) -> None:
        """Map memory at the addresses. The contents are undefined.

        Raise ServerUnavailableError, with nothing mapped, if the device has too little memory.
        """
        with _current(self.device):
            try:
                self._map()
            except DriverError as error:
                if error.code != _OUT_OF_MEMORY:
                    raise
                torch.cuda.empty_cache()  # free the unused memory that torch's allocator keeps
                self._map_or_explain()
        self.is_mapped = True

    def unmap(self) -> None:
        """Free the memory after all work of the device has finished. The addresses stay reserved."""
        with _current(self.device):
            _call("cuMemUnmap", self.address, self.nbytes)
        self.is_mapped = False

    def tensor(self) -> Tensor:
        """Return the region as uint8 [nbytes] without a copy. It may be used only while the region is mapped."""
        tensor = torch.as_tensor(self, device=self.device)
        assert tensor.data_ptr() == self.address, "torch copied the region"
        return tensor

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "strides": None, "version": 3}

    def _map(self) -> None:
        handle = _Handle()
        _call("cuMemCreate", ctypes.byref(handle), self.nbytes, ctypes.byref(self._prop), 0)
        try:
            _call("cuMemMap", self.address, self.nbytes, 0, handle, 0)
        finally:
            _call("cuMemRelease", handle)  # the mapping keeps the memory until it is unmapped
        try:
            _call("cuMemSetAccess", self.address, self.nbytes, ctypes.byref(self._access), 1)
        except DriverError:
            _call("cuMemUnmap", self.address, self.nbytes)
            raise

    def _map_or_explain(self) -> None:
        try:
            self._map()
        except DriverError as error:
            if error.code != _OUT_OF_MEMORY:
                raise
            free, total = torch.cuda.mem_get_info(self.device)
            sentences = (
                f"{self.device} has {free / 2**30:.2f} GiB of {total / 2**30:.2f} GiB free, but "
                f"{self.nbytes / 2**30:.2f} GiB are needed for the weights or the KV cache.",
                holders_sentence(find_uuid(self.device.index)),
                "Free memory on the device (in a trainer: offload, then torch.cuda.empty_cache()) and try again. A "
                "server with a smaller mem_fraction_static needs less for its KV cache.",
            )
            raise ServerUnavailableError(" ".join(filter(None, sentences))) from None


def pin(memory: Tensor, device: torch.device) -> None:
    """Page-lock the memory of a CPU tensor, so that copies to and from `device` run at the full rate of the bus."""
    with _current(device):
        _call("cuMemHostRegister_v2", memory.data_ptr(), memory.nbytes, 0)


def unpin(memory: Tensor, device: torch.device) -> None:
    """Undo `pin`. To be called before the tensor's memory is unmapped."""
    with _current(device):
        _call("cuMemHostUnregister", memory.data_ptr())


def _free(device: torch.device, address: int, nbytes: int) -> None:
    """Free the memory and the addresses of a region. A finalizer has no caller for errors, so they are ignored."""
    with _current(device):
        _driver().cuMemUnmap(address, nbytes)  # a harmless error if nothing is mapped
        _driver().cuMemAddressFree(address, nbytes)


@contextlib.contextmanager
def _current(device: torch.device) -> Iterator[None]:
    """Make the device's context current on the calling thread and wait for the device: driver calls need both."""
    with torch.cuda.device(device):
        torch.cuda.synchronize(device)
        yield


def _call(name: str, *arguments: Any) -> None:
    """Call the driver function `name`. Raise DriverError if it fails."""
    code = getattr(_driver(), name)(*arguments)
    if code:
        raise DriverError(name, code)


@functools.cache
def _driver() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    for name, types in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = types, ctypes.c_int
    return library

"""vLLM's IPC transfer: pickled CUDA handles, parsed into our own handles without unpickling anything.

The stager of each tensor-parallel rank calls `parse_ipc_handles` and passes the result to the receiver like any other
handles. A handle is a dict from the UUID of a GPU to the arguments of torch's `rebuild_cuda_tensor`. There is a dict
for each tensor or, for a packed transfer, one dict for a buffer that holds the tensors one after the other.
"""

from __future__ import annotations

import math
from typing import Any

from verl_server.errors import BadRequestError
from verl_server.weight_sync.handles import PickledHandles, TensorHandle
from verl_server.weight_sync.pickle_reader import read_pickle, shown
from verl_server.weight_sync.sglang.payloads import GLOBALS, ITEMSIZES, decoded, rebuild_cuda_tensor, tensor_name

_ARGUMENTS = 15
_DEVICE = 6
"""Index of the argument of `rebuild_cuda_tensor` that is the sender's device number."""


def parse_ipc_handles(given: PickledHandles, device_uuid: str) -> list[tuple[str, TensorHandle]]:
    """Return (name, handle) of each tensor, in the memory of the GPU `device_uuid`.

    Raise BadRequestError if a handle is damaged, belongs to another GPU, or does not match the announced tensor.
    """
    names, shapes = [tensor_name(name) for name in given.names], given.shapes
    counts = {len(names), len(given.dtypes), len(shapes)}
    if len(counts) != 1 or not names:
        raise BadRequestError("names, dtype_names and shapes must have the same length, at least 1.")
    dtypes = [dtype.removeprefix("torch.") for dtype in given.dtypes]
    for dtype in dtypes:
        if dtype not in ITEMSIZES:
            raise BadRequestError(f"dtype {shown(dtype)!r} is not a dtype of weights.")
    handles = read_pickle(decoded(given.handles), GLOBALS)
    if given.sizes is not None:
        return _unpacked(_on_gpu(handles, device_uuid), names, dtypes, shapes, given.sizes)
    if not isinstance(handles, list) or len(handles) != len(names):
        raise BadRequestError(f"The pickle does not hold a list of {len(names)} IPC handles, one for each name.")
    tensors = [_on_gpu(handle, device_uuid) for handle in handles]
    for name, dtype, shape, tensor in zip(names, dtypes, shapes, tensors, strict=True):
        if (tensor.dtype, tensor.shape) != (dtype, shape):
            raise BadRequestError(f"'{name}' is {tensor.dtype} {tensor.shape}, not {dtype} {shape} as announced.")
    return list(zip(names, tensors, strict=True))


def _on_gpu(handle: Any, device_uuid: str) -> TensorHandle:
    """Return the tensor that `handle` has for this rank's GPU."""
    if not isinstance(handle, dict):
        raise BadRequestError("An IPC handle is not a dict from the UUID of a GPU to a tensor.")
    by_gpu = {uuid.removeprefix("GPU-"): arguments for uuid, arguments in handle.items()}
    if device_uuid not in by_gpu:
        known = ", ".join(shown(uuid) for uuid in list(by_gpu)[:8])
        raise BadRequestError(
            f"There is no IPC handle for this server's GPU {device_uuid or '(it runs on the CPU)'}, only for {known}. "
            "Run the trainer on the same GPUs, or transfer through NCCL."
        )
    given = by_gpu[device_uuid]
    if not isinstance(given, tuple) or len(given) != _ARGUMENTS:
        raise BadRequestError(f"An IPC handle does not have the {_ARGUMENTS} arguments of torch's rebuild_cuda_tensor.")
    arguments = list(given)
    arguments[_DEVICE] = device_uuid
    try:
        return rebuild_cuda_tensor(*arguments)
    except ValueError as error:
        raise BadRequestError(f"An IPC handle was refused: {error}.") from None


def _unpacked(
    buffer: TensorHandle, names: list[str], dtypes: list[str], shapes: list[list[int]], sizes: list[int]
) -> list[tuple[str, TensorHandle]]:
    """Return the tensors of a packed transfer, as views into its buffer of bytes."""
    if buffer.dtype != "uint8" or len(buffer.shape) != 1 or (buffer.stride != [1] and buffer.shape[0] > 1):
        raise BadRequestError(f"The packed buffer is {buffer.dtype} {buffer.shape}, not one dimension of uint8.")
    if len(sizes) != len(names):
        raise BadRequestError(f"tensor_sizes has {len(sizes)} entries for {len(names)} names.")
    tensors, start = [], 0
    for name, dtype, shape, size in zip(names, dtypes, shapes, sizes, strict=True):
        itemsize = ITEMSIZES[dtype]
        if min(shape, default=0) < 0 or size != math.prod(shape) * itemsize or start + size > buffer.shape[0]:
            raise BadRequestError(f"'{name}', {dtype} {shape[:16]}, does not fill {size} bytes of the packed buffer.")
        offset = buffer.storage_offset + start
        if offset % itemsize:
            raise BadRequestError(f"'{name}' begins at byte {offset} of its storage, which {dtype} cannot.")
        stride = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        handle = TensorHandle(
            allocation=buffer.allocation, dtype=dtype, shape=shape, stride=stride, storage_offset=offset // itemsize
        )
        tensors.append((name, handle))
        start += size
    return tensors

"""SGLang's older wire formats: pickled handles, parsed into our own handles without unpickling anything.

The stager of each tensor-parallel rank calls `parse_payload` with its entry of `serialized_named_tensors` and
passes the result to the receiver like any other handles. Three formats:

    load_format None     [(name, tensor), ...], or (name, LocalSerializedTensor(values=[pickle of rank 0, ...]))
    "flattened_bucket"   {"flattened_tensor": 1-D tensor, "metadata": [FlattenedTensorMetadata, ...]}; the indices
                         count bytes if the tensor is uint8 (dtypes may be mixed), else elements (one dtype)
    "direct"             refused: it uses the parameter names inside SGLang's models

torch's `ForkingPickler` makes a tensor a CUDA IPC handle, or a file in /dev/shm. This module checks that the bytes
form a handle. The receiver checks the bounds of its view, as for every handle.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import math
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from verl_server.errors import BadRequestError, WeightUpdateError
from verl_server.weight_sync.handles import Allocation, TensorHandle
from verl_server.weight_sync.pickle_reader import Function, Globals, Record, RecordClass, read_pickle, shown
from verl_server.weight_sync.shm_file import give_back_reference

ITEMSIZES = {
    **{"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1},
    **{"int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1},
}
"""Size in bytes of each dtype that a payload may contain. Buckets are uint8.

The receiver checks whether a dtype fits the parameter.
"""
_MAX_DIM = 16
_SHM_HEADER_BYTES = 64
"""Bytes of the padded reference count with which torch's shared-memory files begin, before the storage."""
_CUDA_COUNTERS = 10_000
"""Number of reference counts in one of torch's files. torch writes at an index without a check of the bound."""
_FILE_SYSTEM_REMEDY = (
    "a CPU tensor travels as a file descriptor, which only a child process of the sender can fetch. In the sender "
    "call torch.multiprocessing.set_sharing_strategy('file_system'), or send CUDA tensors, or use "
    "verl_server's own client"
)


def parse_payload(data: str | bytes, load_format: str | None, *, rank: int = 0) -> list[tuple[str, TensorHandle]]:
    """Return (name, handle) of each tensor in `data`: a plain pickle, or a pickle in base64, encoded once or twice.

    `rank` is this server rank, which chooses from a LocalSerializedTensor. Each handle has an allocation of its own,
    because every pickled tensor has a reference count that the reader decrements once. Raise BadRequestError, which
    names the refused global or opcode and its position.
    """
    if load_format == "direct":
        raise BadRequestError(
            "load_format='direct' is not supported: it uses the parameter names inside SGLang's models. "
            "Send Hugging Face names with load_format unset."
        )
    if load_format not in (None, "auto", "flattened_bucket"):
        raise BadRequestError(
            f"load_format={load_format!r} is not supported; leave it unset or use 'flattened_bucket'."
        )
    payload = read_pickle(decoded(data), GLOBALS)
    return _bucket(payload) if load_format == "flattened_bucket" else _pairs(payload, rank)


def give_back(allocations: Iterable[Allocation]) -> None:
    """Release the references of allocations that will not be opened, because the update was refused.

    A reader releases the reference when it opens the allocation. If an allocation is neither opened nor released, its
    memory stays allocated in the sender until the sender exits. References that can no longer be released are ignored.
    """
    for allocation in allocations:
        with contextlib.suppress(WeightUpdateError, OSError, RuntimeError, AttributeError, NotImplementedError):
            if allocation.kind == "shm_name" and allocation.name:
                give_back_reference(allocation)
            elif allocation.kind == "cuda" and allocation.ref_counter_handle:
                release = torch.UntypedStorage._release_ipc_counter_cuda  # type: ignore[no-untyped-call]
                release(allocation.ref_counter_handle, allocation.ref_counter_offset)


def decoded(data: str | bytes) -> bytes:
    """Return the pickle in `data`. A pickle begins with 0x80, which base64 cannot contain."""
    for _ in range(3):
        if isinstance(data, bytes) and data[:1] == b"\x80":
            return data
        try:
            data = base64.b64decode(data, validate=True)
        except (ValueError, binascii.Error):
            break
    raise BadRequestError("serialized_named_tensors: expected a pickle in base64, once or twice.")


# -- payloads -------------------------------------------------------------------------------------------------


def _pairs(payload: Any, rank: int) -> list[tuple[str, TensorHandle]]:
    if not isinstance(payload, list):
        raise BadRequestError("The payload is not a list of (name, tensor). Is its load_format right?")
    named: list[tuple[str, TensorHandle]] = []
    for entry in payload:
        if not (isinstance(entry, (tuple, list)) and len(entry) == 2 and isinstance(entry[0], str)):
            raise BadRequestError(f"Entry {len(named)} of the payload is not a pair (name, tensor).")
        name, value = tensor_name(entry[0]), entry[1]
        if isinstance(value, Record) and value.name == "LocalSerializedTensor":
            value = _value_of_rank(name, value.fields.get("values"), rank)
        if not isinstance(value, TensorHandle):
            raise BadRequestError(f"'{name}' is not a tensor.")
        named.append((name, value))
    return named


def _value_of_rank(name: str, values: Any, rank: int) -> Any:
    """Return the tensor of trainer rank `rank`. The tensor is a nested pickle, which may not contain another pickle."""
    if not isinstance(values, list) or not all(isinstance(value, bytes) for value in values):
        raise BadRequestError(f"'{name}': the values of its LocalSerializedTensor are not a list of pickles.")
    if rank >= len(values):
        raise BadRequestError(f"'{name}' has {len(values)} values, but this is tensor-parallel rank {rank}.")
    try:
        return read_pickle(decoded(values[rank]), GLOBALS)
    except BadRequestError as error:
        raise BadRequestError(f"'{name}', value {rank}: {error}") from None


def _bucket(payload: Any) -> list[tuple[str, TensorHandle]]:
    flat = payload.get("flattened_tensor") if isinstance(payload, dict) else None
    entries = payload.get("metadata") if isinstance(payload, dict) else None
    if not isinstance(flat, TensorHandle) or not isinstance(entries, list):
        raise BadRequestError(
            'A payload of load_format="flattened_bucket" is {"flattened_tensor": tensor, "metadata": [...]}.'
        )
    if len(flat.shape) != 1 or (flat.stride != [1] and flat.shape[0] > 1):
        raise BadRequestError(
            f"The bucket's tensor has shape {flat.shape} and stride {flat.stride}, not one dimension."
        )
    return [_from_bucket(flat, entry) for entry in entries]


def _from_bucket(flat: TensorHandle, entry: Any) -> tuple[str, TensorHandle]:
    """Return one tensor of a bucket, as a view into its memory."""
    fields = entry.fields if isinstance(entry, Record) and entry.name == "FlattenedTensorMetadata" else {}
    name, dtype = fields.get("name"), fields.get("dtype")
    if not isinstance(name, str) or not isinstance(dtype, _Dtype):
        raise BadRequestError(
            "An entry of the bucket's metadata is no FlattenedTensorMetadata with a name and a dtype."
        )
    name = tensor_name(name)
    try:
        shape = _ints(fields.get("shape"))
        start, end = _int(fields.get("start_idx")), _int(fields.get("end_idx"))
    except ValueError as error:
        raise BadRequestError(f"'{name}' in the bucket: {error}.") from None
    unit, itemsize = ITEMSIZES[flat.dtype], ITEMSIZES[dtype.name]
    if flat.dtype not in ("uint8", dtype.name):
        raise BadRequestError(f"'{name}' is {dtype.name}, but the bucket is {flat.dtype}: only bytes may hold others.")
    if (end - start) * unit != math.prod(shape) * itemsize or end > flat.shape[0]:
        raise BadRequestError(
            f"'{name}', {dtype.name} {shape}, does not fill elements {start} to {end} of a bucket of {flat.shape[0]}."
        )
    offset = (flat.storage_offset + start) * unit
    if offset % itemsize:
        raise BadRequestError(f"'{name}' begins at byte {offset} of its storage, which {dtype.name} cannot.")
    stride = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return name, TensorHandle(
        allocation=flat.allocation, dtype=dtype.name, shape=shape, stride=stride, storage_offset=offset // itemsize
    )


# -- the meaning of a payload's globals -----------------------------------------------------------------------


@dataclass(frozen=True)
class _Dtype:
    name: str


@dataclass(frozen=True)
class _Storage:
    """A CPU storage. `dtype` is set for a typed storage, else None."""

    allocation: Allocation
    dtype: str = ""


@dataclass(frozen=True)
class _Class:
    """A class of tensors or storages. Only its name is used."""


def _rebuild_tensor(_cls: Any, storage: Any, metadata: Any) -> TensorHandle:
    if not isinstance(storage, _Storage) or not storage.dtype or not isinstance(metadata, tuple):
        raise ValueError("rebuild_tensor needs a typed storage and its metadata")
    offset, shape, stride, _requires_grad = metadata
    return _handle(storage.allocation, storage.dtype, shape, stride, offset)


def _rebuild_typed_storage(storage: Any, dtype: Any) -> _Storage:
    if not isinstance(storage, _Storage) or not isinstance(dtype, _Dtype):
        raise ValueError("rebuild_typed_storage needs a storage and a dtype")
    return _Storage(storage.allocation, dtype.name)


def _rebuild_storage_filename(_cls: Any, _manager: Any, handle: Any, size: Any, dtype: Any = None) -> _Storage:
    """Return the storage of a file in /dev/shm. `handle` is "/" followed by the file's name.

    The owner unlinks the file through the manager process.
    """
    if not isinstance(handle, bytes) or not handle.startswith(b"/"):
        raise ValueError("the handle of a shared-memory file is not a name")
    kind = dtype.name if isinstance(dtype, _Dtype) else ""
    allocation = Allocation(
        id=uuid.uuid4().hex,
        kind="shm_name",
        name=shown(handle[1:256].decode("latin1")),
        nbytes=_int(size) * (ITEMSIZES[kind] if kind else 1),
        storage_offset_bytes=_SHM_HEADER_BYTES,
    )
    return _Storage(allocation, kind)


def _rebuild_storage_empty(_cls: Any) -> _Storage:
    return _Storage(Allocation(id=uuid.uuid4().hex, kind="shm_name", nbytes=0))


def _rebuild_storage_fd(*_arguments: Any) -> _Storage:
    raise ValueError(_FILE_SYSTEM_REMEDY)


def _load_from_bytes(*_arguments: Any) -> None:
    raise ValueError(
        "the tensor's values are inside the pickle. Serialize with torch.multiprocessing's ForkingPickler "
        "(SGLang's MultiprocessingSerializer), or use verl_server's own client"
    )


def rebuild_cuda_tensor(
    _cls: Any,
    shape: Any,
    stride: Any,
    offset: Any,
    _storage_cls: Any,
    dtype: Any,
    device: Any,
    handle: Any,
    nbytes: Any,
    storage_offset_bytes: Any,
    _requires_grad: Any,
    ref_counter_handle: Any,
    ref_counter_offset: Any,
    event_handle: Any,
    event_sync_required: Any,
) -> TensorHandle:
    """Return the handle of a CUDA tensor.

    The device is identified by the UUID that SGLang sends, and not by the sender's device index.
    """
    if not isinstance(dtype, _Dtype):
        raise ValueError("rebuild_cuda_tensor needs a dtype")
    empty = handle is None or nbytes == 0
    allocation = Allocation(
        id=uuid.uuid4().hex,
        kind="cuda",
        nbytes=0 if empty else _int(nbytes),
        device_uuid=shown(device).removeprefix("GPU-") if isinstance(device, str) else "",
        handle=b"" if empty else _bytes(handle, 1 << 16),
        storage_offset_bytes=0 if empty else _int(storage_offset_bytes),
        ref_counter_handle=b"" if empty else _counter_name(ref_counter_handle),
        ref_counter_offset=0 if empty else _int(ref_counter_offset, _CUDA_COUNTERS),
        event_handle=b"" if empty else _bytes(event_handle, 64),
        event_sync_required=bool(event_sync_required is True and not empty),
    )
    return _handle(allocation, dtype.name, shape, stride, offset)


def _rebuild_parameter(data: Any, _requires_grad: Any, _hooks: Any) -> TensorHandle:
    if not isinstance(data, TensorHandle):
        raise ValueError("_rebuild_parameter needs a tensor")
    return data


def _handle(allocation: Allocation, dtype: str, shape: Any, stride: Any, offset: Any) -> TensorHandle:
    sizes, strides = _ints(shape), _ints(stride)
    return TensorHandle(allocation=allocation, dtype=dtype, shape=sizes, stride=strides, storage_offset=_int(offset))


def tensor_name(text: str) -> str:
    """Return `text` if it can be a parameter's name. Raise BadRequestError otherwise."""
    if len(text) > 1000 or not text.isprintable():
        raise BadRequestError(f"'{shown(text)}' is no name of a parameter.")
    return text


def _int(value: Any, limit: int = 2**62) -> int:
    if type(value) is not int or not 0 <= value < limit:
        raise ValueError(f"a number that is no integer from 0 to {limit - 1}")
    return value


def _ints(value: Any) -> list[int]:
    """Return the integers of a shape or stride.

    The length is checked first, because a payload may repeat a long tuple.
    """
    if not isinstance(value, (tuple, list)) or len(value) > _MAX_DIM:
        raise ValueError(f"a shape or stride that is no tuple of at most {_MAX_DIM} integers")
    return [_int(number) for number in value]


def _bytes(value: Any, limit: int) -> bytes:
    if not isinstance(value, bytes) or len(value) > limit:
        raise ValueError(f"a handle that is not at most {limit} bytes")
    return value


def _counter_name(value: Any) -> bytes:
    """Return the name of the file of reference counts. The reader writes to this file when it closes the memory."""
    name = _bytes(value, 255)
    if name[:1] != b"/" or b"/" in name[1:] or b"\0" in name:
        raise ValueError("the file of reference counts is not named as one in /dev/shm")
    return name


_REDUCTIONS = {
    "rebuild_tensor": Function(_rebuild_tensor),
    "rebuild_typed_storage": Function(_rebuild_typed_storage),
    "rebuild_storage_filename": Function(_rebuild_storage_filename),
    "rebuild_storage_fd": Function(_rebuild_storage_fd),
    "rebuild_storage_empty": Function(_rebuild_storage_empty),
    "rebuild_cuda_tensor": Function(rebuild_cuda_tensor),
}
GLOBALS: Globals = {
    **{("torch.multiprocessing.reductions", name): function for name, function in _REDUCTIONS.items()},
    # SGLang's variant of rebuild_cuda_tensor, by the paths it has had.
    ("sglang.srt.utils.patch_torch", "_rebuild_cuda_tensor_modified"): Function(rebuild_cuda_tensor),
    ("sglang.srt.patch_torch", "_rebuild_cuda_tensor_modified"): Function(rebuild_cuda_tensor),
    ("torch._utils", "_rebuild_parameter"): Function(_rebuild_parameter),
    # Plain pickle writes a tensor this way. The entry is here so that the error names the remedy.
    ("torch._utils", "_rebuild_tensor_v2"): _Class(),
    ("torch.storage", "_load_from_bytes"): Function(_load_from_bytes),
    ("torch", "Size"): Function(lambda sizes=(): tuple(_ints(sizes))),
    **{("torch", name): _Dtype(name) for name in ITEMSIZES},
    **{("torch", name): _Class() for name in ("Tensor", "UntypedStorage")},
    **{("torch.storage", name): _Class() for name in ("TypedStorage", "UntypedStorage")},
    ("torch.nn.parameter", "Parameter"): _Class(),
    ("collections", "OrderedDict"): Function(lambda: {}),  # the hooks of a parameter that has none
    ("multiprocessing.resource_sharer", "DupFd"): RecordClass("DupFd"),
    **{
        (module, name): RecordClass(name)
        for name in ("LocalSerializedTensor", "FlattenedTensorMetadata")
        for module in (
            "sglang.srt.model_executor.model_runner",
            "sglang.srt.model_executor.model_runner_components.weight_updater",
            "sglang.srt.weight_sync.tensor_bucket",
        )
    },
}
"""The globals that a payload may contain."""

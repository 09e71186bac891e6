"""SGLang's payloads for `update_weights_from_tensor`, written in the trainer's processes.

A payload is a pickle of handles. The server parses it as data (`weight_sync.sglang`), so the classes here carry the
module names that SGLang's pickles have. CPU tensors are moved to shared memory that has a name, because the server is
not a child of the trainer's process. CUDA tensors name their GPU by its UUID.
"""

from __future__ import annotations

import base64
import io
import threading
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing as multiprocessing
from torch.distributed.tensor import DTensor
from torch.multiprocessing import reductions

_BUCKETS = "sglang.srt.weight_sync.tensor_bucket"
_sharing_lock = threading.Lock()
"""Lock that is held while the process's sharing strategy is changed."""


@dataclass
class LocalSerializedTensor:
    """One tensor, with one pickle for each tensor-parallel rank of the server."""

    values: list[bytes]
    """One pickled tensor for each rank."""


@dataclass
class FlattenedTensorMetadata:
    """The place of one tensor in a bucket."""

    name: str
    """Hugging Face name."""
    shape: torch.Size
    """Shape of the tensor."""
    dtype: torch.dtype
    """Dtype of the tensor."""
    start_idx: int
    """First byte in the bucket."""
    end_idx: int
    """Byte after the last one."""
    numel: int
    """Number of bytes."""


@dataclass
class UpdateWeightsFromTensorReqInput:
    """An update, which adapters pass from `update_weights` to their HTTP call."""

    serialized_named_tensors: list[bytes | str]
    """One payload for each tensor-parallel rank."""
    load_format: str | None = None
    """`load_format` of `/update_weights_from_tensor`."""
    flush_cache: bool = True
    """`flush_cache` of `/update_weights_from_tensor`."""
    abort_all_requests: bool = False
    """`abort_all_requests` of `/update_weights_from_tensor`."""
    weight_version: str | None = None
    """`weight_version` of `/update_weights_from_tensor`."""


LocalSerializedTensor.__module__ = "sglang.srt.model_executor.model_runner"
FlattenedTensorMetadata.__module__ = _BUCKETS


class FlattenedTensorBucket:
    """Tensors of any dtypes in one tensor of bytes."""

    supports_multi_dtypes = True

    def __init__(self, named_tensors: list[tuple[str, torch.Tensor]]) -> None:
        """Copy the tensors, which are on one device. Raise ValueError for an empty list."""
        if not named_tensors:
            raise ValueError("A bucket needs at least one tensor.")
        parts = [tensor.detach().reshape(-1).view(torch.uint8) for _, tensor in named_tensors]
        self._flattened = torch.cat(parts)
        self._metadata, start = [], 0
        for (name, tensor), part in zip(named_tensors, parts, strict=True):
            end = start + part.numel()
            self._metadata.append(FlattenedTensorMetadata(name, tensor.shape, tensor.dtype, start, end, part.numel()))
            start = end

    def get_flattened_tensor(self) -> torch.Tensor:
        """Return all tensors as one uint8 tensor of shape [bytes]."""
        return self._flattened

    def get_metadata(self) -> list[FlattenedTensorMetadata]:
        """Return the place of each tensor."""
        return self._metadata


class _Pickler(ForkingPickler):
    """Pickles tensors as handles."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_cuda:
            return NotImplemented
        function, arguments = reductions.reduce_tensor(value)  # type: ignore[no-untyped-call]
        if function is not reductions.rebuild_cuda_tensor:
            return function, arguments
        device = arguments[6]
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        return _rebuild_cuda_tensor_modified, (*arguments[:6], uuid, *arguments[7:])


def _rebuild_cuda_tensor_modified(*arguments: Any) -> None:
    """Represent the function in SGLang's pickles that rebuilds a CUDA tensor, whose GPU is named by its UUID."""
    raise RuntimeError(
        "A payload of handles was unpickled in this process, which cannot open them. Send it to the server's route "
        "/update_weights_from_tensor instead."
    )


_rebuild_cuda_tensor_modified.__module__ = "sglang.srt.utils.patch_torch"


class MultiprocessingSerializer:
    """Writes payloads."""

    @staticmethod
    def serialize(obj: Any, output_str: bool = False) -> bytes | str:
        """Return `obj` pickled, with tensors as handles; as base64 text if `output_str`.

        The tensors must stay alive and unchanged until the server has answered.
        """
        buffer = io.BytesIO()
        with _sharing_lock:
            strategy = multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
            multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
            try:
                _Pickler(buffer).dump(obj)
            finally:
                multiprocessing.set_sharing_strategy(strategy)  # type: ignore[no-untyped-call]
        data = buffer.getvalue()
        return base64.b64encode(data).decode("ascii") if output_str else data


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor. For a DTensor this is a collective call."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


async def update_weights(
    engine: Any,
    params_batch: list[tuple[str, torch.Tensor]],
    device_mesh_key: str,
    device_mesh: Any,
    load_format: str | None = None,
) -> Any:
    """Push one batch of tensors: every rank of the mesh dimension writes handles, its first rank posts them all.

    Return the engine's answer on the first rank, None on the others. `engine` needs `update_weights_from_tensor`.
    """
    mesh = device_mesh[device_mesh_key]
    size, is_first = mesh.size(), mesh.get_local_rank() == 0
    tensors = [(name, full_tensor(tensor.detach())) for name, tensor in params_batch]
    own = [(name, MultiprocessingSerializer.serialize(tensor)) for name, tensor in tensors]
    parts: list[Any] | None = [None] * size if is_first else None
    first_rank = int(mesh.mesh.flatten()[0])
    torch.distributed.gather_object(own, parts, dst=first_rank, group=mesh.get_group())
    try:
        if parts is None:
            return None
        merged = [(name, LocalSerializedTensor([part[i][1] for part in parts])) for i, (name, _) in enumerate(own)]
        payload = MultiprocessingSerializer.serialize(merged)
        request = UpdateWeightsFromTensorReqInput([payload] * size, load_format=load_format)
        return await engine.update_weights_from_tensor(request)
    finally:
        # Gathered tensors exist in this call only: every rank holds its own until the server has read them.
        torch.distributed.barrier(group=mesh.get_group())

"""Converts tensors into the pickled handles that SGLang and vLLM read.

`weight_sync.sglang` and `.vllm` parse the same formats.

The pickles contain names of functions and CUDA IPC handles. The receiving server decides which functions it calls.
"""

from __future__ import annotations

import base64
import io
import pickle
from collections.abc import Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import get_sharing_strategy, reductions

from verl_server.errors import BadRequestError

_PROTOCOL = 3
"""Has the names of functions as lines, and bytes as bytes. Protocol 2 writes bytes as a call of `_codecs.encode`. A
genuine SGLang server does not permit this function, and ends."""
_DEVICE = 6
"""Index of the device among the arguments of torch's `rebuild_cuda_tensor`."""
_TORCH_REBUILD = b"ctorch.multiprocessing.reductions\nrebuild_cuda_tensor\n"
_SGLANG_REBUILD = b"csglang.srt.utils.patch_torch\n_rebuild_cuda_tensor_modified\n"
"""Name of SGLang's function, which takes the UUID of the GPU instead of the index that differs between processes."""


def whole(tensors: Sequence[tuple[str, Any]]) -> list[tuple[str, Tensor]]:
    """Return the tensors contiguous and without gradients.

    Raise BadRequestError for a value that is no whole tensor.
    """
    for name, tensor in tensors:
        if not isinstance(tensor, Tensor) or hasattr(tensor, "full_tensor"):
            raise BadRequestError(
                f"'{name}' is a {type(tensor).__name__}. A server of another project takes whole tensors: gather the "
                "shards with full_tensor() first."
            )
    return [(name, tensor.detach().contiguous()) for name, tensor in tensors]


def vllm_handles(tensors: Sequence[tuple[str, Tensor]]) -> str:
    """Return vLLM's `ipc_handles_pickled`: for each tensor the UUID of its GPU and the arguments of torch's rebuild."""
    handles = []
    for name, tensor in tensors:
        if not tensor.is_cuda:
            raise BadRequestError(
                f"'{name}' is on the CPU, but vLLM reads tensors from CUDA memory only. Push CUDA tensors, or save a "
                "checkpoint and call update_weights_from_disk."
            )
        _, arguments = reductions.reduce_tensor(tensor)  # type: ignore[no-untyped-call]
        handles.append({gpu_uuid(tensor.device): tuple(arguments)})
    return base64.b64encode(pickle.dumps(handles)).decode()


def sglang_payload(tensors: Sequence[tuple[str, Tensor]]) -> str:
    """Return one entry of SGLang's `serialized_named_tensors`. A receiver may open the entry once only."""
    strategy = get_sharing_strategy()  # type: ignore[no-untyped-call]
    if strategy != "file_system" and any(not tensor.is_cuda for _, tensor in tensors):
        raise BadRequestError(
            "CPU tensors reach another project's server through files in /dev/shm only: call "
            "torch.multiprocessing.set_sharing_strategy('file_system') first, or push CUDA tensors."
        )
    buffer = io.BytesIO()
    _SglangPickler(buffer, _PROTOCOL).dump(list(tensors))
    return base64.b64encode(buffer.getvalue().replace(_TORCH_REBUILD, _SGLANG_REBUILD)).decode()


class _SglangPickler(ForkingPickler):
    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, Tensor) or not obj.is_cuda:
            return NotImplemented
        rebuild, arguments = reductions.reduce_tensor(obj)  # type: ignore[no-untyped-call]
        numbered = list(arguments)
        numbered[_DEVICE] = gpu_uuid(obj.device)
        return rebuild, tuple(numbered)


def gpu_uuid(device: torch.device) -> str:
    return str(torch.cuda.get_device_properties(device).uuid)

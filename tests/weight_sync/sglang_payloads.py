"""Makes payloads as SGLang's clients do, for tests of the reader. `stub_modules` stands in for SGLang's modules."""

from __future__ import annotations

import base64
import io
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from verl_server.compat.sglang import weight_sync

OLD = "sglang.srt.model_executor.model_runner"
BUCKETS = "sglang.srt.weight_sync.tensor_bucket"
UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater"


class LocalSerializedTensor(weight_sync.LocalSerializedTensor):
    """A class of its own, because `stub_modules` changes its module."""


class FlattenedTensorMetadata(weight_sync.FlattenedTensorMetadata):
    """A class of its own, because `stub_modules` changes its module."""


def _rebuild_cuda_tensor_modified(*args: Any) -> None:
    raise AssertionError("nothing is unpickled")


class CudaTensor:
    """An object that pickles like a CUDA tensor, without a GPU."""

    def __init__(self, rebuild: Any, *args: Any) -> None:
        self.reduced = (rebuild, args)

    def __reduce__(self) -> Any:
        return self.reduced


@contextmanager
def stub_modules(**places: Any) -> Iterator[None]:
    """Make each object of `places` ({"module:name": object}) importable where SGLang defines it."""
    added = []
    try:
        for place, value in places.items():
            path, name = place.split(":")
            parts = path.split(".")
            for end in range(1, len(parts) + 1):
                module = ".".join(parts[:end])
                if module not in sys.modules:
                    sys.modules[module] = types.ModuleType(module)
                    added.append(module)
            setattr(sys.modules[path], name, value)
            value.__module__, value.__qualname__ = path, name
        yield
    finally:
        for module in added:
            del sys.modules[module]


def dumps(value: Any, protocol: int | None = None) -> bytes:
    """Pickle `value` as SGLang's MultiprocessingSerializer does, without its base64."""
    buffer = io.BytesIO()
    ForkingPickler(buffer, protocol).dump(value)
    return buffer.getvalue()


def serialized(value: Any) -> str:
    return base64.b64encode(dumps(value)).decode()


def bucket(named_tensors: list[tuple[str, torch.Tensor]], *, count_bytes: bool = True) -> dict[str, Any]:
    """Return a flattened bucket: bytes of any dtypes (SGLang 0.5.23), or elements of one dtype (earlier versions)."""
    parts = [tensor.reshape(-1) for _, tensor in named_tensors]
    flat = torch.cat([part.view(torch.uint8) for part in parts] if count_bytes else parts)
    metadata, start = [], 0
    for name, tensor in named_tensors:
        end = start + (tensor.nbytes if count_bytes else tensor.numel())
        metadata.append(FlattenedTensorMetadata(name, tensor.shape, tensor.dtype, start, end, tensor.numel()))
        start = end
    return {"flattened_tensor": flat, "metadata": metadata}

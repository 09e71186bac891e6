"""`MODULES`: module of SGLang -> the names that the stand-in for it has.

Read from what verl 0.9.1 (`http_server_engine`, `sglang_rollout`), slime 0.3.1 (`sglang_engine`, `arguments`,
`megatron_utils.sglang`) and SGLang 0.5.23's own `http_server_engine` import. Several places of one name are places in
older and newer versions of SGLang.
"""

from __future__ import annotations

from typing import Any

from verl_server.compat.sglang.launch import kill_process_tree, launch_server
from verl_server.compat.sglang.server_args import ServerArgs
from verl_server.compat.sglang.weight_sync import (
    FlattenedTensorBucket,
    FlattenedTensorMetadata,
    LocalSerializedTensor,
    MultiprocessingSerializer,
    UpdateWeightsFromTensorReqInput,
    _rebuild_cuda_tensor_modified,
    full_tensor,
    update_weights,
)

SGLANG_VERSION = "0.5.23"
"""The version whose wire the server speaks. Adapters compare it."""


class EngineBase:
    """The base class of adapters. It requires no methods: adapters of different ages have different ones."""


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing: the server sets up its own processes."""


def _is_cuda() -> bool:
    """Return True if PyTorch can use a GPU."""
    import torch

    return torch.cuda.is_available()


def _same(value: Any) -> Any:
    return value


def _ssl_verify(server_args: Any) -> bool:
    """Return whether clients verify certificates. The server speaks plain HTTP, so the answer has no effect."""
    return True


_TENSOR_CLASSES = {
    "LocalSerializedTensor": LocalSerializedTensor,
    "FlattenedTensorBucket": FlattenedTensorBucket,
    "FlattenedTensorMetadata": FlattenedTensorMetadata,
}

MODULES: dict[str, dict[str, Any]] = {
    "sglang": {"__version__": SGLANG_VERSION},
    "sglang.srt.server_args": {"ServerArgs": ServerArgs},
    "sglang.srt.constants": {
        "GPU_MEMORY_TYPE_KV_CACHE": "kv_cache",
        "GPU_MEMORY_TYPE_WEIGHTS": "weights",
        "GPU_MEMORY_TYPE_CUDA_GRAPH": "cuda_graph",
    },
    "sglang.srt.entrypoints.EngineBase": {"EngineBase": EngineBase},
    "sglang.srt.entrypoints.engine": {"_set_envs_and_config": _nothing},
    "sglang.srt.entrypoints.http_server": {"launch_server": launch_server},
    "sglang.srt.managers.io_struct": {"UpdateWeightsFromTensorReqInput": UpdateWeightsFromTensorReqInput},
    "sglang.srt.model_executor.model_runner": _TENSOR_CLASSES,
    "sglang.srt.model_executor.model_runner_components.weight_updater": {
        "LocalSerializedTensor": LocalSerializedTensor
    },
    "sglang.srt.weight_sync.tensor_bucket": {
        "FlattenedTensorBucket": FlattenedTensorBucket,
        "FlattenedTensorMetadata": FlattenedTensorMetadata,
    },
    "sglang.srt.weight_sync.utils": {
        "update_weights": update_weights,
        "_preprocess_tensor_for_update_weights": full_tensor,
    },
    "sglang.srt.utils": {
        "MultiprocessingSerializer": MultiprocessingSerializer,
        "kill_process_tree": kill_process_tree,
        "is_cuda": _is_cuda,
        "assert_pkg_version": _nothing,
        "set_prometheus_multiproc_dir": _nothing,
        "set_ulimit": _nothing,
    },
    "sglang.srt.utils.patch_torch": {
        "monkey_patch_torch_reductions": _nothing,
        "_rebuild_cuda_tensor_modified": _rebuild_cuda_tensor_modified,
    },
    "sglang.srt.patch_torch": {"monkey_patch_torch_reductions": _nothing},
    "sglang.srt.arg_groups.overrides": {"resolving_view": _same},
    "sglang.srt.arg_groups.serving_hook": {"ssl_verify_of": _ssl_verify},
}

"""`SleepingMemory`: SGLang's memory saver as the `ReleasableMemory` of a worker.

The memory saver frees pages and maps others at the same addresses later, so CUDA graphs stay valid. Contents are lost,
and this class keeps what must not be lost: tensors that are no parameters, such as tables of the rotary embedding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from verl_server.backends.sglang.live_model import SglangModel


class SleepingMemory:
    def __init__(self, scheduler: Any, live: SglangModel) -> None:
        """`scheduler` is a `HeldScheduler` with `enable_memory_saver`."""
        self._scheduler, self._live = scheduler, live
        self._saver = scheduler.memory_saver_adapter
        self._contents: dict[str, Tensor] = {}
        """Contents of released tensors, in host memory."""
        self._keeps = False

    def check_release(self, tags: list[str]) -> None:
        """Do nothing: every tag can be released alone."""

    def release_weights(self, keep_contents: bool | None = None) -> None:
        self._keeps = bool(keep_contents)
        self._contents = {
            name: tensor.cpu()
            for name, tensor in self._live.tensors().items()
            if self._keeps or not isinstance(_held(self._live.model, name), torch.nn.Parameter)
        }
        self._saver.pause("weights")

    def resume_weights(self) -> bool:
        self._saver.resume("weights")
        live = self._live.tensors()
        for name, contents in self._contents.items():
            live[name].copy_(contents)
        self._contents = {}
        return self._keeps

    def release_kv_cache(self) -> None:
        self._scheduler.drop_cache()
        self._saver.pause("kv_cache")

    def resume_kv_cache(self) -> None:
        self._saver.resume("kv_cache")

    def release_cuda_graphs(self) -> None:
        self._saver.pause("cuda_graph")

    def resume_cuda_graphs(self) -> None:
        self._saver.resume("cuda_graph")


def _held(model: torch.nn.Module, name: str) -> object:
    path, _, attribute = name.rpartition(".")
    return getattr(model.get_submodule(path), attribute)

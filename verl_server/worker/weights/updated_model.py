"""`UpdatedModel`: the interface through which weight updates use a rank's model.

The embedded engine's `ModelRunner` implements it. `backends` has the implementations for other engines.
"""

from __future__ import annotations

from typing import Protocol

import torch

from verl_server.models.loader import WeightMap


class ReleasableMemory(Protocol):
    """GPU memory that a model frees while its trainer needs the GPU, and allocates again at the same addresses."""

    def check_release(self, tags: list[str]) -> None:
        """Raise BadRequestError if the memory of `tags` cannot be released together."""

    def release_weights(self, keep_contents: bool | None = None) -> None:
        """Free the weights' memory.

        With `keep_contents`, keep the contents in host memory (None: by the server's setting).
        """

    def resume_weights(self) -> bool:
        """Allocate the weights again. Return True if they have the contents from before the release."""

    def release_kv_cache(self) -> None: ...

    def resume_kv_cache(self) -> None: ...

    def release_cuda_graphs(self) -> None: ...

    def resume_cuda_graphs(self) -> None: ...


class UpdatedModel(Protocol):
    @property
    def weight_map(self) -> WeightMap: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def memory(self) -> ReleasableMemory | None:
        """The memory that can be released. None if this model cannot release memory."""

    def synchronize(self) -> None:
        """Wait until the device has finished all copies."""

"""`UpdatedModel`: what weight updates need of a rank's model.

The embedded engine's `ModelRunner` is one. The workers of other engines have theirs in `backends`.
"""

from __future__ import annotations

from typing import Protocol

import torch

from verl_server.models.loader import WeightMap


class UpdatedModel(Protocol):
    @property
    def weight_map(self) -> WeightMap: ...

    @property
    def device(self) -> torch.device: ...

    def synchronize(self) -> None:
        """Wait until the device has finished all copies."""

    def check_release(self) -> None:
        """Raise BadRequestError if memory cannot be released at all."""

    def release_weights(self, keep_contents: bool | None = None) -> None: ...

    def resume_weights(self) -> bool:
        """Allocate the weights again. Return True if a backup restored their contents."""

    def release_kv_cache(self) -> None: ...

    def resume_kv_cache(self) -> None: ...

    def release_cuda_graphs(self) -> None: ...

    def resume_cuda_graphs(self) -> None: ...

"""Registers a `ServerAdapter` that does nothing, for replicas whose weights no trainer updates."""

from __future__ import annotations

from typing import Any

from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout


class IdleAdapter(BaseRollout):
    """The rollout half of a worker that only holds a GPU."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        self.replica_rank, self.is_leader_rank = replica_rank, True

    async def resume(self, tags: list[str]) -> None:
        pass

    async def release(self) -> None:
        pass

    async def update_weights(self, weights: Any, **_: Any) -> None:
        pass


_ROLLOUT_REGISTRY[("verl_server", "async")] = "idle_adapter.IdleAdapter"

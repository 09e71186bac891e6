"""`FSDPEngineWithShards`: verl's FSDP engine, whose weights the server reads shard by shard, without gathers.

verl selects it with `VERL_ENGINE_VENDOR=verl_server`, for every model of the job. Only `get_per_tensor_param` differs
from the parent. If a caller iterates its result, the tensors are the parent's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from verl.utils.device import get_device_id, get_device_name
from verl.utils.fsdp_utils import fsdp_version
from verl.utils.model import convert_weight_keys
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from verl_server.integrations.verl.weight_push import Named, ShardedWeights


@EngineRegistry.register(
    model_type="language_model", backend=["fsdp", "fsdp2"], device=["cuda", "cpu"], vendor="verl_server"
)
class FSDPEngineWithShards(FSDPEngineWithLMHead):
    """verl's FSDP engine. With FSDP2, `get_per_tensor_param` returns `ShardedWeights`."""

    def get_per_tensor_param(
        self, layered_summon: bool = False, base_sync_done: bool = False, **kwargs: Any
    ) -> tuple[Iterable[Named], dict[str, Any] | None]:
        """Return the weights, and the configuration of a LoRA adapter if the weights are an adapter's.

        If the parent must compute the weights (adapters, quantization, packed experts, FSDP1), they are the parent's.
        """

        def gathered() -> tuple[Iterable[Named], dict[str, Any] | None]:
            result: tuple[Iterable[Named], dict[str, Any] | None] = super(
                FSDPEngineWithShards, self
            ).get_per_tensor_param(layered_summon=layered_summon, base_sync_done=base_sync_done, **kwargs)
            return result

        if not self._serves_its_parameters():
            return gathered()
        # FSDP2 reshards parameters that a forward pass has left gathered before it lists them here.
        parameters: dict[str, torch.Tensor] = convert_weight_keys(self.module.state_dict(), self.module)
        device = get_device_name()
        stay = not self._is_offload_param and all(value.device.type == device for value in parameters.values())
        shards = list(parameters.items()) if stay else _on_device(parameters)
        return ShardedWeights(shards, lambda: gathered()[0], stay_in_place=stay), None

    def _serves_its_parameters(self) -> bool:
        """Return True if the served weights are the module's parameters under their names."""
        if fsdp_version(self.module) != 2 or hasattr(self.module, "peft_config") or self._qat_enabled:
            return False
        return not any(name.endswith(".experts.gate_up_proj") for name, _ in self.module.named_parameters())


def _on_device(parameters: dict[str, torch.Tensor]) -> Iterator[Named]:
    """Yield offloaded parameters on the rank's device, one after the other."""
    for name, value in parameters.items():
        yield name, value.to(get_device_id(), non_blocking=True) if isinstance(value, DTensor) else value

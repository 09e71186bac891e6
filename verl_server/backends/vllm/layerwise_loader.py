"""`LayerwiseLoader`: installs pushed tensors in vLLM's model through vLLM's own layerwise reload.

The reload loads a module as soon as all of its tensors have arrived, processes it as at the start (fusing, sharding,
repacking), and copies the result into the live storage, whose addresses CUDA graphs use. `ServedModel` owns the loader.
The loader is used for the modules that a `LoadPlan` cannot write by copies.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from verl_server.backends.vllm.live_model import LiveModel

logger = logging.getLogger(__name__)


class LayerwiseLoader:
    """The `WholeTensorLoader` that loads modules through vLLM's layerwise reload."""

    def __init__(self, live: LiveModel, groups: Mapping[str, str]) -> None:
        """Take `groups`: tensor -> name of the group of vLLM's modules that are loaded together with the tensor."""
        self._live, self._group_of = live, groups
        self.names = frozenset(groups)
        self.unproved = ""
        """The reason why no update may be installed at all, empty if updates may be installed."""
        self._members: dict[str, set[str]] = {}
        for name, group in groups.items():
            self._members.setdefault(group, set()).add(name)
        self._rebuilt = {group: list(_packing_methods(live, group)) for group in self._members}
        """Methods whose kernel must be created again at each reload, by group."""
        self._held: dict[str, dict[str, Tensor]] = {}
        """Copies of the tensors of modules that are still incomplete, by group and name."""

    @property
    def refusal(self) -> str:
        if self.unproved:
            return self.unproved
        moved = self._live.moved()
        return f"vLLM has replaced the storage of {moved} since the start. Restart the server." if moved else ""

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        began = time.perf_counter()
        try:
            self._live.runner.reload_weights(weights_iterator=self._whole_modules(tensors))
        except BaseException:
            self._held = {}
            # Otherwise the next reload would go on where this one ended, with tensors of this one.
            finalize_layerwise_reload(self._live.model, self._live.runner.model_config)
            raise
        logger.debug("vLLM's reload took %.0f ms.", 1e3 * (time.perf_counter() - began))

    def lacking(self, names: Iterable[str]) -> list[str]:
        given = set(names)
        groups = dict.fromkeys(self._group_of[name] for name in given & self.names)
        return [name for group in groups for name in sorted(self._members[group] - given)]

    def _whole_modules(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of each complete module. Hold copies of the tensors of incomplete modules.

        vLLM would fill a missing tensor of a module with whatever its memory contains.
        """
        own: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors:
            group = self._group_of[name]
            own.setdefault(group, {})[name] = tensor
            come = self._held.get(group, {}) | own[group]
            if come.keys() == self._members[group]:
                del own[group]
                self._held.pop(group, None)
                for method in self._rebuilt[group]:
                    method.moe_kernel = None
                yield from come.items()
        for group, come in own.items():
            self._held.setdefault(group, {}).update((name, tensor.clone()) for name, tensor in come.items())


def _packing_methods(live: LiveModel, group: str) -> Iterator[Any]:
    """Yield the methods in `group` that pack weights when they create their kernel, and not at a reload.

    In vLLM 0.32, the methods of experts on a CPU are such methods. A captured CUDA graph would keep the old kernel.
    """
    for path, module in live.model.named_modules() if live.device.type == "cpu" else ():
        method = getattr(module, "quant_method", None)
        if f"{path}.".startswith(f"{group}.") and hasattr(method, "moe_kernel"):
            yield method

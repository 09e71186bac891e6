"""`LayerwiseLoader`: installs pushed tensors in vLLM's model through vLLM's own layerwise reload.

The reload loads a module as soon as all of its tensors have come, processes it as at the start (fusing, sharding,
repacking), and copies the result into the live storage, which CUDA graphs know. `ServedModel` owns the loader, and
proves before the server is ready that a reload restores what the first load made.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

from verl_server.weight_sync.checksum import tensor_checksums

logger = logging.getLogger(__name__)


class LayerwiseLoader:
    """The `WholeTensorLoader` that loads modules through vLLM's layerwise reload."""

    def __init__(self, model_runner: Any, modules: dict[str, str]) -> None:
        """`modules`: parameter -> name of the module of vLLM into which it is fused with others."""
        self._runner, self._module_of = model_runner, modules
        self._members: dict[str, set[str]] = {}
        for name, module in modules.items():
            self._members.setdefault(module, set()).add(name)
        self.refusal = ""
        self._rebuilt: dict[str, list[Any]] = {}
        """Quantization methods whose kernel must be made anew at each reload, by module."""
        self._held: dict[str, dict[str, Tensor]] = {}
        """Copies of the tensors of modules that lack others, by module and name."""

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        try:
            self._runner.reload_weights(weights_iterator=self._whole_modules(tensors))
        except BaseException:
            self._held = {}
            # Otherwise the next reload would go on where this one ended, with tensors of this one.
            finalize_layerwise_reload(self._runner.get_model(), self._runner.model_config)
            raise

    def prove(self, checkpoint: Callable[[], Iterable[tuple[str, Tensor]]]) -> None:
        """Reload the checkpoint that vLLM has loaded, and compare every live byte. Set `refusal` if one differs.

        Some kernels arrange their weights at the first load only (0.32: the experts of the CPU). They are told to do it
        at each reload, if that makes the bytes equal.
        """
        first = self._digests()
        self.load(checkpoint())
        differing = self._differing(first)
        if not differing:
            return
        modules = dict(self._runner.get_model().named_modules())
        methods = [getattr(modules[name.rpartition(".")[0]], "quant_method", None) for name in differing]
        # A captured CUDA graph would keep the old kernel.
        if self._runner.device.type == "cpu" and all(hasattr(method, "moe_kernel") for method in methods):
            for module in self._members:
                inside = [m for name, m in zip(differing, methods, strict=True) if name.startswith(f"{module}.")]
                self._rebuilt[module] = list({id(method): method for method in inside}.values())
            self.load(checkpoint())
            differing = self._differing(first)
        if differing:
            self.refusal = (
                f"vLLM's reload does not restore {len(differing)} tensors of this model ({', '.join(differing[:3])}), "
                "so its weights cannot be updated. Generation works with the weights of the start."
            )
            logger.error(self.refusal)

    def _digests(self) -> dict[str, str]:
        model = self._runner.get_model()
        live = dict([*model.named_parameters(), *model.named_buffers()])
        live = {name: tensor for name, tensor in live.items() if tensor.numel() > 0}
        return dict(zip(live, tensor_checksums(live.values()), strict=True))

    def _differing(self, first: dict[str, str]) -> list[str]:
        now = self._digests()
        return [name for name in first if now.get(name) != first[name]]

    def lacking(self, names: Iterable[str]) -> list[str]:
        given = set(names)
        modules = dict.fromkeys(self._module_of[name] for name in given)
        return [name for module in modules for name in sorted(self._members[module] - given)]

    def _whole_modules(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of each module when all of them have come. Copy those of the other modules.

        vLLM would fill what is missing of a module with whatever its memory holds.
        """
        own: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors:
            module = self._module_of[name]
            own.setdefault(module, {})[name] = tensor
            come = self._held.get(module, {}) | own[module]
            if come.keys() == self._members[module]:
                del own[module]
                self._held.pop(module, None)
                for method in self._rebuilt.get(module, []):
                    method.moe_kernel = None
                yield from come.items()
        for module, come in own.items():
            self._held.setdefault(module, {}).update((name, tensor.clone()) for name, tensor in come.items())

"""`ServedModel`: vLLM's model on one worker, as weight updates know a model.

Names and shapes are those of the checkpoint, which trainers push. vLLM fuses, shards and repacks parameters as its
kernels need them, so the tensors go through its own loaders: its layerwise reload loads each module into the live
storage as soon as all of its tensors are there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from verl_server.errors import BadRequestError
from verl_server.model_folder import resolve_model_folder
from verl_server.models.loader import WeightMap, WeightSlot, checkpoint_shapes
from verl_server.server_args import ServerArgs


class ServedModel:
    def __init__(self, model_runner: Any, server_args: ServerArgs) -> None:
        """`model_runner`: vLLM's, with a loaded model."""
        self._runner = model_runner
        self.device: torch.device = model_runner.device
        model = model_runner.get_model()
        shapes = _parameter_shapes(resolve_model_folder(server_args.model_path, server_args.revision))
        config = model_runner.model_config
        aliases = {}
        if config.hf_text_config.tie_word_embeddings and "model.embed_tokens.weight" in shapes:
            shapes.pop("lm_head.weight", None)
            aliases["lm_head.weight"] = "model.embed_tokens.weight"
        slots = {name: WeightSlot(name, shape, config.dtype, []) for name, shape in shapes.items()}
        modules = _fused_modules(slots, getattr(model, "packed_modules_mapping", None) or {})
        self.weight_map = WeightMap(slots, aliases, _LayerwiseLoader(model_runner, modules))

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def check_release(self) -> None:
        raise BadRequestError(
            "Memory cannot be released with engine='vllm'. Use the embedded engine, or stop the server meanwhile."
        )

    def release_weights(self, keep_contents: bool | None = None) -> None:
        raise NotImplementedError("check_release refuses it")

    def resume_weights(self) -> bool:
        raise NotImplementedError("check_release refuses it")

    release_kv_cache = resume_kv_cache = release_cuda_graphs = resume_cuda_graphs = resume_weights


class _LayerwiseLoader:
    """The `WholeTensorLoader` that loads modules through vLLM's layerwise reload."""

    def __init__(self, model_runner: Any, modules: dict[str, str]) -> None:
        """`modules`: parameter -> name of the module of vLLM into which it is fused with others."""
        self._runner, self._module_of = model_runner, modules
        self._members: dict[str, set[str]] = {}
        for name, module in modules.items():
            self._members.setdefault(module, set()).add(name)
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
                yield from come.items()
        for module, come in own.items():
            self._held.setdefault(module, {}).update((name, tensor.clone()) for name, tensor in come.items())


def _fused_modules(names: Iterable[str], packed: dict[str, list[str]]) -> dict[str, str]:
    """Return for each parameter the module of vLLM that holds it.

    `packed` is the model's `packed_modules_mapping`: fused module -> modules of the checkpoint. The experts of a layer
    are one module.
    """
    fused = {part: whole for whole, parts in packed.items() for part in parts}
    modules = {}
    for name in names:
        path = name.split(".")[:-1]
        if "experts" in path:
            path = path[: path.index("experts") + 1]
        elif path:
            path[-1] = fused.get(path[-1], path[-1])
        modules[name] = ".".join(path)
    return modules


def _parameter_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of a checkpoint, or of transformers' model of its configuration if there are no weights."""
    if any(folder.glob("*.safetensors")):
        return checkpoint_shapes(folder)
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}

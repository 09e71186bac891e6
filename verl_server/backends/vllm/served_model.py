"""`ServedModel`: vLLM's model on one worker, as weight updates know a model.

Names and shapes are those of the checkpoint, which trainers push. vLLM fuses, shards and repacks parameters as its
kernels need them, so the tensors go through its own loaders: its layerwise reload loads each module into the live
storage as soon as all of its tensors are there.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from verl_server.backends.vllm.layerwise_loader import LayerwiseLoader
from verl_server.errors import BadRequestError
from verl_server.model_folder import resolve_model_folder
from verl_server.models.loader import WeightMap, WeightSlot, checkpoint_shapes, iter_checkpoint
from verl_server.server_args import ServerArgs


class ServedModel:
    def __init__(self, model_runner: Any, server_args: ServerArgs) -> None:
        """`model_runner`: vLLM's, with a loaded model."""
        self.device: torch.device = model_runner.device
        model = model_runner.get_model()
        folder = resolve_model_folder(server_args.model_path, server_args.revision)
        shapes = _parameter_shapes(folder)
        config = model_runner.model_config
        aliases = {}
        if config.hf_text_config.tie_word_embeddings and "model.embed_tokens.weight" in shapes:
            shapes.pop("lm_head.weight", None)
            aliases["lm_head.weight"] = "model.embed_tokens.weight"
        slots = {name: WeightSlot(name, shape, config.dtype, []) for name, shape in shapes.items()}
        modules = _fused_modules(slots, getattr(model, "packed_modules_mapping", None) or {})
        loader = LayerwiseLoader(model_runner, modules)
        self.weight_map = WeightMap(slots, aliases, loader)
        if server_args.load_format != "dummy":
            loader.prove(lambda: iter_checkpoint(folder))

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

    def release_kv_cache(self) -> None:
        raise NotImplementedError("check_release refuses it")

    def resume_kv_cache(self) -> None:
        raise NotImplementedError("check_release refuses it")

    def release_cuda_graphs(self) -> None:
        raise NotImplementedError("check_release refuses it")

    def resume_cuda_graphs(self) -> None:
        raise NotImplementedError("check_release refuses it")


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

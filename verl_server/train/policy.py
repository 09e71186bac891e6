"""`Policy`: the model that is trained. It maps token ids to the log-probabilities of the sampled tokens.

`PolicyTrainer` calls it. The weights are fp32. With another compute dtype, or over several ranks, FSDP2 shards the
weights and casts them for each pass. `load_policy` and `save_policy` read and write Hugging Face folders.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers import AutoModelForCausalLM

from verl_server.errors import BadRequestError
from verl_server.files.durable import discard, publish, temporary_folder
from verl_server.files.model_folder import load_pretrained, resolve_model_folder
from verl_server.train.logprobs import token_logprobs
from verl_server.train.ranks import SaveGroup


class Policy(nn.Module):
    """A causal language model of transformers, wrapped in a module, so that FSDP gathers the head for `forward`."""

    def __init__(
        self, language_model: Any, logprob_chunk: int = 2048, compute_dtype: torch.dtype = torch.float32
    ) -> None:
        """`logprob_chunk` is the number of tokens whose logits are in memory at one time."""
        super().__init__()
        _check_head(language_model)
        self.language_model = language_model
        self.logprob_chunk = logprob_chunk
        self.compute_dtype = compute_dtype
        self._stored: list[tuple[str, nn.Parameter]] | None = None

    def forward(
        self, tokens: Tensor, positions: Tensor, temperature: float, entropy: bool = True
    ) -> tuple[Tensor, Tensor | None]:
        """Return (log-probability of each token at `positions` given the tokens before it, entropy there).

        tokens [rows, length] int64 are padded on the right: attention is causal, so no token attends to the padding
        behind it. positions [n] int64 index the flattened tokens; none is the first token of its row. Both results are
        fp32 [n]. Without `entropy`, the second result is None.
        """
        hidden = self.language_model.model(input_ids=tokens, use_cache=False).last_hidden_state
        before = hidden.flatten(0, 1).index_select(0, positions - 1)
        head = self.language_model.lm_head.weight
        targets = tokens.flatten()[positions]
        return token_logprobs(before, head, targets, temperature=temperature, chunk=self.logprob_chunk, entropy=entropy)

    def named_weights(self) -> list[tuple[str, Tensor]]:
        """Return [(Hugging Face name, parameter)]. Sharded parameters are this rank's DTensors."""
        return list(self.language_model.named_parameters())

    def stored_weights(self) -> list[tuple[str, nn.Parameter]]:
        """Return [(Hugging Face name, fp32 parameter that the optimizer updates)], tied parameters once.

        The parameters are the same objects at all times. After an error inside a pass, `named_weights` may return
        gathered, temporary ones.
        """
        return self._stored or list(self.language_model.named_parameters())

    def checkpoint_weights(self) -> list[tuple[str, nn.Parameter]]:
        """Return `stored_weights` with their names in this module, which checkpoints have."""
        return [(f"language_model.{name}", parameter) for name, parameter in self.stored_weights()]

    def remember_stored_weights(self) -> None:
        """Store references to the present parameters. `load_policy` calls this after sharding."""
        self._stored = list(self.language_model.named_parameters())


def load_policy(
    model_path: str,
    device: torch.device,
    *,
    compute_dtype: torch.dtype | None = None,
    gradient_checkpointing: bool = False,
    logprob_chunk: int = 2048,
) -> Policy:
    """Load the policy of a Hugging Face folder in fp32, sharded over the ranks if there are several.

    Passes are computed in `compute_dtype`; None means bfloat16 on CUDA and float32 on the CPU. All ranks call it.
    """
    dtype = compute_dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
    language_model = load_language_model(model_path, "--model-path", device, gradient_checkpointing)
    policy = Policy(language_model, logprob_chunk, dtype)
    shard(policy, language_model.model.layers, dtype, device)
    policy.remember_stored_weights()
    return policy.train()


def load_language_model(
    model_path: str,
    setting: str,
    device: torch.device,
    gradient_checkpointing: bool,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """Return the causal language model of a Hugging Face folder on `device`. `setting` is what named the folder."""
    folder = resolve_model_folder(model_path, setting=setting)
    language_model = load_pretrained(AutoModelForCausalLM, model_path, setting, folder, dtype=dtype)
    if gradient_checkpointing:
        # transformers has renamed the method, but the oldest release that we support has the old name only.
        enable = getattr(language_model, "activation_checkpointing_enable", None)
        (enable or language_model.gradient_checkpointing_enable)()
    return language_model.to(device)


def shard(
    module: nn.Module,
    layers: Iterable[nn.Module],
    dtype: torch.dtype,
    device: torch.device,
    exact: Iterable[nn.Module] = (),
) -> None:
    """Shard the weights of `module` over the ranks, and cast them to `dtype` for each pass. All ranks call it.

    One rank whose passes are fp32 needs neither, so nothing changes. Each of `layers` is gathered by itself. The
    modules in `exact` compute in fp32.
    """
    if dist.get_world_size() == 1 and dtype == torch.float32:
        return
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    for part in exact:
        fully_shard(part, mesh=mesh, mp_policy=replace(precision, param_dtype=torch.float32))
    # The root is resharded after each forward pass. Otherwise a push after a forward pass without a backward pass
    # would read gathered, temporary tensors.
    fully_shard(module, mesh=mesh, mp_policy=precision, reshard_after_forward=True)


def save_policy(policy: Policy, folder: Path, tokenizer: Any, saving: SaveGroup | None = None) -> None:
    """Write a Hugging Face folder, complete or not at all. All ranks call it, and rank 0 writes.

    `saving` has the connections to use. By default they are created for this call.
    """
    saving = saving or SaveGroup.of_all_ranks()
    state = full_weights(policy, saving)

    def write(_: list[bytes]) -> None:
        new = temporary_folder(folder)
        try:
            policy.language_model.save_pretrained(new, state_dict=state)
            _name_dtype(new / "config.json")
            tokenizer.save_pretrained(new)
            publish(folder)
        except BaseException:
            discard(folder)
            raise

    saving.ranks.call("save_policy", write)


def _name_dtype(config: Path) -> None:
    """Set the dtype in config.json to fp32. transformers writes the current dtype of the parameters: bf16 in a pass."""
    values = json.loads(config.read_text())
    values.pop("torch_dtype", None)
    config.write_text(json.dumps(values | {"dtype": "float32"}, indent=2, sort_keys=True) + "\n")


def full_weights(policy: Policy, saving: SaveGroup) -> dict[str, Tensor]:
    """Return the full fp32 weights, on the CPU, on rank 0, and {} on the other ranks. All ranks call it.

    Shards pass from rank to rank in main memory, so that this works while the GPUs have no memory left, and after an
    error in a collective of the training.
    """
    state = {}
    for name, parameter in policy.stored_weights():
        full = _full(name, parameter.detach(), saving)
        if full is not None:
            state[name] = full
    return state


def _full(name: str, tensor: Tensor, saving: SaveGroup) -> Tensor | None:
    """Return the full tensor on rank 0, from the shards of all ranks, and None elsewhere."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    local = local.cpu()
    if saving.ranks.size == 1 or not isinstance(tensor, DTensor):
        return local if saving.ranks.rank == 0 else None
    if tensor.placements != (Shard(0),):  # FSDP2 over one dimension shards rows
        raise BadRequestError(f"'{name}' has the placements {tensor.placements}. Only rows can be saved: (Shard(0),).")
    rows = -(-tensor.shape[0] // saving.ranks.size)  # of every shard but the last ones
    if saving.ranks.rank > 0:
        if len(local):
            dist.send(local.contiguous(), 0, group=saving.process_group)
        return None
    full = torch.empty(tensor.shape, dtype=local.dtype)
    full[: len(local)] = local
    for rank in range(1, saving.ranks.size):
        part = full[rank * rows : (rank + 1) * rows]
        if len(part):
            dist.recv(part, rank, group=saving.process_group)
    return full


def _check_head(language_model: Any) -> None:
    """Raise BadRequestError if the logits of the model are not exactly hidden states times the head's weight."""
    config = language_model.config
    extras = [name for name in ("final_logit_softcapping", "logit_scale", "logits_scaling") if _is_set(config, name)]
    if getattr(language_model.lm_head, "bias", None) is not None:
        extras.append("lm_head.bias")
    if extras:
        raise BadRequestError(
            f"{type(language_model).__name__} computes its logits with {', '.join(extras)}, which this trainer does "
            "not implement. It trains the models that the server serves: Llama, Mistral, Qwen2, Qwen2.5 and Qwen3."
        )


def _is_set(config: Any, name: str) -> bool:
    return getattr(config, name, None) not in (None, 1.0)

"""Tiny folders of models that people train, and how far an engine's log-probabilities are from transformers'.

`test_vllm_models` and `benchmarks.engine_models` use them.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.backends.served import PROMPT
from verl_server import HttpServerEngineAdapter
from verl_server.models.tiny import Arch, make_model_folder

_HYBRID: dict[str, Any] = {
    "head_dim": 64,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
_WINDOW: dict[str, Any] = {
    "head_dim": 64,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"],
}


@dataclasses.dataclass(frozen=True)
class TrainedModel:
    """One model: the shape of its tiny folder, and what an engine needs for it."""

    arch: Arch
    shape: dict[str, Any]
    cpu_dtype: str = "float32"
    """Dtype on a CPU. vLLM's linear attention has no other one than bfloat16 there."""


MODELS: dict[str, TrainedModel] = {
    "qwen3_5": TrainedModel("qwen3_5_text", _HYBRID, "bfloat16"),
    "qwen3_5_moe": TrainedModel(
        "qwen3_5_moe_text",
        _HYBRID | _EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 64},
        "bfloat16",
    ),
    "gemma3": TrainedModel("gemma3_text", _WINDOW | {"query_pre_attn_scalar": 64, "tie_word_embeddings": True}),
    "gpt_oss": TrainedModel("gpt_oss", _WINDOW | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "glm4": TrainedModel("glm4", {"head_dim": 64}),
    "glm4_moe": TrainedModel(
        "glm4_moe",
        _EXPERTS
        | {"head_dim": 64, "n_routed_experts": 4, "first_k_dense_replace": 1, "num_mtp_layers": 0, "use_qk_norm": True},
    ),
}
"""The prompt of `gaps` is longer than the windows, so windows matter."""


class Checkpoint:
    """The weights of a tiny folder, and transformers' model of it, which computes in float32."""

    def __init__(self, path: Path, name: str, seed: int, dtype: str) -> None:
        """Write the folder of model `name` of `MODELS` to `path`."""
        model = MODELS[name]
        shape = {"max_position_embeddings": 8192} | model.shape
        self.folder = make_model_folder(path, model.arch, seed=seed, dtype=getattr(torch, dtype), **shape)
        self.weights = load_file(self.folder / "model.safetensors")
        auto: Any = AutoModelForCausalLM
        self.reference = auto.from_pretrained(self.folder, dtype=torch.float32).eval()

    def push(self, adapter: HttpServerEngineAdapter, version: str) -> None:
        adapter.update_weights_from_tensor(list(self.weights.items()), weight_version=version, partial=False)


@dataclasses.dataclass(frozen=True)
class Gaps:
    """Differences of log-probabilities between an engine and transformers in float32, in nats."""

    prompt: float
    """Largest one over the tokens of the prompt."""
    output: float
    """Largest one over the greedy tokens."""
    below_best: float
    """How much less likely than transformers' best token a greedy token is, at most."""
    version: str
    """Version of the weights that the engine names."""

    @property
    def largest(self) -> float:
        return max(self.prompt, self.output, self.below_best)


@torch.inference_mode()
def gaps(adapter: HttpServerEngineAdapter, reference: Any, tokens: int = 16) -> Gaps:
    """Generate greedily from `PROMPT`, and compare with transformers' `reference`."""
    reply: Any = adapter.generate(
        input_ids=PROMPT,
        sampling_params={"temperature": 0, "ignore_eos": True, "max_new_tokens": tokens},
        return_logprob=True,
        logprob_start_len=0,
        timeout=60.0,
    )
    meta, ids = reply["meta_info"], reply["output_ids"]
    assert len(ids) == len(meta["output_token_logprobs"]) == tokens
    assert len(meta["input_token_logprobs"]) == len(PROMPT)
    rows = reference(torch.tensor([PROMPT + ids])).logits[0].float().log_softmax(-1)
    theirs = rows[:-1].gather(1, torch.tensor(PROMPT[1:] + ids).unsqueeze(1)).squeeze(1)
    found = torch.tensor([entry[0] for entry in meta["input_token_logprobs"][1:] + meta["output_token_logprobs"]])
    first = len(PROMPT) - 1
    differences = (found - theirs).abs()
    below = rows[first:-1].amax(1) - theirs[first:]
    return Gaps(
        float(differences[:first].max()),
        float(differences[first:].max()),
        float(below.max()),
        meta["weight_version"],
    )

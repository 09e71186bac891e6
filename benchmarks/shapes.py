"""The model shapes of the benchmarks, and generated model folders with these shapes, without a download."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from verl_server.models.tiny import make_model_folder

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 320,
        "max_position_embeddings": 512,
    },
    "deep": {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 36,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 320,
        "max_position_embeddings": 512,
    },
    "0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 4096,
    },
    "30b-a3b": {
        "arch": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 4096,
    },
}
"""Shapes of Qwen3-0.6B, Qwen3-8B and Qwen3-30B-A3B (for engines with experts), and two small dense ones.

"deep" has the layers and thus the number of tensors of "8b": a push of it shows the costs that do not depend on bytes.
"""


def shape_folder(
    path: str | Path, shape: str, *, weights: bool = False, dtype: torch.dtype = torch.bfloat16, context: int = 0
) -> Path:
    """Write a Qwen3 folder of a named shape: config, tokenizer, and with `weights` random weights. Returns `path`.

    The model's context has `context` tokens if that is more than the shape has.
    """
    settings: dict[str, Any] = {"arch": "qwen3", "rms_norm_eps": 1e-6} | SHAPES[shape]
    settings["max_position_embeddings"] = max(settings["max_position_embeddings"], context)
    return make_model_folder(path, weights=weights, dtype=dtype, **settings)

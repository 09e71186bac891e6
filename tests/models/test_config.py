"""What is refused before memory is taken, and with which words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from verl_server.errors import BadRequestError
from verl_server.models.config import load_model_config
from verl_server.models.tiny import make_model_folder


def write_config(folder: Path, **changes: Any) -> Path:
    """A llama config of the raw old style; None deletes a key."""
    raw: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "torch_dtype": "bfloat16",
    } | changes
    (folder / "config.json").write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))
    return folder


def test_old_config_keys(tmp_path: Path) -> None:
    """rope_theta, rope_scaling and torch_dtype as checkpoints of earlier years have them."""
    scaling = {
        "type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    config = load_model_config(write_config(tmp_path, rope_theta=500000.0, rope_scaling=scaling))
    assert config.rope["rope_type"] == "llama3" and config.rope["rope_theta"] == 500000.0
    assert config.dtype == torch.bfloat16
    assert config.head_dim == 16 and not config.tie_word_embeddings


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"},
            ["MixtralForCausalLM", "Qwen3ForCausalLM"],
        ),
        ({"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}, ["Qwen3MoeForCausalLM", "supported"]),
        ({"architectures": None, "model_type": "never_heard_of"}, ["never_heard_of", "LlamaForCausalLM"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["yarn", "llama3"]),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, ["quantization_config", "LlamaForCausalLM"]),
        ({"hidden_act": "gelu"}, ["gelu", "silu"]),
        (
            {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 128},
            ["sliding window", "128", "context_length=128"],
        ),
    ],
)
def test_unsupported_is_refused_by_name(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(BadRequestError) as error:
        load_model_config(write_config(tmp_path, **changes))
    assert all(word in str(error.value) for word in words), str(error.value)


def test_sliding_window_wider_than_the_context_changes_nothing(tmp_path: Path) -> None:
    folder = write_config(tmp_path, architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=128)
    assert load_model_config(folder, context_length=128).architecture == "MistralForCausalLM"
    qwen = make_model_folder(tmp_path / "qwen2", "qwen2", weights=False, use_sliding_window=False, sliding_window=128)
    assert load_model_config(qwen).qkv_bias


def test_folder_without_or_with_broken_config(tmp_path: Path) -> None:
    with pytest.raises(BadRequestError, match=r"no config\.json"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(BadRequestError, match="not valid JSON"):
        load_model_config(tmp_path)

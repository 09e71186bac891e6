"""Model configs are read as transformers reads them, or refused by name before memory is allocated."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from verl_server.errors import BadRequestError
from verl_server.models.config import load_model_config
from verl_server.models.tiny import make_model_folder


def write_config(folder: Path, **changes: Any) -> Path:
    """Write a llama config with the keys of old checkpoints. A change to None deletes a key. Return the folder."""
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
    """rope_theta, rope_scaling and torch_dtype are read from where old checkpoints store them."""
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
        ({"rope_scaling": {"rope_type": "proportional", "factor": 4.0}}, ["proportional", "yarn"]),
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


_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_VARIANTS: dict[str, dict[str, Any]] = {
    "all keys": {},
    "no max_position_embeddings": {"max_position_embeddings": None},
    "no num_key_value_heads": {"num_key_value_heads": None, "num_attention_heads": 32, "hidden_size": 256},
    "no head_dim": {"head_dim": None},
    "head_dim": {"head_dim": 32},
    "no rms_norm_eps": {"rms_norm_eps": None},
    "tied": {"tie_word_embeddings": True},
    "biased": {"attention_bias": True, "mlp_bias": True},
    "no dtype": {"torch_dtype": None},
    "dtype": {"torch_dtype": None, "dtype": "float16"},
    "theta": {"rope_theta": 1000000},
    "theta in rope_parameters": {"rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"}},
    "linear": {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 20000.0},
    "llama3": {"rope_scaling": {"rope_type": "llama3", "original_max_position_embeddings": 64} | LLAMA3},
    "yarn": {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    "llama3 in rope_parameters": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 7.0} | LLAMA3},
}


@pytest.mark.parametrize(("model_type", "variant"), list(itertools.product(_ARCHITECTURES, _VARIANTS)))
def test_config_is_read_as_transformers_reads_it(tmp_path: Path, model_type: str, variant: str) -> None:
    changes = {"architectures": [_ARCHITECTURES[model_type]], "model_type": model_type} | _VARIANTS[variant]
    folder = write_config(tmp_path, **changes)
    ours, theirs = load_model_config(folder, context_length=128), AutoConfig.from_pretrained(folder)
    bias = bool(getattr(theirs, "attention_bias", False))
    assert ours.vocab_size == theirs.vocab_size
    assert ours.max_position_embeddings == theirs.max_position_embeddings
    assert ours.num_kv_heads == theirs.num_key_value_heads
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads)
    assert ours.norm_eps == theirs.rms_norm_eps
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.qkv_bias == (bias or model_type == "qwen2")
    assert ours.mlp_bias == bool(getattr(theirs, "mlp_bias", False))
    assert ours.dtype == (theirs.dtype or torch.float32)
    rope = {name: value for name, value in theirs.rope_parameters.items() if name != "type"}
    assert ours.rope == rope


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": None}, ["config.json", "hidden_size"]),
        ({"vocab_size": "many"}, ["vocab_size"]),
        ({"architectures": "LlamaForCausalLM"}, ["LlamaForCausalLM", "not supported"]),
        ({"torch_dtype": "float8_e4m3fn"}, ["float8_e4m3fn", "bfloat16"]),
    ],
)
def test_a_config_with_keys_missing_or_wrong_is_refused_by_key(
    tmp_path: Path, changes: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(BadRequestError) as error:
        load_model_config(write_config(tmp_path, **changes))
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"head_dim": 15}, ["head_dim must be an even number", "is 15"]),
        ({"head_dim": -2}, ["head_dim", ">= 2"]),
        ({"hidden_size": 60}, ["hidden_size / num_attention_heads", "is 15"]),
        ({"num_attention_heads": 0}, ["num_attention_heads", ">= 1"]),
        ({"max_position_embeddings": 0}, ["max_position_embeddings", ">= 1"]),
    ],
)
def test_a_shape_that_cannot_be_rotated_is_refused(tmp_path: Path, changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(BadRequestError) as error:
        load_model_config(write_config(tmp_path, **changes))
    assert all(word in str(error.value) for word in ["config.json", *words]), str(error.value)


@pytest.mark.parametrize(
    ("key", "value", "bound"),
    [
        ("vocab_size", -1, ">= 1"),
        ("vocab_size", 10**30, "<= 16777216"),
        ("vocab_size", 1e30, "Expected `int`"),
        ("hidden_size", 0, ">= 1"),
        ("hidden_size", -64, ">= 1"),
        ("intermediate_size", -1, ">= 1"),
        ("num_hidden_layers", -1, ">= 1"),
        ("num_hidden_layers", 10**12, "<= 4096"),
        ("num_hidden_layers", "\ud800", "lone surrogate"),
        ("num_attention_heads", 10**30, "<= 16384"),
        ("num_key_value_heads", -1, ">= 1"),
        ("num_key_value_heads", 3, "must be a multiple"),
        ("head_dim", 10**30, "<= 4096"),
        ("max_position_embeddings", 10**15, "<= 2147483647"),
        ("sliding_window", -1, ">= 1"),
        ("rms_norm_eps", float("nan"), "> 0"),
        ("rms_norm_eps", float("inf"), "<= 1"),
        ("rms_norm_eps", -1, "> 0"),
    ],
)
def test_a_number_beyond_its_bound_is_refused_by_key(tmp_path: Path, key: str, value: Any, bound: str) -> None:
    with pytest.raises(BadRequestError) as error:
        load_model_config(write_config(tmp_path, **{key: value}))
    words = ["config.json", bound] + ([] if bound == "lone surrogate" else [key])
    assert all(word in str(error.value) for word in words), str(error.value)

"""`ModelConfig`: what the decoder needs to know of a Hugging Face config, checked before any memory is taken.

`load_model_config` is called by every `ModelRunner` (and by whoever wants to refuse a model early). It turns
a folder (`models.folder` finds it) into a `ModelConfig`, or raises `BadRequestError` that names the
architecture or setting, what is supported, and the remedy.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from verl_server.errors import BadRequestError

SUPPORTED = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_BY_MODEL_TYPE = {"llama": SUPPORTED[0], "mistral": SUPPORTED[1], "qwen2": SUPPORTED[2], "qwen3": SUPPORTED[3]}
_ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True)
class ModelConfig:
    """One dense decoder; the flags are all that tells the supported families apart."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    max_position_embeddings: int
    rope: dict[str, Any]
    """Keys as in transformers' `rope_parameters`: rope_theta, rope_type and the type's own."""
    dtype: torch.dtype
    """The checkpoint's."""
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool


def load_model_config(folder: Path, context_length: int | None = None) -> ModelConfig:
    """Read `folder`/config.json. `context_length` decides whether a sliding window would be active."""
    if not (folder / "config.json").is_file():
        raise BadRequestError(f"{folder} has no config.json, so it is not a Hugging Face model folder.")
    architecture = _architecture(folder)
    try:
        hf = AutoConfig.from_pretrained(folder)
    except Exception as error:
        raise BadRequestError(f"Cannot read {folder / 'config.json'}: {_first_line(error)}") from error
    _refuse_unsupported(hf, architecture, context_length or hf.max_position_embeddings)
    heads = hf.num_attention_heads
    bias = bool(getattr(hf, "attention_bias", False))
    return ModelConfig(
        architecture=architecture,
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        num_layers=hf.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=getattr(hf, "num_key_value_heads", None) or heads,
        head_dim=getattr(hf, "head_dim", None) or hf.hidden_size // heads,
        norm_eps=hf.rms_norm_eps,
        max_position_embeddings=hf.max_position_embeddings,
        rope=_rope(hf, architecture),
        dtype=_dtype(hf),
        tie_word_embeddings=bool(hf.tie_word_embeddings),
        qkv_bias=architecture == "Qwen2ForCausalLM" or bias,
        o_bias=bias and architecture != "Qwen2ForCausalLM",
        mlp_bias=bool(getattr(hf, "mlp_bias", False)),
        qk_norm=architecture == "Qwen3ForCausalLM",
    )


def _architecture(folder: Path) -> str:
    """From the raw JSON: AutoConfig does not know every model type, and its error does not say what we do."""
    try:
        raw = json.loads((folder / "config.json").read_text())
    except ValueError as error:
        raise BadRequestError(f"{folder / 'config.json'} is not valid JSON: {error}") from error
    named = raw.get("architectures") or [_BY_MODEL_TYPE.get(raw.get("model_type", ""))]
    if named[0] not in SUPPORTED:
        what = named[0] or f"model_type {raw.get('model_type')!r}"
        raise BadRequestError(
            f"Architecture {what} of {folder} is not supported; supported (dense only): {', '.join(SUPPORTED)}. "
            "For other models use SGLang or vLLM as the engine."
        )
    architecture: str = named[0]
    return architecture


def _refuse_unsupported(hf: Any, architecture: str, context_length: int) -> None:
    def refuse(what: str, remedy: str) -> None:
        raise BadRequestError(f"{architecture} with {what} is not supported: {remedy}")

    if getattr(hf, "quantization_config", None):
        refuse("quantization_config", "give an unquantized checkpoint (float32, bfloat16 or float16).")
    if hf.hidden_act != "silu":
        refuse(f"hidden_act={hf.hidden_act!r}", "only silu is implemented.")
    window = getattr(hf, "sliding_window", None)
    if not getattr(hf, "use_sliding_window", True):
        window = None
    if window is not None and context_length > window:
        refuse(
            f"an active sliding window ({window} < context length {context_length})",
            f"set context_length={window} or less, where the window changes nothing.",
        )


def _rope(hf: Any, architecture: str) -> dict[str, Any]:
    rope = dict(getattr(hf, "rope_parameters", None) or getattr(hf, "rope_scaling", None) or {})
    rope.setdefault("rope_theta", getattr(hf, "rope_theta", None) or 10000.0)
    rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    if rope["rope_type"] not in _ROPE_TYPES:
        raise BadRequestError(
            f"{architecture} with rope type {rope['rope_type']!r} is not supported; "
            f"supported: {', '.join(_ROPE_TYPES)}."
        )
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise BadRequestError(f"{architecture} with partial_rotary_factor != 1 is not supported.")
    return rope


def _dtype(hf: Any) -> torch.dtype:
    dtype = getattr(hf, "dtype", None) or torch.float32
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]

"""`ModelConfig`: the part of a Hugging Face config that the decoder needs, checked before any memory is allocated.

Every `ModelRunner` calls `load_model_config`. It reads `config.json` as transformers does (with the defaults of each
model type, and with old and new keys), but does not import transformers, because that takes as long as importing torch.
It raises `BadRequestError` that names the architecture or setting, the supported values, and the remedy.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch

from verl_server.errors import BadRequestError
from verl_server.files.json_files import convert, read_json
from verl_server.models.rope_config import RopeKeys, read_rope

SUPPORTED = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_BY_MODEL_TYPE = {"llama": SUPPORTED[0], "mistral": SUPPORTED[1], "qwen2": SUPPORTED[2], "qwen3": SUPPORTED[3]}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"max_position_embeddings": 2048},
    "MistralForCausalLM": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "Qwen2ForCausalLM": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "use_sliding_window": False,
        "sliding_window": 4096,
    },
    "Qwen3ForCausalLM": {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "head_dim": 128,
    },
}
"""Architecture -> key -> value if config.json lacks the key, for the keys whose defaults differ between architectures.
"""
_Layers = Annotated[int, msgspec.Meta(ge=1, le=2**12)]
_Heads = Annotated[int, msgspec.Meta(ge=1, le=2**14)]
_HeadDim = Annotated[int, msgspec.Meta(ge=2, le=2**12)]
_Hidden = Annotated[int, msgspec.Meta(ge=1, le=2**20)]
_Rows = Annotated[int, msgspec.Meta(ge=1, le=2**24)]
"""The bounds lie far above those of any model. Within them, the bytes of all weights fit into 63 bits."""
_Epsilon = Annotated[float, msgspec.Meta(gt=0, le=1)]
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class ModelConfig:
    """One dense decoder. The supported families differ in the flags only."""

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
    """The rotary embedding, as `read_rope` returns it."""
    dtype: torch.dtype
    """The dtype of the checkpoint."""
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool

    @property
    def longest_context(self) -> int:
        """Most tokens of a sequence. YaRN stretches the original context by its factor.

        Model cards add YaRN to a config without changing `max_position_embeddings`. For all other rope types
        `max_position_embeddings` is the stretched length.
        """
        if self.rope["rope_type"] != "yarn":
            return self.max_position_embeddings
        stretched = int(self.rope["factor"] * self.rope["original_max_position_embeddings"])
        return max(self.max_position_embeddings, stretched)


class _ConfigFile(RopeKeys, kw_only=True):
    """The keys of config.json that the decoder needs, with their types and the defaults of transformers."""

    vocab_size: _Rows
    hidden_size: _Hidden
    intermediate_size: _Rows
    num_hidden_layers: _Layers
    num_attention_heads: _Heads
    num_key_value_heads: _Heads | None = None
    head_dim: _HeadDim | None = None
    rms_norm_eps: _Epsilon = 1e-6
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    use_sliding_window: bool = True
    sliding_window: Annotated[int, msgspec.Meta(ge=1)] | None = None
    quantization_config: dict[str, Any] | None = None
    dtype: str | None = None
    torch_dtype: str | None = None


def load_model_config(folder: Path, context_length: int | None = None) -> ModelConfig:
    """Read `folder`/config.json. Raise BadRequestError if the model is not supported.

    A sliding window is an error only if `context_length` (default: the model's) is longer than the window.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise BadRequestError(f"{folder} has no config.json, so it is not a Hugging Face model folder.")
    raw = read_json(path)
    architecture = _architecture(raw, folder)
    file = convert(_DEFAULTS[architecture] | raw, _ConfigFile, str(path))
    head_dim = _head_dim(file, path)
    config = ModelConfig(
        architecture=architecture,
        vocab_size=file.vocab_size,
        hidden_size=file.hidden_size,
        intermediate_size=file.intermediate_size,
        num_layers=file.num_hidden_layers,
        num_heads=file.num_attention_heads,
        num_kv_heads=_kv_heads(file, path),
        head_dim=head_dim,
        norm_eps=file.rms_norm_eps,
        max_position_embeddings=file.max_position_embeddings,
        rope=read_rope(file, path, head_dim),
        dtype=_dtype(file, path),
        tie_word_embeddings=file.tie_word_embeddings,
        qkv_bias=architecture == "Qwen2ForCausalLM" or file.attention_bias,
        o_bias=file.attention_bias and architecture != "Qwen2ForCausalLM",
        mlp_bias=file.mlp_bias,
        qk_norm=architecture == "Qwen3ForCausalLM",
    )
    _refuse_unsupported(file, architecture, context_length or config.longest_context)
    return config


def _architecture(raw: dict[str, Any], folder: Path) -> str:
    model_type = raw.get("model_type")
    named = raw.get("architectures") or [_BY_MODEL_TYPE.get(str(model_type))]
    if not isinstance(named, list) or named[0] not in SUPPORTED:
        what = (named[0] if isinstance(named, list) else named) or f"model_type {model_type!r}"
        raise BadRequestError(
            f"Architecture {what} of {folder} is not supported; supported (dense only): {', '.join(SUPPORTED)}. "
            "engine='vllm' and engine='sglang' serve many others: pip install 'verl-server[vllm]'."
        )
    architecture: str = named[0]
    return architecture


def _refuse_unsupported(file: _ConfigFile, architecture: str, context_length: int) -> None:
    def refuse(what: str, remedy: str) -> None:
        raise BadRequestError(f"{architecture} with {what} is not supported: {remedy}")

    if file.quantization_config:
        refuse("quantization_config", "use an unquantized checkpoint (float32, bfloat16 or float16).")
    if file.hidden_act != "silu":
        refuse(f"hidden_act={file.hidden_act!r}", "only silu is implemented.")
    window = file.sliding_window if file.use_sliding_window else None
    if window is not None and context_length > window:
        refuse(
            f"an active sliding window ({window} < context length {context_length})",
            f"set context_length={window} or less, where the window changes nothing.",
        )


def _head_dim(file: _ConfigFile, path: Path) -> int:
    head_dim = file.head_dim or file.hidden_size // file.num_attention_heads
    if head_dim < 2 or head_dim % 2:
        source = "head_dim" if file.head_dim else "head_dim (hidden_size / num_attention_heads)"
        raise BadRequestError(
            f"{path}: {source} must be an even number, but is {head_dim}: the rotary embedding rotates pairs. "
            "Check it against the shapes of the checkpoint."
        )
    return head_dim


def _kv_heads(file: _ConfigFile, path: Path) -> int:
    heads, kv_heads = file.num_attention_heads, file.num_key_value_heads
    if kv_heads is None:
        return heads
    if heads % kv_heads:
        raise BadRequestError(
            f"{path}: num_attention_heads={heads} must be a multiple of num_key_value_heads={kv_heads}. "
            "Set both to the values that the model was trained with."
        )
    return kv_heads


def _dtype(file: _ConfigFile, path: Path) -> torch.dtype:
    name = (file.dtype or file.torch_dtype or "float32").removeprefix("torch.")
    if name not in _DTYPES:
        raise BadRequestError(f"{path}: dtype {name!r} is not supported; supported: {', '.join(_DTYPES)}.")
    return _DTYPES[name]

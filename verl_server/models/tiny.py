"""Model folders made on the spot: random weights, a byte-level tokenizer, no download.

Used by tests, benchmarks and the demo, and handy for trying a setup before the real checkpoint is there.
The folder looks like any from the hub (config.json, model.safetensors, tokenizer.json, ...), so it takes the
real loading path.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

Arch = Literal["llama", "mistral", "qwen2", "qwen3"]

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>")
"""Ids 0..4; byte b has some id in 5..260."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

TINY_SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
"""Small enough for tests; grouped-query attention, two layers."""


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per UTF-8 byte plus `SPECIAL_TOKENS`; decoding any ids gives text (with replacements)."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    build: Any = PreTrainedTokenizerFast  # transformers is only partly typed
    fast: PreTrainedTokenizerFast = build(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_model_folder(
    path: str | Path,
    arch: Arch = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    init_std: float = 0.5,
    max_shard_size: str | None = None,
    tokenizer: PreTrainedTokenizerFast | None = None,
    weights: bool = True,
    **shape: Any,
) -> Path:
    """Write a random model of `arch` with `TINY_SHAPE` updated by `shape`, and its tokenizer; returns `path`.

    `init_std` scales the weight matrices: large enough that greedy decoding is not decided by rounding.
    `weights=False` writes config and tokenizer only (for `load_format="dummy"`).
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    config = AutoConfig.for_model(
        arch, **(TINY_SHAPE | {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0} | shape)
    )
    config.architectures = [f"{arch.capitalize()}ForCausalLM"]
    config.dtype = dtype
    if weights:
        model = random_model(config, seed=seed, dtype=dtype, init_std=init_std)
        model.save_pretrained(folder, **({"max_shard_size": max_shard_size} if max_shard_size else {}))
    else:
        config.save_pretrained(folder)
    (byte_tokenizer() if tokenizer is None else tokenizer).save_pretrained(folder)
    return folder


def random_model(config: Any, *, seed: int = 0, dtype: torch.dtype = torch.float32, init_std: float = 0.5) -> Any:
    """A transformers model whose every weight depends on `seed` alone (norms and biases are random too)."""
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(config, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1 and "norm" in name:
                parameter.copy_(1.0 + 0.1 * noise)
            else:
                fan_in = parameter.shape[-1] if parameter.dim() > 1 else 64
                parameter.copy_(init_std * noise * (2.0 / fan_in**0.5 if parameter.dim() > 1 else 0.2))
    return model.eval()

"""Generated model folders: random weights and a byte-level tokenizer, without a download.

Tests, benchmarks and the demo use them. With such a folder, a setup can also be tried before the real checkpoint is
available. It has the files of a hub snapshot (config.json, model.safetensors, tokenizer.json, ...), so the server loads
it through the same code.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

Arch = Literal[
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "gemma3_text",
    "gpt_oss",
    "glm4",
    "glm4_moe",
]
"""transformers' names. The embedded engine has the first four, other engines have all."""

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>")
"""Tokens 0 to 4. Bytes have the ids 5 to 260, in the order of the byte-level alphabet."""
NUM_BYTE_TOKENS = len(SPECIAL_TOKENS) + 256
"""Size of `byte_tokenizer`'s vocabulary."""

CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n# Tools{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n"
    '<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call><|im_end|>\n{% endif %}'
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
"""A model small enough for tests, with two layers and grouped-query attention."""


def byte_level_tokenizer(
    tokens: Iterable[str], merges: Sequence[tuple[str, str]] = (), *, chat_template: str, split_words: bool = False
) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer whose vocabulary is `SPECIAL_TOKENS`, the bytes, and `tokens`.

    The merges join tokens of the vocabulary. With `split_words` no merge crosses the end of a word, as in the
    tokenizers of released models.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *alphabet, *tokens])}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split_words)
    tokenizer.decoder = decoders.ByteLevel()
    build: Any = PreTrainedTokenizerFast  # because transformers is only partly typed
    fast: PreTrainedTokenizerFast = build(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
    )
    fast.chat_template = chat_template
    return fast


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each UTF-8 byte, and `SPECIAL_TOKENS`.

    Any ids decode to text, with replacement characters.
    """
    return byte_level_tokenizer([], chat_template=CHAT_TEMPLATE)


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
    """Write a random model of `arch` and its tokenizer. Return `path`.

    `shape` overrides entries of `TINY_SHAPE`. `init_std` scales the weight matrices: the default is large enough that
    rounding does not decide greedy decoding. `weights=False` writes config and tokenizer only (for
    `load_format="dummy"`). `tokenizer` defaults to `byte_tokenizer()`.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    config = AutoConfig.for_model(
        arch, **(TINY_SHAPE | {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0} | shape)
    )
    model_classes: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    config.architectures = [model_classes[type(config)].__name__]
    config.dtype = dtype
    if weights:
        model = random_model(config, seed=seed, dtype=dtype, init_std=init_std)
        model.save_pretrained(folder, **({"max_shard_size": max_shard_size} if max_shard_size else {}))
    else:
        config.save_pretrained(folder)
    (byte_tokenizer() if tokenizer is None else tokenizer).save_pretrained(folder)
    return folder


def random_model(config: Any, *, seed: int = 0, dtype: torch.dtype = torch.float32, init_std: float = 0.5) -> Any:
    """Return a transformers model with random weights, norms and biases, which are a function of `seed` alone.

    Buffers of its checkpoint, such as the corrections of a router's scores, are random, too.
    """
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
        stored = model.state_dict().keys()
        for name, buffer in sorted(model.named_buffers()):
            if name in stored and buffer.is_floating_point():
                buffer.copy_(init_std * torch.randn(buffer.shape, generator=generator) * 0.2)
    return model.eval()

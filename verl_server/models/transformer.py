"""The decoder: Llama, Mistral, Qwen2 and Qwen3 (dense) are one network with flags (`ModelConfig`).

`ModelRunner` builds the decoder, fills its weights through `weight_map`, and runs `forward` once a step on a flat list
of new tokens. Residuals are added and rounded in the compute dtype, as transformers does.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from verl_server.errors import BadRequestError
from verl_server.ipc.tp_group import TpGroup
from verl_server.models.attention import AttentionStep
from verl_server.models.config import ModelConfig
from verl_server.models.layers import (
    FusedColumnLinear,
    RMSNorm,
    RotaryEmbedding,
    RowLinear,
    VocabParallel,
)
from verl_server.models.loader import WeightMap
from verl_server.models.ops import TORCH_OPS, Ops

_EMBED = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, tp: TpGroup, ops: Ops) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.num_heads = config.num_heads // tp.size
        self.num_kv_heads = max(1, config.num_kv_heads // tp.size)
        kv_shards = min(config.num_kv_heads, tp.size)
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        parts = {"q_proj": (q_size, tp.size), "k_proj": (kv_size, kv_shards), "v_proj": (kv_size, kv_shards)}
        self.qkv_proj = FusedColumnLinear(tp, config.hidden_size, parts, config.qkv_bias, ops)
        self.o_proj = RowLinear(tp, q_size, config.hidden_size, config.o_bias, ops)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, kv_layer: Tensor, step: AttentionStep) -> Tensor:
        out: Tensor = self.o_proj(step.attend(self.qkv_proj(x), self, kv_layer))
        return out

    def add_slots(self, weight_map: WeightMap, prefix: str) -> None:
        weight_map.add(self.qkv_proj.slots(prefix))
        weight_map.add(self.o_proj.slots(f"{prefix}.o_proj"))
        if self.q_norm is not None and self.k_norm is not None:
            weight_map.add(self.q_norm.slots(f"{prefix}.q_norm"))
            weight_map.add(self.k_norm.slots(f"{prefix}.k_norm"))


class MLP(nn.Module):
    def __init__(self, config: ModelConfig, tp: TpGroup, ops: Ops) -> None:
        super().__init__()
        self._ops = ops
        size = config.intermediate_size
        parts = {"gate_proj": (size, tp.size), "up_proj": (size, tp.size)}
        self.gate_up_proj = FusedColumnLinear(tp, config.hidden_size, parts, config.mlp_bias, ops)
        self.down_proj = RowLinear(tp, size, config.hidden_size, config.mlp_bias, ops)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self._ops.silu_mul(self.gate_up_proj(x)))
        return out

    def add_slots(self, weight_map: WeightMap, prefix: str) -> None:
        weight_map.add(self.gate_up_proj.slots(prefix))
        weight_map.add(self.down_proj.slots(f"{prefix}.down_proj"))


class DecoderLayer(nn.Module):
    """Attention and MLP. Each norm first adds the output of the sublayer before it to the residual, in place.

    So `forward` returns the output of the MLP, which the first norm of the next layer adds.
    """

    def __init__(self, config: ModelConfig, tp: TpGroup, ops: Ops) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps, ops)
        self.self_attn = Attention(config, tp, ops)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps, ops)
        self.mlp = MLP(config, tp, ops)

    def forward(self, x: Tensor | None, residual: Tensor, kv_layer: Tensor, step: AttentionStep) -> Tensor:
        normed = self.input_layernorm(residual) if x is None else self.input_layernorm.add(x, residual)
        attended = self.self_attn(normed, kv_layer, step)
        out: Tensor = self.mlp(self.post_attention_layernorm.add(attended, residual))
        return out

    def add_slots(self, weight_map: WeightMap, prefix: str) -> None:
        weight_map.add(self.input_layernorm.slots(f"{prefix}.input_layernorm"))
        self.self_attn.add_slots(weight_map, f"{prefix}.self_attn")
        weight_map.add(self.post_attention_layernorm.slots(f"{prefix}.post_attention_layernorm"))
        self.mlp.add_slots(weight_map, f"{prefix}.mlp")


class Decoder(nn.Module):
    """The whole network. The caller sets the default device and dtype in which the parameters are created."""

    def __init__(
        self, config: ModelConfig, tp: TpGroup, max_positions: int, device: torch.device, ops: Ops = TORCH_OPS
    ) -> None:
        super().__init__()
        check_tp(config, tp.size)
        self.config = config
        self.embed_tokens = VocabParallel(tp, config.vocab_size, config.hidden_size, ops)
        self.layers = nn.ModuleList(DecoderLayer(config, tp, ops) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, ops)
        tied = config.tie_word_embeddings
        self.lm_head = self.embed_tokens if tied else VocabParallel(tp, config.vocab_size, config.hidden_size, ops)
        self.rotary = RotaryEmbedding(config.head_dim, max_positions, config.rope, device)

    def forward(self, ids: Tensor, kv_layers: list[Tensor], step: AttentionStep) -> Tensor:
        """Return the hidden states [tokens, hidden_size] before the final norm, of the token ids `ids` [tokens].

        Store the keys and values of the tokens into `kv_layers`.
        """
        residual = self.embed_tokens.embed(ids)
        x = None
        for layer, kv_layer in zip(self.layers, kv_layers, strict=True):
            x = layer(x, residual, kv_layer, step)
        assert x is not None, "a decoder has layers"
        return residual.add_(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [n, vocab_size], in the compute dtype, of rows [n, hidden_size] of `forward`'s result."""
        return self.lm_head.logits(self.norm(hidden))

    def weight_map(self) -> WeightMap:
        weight_map = WeightMap()
        weight_map.add(self.embed_tokens.slots(_EMBED))
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, DecoderLayer)
            layer.add_slots(weight_map, f"model.layers.{i}")
        weight_map.add(self.norm.slots("model.norm"))
        if self.config.tie_word_embeddings:
            weight_map.aliases[_HEAD] = _EMBED
        else:
            weight_map.add(self.lm_head.slots(_HEAD))
        return weight_map


def check_tp(config: ModelConfig, tp_size: int) -> None:
    """Raise BadRequestError if `tp_size` does not divide the heads and the MLP of the model."""
    kv_heads = config.num_kv_heads
    wrong = [
        f"{name}={value}"
        for name, value in (("num_attention_heads", config.num_heads), ("intermediate_size", config.intermediate_size))
        if value % tp_size
    ]
    if kv_heads % tp_size and tp_size % kv_heads:
        wrong.append(f"num_key_value_heads={kv_heads}")
    if wrong:
        raise BadRequestError(f"tp_size={tp_size} does not divide {config.architecture}'s {', '.join(wrong)}.")

"""The decoder: Llama, Mistral, Qwen2 and Qwen3 (dense) are one network with flags (`ModelConfig`).

`ModelRunner` builds it, fills it through `weight_map`, and runs `forward` once a step on a flat list of new
tokens. Residuals are added and rounded in the compute dtype, as transformers does.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from verl_server.errors import BadRequestError
from verl_server.models.attention import AttentionPlan, attend
from verl_server.models.config import ModelConfig
from verl_server.models.layers import (
    FusedColumnLinear,
    RMSNorm,
    RotaryEmbedding,
    RowLinear,
    VocabParallel,
    rotate,
)
from verl_server.models.loader import WeightMap
from verl_server.runtime.tp_group import TpGroup

_EMBED = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, tp: TpGroup) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.num_heads = config.num_heads // tp.size
        self.num_kv_heads = max(1, config.num_kv_heads // tp.size)
        kv_shards = min(config.num_kv_heads, tp.size)
        q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        parts = {"q_proj": (q_size, tp.size), "k_proj": (kv_size, kv_shards), "v_proj": (kv_size, kv_shards)}
        self.qkv_proj = FusedColumnLinear(tp, config.hidden_size, parts, config.qkv_bias)
        self.o_proj = RowLinear(tp, q_size, config.hidden_size, config.o_bias)
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, kv_layer: Tensor, plan: AttentionPlan) -> Tensor:
        heads = self.qkv_proj(x).view(x.shape[0], -1, self.head_dim)
        qk = heads[:, : self.num_heads + self.num_kv_heads]
        normed = qk
        if self.q_norm is not None and self.k_norm is not None:
            normed = torch.cat([self.q_norm(qk[:, : self.num_heads]), self.k_norm(qk[:, self.num_heads :])], dim=1)
        qk.copy_(rotate(normed, cos, sin))  # back beside v: keys and values go to the pool in one copy
        kv = heads[:, self.num_heads :].view(x.shape[0], 2, self.num_kv_heads, self.head_dim)
        out: Tensor = self.o_proj(attend(heads[:, : self.num_heads], kv, kv_layer, plan))
        return out

    def add_slots(self, weight_map: WeightMap, prefix: str) -> None:
        weight_map.add(self.qkv_proj.slots(prefix))
        weight_map.add(self.o_proj.slots(f"{prefix}.o_proj"))
        if self.q_norm is not None and self.k_norm is not None:
            weight_map.add(self.q_norm.slots(f"{prefix}.q_norm"))
            weight_map.add(self.k_norm.slots(f"{prefix}.k_norm"))


class MLP(nn.Module):
    def __init__(self, config: ModelConfig, tp: TpGroup) -> None:
        super().__init__()
        size = config.intermediate_size
        parts = {"gate_proj": (size, tp.size), "up_proj": (size, tp.size)}
        self.gate_up_proj = FusedColumnLinear(tp, config.hidden_size, parts, config.mlp_bias)
        self.down_proj = RowLinear(tp, size, config.hidden_size, config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        out: Tensor = self.down_proj(F.silu(gate).mul_(up))
        return out

    def add_slots(self, weight_map: WeightMap, prefix: str) -> None:
        weight_map.add(self.gate_up_proj.slots(prefix))
        weight_map.add(self.down_proj.slots(f"{prefix}.down_proj"))


class DecoderLayer(nn.Module):
    def __init__(self, config: ModelConfig, tp: TpGroup) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.self_attn = Attention(config, tp)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config, tp)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, kv_layer: Tensor, plan: AttentionPlan) -> Tensor:
        x = self.self_attn(self.input_layernorm(x), cos, sin, kv_layer, plan).add_(x)
        out: Tensor = self.mlp(self.post_attention_layernorm(x)).add_(x)
        return out

    def add_slots(self, weight_map: WeightMap, prefix: str) -> None:
        weight_map.add(self.input_layernorm.slots(f"{prefix}.input_layernorm"))
        self.self_attn.add_slots(weight_map, f"{prefix}.self_attn")
        weight_map.add(self.post_attention_layernorm.slots(f"{prefix}.post_attention_layernorm"))
        self.mlp.add_slots(weight_map, f"{prefix}.mlp")


class Decoder(nn.Module):
    """Built under the default device and dtype that the caller sets."""

    def __init__(self, config: ModelConfig, tp: TpGroup, max_positions: int, device: torch.device) -> None:
        super().__init__()
        check_tp(config, tp.size)
        self.config = config
        self.embed_tokens = VocabParallel(tp, config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, tp) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        tied = config.tie_word_embeddings
        self.lm_head = self.embed_tokens if tied else VocabParallel(tp, config.vocab_size, config.hidden_size)
        self.rotary = RotaryEmbedding(config.head_dim, max_positions, config.rope, device)

    def forward(self, ids: Tensor, positions: Tensor, kv_pool: list[Tensor], plan: AttentionPlan) -> Tensor:
        """Hidden states of the step's tokens before the final norm; keys and values go to the pool."""
        x = self.embed_tokens.embed(ids)
        cos, sin = self.rotary.at(positions)
        for layer, kv_layer in zip(self.layers, kv_pool, strict=True):
            x = layer(x, cos, sin, kv_layer, plan)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits [n, vocab_size] of some rows of `forward`'s result."""
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
    """Refuse a `tp_size` that does not divide the model."""
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

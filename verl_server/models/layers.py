"""The decoder's building blocks: norm, rotary embedding, tensor-parallel linear and embedding layers.

Each layer that holds weights yields a `WeightSlot` for each of its Hugging Face tensors (`slots`). A slot maps the
tensor to pieces of the layer's fused and sharded storage. `transformer.Decoder` collects the slots in the `WeightMap`.
The parameters of a layer never move.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from verl_server.ipc.tp_group import TpGroup
from verl_server.models.loader import WeightSlot
from verl_server.models.ops import TORCH_OPS, Ops
from verl_server.models.rope import frequencies


def _weight(*shape: int) -> nn.Parameter:
    """Return a placeholder of the default dtype and device. `ModelRunner` moves it into its weights arena."""
    return nn.Parameter(torch.zeros(*shape), requires_grad=False)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float, ops: Ops = TORCH_OPS) -> None:
        super().__init__()
        self.weight = _weight(size)
        self.eps = eps
        self._ops = ops

    def forward(self, x: Tensor) -> Tensor:
        return self._ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add `x` to `residual` in place. Return the norm of the sum."""
        return self._ops.add_rms_norm(x, residual, self.weight, self.eps)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield WeightSlot.whole(f"{prefix}.weight", self.weight)


class RotaryEmbedding:
    """Tables of cos and sin for every position, in fp32, multiplied by the attention factor of the config.

    The first half of `sin` is negated. So a rotation is x * cos + (x with its halves swapped) * sin.
    """

    def __init__(self, head_dim: int, max_positions: int, rope: dict[str, Any], device: torch.device) -> None:
        # transformers computes the frequencies on the CPU, so we do it there for every device.
        with torch.device("cpu"):
            inv_freq, scale = frequencies(head_dim, rope, max_positions)
            angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), inv_freq)
        cos, sin = angles.cos() * scale, angles.sin() * scale
        # [max_positions, 1, head_dim]: the middle dimension broadcasts over heads.
        self._cos = torch.cat([cos, cos], dim=-1).unsqueeze(1).to(device)
        self._sin = torch.cat([-sin, sin], dim=-1).unsqueeze(1).to(device)

    @property
    def tables(self) -> tuple[Tensor, Tensor]:
        """(cos, sin) of every position, each [max_positions, 1, head_dim], for kernels that index the tables."""
        return self._cos, self._sin

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return (cos, sin), each [tokens, 1, head_dim], at `positions` [tokens]."""
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply the rotary embedding to x [tokens, heads, head_dim]: computed in fp32, returned in x's dtype."""
    half = x.shape[-1] // 2
    rotated = x * cos
    rotated[..., :half].addcmul_(x[..., half:], sin[..., :half])
    rotated[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return rotated.to(x.dtype)


class FusedColumnLinear(nn.Module):
    """Several Hugging Face linear layers over one input as one product, with output rows sharded over the ranks.

    `parts`: name -> (full number of output rows, number of equal shards). If there are fewer shards than ranks (KV
    heads under a larger `tp_size`), neighbouring ranks hold copies of the same shard.
    """

    def __init__(
        self, tp: TpGroup, in_size: int, parts: dict[str, tuple[int, int]], bias: bool, ops: Ops = TORCH_OPS
    ) -> None:
        super().__init__()
        self._tp, self._in_size, self._parts, self._ops = tp, in_size, parts, ops
        rows = sum(full // shards for full, shards in parts.values())
        self.weight = _weight(rows, in_size)
        self.bias = _weight(rows) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return self._ops.linear(x, self.weight, self.bias)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        start = 0
        for name, (full, shards) in self._parts.items():
            rows = full // shards
            first = self._tp.rank * shards // self._tp.size * rows
            source = slice(first, first + rows)
            kept = slice(start, start + rows)
            yield WeightSlot(
                f"{prefix}.{name}.weight",
                (full, self._in_size),
                self.weight.dtype,
                [(self.weight[kept], (source, slice(None)))],
            )
            if self.bias is not None:
                yield WeightSlot(f"{prefix}.{name}.bias", (full,), self.bias.dtype, [(self.bias[kept], (source,))])
            start += rows


class RowLinear(nn.Module):
    """A linear layer whose input columns are sharded over the ranks; the partial products are summed."""

    def __init__(self, tp: TpGroup, in_size: int, out_size: int, bias: bool, ops: Ops = TORCH_OPS) -> None:
        super().__init__()
        self._tp, self._in_size, self._ops = tp, in_size, ops
        self.weight = _weight(out_size, in_size // tp.size)
        self.bias = _weight(out_size) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self._tp.size == 1:
            return self._ops.linear(x, self.weight, self.bias)
        out = self._tp.all_reduce(self._ops.linear(x, self.weight, None))
        return out if self.bias is None else out.add_(self.bias)

    def slots(self, prefix: str) -> Iterator[WeightSlot]:
        out_size, columns = self.weight.shape
        source = slice(self._tp.rank * columns, (self._tp.rank + 1) * columns)
        yield WeightSlot(
            f"{prefix}.weight", (out_size, self._in_size), self.weight.dtype, [(self.weight, (slice(None), source))]
        )
        if self.bias is not None:
            yield WeightSlot.whole(f"{prefix}.bias", self.bias)


class VocabParallel(nn.Module):
    """An embedding table or output head, with rows sharded over the ranks; the last shard is padded."""

    def __init__(self, tp: TpGroup, vocab_size: int, hidden_size: int, ops: Ops = TORCH_OPS) -> None:
        super().__init__()
        self._tp, self._vocab_size, self._ops = tp, vocab_size, ops
        self._rows = -(-vocab_size // tp.size)
        self.weight = _weight(self._rows, hidden_size)
        self._first = tp.rank * self._rows
        self._real = max(0, min(vocab_size - self._first, self._rows))

    def embed(self, ids: Tensor) -> Tensor:
        if self._tp.size == 1:
            return F.embedding(ids, self.weight)
        local = ids - self._first
        foreign = (local < 0) | (local >= self._real)
        out = F.embedding(local.masked_fill_(foreign, 0), self.weight)
        return self._tp.all_reduce(out.masked_fill_(foreign.unsqueeze(-1), 0.0))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [n, vocab_size] of `hidden` [n, hidden_size], in the compute dtype, on every rank."""
        out = self._tp.all_gather_last_dim(self._ops.linear(hidden, self.weight, None))
        return out[..., : self._vocab_size]

    def slots(self, name: str) -> Iterator[WeightSlot]:
        # No piece contains the padding rows: they stay zero, and `logits` cuts them off.
        shape = (self._vocab_size, self.weight.shape[1])
        source = slice(self._first, self._first + self._real)
        pieces = [(self.weight[: self._real], (source, slice(None)))] if self._real else []
        yield WeightSlot(name, shape, self.weight.dtype, list(pieces))

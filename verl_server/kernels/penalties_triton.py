"""Repetition, frequency and presence penalties in one pass over the logits. `sampling.penalties` is the definition."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 4096


def penalize(
    logits: Tensor,
    index: Tensor,
    table: Tensor,
    slots: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
    in_prompt: int,
) -> Tensor:
    """Return the rows `index` [n] int64 of `logits` [rows, vocab] after the penalties, [n, vocab] fp32.

    `table` [slots, vocab] int32 holds the number of times that a token is in the output, plus `in_prompt`, a power of
    two, if the token is in the prompt. `slots` [n] int64 names the line of the table of each row; a row with -1 has no
    penalties. `repetition`, `frequency` and `presence` [n] are fp32.
    """
    n, vocab = len(slots), logits.shape[1]
    assert logits.stride(1) == 1 and table.is_contiguous()
    result = torch.empty((n, vocab), dtype=torch.float32, device=logits.device)
    grid = (n, triton.cdiv(vocab, _TILE))
    _penalize_tile[grid](
        logits,
        index,
        table,
        slots,
        repetition,
        frequency,
        presence,
        result,
        logits.stride(0),
        vocab,
        in_prompt,
        _TILE,
        num_warps=8,
    )
    return result


@triton.jit  # type: ignore[untyped-decorator]
def _penalize_tile(
    logits: tl.tensor,
    index: tl.tensor,
    table: tl.tensor,
    slots: tl.tensor,
    repetition: tl.tensor,
    frequency: tl.tensor,
    presence: tl.tensor,
    result: tl.tensor,
    STRIDE: tl.constexpr,
    VOCAB: tl.constexpr,
    IN_PROMPT: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    source = logits + tl.load(index + row) * STRIDE
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    values = tl.load(source + token, mask=token < VOCAB, other=0.0).to(tl.float32)
    slot = tl.load(slots + row)
    if slot >= 0:
        counts = tl.load(table + slot * VOCAB + token, mask=token < VOCAB, other=0)
        outputs = (counts & (IN_PROMPT - 1)).to(tl.float32)
        factor = tl.where(counts > 0, tl.load(repetition + row), 1.0)
        values = tl.where(values > 0, tl.div_rn(values, factor), values * factor)
        present = tl.where(outputs > 0, tl.load(presence + row), 0.0)
        values -= tl.load(frequency + row) * outputs + present
    tl.store(result + row * VOCAB + token, values, mask=token < VOCAB)

"""`Penalties`: arithmetic on the logits before the temperature, for those rows of a batch that request it.

The `Sampler` owns it. Repetition, frequency and presence penalties read token counts on the device (`TokenCounts`).
`logit_bias` changes few logits, and does not depend on the output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from verl_server.kernels.device_arrays import Ints, to_device
from verl_server.sampling.spec import SampleSpec
from verl_server.sampling.token_counts import IN_PROMPT, TokenCounts


@dataclass
class _Counted:
    """The rows whose penalties read token counts."""

    rows: Ints
    prompt_lens: Ints
    slots: Tensor
    """int64 [n]: line of the table of each row of the batch, -1 for rows without penalties."""
    repetition: Tensor
    """fp32 [n], like `frequency` and `presence`."""
    frequency: Tensor
    presence: Tensor


Penalize = Callable[[Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor, Tensor, int], Tensor]
"""Type of `penalize`, and of the kernel that computes the same."""


def penalize(
    logits: Tensor,
    index: Tensor | None,
    table: Tensor,
    slots: Tensor,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
    in_prompt: int = IN_PROMPT,
) -> Tensor:
    """Return the rows `index` [n] int64 of `logits` [rows, vocab] (None: all) after the penalties, [n, vocab] fp32.

    `table` is the one of `TokenCounts`, and `slots` [n] int64 names the line of each row; a row without penalties has
    -1. `repetition`, `frequency` and `presence` [n] are fp32, and change nothing in such rows.
    """
    rows = logits.float() if index is None else logits.index_select(0, index).float()
    counts = table.index_select(0, slots.clamp(min=0))
    outputs = counts & (in_prompt - 1)
    repetition, frequency, presence = (p.unsqueeze(1) for p in (repetition, frequency, presence))
    factor = torch.where(counts > 0, repetition, 1.0)
    rows = torch.where(rows > 0, rows / factor, rows * factor)
    return rows.sub_(frequency * outputs + presence * (outputs > 0))


class Penalties:
    def __init__(self, vocab_size: int, device: torch.device, penalize: Penalize = penalize) -> None:
        """`penalize`: the function of this module, or a kernel that computes the same."""
        self._vocab_size, self._device, self._penalize = vocab_size, device, penalize
        self._counts: TokenCounts | None = None
        self._counted: _Counted | None = None
        self._bias: tuple[Tensor, Tensor] | None = None
        """(indices into the flattened logits, values to add there), or None."""

    def forget(self) -> None:
        """Drop all counts. The next `set_batch` counts again, from each request's tokens."""
        self._counts = self._counted = None

    def set_batch(self, specs: list[SampleSpec]) -> bool:
        """Prepare for a batch with different rows. A row that stays in the batch keeps its token counts.

        Return True if the batch has penalties or bias.
        """
        rows = [i for i, s in enumerate(specs) if s.penalized]
        self._counted = self._prepare_counts(specs, rows) if rows else None
        if not rows:
            self._counts = None  # gives the memory of the table back
        self._bias = self._prepare_bias(specs)
        return self._counted is not None or self._bias is not None

    def apply(self, logits: Tensor, index: Tensor | None, positions: Ints) -> Tensor:
        """Return the rows `index` [n] of `logits` [rows, vocab] (None: all) after penalties and bias, in fp32.

        `positions` [n] are the positions of the tokens to sample in their sequences, prompt included.
        """
        if self._counts is not None and (counted := self._counted) is not None:
            self._counts.count(positions[counted.rows] - counted.prompt_lens)
            logits = self._penalize(
                logits,
                index,
                self._counts.table,
                counted.slots,
                counted.repetition,
                counted.frequency,
                counted.presence,
                IN_PROMPT,
            )
        else:
            rows = logits if index is None else logits.index_select(0, index)
            logits = rows.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        if self._bias is not None:
            places, values = self._bias
            logits.view(-1).index_add_(0, places, values)
        return logits

    def sampled(self, ids: Tensor) -> None:
        """Record the tokens [n] of the step, which the next step counts. Call this last in a launch."""
        if self._counts is not None and self._counted is not None:
            self._counts.sampled(ids)

    def _prepare_counts(self, specs: list[SampleSpec], rows: list[int]) -> _Counted:
        if self._counts is None:
            self._counts = TokenCounts(self._vocab_size, self._device)
        counted = [specs[i] for i in rows]
        lines = self._counts.set_batch(counted, rows)
        slots = np.full(len(specs), -1, dtype=np.int64)
        slots[rows] = lines

        def column(name: str) -> Tensor:
            return to_device(np.array([getattr(s.params, name) for s in specs], dtype=np.float32), self._device)

        return _Counted(
            rows=np.array(rows, dtype=np.int64),
            prompt_lens=np.array([len(s.prompt_ids) for s in counted], dtype=np.int64),
            slots=to_device(slots, self._device),
            repetition=column("repetition_penalty"),
            frequency=column("frequency_penalty"),
            presence=column("presence_penalty"),
        )

    def _prepare_bias(self, specs: Sequence[SampleSpec]) -> tuple[Tensor, Tensor] | None:
        entries = [
            (row * self._vocab_size + int(token), bias)
            for row, s in enumerate(specs)
            for token, bias in (s.params.logit_bias or {}).items()
            if 0 <= int(token) < self._vocab_size  # the front end refuses other ids
        ]
        if not entries:
            return None
        places, values = zip(*entries, strict=True)
        return (
            to_device(np.array(places, dtype=np.int64), self._device),
            to_device(np.array(values, dtype=np.float32), self._device),
        )

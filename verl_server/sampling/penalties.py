"""`Penalties`: changes of the logits before temperature, for those rows of a batch that request them.

The `Sampler` owns it. Repetition, frequency and presence penalties read token counts on the device. Each step adds the
new output tokens to the counts, so it must know all earlier tokens on the host (`SampleSpec.reads_outputs`).
`logit_bias` and `min_new_tokens` change few logits, and do not depend on output tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from verl_server.kernels.device_arrays import Ints, to_device
from verl_server.sampling.spec import SampleSpec


@dataclass
class _Counted:
    """A row whose penalties read token counts."""

    row: int
    spec: SampleSpec
    seen_outputs: int
    """Number of output tokens that the counts contain."""


@dataclass
class _Counts:
    """The n rows whose penalties read token counts, their penalties ([n, 1] each) and token counts ([n, vocab])."""

    members: list[_Counted]
    rows: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor
    outputs: Tensor
    """fp32: number of times that a token is in the output."""
    prompts: Tensor
    """bool: whether a token is in the prompt."""


class Penalties:
    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._counts: _Counts | None = None
        self._bias: tuple[Tensor, Tensor] | None = None
        """(indices into the flattened logits, values to add there), or None."""
        self._min_new: list[tuple[int, SampleSpec]] = []

    def forget(self) -> None:
        """Drop all counts. The next `set_batch` counts again, from each request's tokens."""
        self._counts = None

    def set_batch(self, specs: list[SampleSpec]) -> None:
        """Prepare for a batch of other rows. Counts of rows that stay in the batch are kept."""
        counted = [_Counted(i, s, 0) for i, s in enumerate(specs) if s.penalized]
        self._counts = self._build_counts(counted, self._counts) if counted else None
        self._bias = self._build_bias(specs)
        self._min_new = [(i, s) for i, s in enumerate(specs) if s.params.min_new_tokens and s.stop_ids]

    def apply(self, logits: Tensor, positions: Ints) -> None:
        """Change `logits` [n, vocab], contiguous, in place.

        `positions` [n] are the positions of the tokens to sample in their sequences, prompt included.
        """
        if self._counts is not None:
            self._apply_counts(self._counts, logits)
        if self._bias is not None:
            places, values = self._bias
            logits.view(-1).index_add_(0, places, values)
        places_masked = [
            row * self._vocab_size + stop
            for row, spec in self._min_new
            if positions[row] < len(spec.prompt_ids) + spec.params.min_new_tokens
            for stop in spec.stop_ids
            if stop < self._vocab_size
        ]
        if places_masked:
            logits.view(-1).index_fill_(0, self._index(places_masked), -torch.inf)

    def _apply_counts(self, counts: _Counts, logits: Tensor) -> None:
        self._count_new_outputs(counts)
        part = logits.index_select(0, counts.rows)
        present = counts.outputs > 0
        factor = torch.where(present | counts.prompts, counts.repetition, 1.0)
        part = torch.where(part > 0, part / factor, part * factor)
        part -= counts.frequency * counts.outputs + counts.presence * present
        logits.index_copy_(0, counts.rows, part)

    def _count_new_outputs(self, counts: _Counts) -> None:
        places = []
        for i, member in enumerate(counts.members):
            places += [i * self._vocab_size + token for token in member.spec.output_ids[member.seen_outputs :]]
            member.seen_outputs = len(member.spec.output_ids)
        if places:
            counts.outputs.view(-1).index_add_(0, self._index(places), torch.ones(len(places), device=self._device))

    def _build_counts(self, members: list[_Counted], old: _Counts | None) -> _Counts:
        n = len(members)
        outputs = torch.zeros(n, self._vocab_size, device=self._device)
        prompts = torch.zeros(n, self._vocab_size, dtype=torch.bool, device=self._device)
        known = {id(m.spec): (i, m.seen_outputs) for i, m in enumerate(old.members)} if old is not None else {}
        for i, member in enumerate(members):
            if old is not None and id(member.spec) in known:
                old_row, member.seen_outputs = known[id(member.spec)]
                outputs[i], prompts[i] = old.outputs[old_row], old.prompts[old_row]
            else:
                prompts[i].index_fill_(0, self._index(member.spec.prompt_ids), True)

        def column(name: str) -> Tensor:
            values = [getattr(m.spec.params, name) for m in members]
            return to_device(np.array(values, dtype=np.float32), self._device).unsqueeze(1)

        return _Counts(
            members=members,
            rows=self._index([m.row for m in members]),
            repetition=column("repetition_penalty"),
            frequency=column("frequency_penalty"),
            presence=column("presence_penalty"),
            outputs=outputs,
            prompts=prompts,
        )

    def _build_bias(self, specs: list[SampleSpec]) -> tuple[Tensor, Tensor] | None:
        entries = [
            (row * self._vocab_size + int(token), bias)
            for row, s in enumerate(specs)
            for token, bias in (s.params.logit_bias or {}).items()
            if 0 <= int(token) < self._vocab_size  # the front end refuses other ids
        ]
        if not entries:
            return None
        places, values = zip(*entries, strict=True)
        return self._index(places), to_device(np.array(values, dtype=np.float32), self._device)

    def _index(self, values: Sequence[int]) -> Tensor:
        return to_device(np.array(values, dtype=np.int64), self._device)

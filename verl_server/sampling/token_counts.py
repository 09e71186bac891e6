"""`TokenCounts`: how often each token occurs in the requests of a batch, in a table on the device, for penalties.

`Penalties` owns it. A request has a line of the table while it is in the batch. The token that a step samples is
counted before the next step samples, from the ids on the device. So the host need not have the token. Tokens of earlier
steps are counted from the lists of the request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from verl_server.kernels.device_arrays import Ints, to_device
from verl_server.sampling.spec import SampleSpec

IN_PROMPT = 1 << 30
"""Added to the count of a token that is in the prompt. Counts of output tokens stay below it."""

_FIRST_LINES = 16
"""Lines of a new table. A table that is too small is doubled."""


@dataclass(frozen=True)
class _Rows:
    """The rows of a batch that have a line of the table, in the order of the batch."""

    places: Ints
    """Indices of the rows in the tensor of sampled ids."""
    lines: Ints
    index: Tensor
    """`places` on the device."""
    starts: Tensor
    """int64: first element of each line in the flattened table."""
    ones: Tensor


class TokenCounts:
    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        self.table = torch.zeros((_FIRST_LINES, vocab_size), dtype=torch.int32, device=device)
        """int32 [lines, vocab]: occurrences in the output, plus `IN_PROMPT` for tokens of the prompt."""
        self._lines: dict[int, int] = {}
        self._free = list(range(_FIRST_LINES))
        self._specs: list[SampleSpec] = []
        """The requests that have a line. The references keep their identities from being reused."""
        self._counted = np.zeros(_FIRST_LINES, dtype=np.int64)
        """Number of output tokens that each line contains."""
        self._rows: _Rows | None = None
        self._sampled: tuple[Tensor, Ints, Ints] | None = None
        """(ids of the last step, indices into these, their lines), not counted yet."""

    def set_batch(self, specs: Sequence[SampleSpec], places: Sequence[int]) -> Ints:
        """Assign a line to each of `specs`, and free the lines of other requests. Return the assigned lines, int64 [n].

        `places` [n] are the indices of the rows in the ids that each step samples.
        """
        staying = {id(s) for s in specs}
        gone = [self._lines.pop(key) for key in list(self._lines) if key not in staying]
        self._free += gone
        if gone and self._sampled is not None:
            ids, at, lines = self._sampled
            kept = ~np.isin(lines, gone)
            self._sampled = ids, at[kept], lines[kept]
        new = [s for s in specs if id(s) not in self._lines]
        self._grow(len(new))
        for s in new:
            self._lines[id(s)] = self._free.pop()
        self._specs = list(specs)
        if new:
            self._clear([self._lines[id(s)] for s in new], new)
        lines = np.array([self._lines[id(s)] for s in specs], dtype=np.int64)
        index = np.array(places, dtype=np.int64)
        starts = to_device(lines * self._vocab_size, self._device)
        ones = torch.ones(len(lines), dtype=torch.int32, device=self._device)
        self._rows = _Rows(index, lines, to_device(index, self._device), starts, ones)
        return lines

    def count(self, wanted: Ints) -> None:
        """Make the lines of the batch contain the first `wanted` [n] output tokens of each row."""
        assert self._rows is not None
        rows, sampled, self._sampled = self._rows, self._sampled, None
        behind = wanted - self._counted[rows.lines]
        if sampled is not None:
            ids, places, lines = sampled
            if lines is rows.lines and (behind == 1).all():  # the usual step: the same rows, one token later
                where = rows.starts + ids.index_select(0, rows.index)
                self.table.view(-1).index_add_(0, where, rows.ones)
                self._counted[lines] += 1
                return
            waiting = np.zeros(len(self._counted), dtype=bool)
            waiting[rows.lines[behind == 1]] = True
            chosen = waiting[lines]
            if chosen.any():
                self._add(lines[chosen], ids.index_select(0, to_device(places[chosen], self._device)))
                self._counted[lines[chosen]] += 1
                behind = wanted - self._counted[rows.lines]
        for i in np.flatnonzero(behind):
            self._count_from_host(self._specs[i], int(rows.lines[i]), int(wanted[i]))

    def sampled(self, ids: Tensor) -> None:
        """Record the ids that a step sampled. The next `count` adds the ids of its rows."""
        assert self._rows is not None
        self._sampled = ids, self._rows.places, self._rows.lines

    def _count_from_host(self, spec: SampleSpec, line: int, wanted: int) -> None:
        if wanted < self._counted[line]:  # output tokens were taken back
            self._clear([line], [spec])
        tokens = spec.output_ids[self._counted[line] : wanted]
        ids = to_device(np.array(tokens, dtype=np.int64), self._device)
        self._add(np.full(len(tokens), line, dtype=np.int64), ids)
        self._counted[line] += len(tokens)

    def _add(self, lines: Ints, ids: Tensor) -> None:
        places = to_device(lines * self._vocab_size, self._device) + ids
        self.table.view(-1).index_add_(0, places, torch.ones_like(places, dtype=torch.int32))

    def _clear(self, lines: list[int], specs: Sequence[SampleSpec]) -> None:
        """Make the lines contain the prompts only."""
        places = [
            np.array(s.prompt_ids, dtype=np.int64) + line * self._vocab_size
            for line, s in zip(lines, specs, strict=True)
        ]
        self.table.index_fill_(0, to_device(np.array(lines, dtype=np.int64), self._device), 0)
        self.table.view(-1).index_fill_(0, to_device(np.concatenate(places), self._device), IN_PROMPT)
        self._counted[lines] = 0

    def _grow(self, needed: int) -> None:
        """Double the table until `needed` lines are free."""
        old = len(self.table)
        lines = old
        while lines - old + len(self._free) < needed:
            lines *= 2
        if lines > old:
            table = torch.zeros((lines, self._vocab_size), dtype=torch.int32, device=self._device)
            table[:old] = self.table
            self.table = table
            self._free += range(old, lines)
            self._counted = np.concatenate([self._counted, np.zeros(lines - old, dtype=np.int64)])

"""`Masks`: tokens that rows of a batch must not sample, by `min_new_tokens`, `allowed_token_ids` and `bad_words`.

The `Sampler` owns it. A forbidden token gets the logit -inf in place, before all arithmetic on logits. No later
arithmetic changes this logit. So the token has no part in log-probabilities and in filters. A word of several tokens
depends on the output, so such a row needs all earlier tokens on the host (`SampleSpec.reads_outputs`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from verl_server.kernels.device_arrays import Ints, to_device
from verl_server.sampling.spec import SampleSpec

_NONE = np.zeros((2, 0), dtype=np.int64)


class _EarlyStops:
    """The stop tokens of rows with `min_new_tokens`, as places [2, n]: rows and tokens."""

    def __init__(self, specs: Sequence[SampleSpec], vocab_size: int) -> None:
        places = [
            (row, stop, len(s.prompt_ids) + s.params.min_new_tokens)
            for row, s in enumerate(specs)
            if s.params.min_new_tokens
            for stop in s.stop_ids
            if stop < vocab_size
        ]
        table = np.array(places, dtype=np.int64).reshape(-1, 3).T
        self._places, self._first_allowed = table[:2], table[2]
        """Place i is allowed where the token to sample has the position `_first_allowed[i]` or a later one."""

    def places(self, positions: Ints) -> Ints:
        if not len(self._first_allowed):
            return _NONE
        return self._places[:, positions[self._places[0]] < self._first_allowed]


class _LongWords:
    """The words of one row that have several tokens."""

    def __init__(self, row: int, spec: SampleSpec) -> None:
        self._row, self._output_ids = row, spec.output_ids
        self._by_token: dict[int, list[list[int]]] = {}  # by the last token but one, which few words share
        for word in spec.bad_words_ids:
            if len(word) > 1:
                self._by_token.setdefault(word[-2], []).append(word)

    def places(self) -> list[tuple[int, int]]:
        """Return the forbidden tokens after the output so far, as (row, token)."""
        output = self._output_ids
        words = self._by_token.get(output[-1], ()) if output else ()
        return [(self._row, word[-1]) for word in words if output[1 - len(word) :] == word[:-1]]


class Masks:
    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._specs: list[SampleSpec] = []
        self._forbidden: Tensor | None = None
        """bool [m, vocab]: tokens outside `allowed_token_ids` of the rows `_rows`, whose specs are `_specs`."""
        self._rows: Tensor | None = None
        self._words: Tensor | None = None
        """Words of one token, as places [2, n]: rows and tokens."""
        self._early_stops = _EarlyStops((), vocab_size)
        self._long_words: list[_LongWords] = []
        self._forbidden_logit: dict[torch.dtype, Tensor] = {}

    def forget(self) -> None:
        """Drop the masks on the device. The next `set_batch` builds all masks again."""
        self._specs, self._forbidden = [], None

    def set_batch(self, specs: list[SampleSpec]) -> None:
        """Prepare for a batch with different rows. A row that stays in the batch keeps its mask."""
        limited = [(row, s) for row, s in enumerate(specs) if s.params.allowed_token_ids is not None]
        known = {id(s): place for place, s in enumerate(self._specs)}
        old, self._specs = self._forbidden, [s for _, s in limited]
        masks = [
            old[known[id(s)]] if old is not None and id(s) in known else self._outside(s.params.allowed_token_ids or [])
            for s in self._specs
        ]
        self._forbidden = torch.stack(masks) if masks else None
        self._rows = to_device(np.array([row for row, _ in limited], dtype=np.int64), self._device) if limited else None
        words = [(row, word[0]) for row, s in enumerate(specs) for word in s.bad_words_ids if len(word) == 1]
        self._words = to_device(np.array(words, dtype=np.int64).T.copy(), self._device) if words else None
        self._early_stops = _EarlyStops(specs, self._vocab_size)
        self._long_words = [
            _LongWords(row, s) for row, s in enumerate(specs) if any(len(w) > 1 for w in s.bad_words_ids)
        ]

    def apply(self, logits: Tensor, positions: Ints) -> None:
        """Set the forbidden tokens in `logits` [n, vocab] to -inf.

        `positions` [n] are the positions of the tokens to sample in their sequences, prompt included.
        """
        if self._forbidden is not None and self._rows is not None:
            part = logits.index_select(0, self._rows).masked_fill_(self._forbidden, -torch.inf)
            logits.index_copy_(0, self._rows, part)
        if self._words is not None:
            self._forbid(logits, self._words)
        long_words = [place for words in self._long_words for place in words.places()]
        places = np.concatenate(
            [self._early_stops.places(positions), np.array(long_words, dtype=np.int64).reshape(-1, 2).T], axis=1
        )
        if places.size:
            self._forbid(logits, to_device(places, self._device))

    def _forbid(self, logits: Tensor, places: Tensor) -> None:
        value = self._forbidden_logit.get(logits.dtype)
        if value is None:
            value = torch.full((1,), -torch.inf, dtype=logits.dtype, device=self._device)
            self._forbidden_logit[logits.dtype] = value
        logits.index_put_((places[0], places[1]), value)

    def _outside(self, allowed: Sequence[int]) -> Tensor:
        """Return bool [vocab] on the device: True for all tokens but `allowed`."""
        forbidden = np.ones(self._vocab_size, dtype=bool)
        forbidden[np.array(allowed, dtype=np.int64)] = False
        return to_device(forbidden, self._device)

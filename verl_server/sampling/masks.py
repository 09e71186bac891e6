"""`Masks`: tokens that some rows of a batch must not sample, by `allowed_token_ids` and `bad_words`.

The `Sampler` owns it and applies it after the penalties. A forbidden token has the logit -inf, so it has no part in
log-probabilities and in filters. A word of several tokens depends on the output, so such a row needs all earlier tokens
on the host (`SampleSpec.reads_outputs`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from verl_server.kernels.device_arrays import to_device
from verl_server.sampling.spec import SampleSpec


class _LongWords:
    """The words of one row that have several tokens."""

    def __init__(self, row: int, spec: SampleSpec) -> None:
        self._row, self._output_ids = row, spec.output_ids
        self._by_token: dict[int, list[list[int]]] = {}  # by the last token but one, which few words share
        for word in spec.bad_words_ids:
            if len(word) > 1:
                self._by_token.setdefault(word[-2], []).append(word)

    def places(self, vocab_size: int) -> list[int]:
        """Return the forbidden tokens after the output so far, as indices into the flattened logits."""
        output = self._output_ids
        words = self._by_token.get(output[-1], ()) if output else ()
        return [self._row * vocab_size + word[-1] for word in words if output[1 - len(word) :] == word[:-1]]


class Masks:
    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._specs: list[SampleSpec] = []
        self._forbidden: Tensor | None = None
        """bool [m, vocab]: tokens outside `allowed_token_ids` of the rows `_rows`, whose specs are `_specs`."""
        self._rows: Tensor | None = None
        self._words: Tensor | None = None
        """Words of one token, as indices into the flattened logits."""
        self._long_words: list[_LongWords] = []

    def forget(self) -> None:
        """Drop the masks on the device. The next `set_batch` makes all of them."""
        self._specs, self._forbidden = [], None

    def set_batch(self, specs: list[SampleSpec]) -> None:
        """Prepare for a batch of other rows. Masks of rows that stay in the batch are kept."""
        limited = [(row, s) for row, s in enumerate(specs) if s.params.allowed_token_ids is not None]
        known = {id(s): place for place, s in enumerate(self._specs)}
        old, self._specs = self._forbidden, [s for _, s in limited]
        masks = [
            old[known[id(s)]] if old is not None and id(s) in known else self._outside(s.params.allowed_token_ids or [])
            for s in self._specs
        ]
        self._forbidden = torch.stack(masks) if masks else None
        self._rows = self._index([row for row, _ in limited]) if limited else None
        words = [
            row * self._vocab_size + word[0]
            for row, s in enumerate(specs)
            for word in s.bad_words_ids
            if len(word) == 1
        ]
        self._words = self._index(words) if words else None
        self._long_words = [
            _LongWords(row, s) for row, s in enumerate(specs) if any(len(w) > 1 for w in s.bad_words_ids)
        ]

    def apply(self, logits: Tensor) -> None:
        """Set the forbidden tokens in `logits` [n, vocab], contiguous, to -inf."""
        if self._forbidden is not None and self._rows is not None:
            part = logits.index_select(0, self._rows).masked_fill_(self._forbidden, -torch.inf)
            logits.index_copy_(0, self._rows, part)
        if self._words is not None:
            logits.view(-1).index_fill_(0, self._words, -torch.inf)
        places = [place for words in self._long_words for place in words.places(self._vocab_size)]
        if places:
            logits.view(-1).index_fill_(0, self._index(places), -torch.inf)

    def _outside(self, allowed: Sequence[int]) -> Tensor:
        """Return bool [vocab] on the device: True for all tokens but `allowed`."""
        forbidden = np.ones(self._vocab_size, dtype=bool)
        forbidden[np.array(allowed, dtype=np.int64)] = False
        return to_device(forbidden, self._device)

    def _index(self, values: Sequence[int]) -> Tensor:
        return to_device(np.array(values, dtype=np.int64), self._device)

"""Log-probabilities of several tokens at a position, and of a prompt, as packed arrays.

The sampler makes them (`sampling.logprobs`), the scheduler sends them in its `BatchTokenIDOut`, and the
TokenizerManager keeps them packed until it builds the caller's result.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from verl_server.messages.packing import ITEM, pack_array, pack_ids, pack_logprobs, unpack_ids, unpack_logprobs


class TokenLogprobs(msgspec.Struct, array_like=True, gc=False):
    """Candidates of one position, packed: the most likely first, or in the order of the request's ids."""

    packed_logprobs: bytes
    packed_ids: bytes

    @classmethod
    def of(cls, logprobs: Sequence[float], token_ids: Sequence[int]) -> TokenLogprobs:
        """`logprobs` are exact in float32."""
        return cls(pack_logprobs(logprobs), pack_ids(token_ids))

    @classmethod
    def rows(
        cls, logprobs: npt.NDArray[np.generic], token_ids: npt.NDArray[np.generic], nums: Iterable[int] | None = None
    ) -> list[TokenLogprobs]:
        """Return the first `nums[i]` candidates of each row i of two arrays [n, count]; all of them by default."""
        n, count = token_ids.shape
        packed_logprobs, packed_ids, width = pack_array(logprobs), pack_array(token_ids), count * ITEM
        starts = range(0, n * width, width) if count else [0] * n
        sizes = [width] * n if nums is None else [min(num * ITEM, width) for num in nums]
        return [
            cls(packed_logprobs[start : start + size], packed_ids[start : start + size])
            for start, size in zip(starts, sizes, strict=True)
        ]

    def __len__(self) -> int:
        return len(self.packed_ids) // ITEM

    def first(self, num: int) -> TokenLogprobs:
        """Return the first `num` candidates, or all if there are fewer."""
        return TokenLogprobs(self.packed_logprobs[: num * ITEM], self.packed_ids[: num * ITEM])

    @property
    def logprobs(self) -> list[float]:
        """The log-probabilities as a new list."""
        return unpack_logprobs(self.packed_logprobs)

    @property
    def token_ids(self) -> list[int]:
        """The token ids as a new list."""
        return unpack_ids(self.packed_ids)


class PromptLogprobs(msgspec.Struct, kw_only=True):
    """Log-probabilities of the tokens prompt[start:], from raw logits.

    Entry i of each list is for log p(prompt[start+i] | prompt[:start+i]). Entry 0 is None, as in SGLang. The part of a
    chunk of the prompt has no such entry.
    """

    packed_ids: bytes
    """Ids of the tokens."""
    packed_logprobs: bytes
    """Log-probabilities of the tokens, but not of the first one if its entry is None."""
    packed_ranks: bytes
    """Packed like ids; parallel to `packed_logprobs`. `ranks` describes them."""
    top: list[TokenLogprobs | None] | None = None
    requested: list[TokenLogprobs | None] | None = None

    @classmethod
    def of(
        cls,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        ranks: Sequence[int],
        top: list[TokenLogprobs | None] | None = None,
        requested: list[TokenLogprobs | None] | None = None,
    ) -> PromptLogprobs:
        """`logprobs`, exact in float32, and `ranks` leave out the first token if its entry is None."""
        return cls(
            packed_ids=pack_ids(token_ids),
            packed_logprobs=pack_logprobs(logprobs),
            packed_ranks=pack_ids(ranks),
            top=top,
            requested=requested,
        )

    @property
    def num_missing(self) -> int:
        """Number of tokens without a log-probability: 1 if the first entry is None."""
        return (len(self.packed_ids) - len(self.packed_logprobs)) // ITEM

    @property
    def token_ids(self) -> list[int]:
        """Ids of the tokens as a new list."""
        return unpack_ids(self.packed_ids)

    @property
    def logprobs(self) -> list[float | None]:
        """The log-probabilities as a new list, parallel to `token_ids`."""
        return [*[None] * self.num_missing, *unpack_logprobs(self.packed_logprobs)]

    @property
    def ranks(self) -> list[int | None]:
        """Place of each token among all tokens of the vocabulary, the most likely first, from 1. Equal tokens share it.

        A new list, parallel to `token_ids`.
        """
        return [*[None] * self.num_missing, *unpack_ids(self.packed_ranks)]

"""Packed token ids and log-probabilities: `bytes` of little-endian int32 and float32, and structs of such `bytes`.

Between the sampler and the caller's result, log-probabilities stay packed. Lists would be millions of objects, and each
full garbage collection visits them all. Packing is exact: the model computes log-probabilities in float32. The sampler
packs (`sampling.logprobs`), the scheduler sends `TokenLogprobs` and `PromptLogprobs` in its `BatchTokenIDOut`, and the
TokenizerManager keeps them packed until it builds the caller's result. `columns` has the form that callers receive.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

ITEM = 4
"""Bytes of one id or log-probability."""


def pack_ids(values: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)  # several times faster than NumPy's conversion of a list


def pack_logprobs(values: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def pack_array(values: npt.NDArray[np.generic]) -> bytes:
    """Pack an array of any shape: integers as ids, floats as log-probabilities."""
    return values.astype("<f4" if values.dtype.kind == "f" else "<i4", copy=False).tobytes()


def unpack_ids(packed: bytes) -> list[int]:
    ids: list[int] = np.frombuffer(packed, dtype="<i4").tolist()
    return ids


def unpack_logprobs(packed: bytes) -> list[float]:
    logprobs: list[float] = np.frombuffer(packed, dtype="<f4").tolist()
    return logprobs


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
        """Rank of each token in the vocabulary: 1 is the most likely token, and equally likely tokens share a rank.

        A new list, parallel to `token_ids`. None: the engine reports no ranks (0 on the wire).
        """
        return [*[None] * self.num_missing, *(rank or None for rank in unpack_ids(self.packed_ranks))]

"""`ForwardBatch`: what one step runs.

The `Scheduler` (rank 0) builds it, and every tensor-parallel rank's `ModelRunner` executes the same one, so it is a
message of plain data. Rank 0 alone samples: with one `SampleSpec` for each sampled entry it gets a `ForwardOutput`.
"""

from __future__ import annotations

import msgspec


class ForwardBatch(msgspec.Struct, tag=True, kw_only=True):
    """One step over a mixed batch: entry i extends request `rows[i]` from cached_lens[i] by extend_lens[i].

    Decode (extend 1), chunked prefill and prefix-cache hits are all this one operation.
    """

    rows: list[int]
    """Row of each request in the page table (`PageTableRows`), in batch order."""
    cached_lens: list[int]
    """Tokens of each request whose KV is in the pool already."""
    extend_lens: list[int]
    """New tokens of each request, >= 1."""
    input_ids: list[int]
    """The new tokens of all entries, concatenated; sum(extend_lens) of them. -1 stands for the token that the latest
    step before this one sampled for the row: it is known to the device only."""
    page_updates: list[tuple[int, int, list[int]]]
    """(row, first column, page ids) to write into the page table before the step."""
    sample: list[int]
    """Entries whose last position is sampled (all but unfinished prefill chunks)."""
    prompt_logprobs: list[tuple[int, int, int, list[int] | None]] = []
    """(entry, first new-token offset, top_num, requested ids): log-probabilities of the prompt tokens that
    follow positions first.. of this chunk, see `ForwardOutput.prompt_logprobs`."""
    prompt_next_ids: list[int] = []
    """Parallel to `prompt_logprobs`: the prompt token that follows the entry's last new token, -1 if none."""

"""`ForwardBatch`: the message that describes one step.

The `Scheduler` (rank 0) builds it. The `ModelRunner` of every tensor-parallel rank executes it, so it is plain data.
Only rank 0 samples, with one `SampleSpec` for each sampled entry, and returns a `ForwardOutput`.
"""

from __future__ import annotations

import msgspec


class ForwardBatch(msgspec.Struct, tag=True, kw_only=True):
    """One step over a mixed batch: entry i extends request `rows[i]` from cached_lens[i] by extend_lens[i] tokens.

    This one operation serves a decode (one new token), a chunk of a prefill, and the rest of a prompt after a
    prefix-cache hit.
    """

    rows: list[int]
    """Row of each request in the page table (`PageTableRows`), in batch order."""
    cached_lens: list[int]
    """Number of tokens of each request whose KV is already in the pool."""
    extend_lens: list[int]
    """Number of new tokens of each request, >= 1."""
    input_ids: list[int]
    """New tokens of all entries, concatenated: sum(extend_lens) ids. -1 stands for the token that the latest earlier
    step sampled for the row, which only the device knows."""
    page_updates: list[tuple[int, int, list[int]]]
    """(row, first column, page ids) entries that are written into the page table before the step."""
    sample: list[int]
    """Indices of the entries whose last position is sampled (all but unfinished prefill chunks)."""
    prompt_logprobs: list[tuple[int, int, int, list[int] | None]] = []
    """Requests for log-probabilities of prompt tokens: (entry, first, top_num, requested ids).

    They are reported for the prompt tokens that follow the entry's new tokens, from offset `first` on. See
    `ForwardOutput.prompt_logprobs`.
    """
    prompt_next_ids: list[int] = []
    """Prompt token that follows the entry's last new token, or -1. Parallel to `prompt_logprobs`."""

"""The seam between scheduling and computing: what one step runs, and what it gave.

The `Scheduler` (rank 0) builds a `ForwardBatch`; every tensor-parallel rank's `ModelRunner` executes the same
one, so it is a message of plain data. Rank 0 alone samples, with one `SampleSpec` per sampled entry, and
gets a `ForwardOutput`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from verl_server.io_struct import PromptLogprobs, TokenLogprobs
from verl_server.sampling_params import TOP_K_ALL, SamplingParams


class ForwardBatch(msgspec.Struct, tag=True, kw_only=True):
    """One step over a mixed batch: entry i extends request `rows[i]` from cached_lens[i] by extend_lens[i].

    Decode (extend 1), chunked prefill and prefix-cache hits are all this one operation.
    """

    rows: list[int]
    """Row of each request in the page table (`ReqToTokenPool`), in batch order."""
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


@dataclass(slots=True, eq=False)
class SampleSpec:
    """What the sampler needs of one request. Built once by the scheduler; the lists are live references.

    Compared by identity: a batch of the same specs has the same parameters.
    """

    params: SamplingParams
    seed: int
    """int64: `params.sampling_seed`, or the scheduler's choice. A draw depends on (seed, position, distribution)."""
    prompt_ids: list[int]
    output_ids: list[int]
    """Grows as the request does; penalties read it."""
    stop_ids: list[int]
    return_logprob: bool
    top_logprobs_num: int = 0
    token_ids_logprob: list[int] | None = None
    reads_outputs: bool = field(init=False)
    """Whether sampling needs the values of all earlier output tokens on the host."""
    filtered: bool = field(init=False)
    """Whether top-k, top-p or min-p may cut tokens."""
    special: bool = field(init=False)
    """Whether sampling takes more than a temperature and a draw."""

    def __post_init__(self) -> None:
        p = self.params
        self.reads_outputs = p.repetition_penalty != 1.0 or bool(p.frequency_penalty or p.presence_penalty)
        self.filtered = not p.is_greedy and (p.top_p < 1.0 or p.top_k < TOP_K_ALL or p.min_p > 0.0)
        edited = self.reads_outputs or bool(p.logit_bias) or (p.min_new_tokens > 0 and bool(self.stop_ids))
        reported = self.top_logprobs_num > 0 or self.token_ids_logprob is not None
        self.special = self.filtered or edited or reported


@dataclass(slots=True)
class ForwardOutput:
    """What a step gave. Lists are parallel to `ForwardBatch.sample`."""

    next_ids: list[int]
    logprobs: list[float]
    """Of the sampled token; see `Sampler` for the definition. Always filled."""
    top_logprobs: list[TokenLogprobs | None]
    token_ids_logprobs: list[TokenLogprobs | None]
    prompt_logprobs: dict[int, PromptLogprobs] = field(default_factory=dict)
    """Batch entry -> this chunk's part: item j is about the token after new-token offset first+j, from raw
    logits. The scheduler concatenates chunks and puts the leading null in front."""

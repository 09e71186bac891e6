"""What sampling takes and returns in one step: a `SampleSpec` for each sampled entry, and one `ForwardOutput`.

The scheduler builds the specs when it admits requests and reads the output; the `Sampler` is between the two.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from verl_server.io_struct import PromptLogprobs, TokenLogprobs
from verl_server.sampling_params import TOP_K_ALL, SamplingParams


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

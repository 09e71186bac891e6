"""Inputs and output of sampling in one step: a `SampleSpec` for each sampled entry, and one `ForwardOutput`.

The scheduler builds a spec when it admits a request, the `Sampler` reads the specs, and the scheduler reads the output.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from verl_server.messages.packed import PromptLogprobs, TokenLogprobs
from verl_server.sampling_params import TOP_K_ALL, LogprobsMode, SamplingParams

NOTHING_ALLOWED = math.inf
"""Value that replaces a log-probability if every token of the row has the logit -inf, so that none can be sampled."""


@dataclass(slots=True, eq=False)
class SampleSpec:
    """The part of a request that the sampler reads. The scheduler builds it once. Its lists are the request's own.

    Specs are compared by identity: a batch of the same specs has the same parameters.
    """

    params: SamplingParams
    seed: int
    """int64: `params.sampling_seed`, or a number that the scheduler chose. A draw is a function of (seed, position,
    distribution)."""
    prompt_ids: list[int]
    output_ids: list[int]
    """Output tokens so far, which the scheduler appends. The newest one may be missing while steps overlap."""
    stop_ids: list[int]
    """Token ids that end the request, which `min_new_tokens` masks."""
    return_logprob: bool
    top_logprobs_num: int = 0
    """Number of most likely tokens whose log-probabilities are requested."""
    token_ids_logprob: list[int] | None = None
    """Token ids whose log-probabilities are requested."""
    sampling_mask_num: int = 0
    """Largest number of tokens to return of the distribution from which the token was drawn; 0: not requested."""
    bad_words_ids: list[list[int]] = field(default_factory=list)
    """Token sequences whose last token is forbidden after the other ones."""
    has_grammar: bool = False
    """True if the step has `TokenMasks` for the request."""
    logprobs_mode: LogprobsMode = field(init=False)
    """The requested mode, or "default" if both have the same distribution or no log-probabilities are requested."""
    penalized: bool = field(init=False)
    """True if penalties read the counts of earlier tokens."""
    masked: bool = field(init=False)
    """True if `Masks` forbids tokens."""
    reads_outputs: bool = field(init=False)
    """True if sampling needs the values of all earlier output tokens on the host."""
    filtered: bool = field(init=False)
    """True if top-k, top-p or min-p may remove tokens."""
    adds_policy: bool = field(init=False)
    """True if the reported log-probability is not the policy's, so that the policy's is reported in addition."""
    counts_choice: bool = field(init=False)
    """True if a mask may leave a single token, so that it is reported whether there was a choice."""
    special: bool = field(init=False)
    """True if sampling needs more than a temperature and a draw."""

    def __post_init__(self) -> None:
        p = self.params
        self.penalized = p.repetition_penalty != 1.0 or bool(p.frequency_penalty or p.presence_penalty)
        self.masked = p.allowed_token_ids is not None or bool(self.bad_words_ids)
        self.reads_outputs = any(len(word) > 1 for word in self.bad_words_ids)
        self.filtered = not p.is_greedy and (p.top_p < 1.0 or p.top_k < TOP_K_ALL or p.min_p > 0.0)
        biased = bool(p.logit_bias) or (p.min_new_tokens > 0 and bool(self.stop_ids))
        edited = self.penalized or self.masked or biased
        differs = {
            "default": False,
            "raw": edited or self.has_grammar or p.temperature not in (0.0, 1.0),
            "sampling": self.filtered or p.is_greedy,
        }
        self.logprobs_mode = p.logprobs_mode if self.return_logprob and differs[p.logprobs_mode] else "default"
        self.adds_policy = self.return_logprob and (self.has_grammar or self.masked or not p.reports_policy)
        self.counts_choice = self.return_logprob and (self.has_grammar or self.masked or p.min_new_tokens > 0)
        reported = self.top_logprobs_num > 0 or self.token_ids_logprob is not None or self.sampling_mask_num > 0
        self.special = self.filtered or edited or reported or self.logprobs_mode != "default"


@dataclass(slots=True)
class TokenMasks:
    """The tokens that a grammar allows, for the rows that have one."""

    rows: list[int]
    """Indices of the rows in the step."""
    words: Tensor
    """int32 [len(rows), ceil(vocab_size / 32)] on the host, pinned for CUDA. See `kernels.token_mask`."""


MakeMasks = Callable[[Callable[[], bool] | None], TokenMasks | None]
"""Returns the masks for sampling a step. A launch calls it after it has launched the step's forward pass.

The argument returns True when the device waits for the sampling, or soon will. It is None if steps do not overlap.
"""


@dataclass(slots=True)
class ForwardOutput:
    """The tokens and log-probabilities of a step. Lists are parallel to `ForwardBatch.sample`."""

    next_ids: list[int]
    """Sampled token ids."""
    logprobs: list[float]
    """Log-probabilities of the sampled tokens, always filled. `Sampler` defines them. NaN: the logits are NaN or +inf.
    `NOTHING_ALLOWED`: all are -inf."""
    top_logprobs: list[TokenLogprobs | None]
    """Log-probabilities of the most likely tokens; None for entries that did not request them."""
    token_ids_logprobs: list[TokenLogprobs | None]
    """Log-probabilities of requested token ids; None for entries that did not request them."""
    policy_logprobs: dict[int, float] = field(default_factory=dict)
    """Index -> log-probability of the sampled token under the policy: log-softmax(model's logits / temperature),
    without mask, penalty or bias. For entries with `SampleSpec.adds_policy`.

    For other entries, the policy's log-probability is in `logprobs`.
    """
    has_choice: dict[int, bool] = field(default_factory=dict)
    """Index -> True if masks allowed at least two tokens, for entries with `SampleSpec.counts_choice`."""
    sampling_masks: dict[int, TokenLogprobs] = field(default_factory=dict)
    """Index -> all tokens that could be drawn, with log-probabilities normalized over these tokens, for entries that
    requested them.

    No tokens if there are more than `SampleSpec.sampling_mask_num`.
    """
    prompt_logprobs: dict[int, PromptLogprobs] = field(default_factory=dict)
    """Batch entry -> log-probabilities of the prompt tokens that this chunk predicts, from raw logits. Item j belongs
    to the token after new token first + j of the chunk, where `first` is the one of `ForwardBatch.prompt_logprobs`. The
    scheduler concatenates the chunks and puts the leading null in front."""

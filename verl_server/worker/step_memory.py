"""`StepMemory`: computes an upper bound on the device memory that one step takes in addition to weights and KV pool.

Made by the `ModelRunner`, which enters the sums into its `MemoryAccount`. The scheduler admits requests whose sampling
takes more than a plain draw as long as their sum fits into the account's part for it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from verl_server.models.config import ModelConfig
from verl_server.sampling.spec import SampleSpec

logger = logging.getLogger(__name__)

MOST_GRAPH_TOKENS = 4096
"""Tokens of the largest step that is captured as a CUDA graph.

A larger step computes for longer than its kernels take to launch, even with a small model.
"""
_MOST_GRAPH_DECODES = 1024
"""Entries of the largest captured decode step if `cuda_graph_max_bs` is not set. They take 39 graphs, and as many again
with shared keys. A larger step is bound by arithmetic and attention, so it gains little from a graph."""
_PROMPT_BYTES = 2**29
"""Bound on the bytes for log-probabilities of a prompt. Their logits are computed for a few positions at a time."""

_WORKSPACES = 2**28
"""Bytes that libraries allocate once, and that graphs take in addition to their tensors."""
_DRAW = 16
"""Bytes for each token of the vocabulary and each sampled row: scaled logits, exponentials and noise, in fp32."""


class _Bytes(NamedTuple):
    """Bytes for each token of the vocabulary and each row that needs more than a plain draw, by the need of the row."""

    edited: int
    """Rows that are edited or reported."""
    penalties: int
    filters: int
    mask: int
    """`allowed_token_ids`: the mask, old and new while a batch changes, and a copy of the logits."""
    mode: int
    """Rows with other log-probabilities than the default."""
    policy: int
    """Rows that also report the policy's log-probabilities, and whether masks left a choice."""
    top: int
    """Rows that request more than `few` most likely tokens."""
    few: int


_TORCH = _Bytes(edited=12, penalties=36, filters=60, mask=14, mode=12, policy=17, top=4, few=0)
"""Edited rows: two copies of the logits in fp32, and the exponentials. Penalties: the counts, old and new while their
table grows, and six temporaries. Filters: sorted logits, their ids, the sort's workspace, and probabilities in fp64. A
policy: a copy of the model's logits until the draw, and then scaled logits and exponentials in fp32; for the choice a
copy of the masked logits and a bool before the draw."""
_KERNELS = _Bytes(edited=2, penalties=18, filters=1, mask=14, mode=4, policy=8, top=12, few=32)
"""Edited rows: the weights of blocks. Penalties: the counts, old and new while their table grows, and the logits in
fp32. A mode: a copy of the logits. A policy: a copy of the model's logits until the end; for the choice a copy of the
masked logits and a bool, or the weights of blocks."""
_TILE = 128
"""Prompt positions that the product with the vocabulary computes at once."""
_TOP = 40
"""Bytes for each token of a top-k: value and id, before and after their sort, and the sort's workspace."""
_NAMED = 32
"""Bytes for each token id in `token_ids_logprob`: two indices, three values."""


def most_decodes(cuda_graph_max_bs: int | None, max_rows: int) -> int:
    """Return the entries of the largest captured decode step of an engine that runs at most `max_rows` requests."""
    return min(cuda_graph_max_bs or _MOST_GRAPH_DECODES, max_rows)


def log_uncaptured(max_bs: int, max_rows: int) -> None:
    """Log which decode steps have no CUDA graph, if the largest captured one has `max_bs` of `max_rows` entries."""
    if max_bs < max_rows:
        logger.info(
            "The largest decode step that is captured as a CUDA graph has %d requests. Steps of %d to %d requests are "
            "launched operator by operator, which takes longer. cuda_graph_max_bs=%d captures them too, and takes more "
            "memory, and time for captures.",
            *(max_bs, max_bs + 1, max_rows, max_rows),
        )


@dataclass(frozen=True)
class StepMemory:
    token_bytes: int
    """Bytes for the activations of one new token."""
    logit_bytes: int
    """Bytes for the logits of one row; for several ranks, of this rank, gathered from all ranks, and concatenated."""
    vocab_size: int
    sampling: _Bytes

    @classmethod
    def of(cls, config: ModelConfig, tp_size: int, dtype: torch.dtype, *, fused: bool = False) -> StepMemory:
        """Return the `StepMemory` of one of `tp_size` ranks that compute in `dtype`.

        `fused` is True if kernels sample.
        """
        hidden, size = config.hidden_size, dtype.itemsize
        queries = config.num_heads * config.head_dim // tp_size
        keys_and_values = 2 * max(1, config.num_kv_heads // tp_size) * config.head_dim
        # Residual, norm, output of a projection and sum over ranks; and the wider one of attention and MLP.
        widest = max(3 * queries + keys_and_values, 3 * config.intermediate_size // tp_size)
        activations = (4 * hidden + widest) * size + 8 * hidden  # a norm in plain PyTorch has two temporaries in fp32
        copies = 1 if tp_size == 1 else 3
        return cls(activations, copies * size * config.vocab_size, config.vocab_size, _KERNELS if fused else _TORCH)

    def largest(self, tokens: int, rows: int) -> int:
        """Return the bytes of a step with `tokens` new tokens, `rows` rows that are drawn plainly, and
        log-probabilities of prompts."""
        return tokens * self.token_bytes + rows * (self.logit_bytes + _DRAW * self.vocab_size) + _PROMPT_BYTES

    def graph(self, tokens: int, rows: int) -> int:
        """Return a bound on the bytes of the capture of a step with `tokens` new tokens and `rows` rows of logits."""
        return _WORKSPACES + tokens * self.token_bytes + rows * self.logit_bytes

    def graphs(self, max_bs: int, rows: int) -> int:
        """Return the bytes of the graphs of an engine with `rows` rows: those of the largest decode step, which has
        `max_bs` entries, and of the largest mixed step. Smaller graphs reuse their memory.

        The workspaces count twice: captures took some already, and the next capture needs room for more."""
        return _WORKSPACES + self.graph(MOST_GRAPH_TOKENS + max_bs, rows + max_bs)

    def special(self, spec: SampleSpec) -> int:
        """Return the bytes that sampling takes for one request beyond a plain draw."""
        of = self.sampling
        policy = of.policy * spec.adds_policy
        if not spec.special:
            return policy * self.vocab_size
        each = policy + of.edited + of.penalties * spec.penalized + of.filters * spec.filtered
        each += of.mask * spec.masked + of.mode * ((spec.logprobs_mode != "default") + (spec.sampling_mask_num > 0))
        each += 4 * bool(spec.params.logit_bias)
        tokens = spec.top_logprobs_num + spec.sampling_mask_num
        return each * self.vocab_size + self._reported(tokens, spec.token_ids_logprob)

    def most_special(self, rows: int) -> int:
        """Return the bytes that sampling takes for `rows` requests which use every setting, without long lists of token
        ids in `token_ids_logprob` and without logits of several kinds of log-probabilities."""
        of = self.sampling
        each = of.edited + of.penalties + of.filters + of.mask + of.mode + of.policy + of.top
        return rows * each * self.vocab_size

    def prompt_positions(self, top_num: int, requested: Sequence[int] | None) -> int:
        """Return the number of prompt positions whose log-probabilities may be computed at once, at least 1."""
        each = self.logit_bytes + self.sampling.edited * self.vocab_size + self._reported(top_num, requested)
        positions = _PROMPT_BYTES // each
        return max(1, positions // _TILE * _TILE if positions > _TILE else positions)

    def _reported(self, top_num: int, requested: Sequence[int] | None) -> int:
        of_all = self.sampling.top * self.vocab_size if top_num > self.sampling.few else 0
        return of_all + _TOP * top_num + _NAMED * len(requested or ())

"""Log-probabilities of sampled tokens from hidden states, a chunk of tokens at a time.

`Policy` calls `token_logprobs` with the hidden states of the positions whose next token was sampled. Neither pass
holds more than a few tensors of [chunk, vocabulary]: the backward pass computes the logits of each chunk again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def token_logprobs(
    hidden: Tensor, head: Tensor, targets: Tensor, *, temperature: float = 1.0, chunk: int = 2048, entropy: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Return the log-probability of each target under softmax(hidden @ head.T / temperature), and each row's entropy.

    hidden [n, width] and head [vocabulary, width] have one dtype, in which the products are computed; targets [n] are
    token ids. Both results are differentiable fp32 tensors [n]; the second one is None without `entropy`. The softmax
    is computed in fp32. Gradients of `head` are summed over the chunks in fp32.
    """
    logprobs, entropies = _ChunkedLogprobs.apply(hidden, head, targets, temperature, chunk, entropy)  # type: ignore[no-untyped-call]
    return logprobs, entropies


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, temperature: float, chunk: int, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        logprobs = torch.empty(targets.shape, dtype=torch.float32, device=hidden.device)
        entropy = torch.empty_like(logprobs) if with_entropy else None
        for rows in _chunks(len(targets), chunk):
            distribution = _log_softmax(hidden[rows], head, temperature)
            logprobs[rows] = distribution.gather(1, targets[rows, None]).squeeze(1)
            if entropy is not None:
                entropy[rows] = -torch.linalg.vecdot(distribution.exp(), distribution)
        ctx.save_for_backward(hidden, head, targets, entropy)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        # With p = softmax(z / T): d logprob / dz = (one-hot - p) / T and d entropy / dz = -p (log p + entropy) / T.
        hidden, head, targets, entropy = ctx.saved_tensors
        if grad_logprobs is None:
            grad_logprobs = torch.zeros(targets.shape, dtype=torch.float32, device=hidden.device)
        grad_hidden = torch.empty_like(hidden)
        grad_head = torch.zeros(head.shape, dtype=torch.float32, device=head.device)
        for rows in _chunks(len(targets), ctx.chunk):
            distribution = _log_softmax(hidden[rows], head, ctx.temperature)
            scale = grad_logprobs[rows, None]
            if grad_entropy is None:
                grad = distribution.exp_().mul_(-scale)
            else:
                bonus = grad_entropy[rows, None]
                probabilities = distribution.exp()
                grad = distribution.add_(entropy[rows, None]).mul_(bonus).add_(scale).mul_(probabilities).neg_()
                del probabilities
            grad.scatter_add_(1, targets[rows, None], scale)
            if ctx.temperature != 1.0:
                grad.div_(ctx.temperature)
            grad = grad.to(hidden.dtype)
            grad_hidden[rows] = grad @ head
            if grad_head.dtype == grad.dtype:
                grad_head.addmm_(grad.T, hidden[rows])
            else:
                grad_head.add_(grad.T @ hidden[rows])
        return grad_hidden, grad_head.to(head.dtype), None, None, None, None


def _log_softmax(hidden: Tensor, head: Tensor, temperature: float) -> Tensor:
    """Return log_softmax(hidden @ head.T / temperature), [rows, vocabulary] fp32."""
    logits = hidden @ head.T
    if temperature != 1.0:
        logits = logits.float().div_(temperature)
    return torch.log_softmax(logits, -1, dtype=torch.float32)


def _chunks(rows: int, chunk: int) -> Iterator[slice]:
    for start in range(0, rows, chunk):
        yield slice(start, start + chunk)

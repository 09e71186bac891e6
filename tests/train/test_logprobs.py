"""Chunked log-probabilities against the plain formula in fp32: values, gradients and memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from verl_server.train.logprobs import token_logprobs

ROWS, WIDTH, VOCABULARY = 23, 8, 301


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, WIDTH, generator=generator).to(dtype).requires_grad_()
    head = torch.randn(VOCABULARY, WIDTH, generator=generator).to(dtype).requires_grad_()
    return hidden, head, torch.randint(VOCABULARY, (ROWS,), generator=generator)


def plain(hidden: Tensor, head: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    distribution = ((hidden @ head.T).float() / temperature).log_softmax(-1)
    logprobs = distribution.gather(1, targets[:, None]).squeeze(1)
    return logprobs, -(distribution.exp() * distribution).sum(-1)


@pytest.mark.parametrize("chunk", [1, 5, 23, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("bonus", [0.0, 0.3])
def test_values_and_gradients_are_the_plain_ones(chunk: int, temperature: float, bonus: float) -> None:
    hidden, head, targets = inputs()
    weights = torch.linspace(-1, 1, ROWS)
    logprobs, entropy = token_logprobs(hidden, head, targets, temperature=temperature, chunk=chunk)
    assert entropy is not None
    expected, expected_entropy = plain(hidden, head, targets, temperature)
    torch.testing.assert_close(logprobs, expected)
    torch.testing.assert_close(entropy, expected_entropy)

    def loss(logprobs: Tensor, entropy: Tensor) -> Tensor:
        total = (weights * logprobs).sum()
        return total + bonus * (weights.square() * entropy).sum() if bonus else total

    ours = torch.autograd.grad(loss(logprobs, entropy), (hidden, head))
    theirs = torch.autograd.grad(loss(expected, expected_entropy), (hidden, head))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_the_entropy_alone_has_a_gradient() -> None:
    hidden, head, targets = inputs()
    _, entropy = token_logprobs(hidden, head, targets, chunk=4)
    assert entropy is not None
    ours = torch.autograd.grad(entropy.sum(), (hidden, head))
    theirs = torch.autograd.grad(plain(hidden, head, targets, 1.0)[1].sum(), (hidden, head))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_entropy_is_optional() -> None:
    hidden, head, targets = inputs()
    logprobs, entropy = token_logprobs(hidden, head, targets, entropy=False)
    assert entropy is None
    torch.testing.assert_close(logprobs, plain(hidden, head, targets, 1.0)[0])


def test_no_tokens_have_gradients_of_zero() -> None:
    hidden, head, targets = inputs()
    logprobs, _ = token_logprobs(hidden[:0], head, targets[:0])
    (2.0 * logprobs.sum()).backward()  # type: ignore[no-untyped-call]
    assert hidden.grad is not None and head.grad is not None
    assert not hidden.grad.any() and not head.grad.any()


def test_gradients_of_the_head_are_summed_in_fp32() -> None:
    """A bf16 sum over many chunks would lose small terms."""
    _, head, _ = inputs(torch.bfloat16)
    hidden = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    many, targets = hidden.expand(1000, WIDTH), torch.zeros(1000, dtype=torch.long)
    logprobs, _ = token_logprobs(many, head, targets, chunk=1, entropy=False)
    (ours,) = torch.autograd.grad(logprobs.sum(), head)
    logprobs, _ = token_logprobs(hidden, head, targets[:1], entropy=False)
    (single,) = torch.autograd.grad(logprobs.sum(), head)
    torch.testing.assert_close(ours.float(), 1000 * single.float(), rtol=0.01, atol=0.01)


class _Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.elements = max([self.elements, *(tensor.numel() for tensor in tensors)])
        return result


def test_no_tensor_is_larger_than_a_chunk_of_logits() -> None:
    hidden, head, targets = inputs()
    with _Largest() as plainly:
        torch.stack(plain(hidden, head, targets, 1.0)).sum().backward()  # type: ignore[no-untyped-call]
    assert plainly.elements == ROWS * VOCABULARY
    chunk = 10  # `head` itself has 8 x VOCABULARY elements
    with _Largest() as largest:
        logprobs, entropy = token_logprobs(hidden, head, targets, chunk=chunk)
        assert entropy is not None
        (logprobs + entropy).sum().backward()  # type: ignore[no-untyped-call]
    assert largest.elements == chunk * VOCABULARY

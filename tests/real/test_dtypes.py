"""The dtype matrix: a server of each dtype against transformers of the same dtype, and both against fp32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SETTINGS, load
from prompts import TEXTS
from reference import Reference

from verl_server import Engine

PROMPTS = [TEXTS[number] for number in (1, 7, 8, 12, 22)]
BOUNDS = {"float32": (5e-5, 1e-4), "bfloat16": (0.1, 1.0), "float16": (0.02, 0.2)}
"""Dtype -> bounds on the mean and on the largest difference from transformers of this dtype.

Measured: 1.6e-5 and 5.3e-5 (float32), 0.036 and 0.25 (bfloat16), 0.0045 and 0.048 (float16).
"""


def prompt_logprobs(engine: Any, tokenizer: Any) -> torch.Tensor:
    """Return the server's log-probabilities of all tokens of the prompts but the first of each, fp32."""
    ids = [tokenizer.encode(text) for text in PROMPTS]
    results: Any = engine.generate(
        input_ids=ids,
        sampling_params={"max_new_tokens": 1},
        return_logprob=True,
        logprob_start_len=0,
        timeout=120,
    )
    return torch.tensor([found for r in results for found, _, _ in r["meta_info"]["input_token_logprobs"][1:]])


def reference_logprobs(reference: Reference, tokenizer: Any) -> torch.Tensor:
    return torch.cat([reference.chosen(tokenizer.encode(text))[0] for text in PROMPTS])


@contextmanager
def served(request: pytest.FixtureRequest, folder: Path, dtype: str) -> Iterator[Any]:
    if dtype == "float32":
        yield request.getfixturevalue("engine")
        return
    with Engine(model_path=str(folder), dtype=dtype, **SETTINGS) as engine:
        yield engine


@pytest.mark.parametrize("dtype", BOUNDS)
def test_dtype(request: pytest.FixtureRequest, folder: Path, reference: Reference, tokenizer: Any, dtype: str) -> None:
    with served(request, folder, dtype) as engine:
        ours = prompt_logprobs(engine, tokenizer)
    exact = reference_logprobs(reference, tokenizer)
    same = Reference(load(folder, getattr(torch, dtype))) if dtype != "float32" else reference
    theirs = reference_logprobs(same, tokenizer)
    mean, worst = float((ours - theirs).abs().mean()), float((ours - theirs).abs().max())
    own_error, their_error = float((ours - exact).abs().mean()), float((theirs - exact).abs().mean())
    print(
        f"{dtype}: from transformers of this dtype {mean:.2e} (mean), {worst:.2e} (largest); "
        f"mean error against fp32 {own_error:.2e}, transformers' {their_error:.2e}, over {len(ours)} tokens"
    )
    assert mean < BOUNDS[dtype][0] and worst < BOUNDS[dtype][1]
    assert dtype == "float32" or own_error < 1.25 * their_error

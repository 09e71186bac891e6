"""Kernels that begin early keep the rules of `kernels.dependent`. What they compute is tested with each kernel."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from verl_server.kernels import (
    activation,
    attention_decode,
    attention_extend,
    attention_shared,
    dependent,
    gemv,
    gpu,
    norms,
    rotary,
)

KERNELS = [
    activation._silu_mul_block,
    attention_decode.decode_kernel,
    attention_extend.extend_kernel,
    attention_shared.shared_kernel,
    gemv._gemv,
    norms._norm_row,
    norms._add_norm_row,
    rotary._norm_rotate_store,
]


@pytest.mark.parametrize(("capability", "early"), [(80, False), (89, False), (90, True), (120, True)])
def test_gpus_before_hopper_launch_as_usual(capability: int, early: bool) -> None:
    with gpu.assumed(132, capability):
        launch = dependent.options(torch.device("meta"))
    assert launch == ({"DEPENDENT": True, "launch_pdl": True} if early else {"DEPENDENT": False})


def test_without_a_gpu_nothing_begins_early() -> None:
    assert dependent.options(torch.device("cpu")) == {"DEPENDENT": False}


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: str(kernel.fn.__name__))
def test_every_program_waits_before_it_stores_or_returns(kernel: Any) -> None:
    """A program that ends without the wait lets the kernel after the next one read unfinished results."""
    assert "DEPENDENT" in inspect.signature(kernel.fn).parameters
    body = [line.strip() for line in inspect.getsource(kernel.fn).splitlines()]
    waits = [i for i, line in enumerate(body) if line.startswith("dependent.wait(DEPENDENT)")]
    stores = [i for i, line in enumerate(body) if line.startswith(("tl.store(", "tl.atomic"))]
    assert waits and stores and min(waits) < min(stores)
    assert all(min(waits) < i for i, line in enumerate(body) if line == "return")
    assert body.index("dependent.let_next_begin(DEPENDENT)") < min(waits)

"""Modules of an engine take copies or go through its own loader, and modules that share a tensor go the same way."""

from __future__ import annotations

import pytest
import torch

from verl_server.backends.process.load_plan import LoadPlan
from verl_server.weight_sync.receiver.load_trace.record import LoadTrace
from verl_server.weight_sync.receiver.load_trace.regions import LoadedCopy, Region

ROW = (slice(0, 2),)


def copy(source: str, offset: int = 0) -> LoadedCopy:
    return LoadedCopy(source, ROW, Region((2,), (1,), offset))


@pytest.fixture
def trace() -> LoadTrace:
    return LoadTrace(
        copies={
            "a.norm.weight": [copy("norm")],
            "a.qkv.weight": [copy("q"), copy("k", 2)],
            "b.head.weight": [copy("e")],
        },
        feeds={
            "norm": {"a.norm.weight"},
            "q": {"a.qkv.weight"},
            "k": {"a.qkv.weight"},
            "e": {"b.head.weight", "b.embed.weight"},
        },
    )


def tensors(**others: torch.Tensor) -> dict[str, torch.Tensor]:
    sizes = {"a.norm.weight": 2, "a.qkv.weight": 4, "b.head.weight": 2, "b.embed.weight": 2}
    return {name: torch.zeros(size) for name, size in sizes.items()} | others


def test_copies_are_pieces_of_the_live_tensors(trace: LoadTrace) -> None:
    live = tensors()
    plan = LoadPlan(trace, tensors(), live)
    assert not plan.reloaded
    (view, index), *_ = plan.pieces()["k"]
    view.fill_(5)
    assert index == ROW and live["a.qkv.weight"].tolist() == [0, 0, 5, 5]


@pytest.mark.parametrize(
    "live",
    [torch.zeros(0), torch.zeros(4, dtype=torch.float16), torch.zeros(8)[::2]],
    ids=["packed", "converted", "padded"],
)
def test_another_layout_is_reloaded(trace: LoadTrace, live: torch.Tensor) -> None:
    plan = LoadPlan(trace, tensors(), tensors(**{"a.qkv.weight": live}))
    assert set(plan.reloaded) == {"a.qkv"}
    assert set(plan.pieces()) == {"norm", "e"}


def test_computed_values_are_reloaded_with_what_shares_their_source(trace: LoadTrace) -> None:
    trace.computed["b.embed.weight"] = "its values are computed"
    plan = LoadPlan(trace, tensors(), tensors())
    assert set(plan.reloaded) == {"b.head", "b.embed"}
    groups = plan.groups(["norm", "q", "k", "e", "elsewhere"])
    assert groups["q"] == groups["k"] != groups["norm"]
    assert "elsewhere" not in groups, "it reaches nothing on this rank"


def test_a_value_that_the_loader_reads_is_reloaded(trace: LoadTrace) -> None:
    trace.read["a.norm.scale"] = "item"
    plan = LoadPlan(trace, tensors(), tensors())
    assert set(plan.reloaded) == {"a.norm"}
    assert plan.groups(["norm", "a.norm.scale"]).keys() == {"norm", "a.norm.scale"}


def test_derived_tensors_send_the_modules_around_them_through_the_reload(trace: LoadTrace) -> None:
    plan = LoadPlan(trace, tensors(), tensors())
    plan.reload_below("a", "a.attn.W_UK is derived from its weights")
    assert set(plan.reloaded) == {"a.norm", "a.qkv"}

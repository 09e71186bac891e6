"""Experts come as one tensor of a layer, as transformers names them, or as one tensor each."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from verl_server.errors import WeightUpdateError
from verl_server.models.expert_stacks import expanded_shapes, expert_stacks
from verl_server.models.loader import WeightMap, WeightSlot
from verl_server.weight_sync.receiver.weight_receiver import WeightReceiver

EXPERTS, ROWS, HIDDEN = 3, 4, 5
SHAPES = {"layer.experts.gate_up_proj": (EXPERTS, 2 * ROWS, HIDDEN), "layer.experts.down_proj": (EXPERTS, HIDDEN, ROWS)}


class Loader:
    """Keeps what it is asked to install, as an engine's own loader would."""

    refusal = ""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = frozenset(names)
        self.installed: dict[str, Tensor] = {}

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self.installed.update((name, tensor.clone()) for name, tensor in tensors)

    def lacking(self, names: Iterable[str]) -> list[str]:
        return []


@pytest.fixture
def slots() -> dict[str, WeightSlot]:
    """A rank that has the second half of each expert's rows."""
    found = {}
    for name, shape in expanded_shapes(SHAPES).items():
        half = shape[0] // 2
        view = torch.zeros(shape[0] - half, shape[1])
        found[name] = WeightSlot(name, shape, torch.float32, [(view, (slice(half, None), slice(None)))])
    return found


@pytest.fixture
def weights() -> dict[str, Tensor]:
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}


def of_expert(weights: dict[str, Tensor], name: str) -> Tensor:
    _, _, number, projection, _ = name.split(".")
    if projection == "down_proj":
        return weights["layer.experts.down_proj"][int(number)]
    gate, up = weights["layer.experts.gate_up_proj"][int(number)].chunk(2)
    return gate if projection == "gate_proj" else up


def test_names_and_shapes_of_the_experts(slots: dict[str, WeightSlot]) -> None:
    assert len(slots) == 3 * EXPERTS
    assert slots["layer.experts.2.up_proj.weight"].shape == (ROWS, HIDDEN)
    assert {name: stack.shape for name, stack in expert_stacks(slots).items()} == SHAPES
    del slots["layer.experts.1.down_proj.weight"]
    assert set(expert_stacks(slots)) == {"layer.experts.gate_up_proj"}


def test_a_stack_is_copied_to_each_expert(slots: dict[str, WeightSlot], weights: dict[str, Tensor]) -> None:
    weight_map = WeightMap(slots, stacks=expert_stacks(slots))
    receiver = WeightReceiver(weight_map, 0, 1, torch.device("cpu"))
    plan = receiver.plan(list(weights.items()), strict_dtype=True, partial=False)
    assert plan.covers_all and set(plan.names) == set(slots)
    plan.commit()
    for name, slot in slots.items():
        (view, index), *_ = slot.pieces
        assert torch.equal(view, of_expert(weights, name)[index]), name


def test_a_stack_is_loaded_expert_by_expert(slots: dict[str, WeightSlot], weights: dict[str, Tensor]) -> None:
    """Only the down projections go through the engine's loader."""
    loaded = [name for name in slots if "down" in name]
    for name in loaded:
        slots[name].pieces = []
    loader = Loader(loaded)
    weight_map = WeightMap(slots, {}, expert_stacks(slots), loader)
    receiver = WeightReceiver(weight_map, 0, 1, torch.device("cpu"))
    receiver.plan(list(weights.items()), strict_dtype=True, partial=False).commit()
    assert set(loader.installed) == set(loaded)
    assert all(torch.equal(tensor, of_expert(weights, name)) for name, tensor in loader.installed.items())


def test_an_expert_must_not_come_twice(slots: dict[str, WeightSlot], weights: dict[str, Tensor]) -> None:
    weight_map = WeightMap(slots, stacks=expert_stacks(slots))
    receiver = WeightReceiver(weight_map, 0, 1, torch.device("cpu"))
    alone = "layer.experts.0.down_proj.weight"
    named = [*weights.items(), (alone, of_expert(weights, alone))]
    with pytest.raises(WeightUpdateError, match=rf"'{alone}' twice, in 'layer.experts.down_proj'"):
        receiver.plan(named, strict_dtype=True, partial=True)


def test_a_stack_of_another_shape_is_refused(slots: dict[str, WeightSlot]) -> None:
    receiver = WeightReceiver(WeightMap(slots, stacks=expert_stacks(slots)), 0, 1, torch.device("cpu"))
    wrong = torch.zeros(EXPERTS, HIDDEN, 2 * ROWS)
    with pytest.raises(WeightUpdateError, match=r"shape \[3, 5, 8\], but the model's is \[3, 8, 5\]"):
        receiver.plan([("layer.experts.gate_up_proj", wrong)], strict_dtype=True, partial=True)


@pytest.mark.parametrize("lost", ["layer.experts.2.up_proj.weight", "layer.experts.gate_up_proj"])
def test_every_expert_must_come(slots: dict[str, WeightSlot], weights: dict[str, Tensor], lost: str) -> None:
    """A whole update brings every expert, in a stack or alone."""
    receiver = WeightReceiver(WeightMap(slots, stacks=expert_stacks(slots)), 0, 1, torch.device("cpu"))
    one_by_one = {name: of_expert(weights, name) for name in slots}
    down = {"layer.experts.down_proj": weights["layer.experts.down_proj"]}
    mixed = down | {name: tensor for name, tensor in one_by_one.items() if "down_proj" not in name}
    for whole in (weights, one_by_one, mixed):
        receiver.plan(list(whole.items()), strict_dtype=True, partial=False)
        if lost in whole:
            named = [(name, tensor) for name, tensor in whole.items() if name != lost]
            expected = 1 if lost in slots else 2 * EXPERTS
            with pytest.raises(WeightUpdateError, match=rf"it lacks {expected} of 9; missing: 'layer\.experts\."):
                receiver.plan(named, strict_dtype=True, partial=False)

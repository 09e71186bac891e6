"""Experts stacked in one tensor, under the names of transformers 5 for the parameters of a mixture of experts.

A checkpoint has one tensor for each expert and projection. A trainer's model has two parameters for all experts of a
layer: `gate_up_proj` [experts, 2 x intermediate, hidden], whose first half are the gates, and `down_proj` [experts,
hidden, intermediate]. Weight maps of engines with experts accept both.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from torch import Tensor

from verl_server.models.loader import Index, WeightSlot, WeightStack

_EXPERT = re.compile(r"(?P<layer>.+\.experts)\.(?P<number>\d+)\.(?P<projection>gate|up|down)_proj\.weight")
_STACK = re.compile(r"(?P<layer>.+\.experts)\.(?P<projection>gate_up|down)_proj")


def expert_stacks(slots: Mapping[str, WeightSlot]) -> dict[str, WeightStack]:
    """Return the stacks of all layers whose experts are complete and of equal shape, by their names."""
    layers: dict[str, dict[str, set[int]]] = {}
    for name in slots:
        if match := _EXPERT.fullmatch(name):
            layers.setdefault(match["layer"], {}).setdefault(match["projection"], set()).add(int(match["number"]))
    stacks = {}
    for layer, projections in layers.items():
        for projection, parts in (("gate_up", ("gate", "up")), ("down", ("down",))):
            count = max((len(numbers) for numbers in projections.values()), default=0)
            first = slots.get(f"{layer}.0.{parts[0]}_proj.weight")
            if first is None:
                continue
            name, (rows, columns) = f"{layer}.{projection}_proj", first.shape
            shape = (count, len(parts) * rows, columns)
            members = _members(name, shape)
            if all(member in slots and slots[member].shape == first.shape for member in members):
                stacks[name] = WeightStack(name, shape, first.dtype, members)
    return stacks


def expanded_shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return name -> shape in the checkpoint for `shapes`, name -> shape in a model with stacked experts."""
    found: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        members = _members(name, shape)
        found.update({member: _lengths(box)[1:] for member, box in members.items()} if members else {name: shape})
    return found


def expanded_tensors(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, view) of each checkpoint tensor in a model's tensor: the tensor itself, or each part of a stack."""
    members = _members(name, tuple(tensor.shape))
    if not members:
        yield name, tensor
    for member, box in members.items():
        yield member, tensor[box][0]


def _members(name: str, shape: tuple[int, ...]) -> dict[str, Index]:
    """Return the names and boxes of the members of a stack, or nothing if `name` is no stack."""
    match = _STACK.fullmatch(name)
    if match is None:
        return {}
    experts, rows, columns = shape
    halves = ("gate", "up") if match["projection"] == "gate_up" else ("down",)
    size = rows // len(halves)
    return {
        f"{match['layer']}.{number}.{half}_proj.weight": (
            slice(number, number + 1),
            slice(i * size, (i + 1) * size),
            slice(0, columns),
        )
        for number in range(experts)
        for i, half in enumerate(halves)
    }


def _lengths(box: Index) -> tuple[int, ...]:
    return tuple(part.stop - part.start for part in box)

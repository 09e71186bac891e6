"""The list of a module's parameters is rebuilt only when the parameters change."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from verl_server.weight_sync.trainer.trainer_modules import ModuleParameters


def block() -> nn.Module:
    module = nn.Module()
    module.up, module.down, module.empty = nn.Linear(4, 4), nn.Linear(4, 4), nn.Module()
    module.tied = module.up
    return module


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "a parameter is replaced": lambda m: setattr(m.up, "weight", nn.Parameter(torch.zeros(4, 4))),
    "a child is replaced": lambda m: setattr(m, "down", nn.Linear(4, 4)),
    "a child is added": lambda m: m.add_module("more", nn.Linear(4, 4)),
    "a child is added where there was none": lambda m: m.get_submodule("empty").add_module("more", nn.Linear(4, 4)),
    "a parameter is added where there was none": lambda m: m.get_submodule("empty").register_parameter(
        "more", nn.Parameter(torch.zeros(4))
    ),
    "a parameter is removed": lambda m: delattr(m.up, "bias"),
    "a parameter becomes none": lambda m: setattr(m.down, "bias", None),
    "a parameter goes to the next module": lambda m: (
        setattr(m.down, "moved", m.up.bias),
        m.down._parameters.update(weight=m.down._parameters.pop("weight"), bias=m.down._parameters.pop("bias")),
        delattr(m.up, "bias"),
    ),
    "two children change places": lambda m: m._modules.update(up=m.down, down=m.up),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_list_is_the_same_until_something_changes(change: str) -> None:
    module = block()
    parameters = ModuleParameters(module)
    first = parameters.named()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1.0)
            parameter.data = parameter.data.clone()
    assert parameters.named() is first
    assert first == list(module.named_parameters()) and first.names == tuple(name for name, _ in first)
    CHANGES[change](module)
    second = parameters.named()
    assert second is not first and parameters.named() is second
    assert [(n, id(p)) for n, p in second] == [(n, id(p)) for n, p in module.named_parameters()]

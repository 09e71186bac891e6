"""What `pusher` must know of the trainer's modules: their parameters now, and which of them FSDP2 holds for a moment.

Parameters are listed again at every push, so that one that was replaced is noticed; as long as the modules are
built as they were, that costs a comparison and not a walk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from verl_server.errors import BadRequestError


class ModuleParameters:
    """The parameters of a module under their names, sharded if FSDP2 shards them. Refers to the module."""

    def __init__(self, module: nn.Module) -> None:
        for child in module.modules():
            if isinstance(child, FullyShardedDataParallel):
                raise BadRequestError(
                    "FullyShardedDataParallel (FSDP1) keeps its shards in flat parameters without names. Use "
                    "fully_shard (FSDP2), or push the tensors of a full state dict."
                )
        self._module = module
        self._read()

    def named(self) -> list[tuple[str, torch.Tensor]]:
        """(name, parameter) as `named_parameters()` gives them, after resharding.

        Parameters that FSDP2 gathered are other objects than the sharded ones, so they are noticed like any change.
        """
        if any([*map(id, members.values())] != ids for members, ids in self._members):
            self._read()
        return self._named

    def _read(self) -> None:
        modules = list(self._module.modules())
        for module in modules:
            if isinstance(module, FSDPModule):
                module.reshard()
        self._named: list[tuple[str, torch.Tensor]] = list(self._module.named_parameters())
        # Whether children and parameters are the same objects. They stay alive through `_alive`, so ids are not
        # used again.
        tables: list[dict[str, Any]] = [t for m in modules for t in (m._modules, m._parameters) if t]
        self._members = [(table, [*map(id, table.values())]) for table in tables]
        self._alive = [list(table.values()) for table in tables]


def gathered_by_fsdp() -> set[int]:
    """`_cdata` of the storages that FSDP2 gathers full parameters into, of every module of this process.

    FSDP2 resizes them between forward and backward, and does not write them back: they are nobody's weights.
    """
    storages = set()
    for module in list(_module_state_mapping):
        if isinstance(module, FSDPModule):
            for parameter in _fsdp_parameters(module):
                storages |= {output.untyped_storage()._cdata for output in parameter.all_gather_outputs}
    return storages


def _fsdp_parameters(module: FSDPModule) -> list[Any]:
    """FSDP2's own records of the parameters that it shards; it has no public way to ask for them."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # releases of torch before several groups a module: one
    groups = groups if groups is not None else [state._fsdp_param_group]
    return [parameter for group in groups if group is not None for parameter in group.fsdp_params]

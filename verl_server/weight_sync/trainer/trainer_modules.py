"""Reads the trainer's modules for pushes: their present parameters, and the parameters that FSDP2 has gathered.

Parameters are listed again at every push, so that a replaced parameter is detected. While the structure of the modules
is unchanged, this takes a comparison, and no traversal of the modules.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from verl_server.errors import BadRequestError
from verl_server.weight_sync.trainer.memory_layout import NamedTensors


class ModuleParameters:
    """The parameters of a module under their names, sharded if FSDP2 shards them. It has a reference to the module."""

    def __init__(self, module: nn.Module) -> None:
        for child in module.modules():
            if isinstance(child, FullyShardedDataParallel):
                raise BadRequestError(
                    "FullyShardedDataParallel (FSDP1) keeps its shards in flat parameters without names. Use "
                    "fully_shard (FSDP2), or push the tensors of a full state dict."
                )
        self._module = module
        self._read()

    def named(self) -> NamedTensors:
        """Return (name, parameter) of `named_parameters()`, after resharding.

        While the parameters are the same objects, the returned list is the same object, too. Parameters that FSDP2
        gathered are not the sharded objects, so they are detected like any other change.
        """
        if [*map(len, self._tables)] != self._sizes or not all(map(operator.is_, self._entries(), self._members)):
            self._read()
        return self._named

    def _read(self) -> None:
        modules = list(self._module.modules())
        for module in modules:
            if isinstance(module, FSDPModule):
                module.reshard()
        self._named = NamedTensors(self._module.named_parameters())
        self._tables: list[dict[str, Any]] = [t for m in modules for t in (m._modules, m._parameters)]
        self._sizes = [*map(len, self._tables)]
        self._filled = [table for table in self._tables if table]
        self._members = [*self._entries()]

    def _entries(self) -> Iterator[Any]:
        """Return all children and parameters of the modules, in the order of the modules' tables."""
        return itertools.chain.from_iterable(map(dict.values, self._filled))


def gathered_by_fsdp() -> set[int]:
    """Return the `_cdata` of the storages into which FSDP2 gathers full parameters, for all modules of this process.

    FSDP2 resizes these storages between forward and backward, and never copies them to the sharded parameters. So they
    must not be pushed.
    """
    storages = set()
    for module in list(_module_state_mapping):
        if isinstance(module, FSDPModule):
            for parameter in _fsdp_parameters(module):
                storages |= {output.untyped_storage()._cdata for output in parameter.all_gather_outputs}
    return storages


def _fsdp_parameters(module: FSDPModule) -> list[Any]:
    """Return FSDP2's records of the parameters that it shards. FSDP2 has no public interface for this."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # releases of torch before several groups a module: one
    groups = groups if groups is not None else [state._fsdp_param_group]
    return [parameter for group in groups if group is not None for parameter in group.fsdp_params]

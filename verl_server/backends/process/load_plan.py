"""`LoadPlan`: decides for each module of an engine's model whether updates copy its weights or load it again.

Copies are used if the engine's loader only copies into the module's parameters, and if the live parameters have the
format in which they are loaded. Otherwise, and if `load_proof` finds a difference, each update loads the module through
the engine. `ServedModel` converts the plan into pieces of the `WeightMap`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from torch import Tensor

from verl_server.models.loader import Index, WeightSlot
from verl_server.weight_sync.receiver.load_trace.record import LoadTrace
from verl_server.weight_sync.receiver.load_trace.regions import LoadedCopy

logger = logging.getLogger(__name__)


class LoadPlan:
    def __init__(self, trace: LoadTrace, loaded: Mapping[str, Tensor], live: Mapping[str, Tensor]) -> None:
        """Plan from `trace`.

        `loaded` are the parameters that the loader fills, `live` the tensors that kernels read.
        """
        self._trace, self._live = trace, live
        self.reloaded: dict[str, str] = {}
        """Module that each update reloads -> the reason."""
        self._modules = {source: {_module(name) for name in names} for source, names in trace.feeds.items()}
        for source in trace.read:  # it reaches a parameter as a number, which no trace shows
            self._modules.setdefault(source, {_module(source)})
        for name in trace.copies.keys() | trace.computed.keys():
            if name in trace.computed:
                self.reload(_module(name), trace.computed[name])
            elif not _is_same_format(loaded[name], live.get(name)):
                self.reload(_module(name), "its live layout is not that of the checkpoint")
        for source, operation in trace.read.items():
            for module in self._modules[source]:
                self.reload(module, f"its loader reads the values of {source} ({operation})")

    def reload(self, module: str, reason: str) -> None:
        """Reload a module at each update, and every module that shares a tensor of the checkpoint with it.

        A module without weights is ignored.
        """
        if not any(module in modules for modules in self._modules.values()):
            return
        pending = {module}
        while pending:
            module = pending.pop()
            if module in self.reloaded:
                continue
            self.reloaded[module] = reason
            pending |= {other for modules in self._modules.values() if module in modules for other in modules}

    def reload_below(self, path: str, reason: str) -> None:
        """Reload the modules at and below `path` at each update."""
        for module in {module for modules in self._modules.values() for module in modules}:
            if module == path or module.startswith(f"{path}."):
                self.reload(module, reason)

    def groups(self, names: Iterable[str]) -> dict[str, str]:
        """Return {tensor of the checkpoint: group of modules that is loaded with it, named by one of its modules}.

        A tensor is omitted if no parameter of this rank depends on it, and if the loader does not read its values.
        """
        leader: dict[str, str] = {}

        def find(module: str) -> str:
            while leader.setdefault(module, module) != module:
                module = leader[module]
            return module

        for modules in self._modules.values():
            first, *others = sorted(modules)
            for other in others:
                leader[find(other)] = find(first)
        return {name: find(min(self._modules[name])) for name in names if name in self._modules}

    def reloaded_with_weights(self) -> dict[str, set[str]]:
        """Return {module that each update reloads: tensors of the checkpoint in its parameters on this rank}."""
        found: dict[str, set[str]] = {}
        for source, names in self._trace.feeds.items():
            for module in {_module(name) for name in names} & self.reloaded.keys():
                found.setdefault(module, set()).add(source)
        return found

    def copied(self) -> dict[str, list[LoadedCopy]]:
        """Return {live parameter: its copies} for the modules that are written by copies."""
        return {name: copies for name, copies in self._trace.copies.items() if _module(name) not in self.reloaded}

    def pieces(self) -> dict[str, list[tuple[Tensor, Index]]]:
        """Return {tensor of the checkpoint: its pieces} for the modules that are written by copies."""
        found: dict[str, list[tuple[Tensor, Index]]] = {}
        for name, copies in self.copied().items():
            for copy in copies:
                found.setdefault(copy.source, []).append((copy.destination.view(self._live[name]), copy.index))
        return found

    def log(self, slots: Mapping[str, WeightSlot], engine: str) -> None:
        """Log how many tensors updates copy, which modules each update reloads, and the reasons."""
        reasons: dict[str, list[str]] = {}
        for module, reason in self.reloaded.items():
            reasons.setdefault(reason, []).append(module)
        copied = len(self.pieces())
        logger.info("Weight updates copy %d of %d tensors straight into %s's storage.", copied, len(slots), engine)
        for reason, modules in reasons.items():
            shown = ", ".join(modules[:3]) + (", ..." if len(modules) > 3 else "")
            logger.info("Each update loads %d modules through %s, because %s: %s", len(modules), engine, reason, shown)


def _module(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _is_same_format(loaded: Tensor, live: Tensor | None) -> bool:
    return (
        live is not None
        and (live.shape, live.dtype) == (loaded.shape, loaded.dtype)
        and live.is_contiguous()
        and loaded.is_contiguous()
    )

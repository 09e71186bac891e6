"""`ModuleLoader`: installs pushed tensors through the engine's own loader, module by module.

It is used for the modules that a `LoadPlan` cannot write by copies. `ServedModel` owns the loader.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Iterator, Mapping

from torch import Tensor

from verl_server.backends.process.live_model import LiveModel

logger = logging.getLogger(__name__)


class ModuleLoader:
    """The `WholeTensorLoader` that loads groups of modules through `LiveModel.reload`."""

    def __init__(self, live: LiveModel, groups: Mapping[str, str], overwritten: Collection[str] = ()) -> None:
        """Take `groups`: tensor -> name of the group of the engine's modules that are loaded together with it.

        The engine gets copies of the tensors in `overwritten`, because its loader may change them.
        """
        self._live, self._group_of, self._overwritten = live, groups, overwritten
        self.names = frozenset(groups)
        self.unproved = ""
        """The reason why no update may be installed at all, empty if updates may be installed."""
        self._members: dict[str, set[str]] = {}
        for name, group in groups.items():
            self._members.setdefault(group, set()).add(name)
        self._held: dict[str, dict[str, Tensor]] = {}
        """Copies of the tensors of modules that are still incomplete, by group and name."""

    @property
    def refusal(self) -> str:
        if self.unproved:
            return self.unproved
        moved, engine = self._live.moved(), self._live.engine
        return f"{engine} has replaced the storage of {moved} since the start. Restart the server." if moved else ""

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        began = time.perf_counter()
        try:
            self._live.reload(self._whole_modules(tensors))
        except BaseException:
            self._held = {}
            raise
        logger.debug("The reload took %.0f ms.", 1e3 * (time.perf_counter() - began))

    def lacking(self, names: Iterable[str]) -> list[str]:
        given = set(names)
        groups = dict.fromkeys(self._group_of[name] for name in given & self.names)
        return [name for group in groups for name in sorted(self._members[group] - given)]

    def _whole_modules(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
        """Yield the tensors of each complete group. Hold copies of the tensors of incomplete groups.

        The engine would fill a missing tensor of a module with whatever its memory contains.
        """
        own: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors:
            group = self._group_of[name]
            # The memory is the trainer's own.
            own.setdefault(group, {})[name] = tensor.clone() if name in self._overwritten else tensor
            come = self._held.get(group, {}) | own[group]
            if come.keys() == self._members[group]:
                del own[group]
                self._held.pop(group, None)
                yield come
        for group, come in own.items():
            self._held.setdefault(group, {}).update((name, tensor.clone()) for name, tensor in come.items())

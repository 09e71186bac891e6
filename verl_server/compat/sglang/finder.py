"""`install`: an import hook that makes the modules of `names.MODULES` on import.

A module is made from its table of names. A name that is missing raises an ImportError with the remedy. Names with two
underscores raise AttributeError, because Python itself looks for such names.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from verl_server.compat.sglang.names import MODULES

_PACKAGES = {".".join(path.split(".")[:depth]) for path in MODULES for depth in range(1, path.count(".") + 2)}
"""Paths of all stand-in modules and of the packages above them."""


def install() -> None:
    """Make `import sglang` find the stand-ins in this process. A second call does nothing.

    Raise ImportError if the real package is imported already: its names would be mixed with the stand-ins.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    imported = sorted(name for name in sys.modules if name == "sglang" or name.startswith("sglang."))
    if imported:
        raise ImportError(
            f"verl_server.compat.sglang.install() must be called before sglang is imported, but {imported[0]} is "
            f"imported from {getattr(sys.modules[imported[0]], '__file__', None)}."
        )
    sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "sglang" and not fullname.startswith("sglang."):
            return None
        if fullname not in _PACKAGES:
            raise ModuleNotFoundError(_remedy(fullname), name=fullname)
        return importlib.util.spec_from_loader(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        module.__doc__ = f"Stand-in for {name}, by verl_server.compat.sglang."
        vars(module).update(MODULES.get(name, {}))

        def missing(attribute: str) -> Any:
            if attribute.startswith("__") or f"{name}.{attribute}" in _PACKAGES:
                raise AttributeError(f"module {name!r} has no attribute {attribute!r}")
            raise ImportError(_remedy(f"{name}.{attribute}"), name=name)

        module.__getattr__ = missing  # type: ignore[method-assign]


def _remedy(name: str) -> str:
    return (
        f"verl_server.compat.sglang has no stand-in for {name}. The stand-ins cover what HTTP adapters import. A "
        "program that runs SGLang's engine in its own process needs SGLang: do not call install(), or attach the "
        "program to a running verl-server by its URL."
    )

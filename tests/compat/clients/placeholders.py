"""Placeholders for packages that bring CUDA libraries, where a client imports them for parts that do not run here."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock


class Placeholders(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes modules importable that have any name. `packages` stand for all their modules, `modules` for themselves."""

    def __init__(self, packages: dict[str, str], modules: tuple[str, ...] = ()) -> None:
        self._packages, self._modules = packages, modules
        """Package -> its version."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> Any:
        if fullname.partition(".")[0] in self._packages or fullname in self._modules:
            return importlib.util.spec_from_loader(fullname, self, is_package=True)
        return None

    def exec_module(self, module: ModuleType) -> None:
        def attribute(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return MagicMock(name=name)

        module.__version__ = self._packages.get(module.__name__, "0")  # type: ignore[attr-defined]
        module.__getattr__ = attribute  # type: ignore[method-assign]


def place(packages: dict[str, str], modules: tuple[str, ...] = ()) -> None:
    """Install placeholders in this process."""
    sys.meta_path.insert(0, Placeholders(packages, modules))

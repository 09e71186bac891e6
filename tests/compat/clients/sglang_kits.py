"""The modules of SGLang's test kits, imported from its wheel without SGLang's engine.

The kits need no part of the engine to test a server, but their modules import it, and it needs CUDA libraries. Modules
of `sglang.srt` are placeholders here. What a placeholder returns may be called while the kits are imported, and raises
afterwards, so that no check of a kit can pass through a placeholder.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any

from transformers import AutoTokenizer

_REAL = ("sglang.srt", "sglang.srt.environ")
"""Modules of the engine that import no CUDA library."""


class Absent:
    """Stands for a function or class that a module of the engine would have."""

    importing = True

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{self._name}.{name}")

    def __call__(self, *args: Any, **options: Any) -> Any:
        if not Absent.importing:
            raise RuntimeError(f"{self._name} of SGLang's engine is not here: a test of a kit must not need it.")
        return Absent(f"{self._name}()")


class EngineFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a placeholder for each module of `sglang.srt`, and for IPython, which SGLang's package imports."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> Any:
        if fullname in _REAL or not f"{fullname}.".startswith(("sglang.srt.", "IPython.")):
            return None
        return importlib.util.spec_from_loader(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        def attribute(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return Absent(f"{module.__name__}.{name}")

        module.__getattr__ = attribute  # type: ignore[method-assign]


def tokenizer_of(tokenizer_name: str, **options: Any) -> Any:
    """Return the tokenizer of a folder. It has the place of SGLang's `get_tokenizer`."""
    return AutoTokenizer.from_pretrained(tokenizer_name)


def import_kits(*names: str) -> list[ModuleType]:
    """Return modules below `sglang.test`."""
    finder = EngineFinder()
    sys.meta_path.insert(0, finder)
    Absent.importing = True
    try:
        utils: Any = importlib.import_module("sglang.srt.utils.hf_transformers_utils")
        utils.get_tokenizer = tokenizer_of
        return [importlib.import_module(f"sglang.test.{name}") for name in names]
    finally:
        Absent.importing = False
        sys.meta_path.remove(finder)

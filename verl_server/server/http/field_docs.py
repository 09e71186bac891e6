"""Reads the docstrings below the fields of a class from its source, because Python does not keep them.

`server.openapi` and `docs/declarations.py` describe fields with them.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import sys


def field_docs(cls: type) -> dict[str, str]:
    """Return field -> docstring for a class of this package and its bases. Without source, the result is empty."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("verl_server"):
            docs |= _module_docs(base.__module__).get(base.__name__, {})
    return docs


@functools.cache
def _module_docs(module: str) -> dict[str, dict[str, str]]:
    """Return class -> field -> docstring for the classes at the top level of a module."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except OSError:
        return {}
    return {node.name: docs_in(node.body) for node in tree.body if isinstance(node, ast.ClassDef)}


def docs_in(body: list[ast.stmt]) -> dict[str, str]:
    """Return field -> docstring in one line, for the fields or members that the body of a class declares."""
    docs = {}
    for field, after in itertools.pairwise(body):
        target = field.targets[0] if isinstance(field, ast.Assign) else getattr(field, "target", None)
        if not isinstance(target, ast.Name) or not isinstance(after, ast.Expr):
            continue
        if isinstance(after.value, ast.Constant) and isinstance(after.value.value, str):
            docs[target.id] = " ".join(after.value.value.split())
    return docs

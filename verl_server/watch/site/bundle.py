"""`bundled`: the page's modules as one script, in the order of their imports, for a page that loads nothing.

The modules keep to rules that make this a matter of text: `import { names } from "./file.js"` only, no default exports,
no circles, and no name twice on the top level of all modules. A module that breaks one is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from posixpath import dirname, join, normpath

_IMPORT = re.compile(r'^import\s*\{([^}]*)\}\s*from\s*"(\.[^"]+)";[ \t]*\n?', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?function|class|const|let)", re.MULTILINE)
_NAME = re.compile(r"^(?:async )?(?:function\*?|class|const|let|var)\s+([A-Za-z_$][\w$]*)", re.MULTILINE)
_OTHER = re.compile(r"^(?:import|export)\b[^\n]*", re.MULTILINE)


class BundleError(ValueError):
    """A module breaks a rule."""


def bundled(modules: Mapping[str, str], entry: str) -> str:
    """Return one script of `modules` (path -> text): `entry` and what it imports. Raise BundleError."""
    order = _order(modules, entry)
    owners: dict[str, str] = {}
    texts = []
    for path in order:
        text = _EXPORT.sub("", _IMPORT.sub("", modules[path]))
        if other := _OTHER.search(text):
            raise BundleError(f"{path}: {other[0]!r} is no import or export that a bundle can have.")
        for name in _NAME.findall(text):
            if name in owners:
                raise BundleError(f"{name} is on the top level of {owners[name]} and of {path}.")
            owners[name] = path
        texts.append(f"// {path}\n{text.strip()}\n")
    return "\n".join(texts)


def _order(modules: Mapping[str, str], entry: str) -> list[str]:
    """Return the modules that `entry` needs, each after those that it imports."""
    order: list[str] = []
    open_: list[str] = []

    def visit(path: str) -> None:
        if path in order:
            return
        if path in open_:
            raise BundleError(f"The imports are a circle: {' -> '.join([*open_, path])}.")
        if path not in modules:
            raise BundleError(f"{open_[-1] if open_ else 'The page'} imports {path}, which does not exist.")
        open_.append(path)
        for names, target in _IMPORT.findall(modules[path]):
            if " as " in names:
                raise BundleError(f"{path} renames an import: {names.strip()}.")
            visit(normpath(join(dirname(path), target)))
        open_.pop()
        order.append(path)

    visit(entry)
    return order

"""`Resolver`: finds the operation of a request by its path and method. No other code does this.

An application calls it first and keeps the result in `scope["state"]["route"]`. Access rules, sessions, replay and
dispatch read the result, and none of them parses the path again. So no two of them can disagree about a path.

A path is compared as a whole, as uvicorn decoded it. A path with an additional slash, another case or a control
character is another path, which no operation serves. There are no redirects.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

_PARAMETER = re.compile(r"{(\w+)(:path)?}")
_CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_NO_PARAMETERS: dict[str, str] = {}


class Served(Protocol):
    """The interface of an operation, which serves some methods at some paths."""

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths. `{name}` stands for one part of a path, `{name:path}` for any number of parts."""

    @property
    def methods(self) -> tuple[str, ...]: ...


OperationT = TypeVar("OperationT", bound=Served)


@dataclass(frozen=True, slots=True)
class Found(Generic[OperationT]):
    operation: OperationT
    parameters: dict[str, str]
    """Parameters of the path."""


@dataclass(frozen=True, slots=True)
class NotServed:
    """No operation serves the request, and it must be refused."""

    status: int
    """400: a control character. 404: no such path. 405: no such method at this path."""
    message: str
    allowed: tuple[str, ...] = ()
    """Methods that the path has."""


class Resolver(Generic[OperationT]):
    def __init__(self, operations: Iterable[OperationT]) -> None:
        """Prefer a path without parameters to paths with them, and the first of two operations of one path."""
        self._exact: dict[str, dict[str, OperationT]] = {}
        patterns: dict[str, dict[str, OperationT]] = {}
        for operation in operations:
            for path in operation.paths:
                methods = (patterns if "{" in path else self._exact).setdefault(path, {})
                for method in operation.methods:
                    methods.setdefault(method, operation)
                if operation.methods == ("GET",):  # one that POST carries out as well has effects
                    methods.setdefault("HEAD", operation)
        self._patterns = [(_compiled(path), methods) for path, methods in patterns.items()]

    def find(self, method: str, path: str) -> Found[OperationT] | NotServed:
        """Return the operation of a request, or the refusal if there is none."""
        exact = self._exact.get(path)
        if exact is not None and (operation := exact.get(method)) is not None:
            return Found(operation, _NO_PARAMETERS)
        if has_control_character(path):
            return NotServed(400, "The path of the URL has a control character.")
        allowed = set(exact or ())
        for pattern, methods in self._patterns:
            match = pattern.fullmatch(path)
            if match is not None:
                if (operation := methods.get(method)) is not None:
                    return Found(operation, match.groupdict())
                allowed |= methods.keys()
        if allowed:
            named = tuple(sorted(allowed))
            return NotServed(405, f"Method Not Allowed: {method} {path} (it has {', '.join(named)})", named)
        hint = f" Did you mean {near}?" if (near := self._near(path)) else ""
        return NotServed(404, f"Not Found: {method} {path}.{hint}")

    def _near(self, path: str) -> str | None:
        """Return the path that differs in slashes only, if there is one."""
        plain = "/" + "/".join(part for part in path.split("/") if part)
        return plain if plain != path and plain in self._exact else None


def has_control_character(path: str) -> bool:
    """Return True for a path that is refused before anything else: `$` of a regular expression ignores a line break."""
    return _CONTROL_CHARACTERS.search(path) is not None


def _compiled(path: str) -> re.Pattern[str]:
    pattern, end = "", 0
    for match in _PARAMETER.finditer(path):
        name, takes_slashes = match.groups()
        pattern += re.escape(path[end : match.start()]) + f"(?P<{name}>{'.+' if takes_slashes else '[^/]+'})"
        end = match.end()
    return re.compile(pattern + re.escape(path[end:]))

"""The operations that servers have, as the router sees them: read from the table `web/operations.json`.

`docs/generate.py` writes the table from the dialects' own declarations, so the router knows every path that a server
has without importing one. `router` resolves each request with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from importlib.resources import files

import msgspec
from starlette.types import Scope


class RoutedOperation(msgspec.Struct, frozen=True):
    """One operation of a server."""

    paths: tuple[str, ...]
    methods: tuple[str, ...]
    dialect: str
    """Name of the dialect, in whose shape errors are answered."""
    access: str
    """open, key, control, owner or local_owner (`server.http.operation.Access`)."""
    in_session: bool = False
    """True if a session key permits the operation."""
    generates: bool = False
    """True if the operation samples tokens."""

    @property
    def name(self) -> str:
        return self.paths[0]


class Dialects:
    """Names the dialect in whose shape an error of the router is answered, as the servers choose it."""

    def __init__(self, operations: Collection[RoutedOperation]) -> None:
        self._known = [(path.split("/")[1:], operation) for operation in operations for path in operation.paths]

    def of(self, scope: Scope, operation: RoutedOperation | None) -> str:
        """Return the dialect of an operation. Without one: of the operations whose paths share the most leading parts
        with the request's path. A header of Anthropic's clients names theirs where dialects share a path."""
        is_shared = operation is None or operation.dialect == "models"
        if is_shared and any(name == b"anthropic-version" for name, _ in scope["headers"]):
            return "anthropic"
        if operation is not None:
            return operation.dialect
        parts = scope["path"].split("/")[1:]
        shared = [(_shared_parts(parts, known), each.dialect) for known, each in self._known]
        most = max(count for count, _ in shared)
        near = Counter(dialect for count, dialect in shared if count == most)
        return near.most_common(1)[0][0] if most else "sglang"


def _shared_parts(parts: list[str], known: list[str]) -> int:
    count = 0
    for part, pattern in zip(parts, known, strict=False):
        if part != pattern and not (part and pattern.startswith("{")):
            break
        count += bool(part)  # the root has one part, which is empty
    return count


def server_operations() -> list[RoutedOperation]:
    """Return the operations of all dialects."""
    table = files("verl_server.web").joinpath("operations.json").read_bytes()
    return msgspec.json.decode(table, type=list[RoutedOperation])

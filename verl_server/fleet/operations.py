"""The operations that servers have, as the router sees them: read from the table `web/operations.json`.

`docs/generate.py` writes the table from the dialects' own declarations, so the router knows every path that a server
has without importing one. `router` resolves each request with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from importlib.resources import files

import msgspec


class RoutedOperation(msgspec.Struct, frozen=True):
    """One operation of a server."""

    paths: tuple[str, ...]
    methods: tuple[str, ...]
    dialect: str
    """Name of the dialect, in whose shape errors are answered (`errors_of`)."""
    access: str
    """open, key, control, owner or local_owner (`server.http.operation.Access`)."""
    in_session: bool = False
    """True if a session key permits the operation."""
    generates: bool = False
    """True if the operation samples tokens."""
    says_success: bool = False
    """True if errors have `"success": false`, too, as those of SGLang's routes that change weights."""
    shared_with: dict[str, str] = {}
    """Header, in lower case, that the clients of another dialect send -> that dialect."""

    @property
    def name(self) -> str:
        return self.paths[0]

    def errors_of(self, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """Return the name of the dialect in whose shape a request with these headers gets an error."""
        sent = {name.decode("latin-1") for name, _ in headers} if self.shared_with else ()
        return next((dialect for header, dialect in self.shared_with.items() if header in sent), self.dialect)


class UnservedPaths:
    """The paths that no operation serves. A server refuses them, with the hints that it has for them."""

    def __init__(self, operations: Collection[RoutedOperation]) -> None:
        self._known = [(path.split("/")[1:], operation) for operation in operations for path in operation.paths]
        self._shared_with = {header: dialect for each in operations for header, dialect in each.shared_with.items()}

    def operation(self, path: str) -> RoutedOperation:
        """Return what stands for a path. Its dialect is that of the operations whose paths share most leading parts."""
        parts = path.split("/")[1:]
        shared = [(_shared_parts(parts, known), each.dialect) for known, each in self._known]
        most = max(count for count, _ in shared)
        near = Counter(dialect for count, dialect in shared if count == most)
        dialect = near.most_common(1)[0][0] if most else "sglang"
        return RoutedOperation(("(not served)",), (), dialect, "key", shared_with=self._shared_with)


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

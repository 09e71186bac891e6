"""The operations that servers have, as the router sees them: read from the table `web/operations.json`.

`docs/generate.py` writes the table from the dialects' own declarations, so the router knows every path that a server
has without importing one. `router` resolves each request with it.
"""

from __future__ import annotations

from collections.abc import Iterable
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


def not_served(operations: list[RoutedOperation]) -> RoutedOperation:
    """Return what stands for a path that nobody serves: a server refuses it, in the shape and with the hints for it."""
    shared = {header: dialect for operation in operations for header, dialect in operation.shared_with.items()}
    return RoutedOperation(("(not served)",), (), "sglang", "key", shared_with=shared)


def server_operations() -> list[RoutedOperation]:
    """Return the operations of all dialects."""
    table = files("verl_server.web").joinpath("operations.json").read_bytes()
    return msgspec.json.decode(table, type=list[RoutedOperation])
